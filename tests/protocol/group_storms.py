"""Storms of the groups' machine alone: random events on a SyncerCore, in an order drawn from a seed.

    python -m tests.protocol.group_storms FIRST-LAST [--json]

Rollout and reward workers are started, stopped, replaced and forgotten; their messages are lost before or after the
syncer has read them, repeated and overtaken; groups are good, bad, foreign or sent twice; records are taken and become
durable later; the syncer starts again with the newest durable one; trainers lease, send, give up, leave and come back;
versions are published. After every event all groups are counted again (`tests.storms.groups.check_groups`), and what
was acknowledged must be there. No driver, store, wire or clock takes part; `python -m tests.storms --groups` has those.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

from tests.chaos.versions import require
from tests.protocol.groups_run import RULES, Run
from tests.storms.groups import check_groups

from diloco.errors import NoRoomError, PayloadError, RunError
from diloco.protocol.groups import Made
from diloco.protocol.members import Report
from diloco.protocol.records import Record
from diloco.protocol.workers import Score

EVENTS = 600


@dataclass(eq=False)
class Process:
    """A worker's process: what it believes to hold, and what it has done and was not told to be durable."""

    role: Literal["rollout", "reward"]
    name: str
    number: int
    order: int = 0
    holds: set[int] = field(default_factory=set)
    made: dict[int, Made] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)


