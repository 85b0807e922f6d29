"""Discrete-event simulation of learners and a syncer: compute, waiting and transfers, without a model or a tensor.

Learners and syncer follow the timing of `diloco.learner`, `diloco.exchange.remote` and `diloco.syncer`:

- A learner pushes one contribution at a time, in order, the next one once the previous one is acknowledged. It pulls
  one update at a time.
- The syncer merges one round at a time, then notifies every learner, and each learner requests the update: a
  publication costs two latencies more than its bytes.
- At a boundary sends come before applications; in a method that waits, a learner blocks until every due answer has
  arrived.

`simulated_rounds.py` decides when a fragment is sent and merged.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial

from diloco.core.quorum import Called
from diloco.core.schedule import Schedule
from diloco.planning.network import Network, Transfer
from diloco.report.drawing import Kind, Span


@dataclass(frozen=True)
class Merging:
    """The syncer's time for a round; rounds are merged one after the other.

    Attributes:
        fixed_s: independent of the size: closing, storing, notifying.
        bytes_per_s: throughput in encoded contributions, of all learners together; infinite: no time.
    """

    fixed_s: float = 0.0
    bytes_per_s: float = math.inf

    def seconds(self, num_bytes: float) -> float:
        """Time of a round with `num_bytes` of contributions."""
        return self.fixed_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class ExchangePlan:
    """The exchange of a method: schedule, sizes and the syncer's time.

    Attributes:
        schedule: which fragment is sent after which inner step, and τ.
        up_bytes, down_bytes: encoded size of each fragment.
        merging: the syncer's time for a round.
        called: quorum of rounds that the syncer calls; None: rounds follow the schedule, and learners wait.
    """

    schedule: Schedule
    up_bytes: Sequence[float]
    down_bytes: Sequence[float]
    merging: Merging = Merging()
    called: Called | None = None

    def per_interval(self, of_fragments: Sequence[float]) -> float:
        """Sum over fragments of a number, such as bytes, in H inner steps: one sent every k·H steps counts 1/k."""
        return math.fsum(each / k for each, k in zip(of_fragments, self.schedule.multiples, strict=True))


@dataclass
class SimulatedLearner:
    """One learner: its inner steps, and its two connections.

    Attributes:
        step_s: duration of an inner step.
        latency_s: one way.
        step: the inner step whose boundary it has reached or computes to.
        blocked_at: start of the wait; None: it computes.
        adopted, received, notified: per fragment, the newest version that it has adopted, received, been notified of.
        pushes: contributions to send: fragment and round.
        pulls: fragments with a newer version than the received one, those that have waited longest first.
    """

    index: int
    step_s: float
    latency_s: float
    num_fragments: InitVar[int]
    step: int = 0
    blocked_at: float | None = None
    pushes: deque[tuple[int, int]] = field(default_factory=deque)
    pulls: deque[int] = field(default_factory=deque)

    def __post_init__(self, num_fragments: int) -> None:
        self.adopted, self.received, self.notified = ([0] * num_fragments for _ in range(3))


class StarSimulation:
    """Links, connections and the syncer's worker; a subclass decides when fragments are sent and merged.

    Arguments:
        network: all links, idle.
        step_s: duration of an inner step, of each learner.
        exchange: schedule, sizes and the syncer's time.
        copies: number of equal learners that each simulated one represents: they do the same at the same time.
        traced: keep the activities of every learner.
    """

    def __init__(
        self, network: Network, step_s: Sequence[float], exchange: ExchangePlan, copies: int = 1, traced: bool = False
    ) -> None:
        num_fragments = len(exchange.up_bytes)
        self.learners = [
            SimulatedLearner(i, seconds, network.latency_s(i), num_fragments) for i, seconds in enumerate(step_s)
        ]
        self.now_s = 0.0
        self.spans: list[list[Span]] = [[] for _ in step_s]
        self.num_merges = [0] * num_fragments
        self._published = [0] * num_fragments
        self._num_kept = 1 + exchange.schedule.intervals_in_flight
        """Updates of a fragment that the syncer keeps; a learner further behind fetches the newest version whole."""
        self.num_contributions = 0
        self._network, self._merging, self._copies, self._traced = network, exchange.merging, copies, traced
        self._up_bytes, self._down_bytes = exchange.up_bytes, exchange.down_bytes
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._in_transfer: dict[int, tuple[int, int]] = {}  # by transfer: fragment, and round or version
        self._merger_free_s = 0.0

    # --- time ---------------------------------------------------------------------------------------------------------

    def at(self, time_s: float, do: Callable[[], None]) -> None:
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
            for transfer in self._network.arrived(self.now_s):
                self._arrived(transfer)
            while self._events and self._events[0][0] <= self.now_s and self._network.next_s > self.now_s:
                heapq.heappop(self._events)[2]()

    def note(self, learner: int, kind: Kind, begin_s: float, end_s: float) -> None:
        """Add an activity to a learner's trace."""
        if self._traced and end_s > begin_s:
            self.spans[learner].append(Span(begin_s, end_s, kind))

    # --- connections --------------------------------------------------------------------------------------------------

    def push(self, learner: SimulatedLearner, fragment: int, round_: int) -> None:
        """Queue a contribution; it is sent once the previous ones are acknowledged."""
        learner.pushes.append((fragment, round_))
        if len(learner.pushes) == 1:
            self._send_next(learner)

    def _send_next(self, learner: SimulatedLearner) -> None:
        fragment, round_ = learner.pushes[0]
        number = self._network.send(self.now_s, learner.index, "up", self._up_bytes[fragment])
        self._in_transfer[number] = (fragment, round_)

    def _acknowledged(self, learner: SimulatedLearner) -> None:
        learner.pushes.popleft()
        if learner.pushes:
            self._send_next(learner)

    def _notify(self, learner: SimulatedLearner, fragment: int, version: int) -> None:
        """Notify a learner of a published version."""
        learner.notified[fragment] = version
        if fragment not in learner.pulls:
            learner.pulls.append(fragment)
            if len(learner.pulls) == 1:
                self._request_next(learner)

    def _request_next(self, learner: SimulatedLearner) -> None:
        fragment = learner.pulls[0]

        def answer() -> None:
            next_, newest = learner.received[fragment] + 1, self._published[fragment]
            version = next_ if newest - next_ < self._num_kept else newest
            number = self._network.send(self.now_s, learner.index, "down", self._down_bytes[fragment])
            self._in_transfer[number] = (fragment, version)

        self.at(self.now_s + learner.latency_s, answer)

    def _arrived(self, transfer: Transfer) -> None:
        learner = self.learners[transfer.learner]
        fragment, number = self._in_transfer.pop(transfer.number)
        self.note(transfer.learner, transfer.direction, transfer.began_s, transfer.ended_s)
        if transfer.direction == "up":
            self.at(self.now_s + learner.latency_s, partial(self._acknowledged, learner))
            self.contributed(learner, fragment, number)
            return
        learner.received[fragment] = max(learner.received[fragment], number)
        learner.pulls.popleft()
        if (
            learner.received[fragment] < learner.notified[fragment]
        ):  # requested again after the others, as the session does
            learner.pulls.append(fragment)
        if learner.pulls:
            self._request_next(learner)
        self.received(learner, fragment)

    # --- the syncer ---------------------------------------------------------------------------------------------------

    def merge(self, fragment: int, version: int, num_contributions: int) -> None:
        """Close a round; its version is published once the syncer's worker has merged it."""
        seconds = self._merging.seconds(num_contributions * self._copies * self._up_bytes[fragment])
        self._merger_free_s = max(self._merger_free_s, self.now_s) + seconds
        self.num_merges[fragment] += 1
        self.num_contributions += num_contributions * self._copies
        self.at(self._merger_free_s, partial(self._publish, fragment, version))

    def _publish(self, fragment: int, version: int) -> None:
        self._published[fragment] = version
        for learner in self.learners:
            self.at(self.now_s + learner.latency_s, partial(self._notify, learner, fragment, version))
        self.published(fragment, version)

    # --- what a method decides ----------------------------------------------------------------------------------------

    def contributed(self, learner: SimulatedLearner, fragment: int, round_: int) -> None:
        """Handle a contribution that the syncer has received completely."""
        raise NotImplementedError

    def received(self, learner: SimulatedLearner, fragment: int) -> None:
        """Handle a version that a learner has received."""
        raise NotImplementedError

    def published(self, fragment: int, version: int) -> None:
        """Handle the publication of a version."""
