"""Measure the link to a running syncer: rate up, rate down and latency, over the connection that an exchange uses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import RunError
from diloco.exchange.connection import Connection
from diloco.exchange.dialling import dialler, found
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.probe import MAX_PROBE_BYTES

FIRST_BYTES = 1 << 16
GROWTH = 16
"""A probe is at most so many times as large as the one before: an early estimate may be far too high."""
NUM_PINGS = 10

CHANNEL = "probes"


@dataclass(frozen=True)
class LinkSpeed:
    """What was measured.

    Attributes:
        up_bit_per_s, down_bit_per_s: of payload, as contributions and updates get it; headers of TCP, IP and below not
            counted.
        latency_s: half of the shortest time that an empty call took there and back.
        num_bytes: bytes that the measurement sent and received.
    """

    up_bit_per_s: float
    down_bit_per_s: float
    latency_s: float
    num_bytes: int


def measure_link(
    address: str, *, run: str, learner: str, keys: str | Path | None = None, token: str | None = None,
    ca: str | Path | None = None, insecure: bool = False,
    seconds: float = 1.0, repeats: int = 3,
) -> LinkSpeed:  # fmt: skip
    """Measure the link to the syncer that serves a run, which needs no model yet; one direction after the other.

    Probes grow until one takes `seconds`; the rate is the median of `repeats` probes of that size. Other traffic on the
    link lowers the result.

    Raises:
        ExchangeError: no syncer answers. AuthError: the keys or token may not train as `learner`. RunError: another
            link is being measured.
    """
    syncers = dialler(address, keys=keys, token=token, ca=ca, insecure=insecure)
    num_bytes = 0

    def up(size: int) -> tuple[int, float]:
        reply, _ = syncers.current.probe(CHANNEL, pb.ProbeHeader(run=run, learner=learner, up_bytes=size))
        return reply.num_bytes, reply.seconds

    def down(size: int) -> tuple[int, float]:
        _, timing = syncers.current.probe(CHANNEL, pb.ProbeHeader(run=run, learner=learner, down_bytes=size))
        return timing

    def counted(probe: Callable[[int], tuple[int, float]]) -> Callable[[int], tuple[int, float]]:
        def run_it(size: int) -> tuple[int, float]:
            nonlocal num_bytes
            num_bytes += size
            return probe(size)

        return run_it

    try:
        if syncers.num_addresses > 1:
            found(syncers, run)
        latency_s = min(_ping_s(syncers.current, run, learner) for _ in range(1 + NUM_PINGS)) / 2
        up_bit_per_s = rate_bit_per_s(counted(up), seconds, repeats)
        down_bit_per_s = rate_bit_per_s(counted(down), seconds, repeats)
    finally:
        syncers.close()
    return LinkSpeed(up_bit_per_s, down_bit_per_s, latency_s, num_bytes)


def _ping_s(connection: Connection, run: str, learner: str) -> float:
    started = time.monotonic()
    connection.probe(CHANNEL, pb.ProbeHeader(run=run, learner=learner))
    return time.monotonic() - started


def rate_bit_per_s(probe: Callable[[int], tuple[int, float]], seconds: float, repeats: int) -> float:
    """The median rate of `repeats` probes of a size that takes at least `seconds`.

    `probe` takes a size in bytes and gives bytes and the seconds that they took. The size grows by what the last one
    lets expect. Raises RunError where even the largest takes no time.
    """
    size = FIRST_BYTES
    while True:
        num_bytes, took_s = probe(size)
        if took_s >= seconds or size == MAX_PROBE_BYTES:
            break
        wanted = 1.5 * seconds * size / took_s if took_s > 0 else MAX_PROBE_BYTES
        size = int(min(MAX_PROBE_BYTES, GROWTH * size, max(wanted, 2 * size)))
    timings = [(num_bytes, took_s), *(probe(size) for _ in range(repeats - 1))]
    if any(took_s <= 0 for _, took_s in timings):
        raise RunError(f"a probe of {size} bytes took no time at all: the link is too fast to be timed.")
    return statistics.median(8 * num_bytes / took_s for num_bytes, took_s in timings)
