"""The bytes of an upload, as they arrive."""

from __future__ import annotations

from collections.abc import Iterator

from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import filling
from diloco.exchange.wire.incoming import Progress


def receiving(stream: Iterator[bytes], buffer: memoryview) -> Iterator[pb.Received]:
    """Fill `buffer`, saying how far it is: the sender goes by it.

    Raises:
        CorruptPayloadError: as `filling`.
    """
    progress = Progress()
    for filled in filling(stream, buffer):
        if progress.is_due():
            yield pb.Received(num_bytes=filled)
