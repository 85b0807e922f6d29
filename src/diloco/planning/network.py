"""Transfers over links that share their capacity, in virtual time: bandwidth, queueing, shared bottlenecks, latency.

A transfer runs over the links of its path at one rate. Transfers that are under way at the same time share every link
fairly: rates are max-min fair, as long-lived TCP connections of like round-trip times come to be. A learner's transfers
in one direction queue, as they do on its one connection. Latency is added at the end. Nothing here knows what the bytes
are.
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
    """One learner's way to the syncer and back.

    Attributes:
        up, down: names of the links on the way, in any order.
        latency_s: one way.
    """

    up: tuple[str, ...]
    down: tuple[str, ...]
    latency_s: float = 0.0


@dataclass(frozen=True)
class Transfer:
    """A transfer that has arrived: learner, size, and when it began, left the last link and arrived."""

    number: int
    learner: int
    direction: Direction
    num_bytes: float
    began_s: float
    ended_s: float
    arrived_s: float


@dataclass
class _Flow:
    """A transfer that is queued or under way."""

    number: int
    learner: int
    direction: Direction
    num_bytes: float
    links: tuple[str, ...]
    left_bits: float
    began_s: float = math.nan
    rate_bit_per_s: float = 0.0
    ends_s: float = math.inf


class Network:
    """All links of a run and what is on them.

    Arguments:
        bit_per_s: capacity of every link, by name; may be infinite.
        paths: each learner's, in learner order.

    Raises:
        ConfigError: a capacity that is not above 0, a negative latency, a path over a link that is not there.
    """

    def __init__(self, bit_per_s: Mapping[str, float], paths: Sequence[Route]) -> None:
        for name, rate in bit_per_s.items():
            if not rate > 0:
                raise ConfigError(f"link {name} carries {rate!r} bit/s; a link needs more than 0.")
        for index, path in enumerate(paths):
            if not 0 <= path.latency_s < math.inf:
                raise ConfigError(f"learner {index} has a latency of {path.latency_s!r} s; it is 0 or more.")
            if missing := [name for name in (*path.up, *path.down) if name not in bit_per_s]:
                known = ", ".join(bit_per_s) or "none"
                raise ConfigError(f"learner {index} has a path over the link {missing[0]}; known links: {known}.")
        self._bit_per_s, self._paths = dict(bit_per_s), tuple(paths)
        self._now = 0.0
        self._num_sent = 0
        self._queues: dict[tuple[int, Direction], deque[_Flow]] = {}
        self._arriving: list[tuple[float, int, Transfer]] = []

    def send(self, now_s: float, learner: int, direction: Direction, num_bytes: float) -> int:
        """Queue a transfer and return its number."""
        self._advance(now_s)
        path = self._paths[learner]
        links = path.up if direction == "up" else path.down
        flow = _Flow(self._num_sent, learner, direction, num_bytes, links, 8.0 * num_bytes)
        self._num_sent += 1
        queue = self._queues.setdefault((learner, direction), deque())
        queue.append(flow)
        if len(queue) == 1:
            self._begin([flow])
        return flow.number

    def drop(self, now_s: float, learner: int) -> None:
        """Forget all that is on its way from and to a learner."""
        self._advance(now_s)
        self._queues = {key: queue for key, queue in self._queues.items() if key[0] != learner}
        self._arriving = [each for each in self._arriving if each[2].learner != learner]
        heapq.heapify(self._arriving)
        self._share()

    def latency_s(self, learner: int) -> float:
        """The one-way latency of a learner's path."""
        return self._paths[learner].latency_s

    @property
    def next_s(self) -> float:
        """When the next transfer leaves its last link or arrives, if nothing is sent before; infinite where none is."""
        ends = min((queue[0].ends_s for queue in self._queues.values()), default=math.inf)
        return min(ends, self._arriving[0][0] if self._arriving else math.inf)

    def arrived(self, now_s: float) -> list[Transfer]:
        """Transfers that have arrived by now and were not returned before, in order of arrival, then of sending."""
        self._advance(now_s)
        found = []
        while self._arriving and self._arriving[0][0] <= now_s:
            found.append(heapq.heappop(self._arriving)[2])
        return found

    def _advance(self, to_s: float) -> None:
        while (at := min((queue[0].ends_s for queue in self._queues.values()), default=math.inf)) <= to_s:
            self._carry(at)
            following = []
            for key, queue in list(self._queues.items()):
                if queue[0].ends_s > at:
                    continue
                self._end(queue.popleft(), at)
                if queue:
                    following.append(queue[0])
                else:
                    del self._queues[key]
            self._begin(following)
        self._carry(to_s)

    def _carry(self, to_s: float) -> None:
        """Advance everything under way at its rate."""
        for queue in self._queues.values():
            flow = queue[0]
            if flow.rate_bit_per_s < math.inf:
                flow.left_bits -= flow.rate_bit_per_s * (to_s - self._now)
        self._now = max(self._now, to_s)

    def _end(self, flow: _Flow, at: float) -> None:
        arrives = at + self._paths[flow.learner].latency_s
        done = Transfer(flow.number, flow.learner, flow.direction, flow.num_bytes, flow.began_s, at, arrives)
        heapq.heappush(self._arriving, (arrives, flow.number, done))

    def _begin(self, flows: Iterable[_Flow]) -> None:
        for flow in flows:
            flow.began_s = self._now
        self._share()

    def _share(self) -> None:
        """Max-min fair rates: fill the link that gives least, fix the rates of its flows, repeat with what is left."""
        flows = [queue[0] for queue in self._queues.values()]
        rates = dict.fromkeys((flow.number for flow in flows), math.inf)
        left = {
            name: self._bit_per_s[name] for flow in flows for name in flow.links if self._bit_per_s[name] < math.inf
        }
        waiting = {flow.number: flow for flow in flows if any(name in left for name in flow.links)}
        while waiting:
            users: dict[str, list[int]] = {}
            for flow in waiting.values():
                for name in flow.links:
                    if name in left:
                        users.setdefault(name, []).append(flow.number)
            share, narrowest = min((left[name] / len(numbers), name) for name, numbers in users.items())
            for number in users[narrowest]:
                rates[number] = share
                for name in waiting.pop(number).links:
                    if name in left:
                        left[name] = max(0.0, left[name] - share)
            del left[narrowest]
        for flow in flows:
            rate = rates[flow.number]
            if rate != flow.rate_bit_per_s or math.isinf(flow.ends_s):
                flow.rate_bit_per_s = rate
                flow.ends_s = self._now + max(0.0, flow.left_bits) / rate
