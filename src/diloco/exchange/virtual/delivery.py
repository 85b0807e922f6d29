"""Messages and transfers between learners and a syncer in virtual time, and faults of learners."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from diloco.errors import ConfigError
from diloco.exchange.virtual.turns import Watch

Direction = Literal["up", "down"]
Event = Callable[[], None]


class Arrival(Protocol):
    """A transfer that has arrived: its number, as `Links.send` returned it, and when it began and ended."""

    number: int
    learner: int
    direction: Direction
    began_s: float
    ended_s: float


class Links(Protocol):
    """A network in virtual time, such as `diloco.planning.network.Network`."""

    def send(self, now_s: float, learner: int, direction: Direction, num_bytes: float) -> int:
        """Begin a transfer; returns its number."""

    def drop(self, now_s: float, learner: int) -> None:
        """Drop all transfers from and to a learner."""

    def latency_s(self, learner: int) -> float:
        """The delay of a small message, one way."""

    @property
    def next_s(self) -> float:
        """When the next transfer may arrive."""

    def arrived(self, now_s: float) -> Sequence[Arrival]:
        """The transfers that have arrived by now and were not returned before."""


class Delivery:
    """Scheduled events, and messages and transfers over a network. Without a network they arrive at once, in the order
    sent.

    Arguments:
        now_s: returns the virtual time.
        watch: is called for every transfer.
    """

    def __init__(self, links: Links | None, now_s: Callable[[], float], watch: Watch) -> None:
        self.now_s = now_s
        self._links, self._watch = links, watch
        self._transfers: dict[int, Event] = {}
        self._events: list[tuple[float, int, int | None, Event]] = []
        self._num_events = 0

    @property
    def takes_time(self) -> bool:
        """Whether there is a network, over which messages take time."""
        return self._links is not None

    def send(self, learner: int, direction: Direction, num_bytes: int, arrive: Event) -> None:
        """Call `arrive` when this many bytes have arrived. A message of 0 bytes does not queue behind transfers."""
        if self._links is None:
            self.at(self.now_s(), arrive, learner)
        elif num_bytes:
            self._transfers[self._links.send(self.now_s(), learner, direction, num_bytes)] = arrive
        else:
            self.at(self.now_s() + self._links.latency_s(learner), arrive, learner)

    def at(self, at_s: float, event: Event, learner: int | None = None) -> None:
        """Call `event` at this time, unless the learner's events are dropped before."""
        heapq.heappush(self._events, (at_s, self._num_events, learner, event))
        self._num_events += 1

    def drop(self, learner: int) -> None:
        """Drop the events, messages and transfers of a learner."""
        self._events = [each for each in self._events if each[2] != learner]
        heapq.heapify(self._events)
        if self._links is not None:
            self._links.drop(self.now_s(), learner)

    @property
    def next_s(self) -> float:
        """When the next event is due."""
        event_s = self._events[0][0] if self._events else math.inf
        return event_s if self._links is None else min(event_s, self._links.next_s)

    def fire(self, now_s: float) -> None:
        """Fire the first event that is due, or, if none is, all transfers that arrive now. (A message that was sent
        before a transfer arrives before it.)"""
        if self._events and self._events[0][0] <= now_s:
            heapq.heappop(self._events)[3]()
            return
        for each in () if self._links is None else self._links.arrived(now_s):
            self._watch(each.direction, each.learner, each.began_s, each.ended_s)
            self._transfers.pop(each.number)()


class Alarm:
    """The clock of a state machine (`run.ports.ClockPort`): calls `ring` at the time that was set last.

    Arguments:
        learner: the learner whose alarm this is; None: it is the syncer's.
    """

    def __init__(self, delivery: Delivery, ring: Event, learner: int | None = None) -> None:
        self._delivery, self._ring, self._learner = delivery, ring, learner
        self._wanted_s = self._planned_s = math.inf

    def now_s(self) -> float:
        """The virtual time."""
        return self._delivery.now_s()

    def wake_at(self, at_s: float) -> None:
        """Ring at this time, in place of the time set before."""
        self._wanted_s = at_s
        if at_s < self._planned_s:
            self._plan(at_s)

    def stop(self) -> None:
        """Never ring again."""
        self._ring = lambda: None

    def _plan(self, at_s: float) -> None:
        self._planned_s = at_s
        self._delivery.at(at_s, lambda: self._fire(at_s), self._learner)

    def _fire(self, at_s: float) -> None:
        if at_s != self._planned_s:  # an earlier time was planned after this one
            return
        self._planned_s = math.inf
        if self._wanted_s <= at_s:
            self._wanted_s = math.inf
            self._ring()
        elif self._wanted_s < math.inf:
            self._plan(self._wanted_s)


@dataclass(frozen=True)
class Fault:
    """The kill of a learner.

    Attributes:
        learner: its index.
        at_s: when it is killed.
        back_s: when it starts again; None: never.
    """

    learner: int
    at_s: float
    back_s: float | None = None

    def __post_init__(self) -> None:
        back_s = self.at_s if self.back_s is None else self.back_s
        if not 0 <= self.at_s <= back_s < math.inf:
            raise ConfigError(
                f"learner {self.learner} is killed at {self.at_s!r} s and starts again at {self.back_s!r} s; let it "
                "start later, or never (None)."
            )


class Faults:
    """The kills of a run in order of time; `kill` executes one."""

    def __init__(self, faults: Sequence[Fault], kill: Callable[[Fault], None]) -> None:
        self._left = sorted(faults, key=lambda each: (each.at_s, each.learner))
        self._kill = kill

    @property
    def next_s(self) -> float:
        """When the next kill is due."""
        return self._left[0].at_s if self._left else math.inf

    def fire(self, now_s: float) -> None:
        """Execute all kills that are due."""
        while self._left and self._left[0].at_s <= now_s:
            self._kill(self._left.pop(0))
