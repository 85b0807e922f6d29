"""Transfers over links that share their capacity, in virtual time: bandwidth, queueing, shared bottlenecks, latency.

A transfer uses every link of its route at one rate. Concurrent transfers share each link by max-min fairness, which
long-lived TCP connections of similar round-trip times approach. A learner's transfers in one direction queue, as they
do on its one connection. Latency is added at the end. The content of a transfer is irrelevant.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from diloco.errors import ConfigError

Direction = Literal["up", "down"]


@dataclass(frozen=True)
class Route:
    """A learner's route to the syncer and back.

    Attributes:
        up, down: names of the links in each direction, in any order.
        latency_s: one way.
    """

    up: tuple[str, ...]
    down: tuple[str, ...]
    latency_s: float = 0.0


@dataclass
class Transfer:
    """A transfer: queued, active or arrived.

    Attributes:
        links: names of the links that it uses.
        left_bits: not sent yet.
        began_s: start of the transfer; NaN while it is queued.
        rate_bit_per_s: its current rate.
        ended_s: time at which its last bit leaves the last link, if no rate changes before.
        arrived_s: arrival, after the latency.
    """

    number: int
    learner: int
    direction: Direction
    num_bytes: float
    links: tuple[str, ...]
    left_bits: float
    began_s: float = math.nan
    rate_bit_per_s: float = 0.0
    ended_s: float = math.inf
    arrived_s: float = math.inf


class Network:
    """All links of a run and the transfers on them.

    Arguments:
        bit_per_s: capacity of every link, by name; may be infinite.
        routes: one for each learner, in learner order.

    Raises:
        ConfigError: a capacity that is not above 0, a negative latency, or a route over an unknown link.
    """

    def __init__(self, bit_per_s: Mapping[str, float], routes: Sequence[Route]) -> None:
        for name, rate in bit_per_s.items():
            if not rate > 0:
                raise ConfigError(f"link {name} carries {rate!r} bit/s; a link needs more than 0.")
        for index, route in enumerate(routes):
            if not 0 <= route.latency_s < math.inf:
                raise ConfigError(f"learner {index} has a latency of {route.latency_s!r} s; give 0 or more.")
            if missing := [name for name in (*route.up, *route.down) if name not in bit_per_s]:
                known = ", ".join(bit_per_s) or "none"
                raise ConfigError(f"learner {index} has a route over the link {missing[0]}; known links: {known}.")
        self._bit_per_s, self._routes = dict(bit_per_s), tuple(routes)
        self._now = 0.0
        self._num_sent = 0
        self._queues: dict[tuple[int, Direction], deque[Transfer]] = {}
        self._arriving: list[tuple[float, int, Transfer]] = []
        self._next_end_s = math.inf

    def send(self, now_s: float, learner: int, direction: Direction, num_bytes: float) -> int:
        """Queue a transfer and return its number."""
        self._advance(now_s)
        route = self._routes[learner]
        links = route.up if direction == "up" else route.down
        transfer = Transfer(self._num_sent, learner, direction, num_bytes, links, 8.0 * num_bytes)
        self._num_sent += 1
        queue = self._queues.setdefault((learner, direction), deque())
        queue.append(transfer)
        if len(queue) == 1:
            self._begin([transfer])
        return transfer.number

    def drop(self, now_s: float, learner: int) -> None:
        """Drop all transfers from and to a learner."""
        self._advance(now_s)
        self._queues = {key: queue for key, queue in self._queues.items() if key[0] != learner}
        self._arriving = [each for each in self._arriving if each[2].learner != learner]
        heapq.heapify(self._arriving)
        self._share()

    def latency_s(self, learner: int) -> float:
        """The one-way latency of a learner's route."""
        return self._routes[learner].latency_s

    @property
    def next_s(self) -> float:
        """Time at which the next transfer leaves its last link or arrives, if nothing is sent before."""
        return min(self._next_end_s, self._arriving[0][0] if self._arriving else math.inf)

    def arrived(self, now_s: float) -> list[Transfer]:
        """Return transfers that arrived since the last call, in order of arrival, then of sending."""
        self._advance(now_s)
        found = []
        while self._arriving and self._arriving[0][0] <= now_s:
            found.append(heapq.heappop(self._arriving)[2])
        return found

    def _advance(self, to_s: float) -> None:
        while (at := self._next_end_s) <= to_s:
            self._advance_active(at)
            following = []
            for key, queue in list(self._queues.items()):
                if queue[0].ended_s > at:
                    continue
                self._end(queue.popleft(), at)
                if queue:
                    following.append(queue[0])
                else:
                    del self._queues[key]
            self._begin(following)
        self._advance_active(to_s)

    def _advance_active(self, to_s: float) -> None:
        """Advance the active transfers, each at its rate."""
        for queue in self._queues.values():
            transfer = queue[0]
            if transfer.rate_bit_per_s < math.inf:
                transfer.left_bits -= transfer.rate_bit_per_s * (to_s - self._now)
        self._now = max(self._now, to_s)

    def _end(self, transfer: Transfer, at: float) -> None:
        transfer.ended_s, transfer.arrived_s = at, at + self.latency_s(transfer.learner)
        heapq.heappush(self._arriving, (transfer.arrived_s, transfer.number, transfer))

    def _begin(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            transfer.began_s = self._now
        self._share()

    def _share(self) -> None:
        """Set max-min fair rates: saturate the narrowest link, fix the rates of its transfers, repeat with the rest."""
        active = [queue[0] for queue in self._queues.values()]
        rates: dict[int, float] = {}
        users: dict[str, dict[int, Transfer]] = {}  # of each link that is not saturated yet
        for each in active:
            for name in each.links:
                if self._bit_per_s[name] < math.inf:
                    users.setdefault(name, {})[each.number] = each
        left = {name: self._bit_per_s[name] for name in users}
        while users:
            share, narrowest = min((left[name] / len(of_link), name) for name, of_link in users.items())
            for number, each in users.pop(narrowest).items():
                rates[number] = share
                for name in each.links:
                    if number in users.get(name, ()):
                        left[name] = max(0.0, left[name] - share)
                        del users[name][number]
                        if not users[name]:
                            del users[name]
        for each in active:
            rate = rates.get(each.number, math.inf)
            if rate != each.rate_bit_per_s or math.isinf(each.ended_s):
                each.rate_bit_per_s = rate
                each.ended_s = self._now + max(0.0, each.left_bits) / rate
        self._next_end_s = min((each.ended_s for each in active), default=math.inf)
