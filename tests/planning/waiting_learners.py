"""Decoupled learners one event at a time: a slow and plain reference for `diloco.planning.failures`."""

import heapq
import math
import random
import statistics
from dataclasses import dataclass, field

from diloco.planning.fleet import Fleet

NEWEST = 0.2
"""Weight of the newest measurement of what a quorum takes."""


@dataclass
class Learner:
    """What one learner is doing.

    `contributed` is the number of its last contribution, `made` the steps since, `extra` a step that is made for want
    of an answer.
    """

    contributed: int = -1
    made: int = 0
    work: int = 0
    repaired_s: float = math.inf
    stopped: bool = False
    waits_for: int | None = None
    failed: bool = False
    extra: bool = False


@dataclass
class Round:
    opened_s: float
    answers: set[int] = field(default_factory=set)
    formed_s: float | None = None
    grace_s: float = 0.0


class World:
    """A heap of events: (time, number, what, learner or round)."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet, self.rng = fleet, random.Random(seed)
        self.learners = [Learner() for _ in range(fleet.learners)]
        self.rounds: dict[int, Round] = {}
        self.known = -1  # the newest round whose result the learners have
        self.closed = -1
        self.quorum_s = 0.0
        self.shares: list[float] = []
        self.heap: list[tuple[float, int, str, int]] = []
        self.events = 0
        for index in range(fleet.learners):
            self.at(-self.rng.random() * fleet.times.step_s, "go on", index)

    def at(self, when_s: float, what: str, who: int) -> None:
        self.events += 1
        heapq.heappush(self.heap, (when_s, self.events, what, who))

    def run(self, until_s: float) -> float:
        """Goodput."""
        while self.heap[0][0] < until_s:
            now_s, _, what, who = heapq.heappop(self.heap)
            getattr(self, what.replace(" ", "_"))(now_s, who)
            self.close(now_s)
        work_s = sum(each.work for each in self.learners) * self.fleet.times.step_s
        return work_s / (until_s * sum(self.fleet.relative_speeds))

    def go_on(self, now_s: float, who: int) -> None:
        """At the end of a step, or of a stop: contribute if it is time, wait for an answer that is needed, make the
        next step."""
        me, rules = self.learners[who], self.fleet.rounds
        me.stopped = False
        if me.made == rules.sync_every:
            me.made = 0
            self.contribute(now_s, who)
        behind, after = divmod(rules.overlap, rules.sync_every)
        needed = me.contributed - behind
        me.extra = me.made == after and needed > self.known
        if me.extra and rules.wait:
            me.waits_for = needed
            return
        mean_s = self.fleet.times.step_s / self.fleet.relative_speeds[who]
        jitter = self.fleet.speeds.jitter
        took_s = mean_s * (self.rng.gammavariate(jitter**-2, jitter**2) if jitter else 1.0)
        self.at(now_s + took_s, "end step", who)
        failed = self.rng.random() < -math.expm1(
            -took_s * self.fleet.chips / self.fleet.learners / self.fleet.times.mtbi_s
        )
        me.failed = failed  # noticed at the end of the step

    def end_step(self, now_s: float, who: int) -> None:
        me, times = self.learners[who], self.fleet.times
        me.made, me.work = me.made + (not me.extra), me.work + 1
        stop_s = 0.0
        if me.failed and self.fleet.elastic_learners:
            me.repaired_s = min(me.repaired_s, now_s + times.repair_s)
            stop_s += times.down_s
        elif me.failed:
            stop_s += times.repair_s + times.up_s
        if me.repaired_s <= now_s + stop_s:
            me.repaired_s = math.inf
            stop_s += times.up_s
        if stop_s:
            me.stopped = True
            self.at(now_s + stop_s, "go on", who)
        else:
            self.go_on(now_s, who)

    def contribute(self, now_s: float, who: int) -> None:
        me = self.learners[who]
        me.contributed += 1
        unanswered = [number for number, each in self.rounds.items() if who not in each.answers]
        if unanswered:
            me.contributed = max(me.contributed, min(unanswered))
            self.rounds[min(unanswered)].answers.add(who)
        elif me.contributed > max(self.rounds, default=self.closed):
            self.rounds[me.contributed] = Round(now_s, {who})
        else:
            me.contributed = max(self.rounds, default=self.closed)

    def close(self, now_s: float) -> None:
        """Close the oldest round if it is time; look again when its grace is over."""
        if not self.rounds:
            return
        rules, number = self.fleet.rounds, min(self.rounds)
        it = self.rounds[number]
        running = {who for who, each in enumerate(self.learners) if not each.stopped or who in it.answers}
        if len(it.answers) < min(rules.quorum, len(running)):
            return
        if it.formed_s is None:
            it.formed_s = now_s
            self.quorum_s += NEWEST * (now_s - it.opened_s - self.quorum_s)
            it.grace_s = self.grace_s()
            self.at(now_s + it.grace_s, "look", number)
        if running - it.answers and now_s < it.formed_s + it.grace_s - 1e-9:
            return
        self.shares.append(len(it.answers) / len(running))
        del self.rounds[number]
        self.closed = number
        self.at(now_s + rules.sync_s, "publish", number)
        self.close(now_s)

    def grace_s(self) -> float:
        rules, times = self.fleet.rounds, self.fleet.times
        median_s = statistics.median(times.step_s / speed for speed in self.fleet.relative_speeds)
        slack_s = rules.overlap * median_s - self.quorum_s - rules.sync_s
        return min(rules.grace_cap_s, max(0.0, rules.grace * slack_s))

    def look(self, now_s: float, number: int) -> None:
        """The time has come to look whether a round can close."""

    def publish(self, now_s: float, number: int) -> None:
        self.known = max(self.known, number)
        for who, each in enumerate(self.learners):
            if each.waits_for is not None and each.waits_for <= self.known:
                each.waits_for = None
                self.go_on(now_s, who)
