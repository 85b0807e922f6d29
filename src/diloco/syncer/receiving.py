"""The bytes of an upload, as they arrive."""

from __future__ import annotations

import time
from collections.abc import Iterator

from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import filling

SAY_EVERY_S = 0.5
"""Between two words on how much of an upload has arrived."""


def receiving(stream: Iterator[bytes], buffer: memoryview) -> Iterator[pb.Received]:
    """Fill `buffer`, saying now and then how far it is: the sender must see that it moves.

    Raises:
        CorruptPayloadError: as `filling`.
    """
    said_at = time.monotonic()
    for filled in filling(stream, buffer):
        if time.monotonic() - said_at >= SAY_EVERY_S:
            yield pb.Received(num_bytes=filled)
            said_at = time.monotonic()
    yield pb.Received(num_bytes=len(buffer), all=True)
