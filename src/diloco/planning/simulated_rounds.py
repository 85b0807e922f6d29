"""Rounds of learners around a syncer, simulated: rounds by the schedule, and rounds that the syncer calls.

`ScheduledRounds` simulates DiLoCo, Streaming and eager updates: at a boundary sends come before applications, and a
learner blocks until every due answer has arrived. `CalledRounds` simulates Decoupled DiLoCo: learners never block.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from diloco.planning.discrete_events import ExchangePlan, SimulatedLearner, StarSimulation
from diloco.planning.network import Network
from diloco.protocol.rounds.called import Pace
from diloco.protocol.rounds.late_contributions import decide

ROUNDING = 1e-9
"""In steps: rounding error of the run clock, which is a sum of fractions."""
REPORT_EVERY_S = 0.05
"""Least time between two reports of steps by a learner whose rounds are called."""


class ScheduledRounds(StarSimulation):
    """Rounds of a schedule: every learner contributes to every round and waits for each answer that is due.

    Attributes:
        window: inner steps after which the pattern may repeat: as many periods as an answer may take.
        left_s: by learner, times at which it continued from step 0, 1·window, 2·window, …
        ended_s: by learner, time at which it completed step `stop_at`, the last one.
    """

    def __init__(
        self,
        network: Network,
        step_s: Sequence[float],
        exchange: ExchangePlan,
        copies: int = 1,
        traced: bool = False,
        stop_at: int | None = None,
    ) -> None:
        super().__init__(network, step_s, exchange, copies, traced)
        schedule = exchange.schedule
        assert isinstance(schedule.sync_every, int)
        assert schedule.offsets is not None
        every, tau = schedule.sync_every, schedule.overlap
        self.window = every * math.lcm(*schedule.multiples) * (tau // every + 1)
        self.left_s: list[list[float]] = [[] for _ in self.learners]
        self.ended_s = [math.inf] * len(self.learners)
        self._schedule, self._every, self._stop_at = schedule, every, stop_at
        self._rounds = [[0] * len(self._up_bytes) for _ in self.learners]
        self._due: list[deque[tuple[int, int, int]]] = [deque() for _ in self.learners]  # step, fragment, version
        self._num_received: dict[tuple[int, int], int] = {}  # contributions, by fragment and round
        sends = {offset % every for offset in schedule.offsets}
        self._eventful_steps = sorted({0} | sends | {(place + tau) % every for place in sends})
        for learner in self.learners:
            self._compute_on(learner)

    def _compute_on(self, learner: SimulatedLearner) -> None:
        """Compute to the next step after which a fragment is sent or applied."""
        if learner.step % self.window == 0:
            self.left_s[learner.index].append(self.now_s)
        if learner.step == self._stop_at:
            self.ended_s[learner.index] = self.now_s
            return
        steps = self._steps_to_next(learner.step)
        if self._stop_at is not None:
            steps = min(steps, self._stop_at - learner.step)
        ends_s = self.now_s + steps * learner.step_s
        self.note(learner.index, "compute", self.now_s, ends_s)
        learner.step += steps
        self.at(ends_s, partial(self._boundary, learner))

    def _steps_to_next(self, step: int) -> int:
        place = step % self._every
        return next((each - place for each in self._eventful_steps if each > place), self._every - place)

    def _boundary(self, learner: SimulatedLearner) -> None:
        rounds, due = self._rounds[learner.index], self._due[learner.index]
        for fragment in self._schedule.sends(learner.step):
            self.push(learner, fragment, rounds[fragment])
            rounds[fragment] += 1
            due.append((learner.step + self._schedule.overlap, fragment, rounds[fragment]))
        learner.blocked_at = self.now_s
        self._continue_if_received(learner)

    def _continue_if_received(self, learner: SimulatedLearner) -> None:
        """Continue once every due answer has arrived."""
        due = self._due[learner.index]
        if any(step <= learner.step and learner.received[fragment] < version for step, fragment, version in due):
            return
        while due and due[0][0] <= learner.step:
            due.popleft()
        assert learner.blocked_at is not None
        self.note(learner.index, "waiting", learner.blocked_at, self.now_s)
        learner.blocked_at = None
        self._compute_on(learner)

    def contributed(self, learner: SimulatedLearner, fragment: int, round_: int) -> None:
        self._num_received[fragment, round_] = self._num_received.get((fragment, round_), 0) + 1
        if self._num_received[fragment, round_] == len(self.learners):
            del self._num_received[fragment, round_]
            self.merge(fragment, round_ + 1, len(self.learners))

    def received(self, learner: SimulatedLearner, fragment: int) -> None:
        if learner.blocked_at is not None:
            self._continue_if_received(learner)


@dataclass
class _CalledRound:
    """The newest round of a fragment at the syncer.

    Attributes:
        next_step: step of the run clock at which the fragment is called next.
        fresh: learners that have contributed since the call.
        late: learners whose contribution joins the next round.
    """

    next_step: int
    version: int = 0
    is_open: bool = True
    called_at: float | None = None
    quorum_at: float | None = None
    closed_at: float = 0.0
    contributed: set[int] = field(default_factory=set)
    fresh: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)


class CalledRounds(StarSimulation):
    """The syncer calls the rounds of each fragment by a run clock; learners answer at a boundary and never wait.

    Attributes:
        stale_steps: inner steps since the last send, which an adoption overwrites, summed over all adoptions.
        num_adoptions: adoptions of all learners.
    """

    def __init__(
        self, network: Network, step_s: Sequence[float], exchange: ExchangePlan, copies: int = 1, traced: bool = False
    ) -> None:
        super().__init__(network, step_s, exchange, copies, traced)
        assert exchange.called is not None
        schedule, quorum = exchange.schedule, exchange.called
        num, num_fragments = len(self.learners), len(self._up_bytes)
        self.stale_steps = self.num_adoptions = 0
        self._schedule, self._quorum = schedule, quorum
        self._clock = 0.0
        self._next_call: float = 0.0
        self._reported = [0] * num
        self._pace = Pace(step_s=median(learner.step_s for learner in self.learners))
        self._rounds = [_CalledRound(schedule.next_send(f, 0)) for f in range(num_fragments)]
        # By learner and fragment: base version of the newest contribution, step since which work is pending.
        self._answered = [[-1] * num_fragments for _ in range(num)]
        self._fresh_from = [[0] * num_fragments for _ in range(num)]
        self._asked: list[dict[int, None]] = [{} for _ in range(num)]
        self._calls: list[deque[tuple[int, int]]] = [deque() for _ in range(num)]
        self._arrivals: list[set[int]] = [set() for _ in range(num)]
        self._names = [str(i) for i in range(num)]
        for learner in self.learners:
            self._compute(learner)

    # --- learners -----------------------------------------------------------------------------------------------------

    def _compute(self, learner: SimulatedLearner) -> None:
        self.note(learner.index, "compute", self.now_s, self.now_s + learner.step_s)
        self.at(self.now_s + learner.step_s, partial(self._boundary, learner))

    def _boundary(self, learner: SimulatedLearner) -> None:
        i = learner.index
        learner.step += 1
        report_every = max(1, math.ceil(REPORT_EVERY_S / learner.step_s))
        if learner.step % report_every == 0:
            self.at(self.now_s + learner.latency_s, partial(self._steps_reported, i, learner.step))
        asked, self._asked[i] = self._asked[i], {}
        for fragment in asked:
            self._answer(learner, fragment, learner.adopted[fragment] + 1)  # a call that is still open
        while self._calls[i]:
            self._answer(learner, *self._calls[i].popleft())
        for fragment in sorted(self._arrivals[i]):
            self._adopt(learner, fragment, learner.received[fragment])
        self._arrivals[i].clear()
        self._compute(learner)

    def _answer(self, learner: SimulatedLearner, fragment: int, version: int) -> None:
        i = learner.index
        if self._answered[i][fragment] == learner.adopted[fragment]:
            if version > learner.adopted[fragment]:
                self._asked[i][fragment] = None
        elif learner.step == self._fresh_from[i][fragment]:
            self._asked[i][fragment] = None
        else:
            self._answered[i][fragment] = learner.adopted[fragment]
            self._fresh_from[i][fragment] = learner.step
            self.push(learner, fragment, learner.adopted[fragment])

    def _adopt(self, learner: SimulatedLearner, fragment: int, version: int) -> None:
        i = learner.index
        self.stale_steps += learner.step - self._fresh_from[i][fragment]
        self.num_adoptions += 1
        self._fresh_from[i][fragment] = learner.step
        learner.adopted[fragment] = version

    def received(self, learner: SimulatedLearner, fragment: int) -> None:
        self._arrivals[learner.index].add(fragment)  # adopted at the next boundary

    # --- the syncer ---------------------------------------------------------------------------------------------------

    def _steps_reported(self, learner: int, step: int) -> None:
        self._clock += (step - self._reported[learner]) / len(self.learners)
        self._reported[learner] = step
        if self._clock > self._next_call - ROUNDING:
            for fragment in range(len(self._rounds)):
                self._call_if_due(fragment)
            waiting = (each.next_step for each in self._rounds if each.is_open and each.called_at is None)
            self._next_call = min(waiting, default=math.inf)

    def contributed(self, learner: SimulatedLearner, fragment: int, round_: int) -> None:
        current = self._rounds[fragment]
        if not current.is_open:
            current.late.add(learner.index)
            return
        current.contributed.add(learner.index)
        if current.called_at is not None:
            current.fresh.add(learner.index)
            if current.quorum_at is None and len(current.fresh) >= min(self._quorum.at_least, len(self.learners)):
                current.quorum_at = self.now_s
                self._pace.measured(quorum_s=self.now_s - current.called_at)
            self._decide(fragment)

    def _call_if_due(self, fragment: int) -> None:
        current = self._rounds[fragment]
        if not current.is_open or current.called_at is not None or self._clock <= current.next_step - ROUNDING:
            return
        current.called_at = self.now_s
        current.next_step = self._schedule.next_send(fragment, self._clock + ROUNDING)
        call = (fragment, current.version)
        for learner in self.learners:
            self.at(self.now_s + learner.latency_s, partial(self._calls[learner.index].append, call))
        self._decide(fragment)  # late contributions may already complete it

    def _decide(self, fragment: int) -> None:
        current = self._rounds[fragment]
        if not current.is_open or current.called_at is None:
            return
        names = self._names
        grace_s = self._quorum.grace_s(self._pace.slack_s(self._schedule.overlap))
        decision = decide(
            self.now_s, [names[i] for i in current.contributed], [names[i] for i in current.fresh], names,
            self._quorum.at_least, enough_at=current.quorum_at, grace_s=grace_s,
        )  # fmt: skip
        if decision.merge is not None:
            current.is_open, current.closed_at = False, self.now_s
            self.merge(fragment, current.version + 1, len(current.contributed))
        elif decision.wait_until is not None:
            self.at(decision.wait_until, partial(self._decide, fragment))

    def published(self, fragment: int, version: int) -> None:
        current = self._rounds[fragment]
        self._pace.measured(sync_s=self.now_s - current.closed_at)
        self._rounds[fragment] = _CalledRound(current.next_step, version, contributed=current.late)
        self._next_call = min(self._next_call, current.next_step)
        self._call_if_due(fragment)
