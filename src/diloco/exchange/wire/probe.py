"""Bytes that only measure a link: what either end sends, and how it times what arrives."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator

from diloco.errors import CorruptPayloadError
from diloco.exchange.wire.window import LONGEST_CHUNK_BYTES

MAX_PROBE_BYTES = 1 << 28
"""What one probe carries each way at most: a fifth of a second at 10 Gbit/s."""

_MIN_CHUNKS = 16
_SKIPPED = 0.25
"""Share of the bytes, the first ones, that is not timed: a connection finds its speed, and a link gives away what it
had saved up."""


def noise(num_bytes: int) -> Iterator[bytes]:
    """Random bytes, which no link can compress, in chunks like those of a transfer but never a few large ones."""
    chunk_bytes = max(1, min(LONGEST_CHUNK_BYTES, num_bytes // _MIN_CHUNKS))
    chunk = os.urandom(chunk_bytes)
    for start in range(0, num_bytes, chunk_bytes):
        yield chunk[: num_bytes - start]


def timed(
    stream: Iterator[bytes], num_bytes: int, moved: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic
) -> tuple[int, float]:  # fmt: skip
    """As `timing`; `moved` is called after each chunk."""
    chunks = timing(stream, num_bytes, clock)
    while True:
        try:
            next(chunks)
        except StopIteration as ended:
            found: tuple[int, float] = ended.value
            return found
        moved()


def timing(
    stream: Iterator[bytes], num_bytes: int, clock: Callable[[], float] = time.monotonic
) -> Generator[int, None, tuple[int, float]]:  # fmt: skip
    """Drop the `num_bytes` of a stream as they come, to its end; how many came after the beginning, and in how many
    seconds by `clock`.

    Gives after each chunk how many have arrived. Raises CorruptPayloadError for another number of bytes.
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
    return arrived - counted_from, now_s - began_s
