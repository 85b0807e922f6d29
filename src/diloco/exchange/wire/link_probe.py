"""The messages of a link probe: random bytes both ways, whose arrival is timed.

A learner sends as many random bytes as it announces; the syncer times their arrival and sends the requested number
back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from diloco.errors import ConfigError, CorruptPayloadError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import LONGEST_CHUNK_BYTES
from diloco.exchange.wire.incoming import ArrivalReports

MAX_PROBE_BYTES = 1 << 28
"""Maximum bytes of one probe, each way: a fifth of a second at 10 Gbit/s."""

_MIN_CHUNKS = 16
_SKIPPED = 0.25
"""Share of the bytes, from the first one, that is not timed: a connection ramps up, and a shaped link lets a burst
pass."""


def answer_probe(header: pb.ProbeHeader, stream: Iterator[bytes]) -> Iterator[bytes]:
    """The syncer's end: the messages that answer a probe whose bytes arrive by `stream`.

    Raises:
        ConfigError: the probe is larger than MAX_PROBE_BYTES. CorruptPayloadError: another number of bytes arrived.
    """
    most = max(header.up_bytes, header.down_bytes)
    if most > MAX_PROBE_BYTES:
        raise ConfigError(f"a probe of {most} bytes is too large; send up to {MAX_PROBE_BYTES} each way.")
    timing, progress = StreamTiming(), ArrivalReports()
    for arrived in timing.take(stream, header.up_bytes):
        if progress.is_due():
            yield pb.ProbeReply(received=pb.Received(num_bytes=arrived)).SerializeToString()
    yield pb.ProbeReply(num_bytes=timing.num_bytes, seconds=timing.seconds).SerializeToString()
    yield from noise(header.down_bytes)


def noise(num_bytes: int) -> Iterator[bytes]:
    """Random bytes, which no link can compress, in chunks of at most a transfer's size, and at least _MIN_CHUNKS."""
    chunk_bytes = max(1, min(LONGEST_CHUNK_BYTES, num_bytes // _MIN_CHUNKS))
    chunk = os.urandom(chunk_bytes)
    for start in range(0, num_bytes, chunk_bytes):
        yield chunk[: num_bytes - start]


@dataclass
class StreamTiming:
    """The bytes of a stream after its untimed beginning, and the seconds in which they arrived."""

    num_bytes: int = 0
    seconds: float = 0.0

    def take(
        self, stream: Iterator[bytes], num_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> Iterator[int]:
        """Time the `num_bytes` of a stream as they arrive, and drop them; yields the bytes arrived after each chunk.

        Raises:
            CorruptPayloadError: another number of bytes arrived.
        """
        arrived = counted_from = 0
        began_s = now_s = 0.0
        while arrived < num_bytes:
            chunk = next(stream, None)
            if chunk is None:
                raise CorruptPayloadError(f"the probe ended after {arrived} of {num_bytes} bytes; measure again.")
            now_s = clock()
            arrived += len(chunk)
            if not counted_from and arrived >= _SKIPPED * num_bytes:
                counted_from, began_s = arrived, now_s
            yield arrived
        if arrived > num_bytes or next(stream, None) is not None:
            raise CorruptPayloadError(f"the probe carries more than the {num_bytes} bytes it announced; measure again.")
        self.num_bytes, self.seconds = arrived - counted_from, now_s - began_s
