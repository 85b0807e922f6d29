"""When connections are ended, and what follows for new ones of the same hosts.

TLS says nothing of a caller before its first call, and gRPC shows no connection that fails in its handshake. What is
known of the sender of a connection that never brought a call is its address, and many learners may share that with it.
So a host with many such connections is not shut out: fewer of its new ones are taken, and the more so the more there
are. A caller with a certificate is known by that; its further connections have lower limits. Both are forgotten within
a minute or two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from diloco.syncer.tcp import network_of

FORGOTTEN_S, FORGOTTEN = 20.0, 1.0
"""What strikes count falls by e within this time; less than this is nothing."""

STRIKE_BYTES = 1 << 20
"""A connection without a call is a strike, and another one for so many bytes that it brought."""

MOST_THINNED, MOST_THINNED_KNOWN = 10, 3
"""One in 2^k new connections is taken at least; of a host that learners were known at within `KNOWN_S`, the second."""

KNOWN_S, KNOWN_FACTOR = 3600.0, 8
"""Such a host has so many times the free strikes: many learners behind a link that keeps breaking are no flood."""

MOST_REMEMBERED, MOST_FILTERED = 1024, 64
"""Hosts that are remembered, and whose connections are thinned out at a time: those with most strikes."""


@dataclass(frozen=True)
class Guard:
    """When connections are ended.

    Attributes:
        unknown_s: after so long without a known caller.
        num_unknown: connections without a known caller at most; beyond, the oldest of the host that has most is ended.
        unknown_bytes: received on a connection without a known caller, at most.
        first_bytes: received on one before a call takes its first message, at most: more than the longest message.
        untaken_bytes: received since a call took a message last, at most: more than gRPC receives ahead.
        num_refused: calls of one connection that were refused for what their sender did, at most.
        few_refused: where a connection of the same caller was ended for what it brought, a minute or so ago; then
            `unknown_bytes` stands for the two above, too.
        thins: fewer new connections are taken from hosts whose connections bring no call. Only where callers are known
            by the certificates of their connections: a proxy that ends TLS is one host for all learners.
        free_strikes: such connections of a host before that; 64 are 3 a second for as long as they may last.
    """

    unknown_s: float = 20.0
    num_unknown: int = 256
    unknown_bytes: int = 1 << 20
    first_bytes: int = 8 << 20
    untaken_bytes: int = 32 << 20
    num_refused: int = 64
    few_refused: int = 4
    thins: bool = False
    free_strikes: int = 64


class Strikes:
    """Counts, by host and by caller, connections that brought no call, or were ended for what they brought. No clock:
    the time, in seconds, is an argument.

    Arguments:
        free: as `Guard.free_strikes`.
    """

    def __init__(self, free: float) -> None:
        self._free = free
        self._by_host, self._by_caller = _Scores[bytes](), _Scores[str]()
        self._known_at: dict[bytes, float] = {}

    def add(self, now: float, host: str, num_bytes: int, caller: str = "") -> None:
        """A connection of a host, and of a caller if it is known, was one."""
        strikes = 1 + num_bytes / STRIKE_BYTES
        self._by_host.add(now, network_of(host), strikes)
        if caller:
            self._by_caller.add(now, caller, strikes)

    def of_caller(self, now: float, caller: str) -> bool:
        """Whether a caller has any that is not forgotten."""
        return self._by_caller.of(now, caller) >= FORGOTTEN

    def known(self, now: float, host: str) -> None:
        """A caller at a host is known."""
        network = network_of(host)
        self._known_at.pop(network, None)
        self._known_at[network] = now
        if len(self._known_at) > MOST_REMEMBERED:
            del self._known_at[next(iter(self._known_at))]

    def thinned(self, now: float) -> Mapping[bytes, int]:
        """By network, k: one in 2^k of its new connections is to be taken. The square of what strikes there are keeps
        a flood of any rate at a few connections a second."""
        found = {}
        for network, score in self._by_host.items(now):
            known_at = self._known_at.get(network)
            is_known = known_at is not None and now - known_at < KNOWN_S
            most, free = (MOST_THINNED_KNOWN, KNOWN_FACTOR * self._free) if is_known else (MOST_THINNED, self._free)
            if score >= math.sqrt(2) * free:
                found[network] = score, min(most, int(2 * math.log2(score / free)))
        worst = sorted(found, key=lambda network: (-found[network][0], network))[:MOST_FILTERED]
        return {network: found[network][1] for network in worst}


K = TypeVar("K")


class _Scores(Generic[K]):
    """Sums by key that decay, of the keys that were added to last."""

    def __init__(self) -> None:
        self._sums: dict[K, tuple[float, float]] = {}  # at this time; the newest last

    def add(self, now: float, key: K, amount: float) -> None:
        score = self.of(now, key) + amount
        self._sums.pop(key, None)
        self._sums[key] = score, now
        if len(self._sums) > MOST_REMEMBERED:
            del self._sums[next(iter(self._sums))]

    def of(self, now: float, key: K) -> float:
        score, then = self._sums.get(key, (0.0, now))
        return score * math.exp((then - now) / FORGOTTEN_S)

    def items(self, now: float) -> list[tuple[K, float]]:
        """Those that are not forgotten."""
        found = [(key, self.of(now, key)) for key in self._sums]
        self._sums = {key: self._sums[key] for key, score in found if score >= FORGOTTEN}
        return [(key, score) for key, score in found if score >= FORGOTTEN]
