"""A run of learners around a syncer: the state machines of `diloco.protocol` in virtual time, without any tensor.

`SyncerCore` and a `LearnerCore` for each learner decide what is sent, merged and adopted. The timing around them is
that of `diloco.learner`, `diloco.exchange.remote` and `diloco.syncer`:

- A learner pushes one contribution at a time, in order, the next one once the previous one is acknowledged. It pulls
  one update at a time.
- The syncer merges one round at a time, then notifies every learner, and each learner requests the update: a
  publication costs two latencies more than its bytes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from diloco.core.quorum import AllLive
from diloco.planning.exchange_plan import ExchangePlan
from diloco.planning.network import Network, Transfer
from diloco.protocol.actions import Action, MergeRound, Publish, Tell, WakeAt
from diloco.protocol.contribution import NOTHING, Contribution
from diloco.protocol.learner import LearnerCore
from diloco.protocol.members import NO_DEADLINES, Report
from diloco.protocol.rounds.base import Rules
from diloco.protocol.syncer import SyncerCore
from diloco.report.drawing import Kind, Span

REPORT_EVERY_S = 0.05
"""Least time between two reports of steps by a learner whose rounds are called."""


@dataclass
class SimulatedLearner:
    """One learner: its state machine, and its two connections.

    Attributes:
        step_s: duration of an inner step.
        latency_s: one way.
        notified: per fragment, the newest version that it has been notified of.
        incarnation: its number in the run.
        blocked_at: start of the wait at a boundary; None: it computes.
        calls: of the syncer, not answered yet: by fragment, its version.
        pushes: contributions to send.
        pulls: fragments with a newer version than the received one, those that have waited longest first.
    """

    index: int
    step_s: float
    latency_s: float
    core: LearnerCore
    notified: list[int]
    incarnation: int
    blocked_at: float | None = None
    calls: dict[int, int] = field(default_factory=dict)
    pushes: deque[Contribution] = field(default_factory=deque)
    pulls: deque[int] = field(default_factory=deque)

    @property
    def name(self) -> str:
        """Its id in the run."""
        return str(self.index)


class SimulatedRounds:
    """A run with rounds by the schedule, where learners wait for due answers, or with rounds that the syncer calls.

    Arguments:
        network: all links, idle.
        step_s: duration of an inner step, of each learner.
        exchange: schedule, sizes and the syncer's time.
        copies: number of equal learners that each simulated one represents: they do the same at the same time.
        stop_at: the last step of every learner; None: none is.

    Attributes:
        window: `stop_at`, or else the inner steps after which the pattern of scheduled rounds may repeat: as many
            periods as an answer may take.
        left_s: by learner, times at which it continued from step 0, 1·window, 2·window, …, or completed `stop_at`.
        spans: by learner, its activities.
        num_merges, num_contributions: rounds that were closed, and learners in them, copies included.
        stale_steps: inner steps since the last send, which an adoption overwrites, summed over all adoptions.
        num_adoptions: adoptions of all learners.
    """

    def __init__(
        self, network: Network, step_s: Sequence[float], exchange: ExchangePlan, copies: int = 1,
        stop_at: int | None = None,
    ) -> None:  # fmt: skip
        schedule = exchange.schedule
        assert isinstance(schedule.sync_every, int)
        assert schedule.offsets is not None
        every, tau = schedule.sync_every, schedule.overlap
        self.now_s = 0.0
        self.window = stop_at or every * math.lcm(*schedule.multiples) * (tau // every + 1)
        self.left_s: list[list[float]] = [[] for _ in step_s]
        self.spans: list[list[Span]] = [[] for _ in step_s]
        self.num_merges = self.num_contributions = self.stale_steps = self.num_adoptions = 0
        self._network, self._exchange, self._copies = network, exchange, copies
        self._every, self._stop_at = every, stop_at
        sends = {offset % every for offset in schedule.offsets}
        self._eventful_steps = sorted({0} | sends | {(place + tau) % every for place in sends})
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._in_transfer: dict[int, Contribution | tuple[int, int]] = {}  # by number; down: fragment, version
        self._merger_free_s = 0.0
        self._wake_s = math.inf
        rules = Rules(exchange.called or AllLive(), schedule, wait=exchange.called is None)
        versions = [0] * len(exchange.up_bytes)
        self._syncer = SyncerCore(rules, versions, deadlines=NO_DEADLINES)
        shares = [exchange.share(fragment) for fragment in range(len(versions))]
        self._up_bytes = [each / share for each, share in zip(exchange.up_bytes, shares, strict=True)]
        self._down_bytes = [each / share for each, share in zip(exchange.down_bytes, shares, strict=True)]
        self.learners = []
        for i, seconds in enumerate(step_s):
            held = exchange.held[i % len(exchange.held)] if exchange.held else None
            incarnation, _ = self._syncer.joined(0.0, str(i), ready=True, held=held)
            own = [0 if held is None or fragment in held else NOTHING for fragment in range(len(versions))]
            core = LearnerCore(rules, own)
            self.learners.append(SimulatedLearner(i, seconds, network.latency_s(i), core, own[:], incarnation))
        for learner in self.learners:
            self._compute(learner)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _at(self, time_s: float, do: Callable[[], None]) -> None:
        """Schedule `do` at a time; simultaneous events run in the order of the calls."""
        heapq.heappush(self._events, (time_s, self._num_events, do))
        self._num_events += 1

    def run(self, is_over: Callable[[], bool]) -> None:
        """Process events until `is_over()`, or until none is left."""
        while not is_over():
            next_s = min(self._network.next_s, self._events[0][0] if self._events else math.inf)
            if math.isinf(next_s):
                return
            self.now_s = max(self.now_s, next_s)
            if self._network.next_s <= self.now_s:
                for transfer in self._network.arrived(self.now_s):
                    self._arrived(transfer)
            while self._events and self._events[0][0] <= self.now_s and self._network.next_s > self.now_s:
                heapq.heappop(self._events)[2]()

    def _note(self, learner: SimulatedLearner, kind: Kind, begin_s: float, end_s: float) -> None:
        """Add an activity to a learner's trace."""
        if end_s > begin_s:
            self.spans[learner.index].append(Span(begin_s, end_s, kind))

    # --- learners -----------------------------------------------------------------------------------------------------

    def _compute(self, learner: SimulatedLearner) -> None:
        """Compute to the next step after which a fragment may be sent or adopted."""
        step = learner.core.step
        if step % self.window == 0:
            self.left_s[learner.index].append(self.now_s)
        if step == self._stop_at:
            return
        place, steps = step % self._every, 1
        if self._exchange.called is None:
            steps = next((each for each in self._eventful_steps if each > place), self._every) - place
            steps = min(steps, self.window - step % self.window)
        ends_s = self.now_s + steps * learner.step_s
        self._note(learner, "compute", self.now_s, ends_s)
        learner.core.step += steps - 1
        self._at(ends_s, partial(self._boundary, learner))

    def _boundary(self, learner: SimulatedLearner) -> None:
        """Sends come before adoptions."""
        core = learner.core
        sends = [*core.stepped(1), *(core.called(fragment, version) for fragment, version in learner.calls.items())]
        learner.calls.clear()
        for send in sends:
            if send is not None:
                learner.pushes.append(Contribution(
                    learner.name, learner.incarnation, send.fragment, send.number, send.round, send.base, send.tokens,
                    send.steps, core.tokens, send.discarded, step=core.step,
                ))  # fmt: skip
                if len(learner.pushes) == 1:
                    self._send_next(learner)
        if self._exchange.called is not None and core.step % max(1, math.ceil(REPORT_EVERY_S / learner.step_s)) == 0:
            report = Report(core.step, core.tokens, learner.step_s, steps=core.steps)
            self._at(self.now_s + learner.latency_s, partial(self._reported, learner, report))
        learner.blocked_at = self.now_s
        self._continue_if_received(learner)

    def _continue_if_received(self, learner: SimulatedLearner) -> None:
        """Adopt the due versions and continue, once every due answer has arrived."""
        if learner.blocked_at is None or learner.core.waiting():
            return
        for fragment, version in learner.core.adoptions():
            self.stale_steps += learner.core.fragments[fragment].pending_steps
            self.num_adoptions += 1
            learner.core.adopted(fragment, version)
        self._note(learner, "waiting", learner.blocked_at, self.now_s)
        learner.blocked_at = None
        self._compute(learner)

    # --- connections --------------------------------------------------------------------------------------------------

    def _send_next(self, learner: SimulatedLearner) -> None:
        c = learner.pushes[0]
        num_bytes = self._up_bytes[c.fragment]
        self._in_transfer[self._network.send(self.now_s, learner.index, "up", num_bytes)] = c

    def _acknowledged(self, learner: SimulatedLearner) -> None:
        learner.pushes.popleft()
        if learner.pushes:
            self._send_next(learner)

    def _notified(self, learner: SimulatedLearner, fragment: int, version: int) -> None:
        learner.notified[fragment] = version
        if version > learner.core.received_versions[fragment] and fragment not in learner.pulls:
            learner.pulls.append(fragment)
            if len(learner.pulls) == 1:
                self._request_next(learner)

    def _request_next(self, learner: SimulatedLearner) -> None:
        self._at(self.now_s + learner.latency_s, partial(self._answer, learner, learner.pulls[0]))

    def _answer(self, learner: SimulatedLearner, fragment: int) -> None:
        """Send the next version, or the newest one if the syncer has not kept that update."""
        next_, newest = learner.core.received_versions[fragment] + 1, self._syncer.fragments[fragment].version
        version = next_ if newest - next_ <= self._syncer.intervals_in_flight else newest
        number = self._network.send(self.now_s, learner.index, "down", self._down_bytes[fragment])
        self._in_transfer[number] = fragment, version

    def _arrived(self, transfer: Transfer) -> None:
        learner = self.learners[transfer.learner]
        self._note(learner, transfer.direction, transfer.began_s, transfer.ended_s)
        arrived = self._in_transfer.pop(transfer.number)
        if isinstance(arrived, Contribution):
            self._at(self.now_s + learner.latency_s, partial(self._acknowledged, learner))
            self._do(self._syncer.contributed(self.now_s, arrived))
            return
        fragment, version = arrived
        learner.pulls.popleft()
        if version < learner.notified[fragment]:  # requested again after the others, as the session does
            learner.pulls.append(fragment)
        if learner.pulls:
            self._request_next(learner)
        merged = [verdict.number for verdict in self._syncer.verdicts(learner.name, fragment, version)]
        learner.core.received(fragment, version, max(merged, default=0))
        self._continue_if_received(learner)

    # --- the syncer ---------------------------------------------------------------------------------------------------

    def _reported(self, learner: SimulatedLearner, report: Report) -> None:
        self._do(self._syncer.heartbeat(self.now_s, learner.name, learner.incarnation, report))

    def _do(self, actions: Sequence[Action]) -> None:
        """Execute the syncer's actions; nothing is durable here, so that a merged version is published at once."""
        for action in actions:
            match action:
                case MergeRound(fragment=fragment, weights=weights):  # one of each learner
                    num = len(weights) * self._copies
                    seconds = self._exchange.merging.seconds(num * self._up_bytes[fragment])
                    self._merger_free_s = max(self._merger_free_s, self.now_s) + seconds
                    self.num_merges += 1
                    self.num_contributions += num
                    self._at(self._merger_free_s, partial(self._merged, fragment))
                case Publish(fragment=fragment, version=version):
                    for each in self.learners:
                        if each.core.fragments[fragment].is_held:
                            self._at(self.now_s + each.latency_s, partial(self._notified, each, fragment, version))
                case Tell(learners=names):
                    for each in (self.learners[int(name)] for name in names):
                        calls = self._syncer.rounds.calls(each.name)
                        self._at(self.now_s + each.latency_s, partial(each.calls.update, calls))
                case WakeAt(at=at):
                    self._wake_s = at
                    if at < math.inf:
                        self._at(at, self._tick)

    def _merged(self, fragment: int) -> None:
        self._syncer.merged(fragment)
        self._do(self._syncer.stored(self.now_s, fragment))

    def _tick(self) -> None:
        if self.now_s >= self._wake_s:
            self._do(self._syncer.tick(self.now_s))
