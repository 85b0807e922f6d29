"""What is on its way between learners and a syncer in virtual time, and what happens to them from outside."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from diloco.errors import ConfigError
from diloco.exchange.virtual import Watch

Direction = Literal["up", "down"]
Deliver = Callable[[], None]


class Arrival(Protocol):
    """A transfer that has arrived: its number as `send` gave it, and when it was on the links."""

    @property
    def number(self) -> int: ...

    @property
    def learner(self) -> int: ...

    @property
    def direction(self) -> Direction: ...

    @property
    def began_s(self) -> float: ...

    @property
    def ended_s(self) -> float: ...


class Links(Protocol):
    """A network, as a run in virtual time sees it; `diloco.planning.network.Network` is one."""

    def send(self, now_s: float, learner: int, direction: Direction, num_bytes: float) -> int:
        """Put a transfer on its way; returns its number."""

    def drop(self, now_s: float, learner: int) -> None:
        """Forget all that is on its way from and to a learner."""

    def latency_s(self, learner: int) -> float:
        """Of something small, one way."""

    @property
    def next_s(self) -> float:
        """When to look next."""

    def arrived(self, now_s: float) -> Sequence[Arrival]:
        """What has arrived by now and was not returned before."""


class Delivery:
    """Carries transfers over a network, and small messages beside them after the latency; without a network all arrives at once."""

    def __init__(self, links: Links | None, now_s: Callable[[], float], watch: Watch) -> None:
        self._links, self._now_s, self._watch = links, now_s, watch
        self._transfers: dict[int, Deliver] = {}
        self._messages: list[tuple[float, int, int | None, Deliver]] = []
        self._num_messages = 0

    def carry(self, learner: int, direction: Direction, num_bytes: int, deliver: Deliver) -> None:
        """`deliver` is called when this many bytes have got through."""
        if self._links is None:
            deliver()
        else:
            self._transfers[self._links.send(self._now_s(), learner, direction, num_bytes)] = deliver

    def tell(self, learner: int, deliver: Deliver) -> None:
        """`deliver` is called when a few bytes have got through, which wait for no transfer."""
        if self._links is None:
            deliver()
        else:
            self.later(self._now_s() + self._links.latency_s(learner), deliver, learner)

    def later(self, at_s: float, deliver: Deliver, learner: int | None = None) -> None:
        """`deliver` is called at this time, unless all that is to or from the learner is forgotten before."""
        heapq.heappush(self._messages, (at_s, self._num_messages, learner, deliver))
        self._num_messages += 1

    def forget(self, learner: int) -> None:
        """Nothing that is on its way from or to the learner arrives."""
        self._messages = [each for each in self._messages if each[2] != learner]
        heapq.heapify(self._messages)
        if self._links is not None:
            self._links.drop(self._now_s(), learner)

    @property
    def next_s(self) -> float:
        """When something may arrive next."""
        message_s = self._messages[0][0] if self._messages else math.inf
        return message_s if self._links is None else min(message_s, self._links.next_s)

    def happen(self, now_s: float) -> None:
        """All that arrives now."""
        for each in () if self._links is None else self._links.arrived(now_s):
            self._watch(each.direction, each.learner, each.began_s, each.ended_s)
            self._transfers.pop(each.number)()
        while self._messages and self._messages[0][0] <= now_s:
            heapq.heappop(self._messages)[3]()


@dataclass(frozen=True)
class Fault:
    """A learner is killed.

    Attributes:
        learner: its index.
        at_s: when.
        back_s: when it starts again; None: it does not.
    """

    learner: int
    at_s: float
    back_s: float | None = None

    def __post_init__(self) -> None:
        if (
            not 0 <= self.at_s < math.inf
            or not self.at_s <= (self.at_s if self.back_s is None else self.back_s) < math.inf
        ):
            raise ConfigError(
                f"learner {self.learner} is killed at {self.at_s!r} s and back at {self.back_s!r} s; it comes back later, or never (None)."
            )


class Faults:
    """When learners are killed, and what is done about it."""

    def __init__(self, faults: Sequence[Fault], kill: Callable[[Fault], None]) -> None:
        self._left = sorted(faults, key=lambda each: (each.at_s, each.learner))
        self._kill = kill

    @property
    def next_s(self) -> float:
        """When the next one is due."""
        return self._left[0].at_s if self._left else math.inf

    def happen(self, now_s: float) -> None:
        """All that are due now."""
        while self._left and self._left[0].at_s <= now_s:
            self._kill(self._left.pop(0))


class Alarm:
    """Calls once, at the time that was set last."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.next_s = math.inf
        self._call = call

    def happen(self, now_s: float) -> None:
        """It goes off."""
        self.next_s = math.inf
        self._call()
