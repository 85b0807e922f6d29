"""Measure the link to a running syncer with probes over the connection that an exchange uses: rate up, rate down and
latency."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

from diloco.errors import RunError
from diloco.exchange.connection import Connection
from diloco.exchange.dialling import dialler, found
from diloco.exchange.key_pair import AnyKeys
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import read_header
from diloco.exchange.wire.link_probe import MAX_PROBE_BYTES, StreamTiming, noise

FIRST_BYTES = 1 << 16
GROWTH = 16
"""Maximum ratio of a probe's size to the size before: an early estimate may be far too high."""
NUM_PINGS = 10

CHANNEL = "probes"


@dataclass(frozen=True)
class LinkSpeed:
    """A measured link.

    Attributes:
        up_bit_per_s, down_bit_per_s: of payload, as for contributions and updates; headers of TCP, IP and below are not
            counted.
        latency_s: half of the shortest round trip of an empty call.
        num_bytes: bytes that the measurement sent and received.
    """

    up_bit_per_s: float
    down_bit_per_s: float
    latency_s: float
    num_bytes: int


def measure_link(
    address: str, *, run: str, learner: str, keys: AnyKeys | None = None, insecure: bool = False,
    seconds: float = 1.0, repeats: int = 3,
) -> LinkSpeed:  # fmt: skip
    """Measure the link to the syncer that serves a run, which needs no model yet; one direction after the other.

    Probes grow until one takes `seconds`; the rate is the median of `repeats` probes of that size. Other traffic on the
    link lowers the result.

    Raises:
        ExchangeError: no syncer answers. AuthError: the keys do not permit training as `learner`. RunError: another
            link is being measured.
    """
    num_bytes = 0

    def ask(up_bytes: int = 0, down_bytes: int = 0) -> tuple[pb.ProbeReply, StreamTiming]:
        nonlocal num_bytes
        num_bytes += up_bytes + down_bytes
        header = pb.ProbeHeader(run=run, learner=learner, up_bytes=up_bytes, down_bytes=down_bytes)
        return probe(syncers.current, header)

    def up(size: int) -> tuple[int, float]:
        reply, _ = ask(up_bytes=size)
        return reply.num_bytes, reply.seconds

    def down(size: int) -> tuple[int, float]:
        _, timing = ask(down_bytes=size)
        return timing.num_bytes, timing.seconds

    def ping_s() -> float:
        started = time.monotonic()
        ask()
        return time.monotonic() - started

    with closing(dialler(address, keys=keys, insecure=insecure)) as syncers:
        if syncers.num_addresses > 1:
            found(syncers, run)
        latency_s = min(ping_s() for _ in range(1 + NUM_PINGS)) / 2
        up_bit_per_s = rate_bit_per_s(up, seconds, repeats)
        down_bit_per_s = rate_bit_per_s(down, seconds, repeats)
    return LinkSpeed(up_bit_per_s, down_bit_per_s, latency_s, num_bytes)


def rate_bit_per_s(probe: Callable[[int], tuple[int, float]], seconds: float, repeats: int) -> float:
    """The median rate of `repeats` probes of a size that takes at least `seconds`.

    `probe` takes a size in bytes and returns bytes and the seconds that they took. The size grows by the estimate of
    the last probe. Raises RunError if even the largest takes no time.
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


def probe(connection: Connection, header: pb.ProbeHeader) -> tuple[pb.ProbeReply, StreamTiming]:
    """Send and receive the bytes that the header announces. Returns the syncer's reply, and the timing of the received
    bytes. Raises as `Connection.call`, and CorruptPayloadError for another number of bytes."""
    sent = chain([header.SerializeToString()], noise(header.up_bytes))
    timing = StreamTiming()
    with connection.stream(CHANNEL, "Probe", sent) as (replies, moved):
        while (reply := read_header(replies, pb.ProbeReply)).HasField("received"):  # how much has arrived so far
            moved()
        moved()
        for _ in timing.take(replies, header.down_bytes):
            moved()
    return reply, timing