class GroupStorm:
    """One storm.

    Attributes:
        acknowledged: digests of groups by their number, whose workers were told that they are durable.
        scored: likewise, groups with a score.
        num_restarts: of the syncer.
    """

    def __init__(self, seed: int) -> None:
        self.draws = Random(seed)
        self.rules = replace(RULES, max_staleness=self.draws.choice([0, 1, 2, 4]), queue=self.draws.choice([3, 8, 20]))
        self.run = Run(fragments=self.draws.choice([1, 1, 2, 3]), rules=self.rules)
        self.acknowledged: dict[int, str] = {}
        self.scored: set[int] = set()
        self.num_restarts = self._num_processes = 0
        self._incarnations = {"a": 1, "b": 1}
        self._processes = [self._process(role, name) for role, name in WORKERS]
        self._taken: list[tuple[Record, list[Callable[[], None]]]] = []  # records that are not durable yet
        self._waiting: list[Callable[[], None]] = []  # told once the next record is durable

    @property
    def core(self) -> Any:
        return self.run.core

    def _process(self, role: Literal["rollout", "reward"], name: str) -> Process:
        self._num_processes += 1
        return Process(role, name, self._num_processes)

    def go(self) -> None:
        """Raises BrokenInvariantError, or whatever the machine raises where it should not."""
        events, weights = zip(*EVENTS_BY_WEIGHT.items(), strict=True)
        for event in self.draws.choices(events, weights, k=EVENTS):
            event(self)
            check_groups(self.core)
            self._check_durable()

    def _check_durable(self) -> None:
        """What was acknowledged is counted, and where it is unsettled it is the same group, with its score."""
        groups = self.core.groups
        require(groups.counts["acknowledged"] >= len(self.acknowledged), "an acknowledged group is lost")
        for number, digest in self.acknowledged.items():
            group = groups.groups.get(number)
            require(group is None or group.made.digest == digest, f"group {number} is another one")
            require(group is None or group.rewards or number not in self.scored, f"the score of {number} is lost")
            require(not groups.workers.has("rollout", number), f"the prompt of group {number} is free again")

    # --- workers ------------------------------------------------------------------------------------------------------

    def works(self) -> None:
        """A worker states what it holds; message or answer may be lost."""
        it = self.draws.choice(self._processes)
        if self.draws.random() < 0.1:  # it drops some
            it.holds -= set(self.draws.sample(sorted(it.holds), len(it.holds) // 2))
        it.order += 1
        order = max(1, it.order - self.draws.choice([0, 0, 0, 0, 2]))  # now and then one is overtaken
        scores, wants = tuple(it.scores.values()), self.draws.randrange(5)
        if self.draws.random() < 0.1:
            return
        try:
            answer = self.run.work(
                it.role, it.name, it.number, holds=sorted(it.holds | it.made.keys()), wants=wants, scores=scores,
                order=order,
            )  # fmt: skip
        except RunError:  # it was replaced
            self._processes[self._processes.index(it)] = self._process(it.role, it.name)
            return
        if scores and order == it.order:
            told = [score.number for score in scores]
            self._waiting.append(lambda: self._told_of_scores(it, told))
        if order == it.order and self.draws.random() < 0.9:
            it.holds = set(answer.numbers) - it.made.keys() - it.scores.keys()

    def _told_of_scores(self, it: Process, numbers: list[int]) -> None:
        for number in numbers:
            if it.scores.pop(number, None) is not None and it.role == "reward":
                self.scored.add(number)

    def does(self) -> None:
        """A worker finishes something that it holds."""
        it = self.draws.choice(self._processes)
        if not it.holds:
            return
        number, luck = self.draws.choice(sorted(it.holds)), self.draws.random()
        it.holds.discard(number)
        if it.role == "reward" or luck < 0.05:
            bad = it.role == "rollout" or luck < 0.1
            rewards = () if bad else self.draws.choice([(1.0, 0.0), (0.5, 0.5), (math.nan, 0.0), (1.0,)])
            it.scores[number] = Score(number, rewards, "it hangs" if bad else "")
            return
        versions = self._versions()
        made = Made(
            number, "sums", versions, self.core.groups.weights_of(versions) or "gone", f"{number} {it.number}", 100, 10,
            self.draws.choice([(), (), (1.0, 0.0), (0.5, 0.5)]),
        )  # fmt: skip
        if luck > 0.9:
            made = self.draws.choice([
                replace(made, weights="f" * 64), replace(made, fault="no good"), replace(made, number=10**6),
                replace(made, rewards=(math.nan, 0.0)), replace(made, versions=tuple(each + 9 for each in versions)),
            ])  # fmt: skip
        it.made[number] = made

    def sends(self) -> None:
        """A rollout worker sends a group, maybe again; the call may be lost."""
        it = self.draws.choice([each for each in self._processes if each.role == "rollout"])
        if not it.made or self.draws.random() < 0.1:
            return
        key = self.draws.choice(sorted(it.made))
        made, groups = it.made[key], self.core.groups
        before = groups.counts["acknowledged"]
        try:
            is_new = self.run.sends(made, it.name, it.number)
        except PayloadError:
            it.made.pop(key)
        except (RunError, NoRoomError):  # it is unknown, or is to come again
            return
        else:
            known = groups.counts["acknowledged"] > before or made.number in groups.groups
            require(known or is_new, f"{made} is accepted and not counted")
            self._waiting.append(lambda: self._told(it, made))

    def _told(self, it: Process, made: Made) -> None:
        it.made.pop(made.number, None)
        self.acknowledged.setdefault(made.number, made.digest)

    def restarts_a_worker(self) -> None:
        """A worker's process is killed, and another begins under its name."""
        index = self.draws.randrange(len(self._processes))
        it = self._processes[index]
        self._processes[index] = self._process(it.role, it.name)

    # --- the syncer ---------------------------------------------------------------------------------------------------

    def waits(self) -> None:
        """Time passes; trainers are heard of, and workers may be forgotten."""
        self.run.now += self.draws.choice([0.1, 0.5, 1.0, 1.0, 7.0])
        for learner, incarnation in self._incarnations.items():
            self.core.heartbeat(self.run.now, learner, incarnation, Report(step=0, tokens=1))
        self.core.tick(self.run.now)
        self.run.check()

    def takes_a_record(self) -> None:
        """A record is taken; it becomes durable later."""
        self._taken.append((self.core.saved(), self._waiting))
        self._waiting = []
        self.run.check()

    def is_recorded(self) -> None:
        """The oldest record is durable, and workers hear of it."""
        if self._taken:
            record, waiting = self._taken.pop(0)
            self._durable(record)
            self.core.recorded(self.run.now, record.serial)
            self.run.check()
            for told in waiting:
                told()

    def _durable(self, record: Record) -> None:
        self.run.durable = record

    def restarts(self) -> None:
        """The syncer is killed and starts again; what was not durable is lost, and nobody was told of it."""
        self.num_restarts += 1
        self._taken, self._waiting = [], []
        self.run.restart()
        for learner, incarnation in self._incarnations.items():
            lease = self.core.leases.leases.get((learner, incarnation))
            self.run.asked[learner] = 0 if lease is None else lease.grant.number

    def _versions(self) -> tuple[int, ...]:
        return tuple(state.version for state in self.core.fragments)

    # --- trainers -----------------------------------------------------------------------------------------------------

    def _trainer(self) -> tuple[str, int]:
        learner = self.draws.choice("ab")
        return learner, self._incarnations[learner]

    def leases(self) -> None:
        """A trainer asks for groups, and is told at once: its lease is in the next record."""
        learner, incarnation = self._trainer()
        self.run.lease(learner, self.draws.randrange(1, 4), incarnation)

    def gives_up(self) -> None:
        """A trainer cannot use some of what it holds."""
        learner, incarnation = self._trainer()
        held = self.core.leases.leases.get((learner, incarnation))
        numbers = [] if held is None else [number for first, stop in held.units for number in range(first, stop)]
        if numbers:
            score = Score(self.draws.choice(numbers), (), self.draws.choice(["stale", "its object is missing"]))
            self.run.work("trainer", learner, incarnation, scores=[score])

    def publishes(self) -> None:
        """Both trainers send work on what they hold for a fragment, and its next version is durable with all before."""
        fragment = self.draws.randrange(len(self.core.fragments))
        for learner, incarnation in self._incarnations.items():
            held = self.core.leases.leases.get((learner, incarnation))
            fated = () if held is None else held.settled(fragment)
            done = {number for first, stop in fated for number in range(first, stop)}
            units = [] if held is None else [n for first, stop in held.units for n in range(first, stop)]
            units = [n for n in units if n not in done and self.draws.random() < 0.9]
            self.run.send(learner, *units, fragment=fragment, incarnation=incarnation)
        while self._taken:
            self.is_recorded()
        waiting, self._waiting = self._waiting, []
        self.run.publish(fragment)
        for told in waiting:
            told()

    def comes_back(self) -> None:
        """A trainer's process is replaced by the next one, which begins anew."""
        learner, _ = self._trainer()
        self.core.joined(self.run.now, learner)
        self._incarnations[learner] = self.core.members[learner].incarnation
        self.run.asked.pop(learner, None)
        for fragment in range(len(self.core.fragments)):
            self.run.numbers.pop((learner, fragment), None)
        self.run.check()
        while self._taken:
            self.is_recorded()
        self.run.record()  # it is told of its incarnation once that is durable
        self._answered()

    def _answered(self) -> None:
        waiting, self._waiting = self._waiting, []
        for told in waiting:
            told()


WORKERS: tuple[tuple[Literal["rollout", "reward"], str], ...] = (
    ("rollout", "w"), ("rollout", "v"), ("reward", "r"), ("reward", "s"),
)  # fmt: skip

EVENTS_BY_WEIGHT = {
    GroupStorm.works: 30, GroupStorm.does: 25, GroupStorm.sends: 20, GroupStorm.restarts_a_worker: 1,
    GroupStorm.waits: 3, GroupStorm.takes_a_record: 10, GroupStorm.is_recorded: 12, GroupStorm.restarts: 0.5,
    GroupStorm.leases: 10, GroupStorm.gives_up: 0.5, GroupStorm.publishes: 2, GroupStorm.comes_back: 0.5,
}  # fmt: skip


def failure(seed: int) -> str | None:
    """What a storm breaks; None: nothing."""
    try:
        GroupStorm(seed).go()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is found
        return f"seed {seed}: {type(error).__name__}: {error}"
    return None


def main() -> int:
    """Run storms from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", help="FIRST-LAST")
    parser.add_argument("--json", action="store_true", help="print JSON; failures go to standard error")
    chosen = parser.parse_args()
    first, _, last = chosen.seeds.partition("-")
    began, failed = time.monotonic(), 0
    for seed in range(int(first), int(last) + 1):
        if (said := failure(seed)) is not None:
            print(said, flush=True, file=sys.stderr)
            failed += 1
    num, seconds = int(last) - int(first) + 1, round(time.monotonic() - began, 1)
    found = {"first": int(first), "storms": num, "events": num * EVENTS, "seconds": seconds, "failed": failed}
    print(json.dumps(found) if chosen.json else f"{num} storms in {seconds:.0f} s: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
