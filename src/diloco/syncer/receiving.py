"""The bytes of an upload, as they arrive."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator

from diloco.errors import CorruptPayloadError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import filling, read_header
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


def resumed_at(start: int, received: int) -> int:
    """Where an upload goes on, of which so many bytes are here.

    Raises:
        CorruptPayloadError: elsewhere than there, or at the beginning.
    """
    if start not in (0, received):
        raise CorruptPayloadError(f"{received} bytes are here and the upload goes on at byte {start}; send it again.")
    return start


class IncomingModel:
    """The bytes of a run's initial model, as they arrive. Those of an upload that is cut off are kept for the next one
    that says the same; one upload at a time."""

    def __init__(self) -> None:
        self._kept: tuple[bytes, memoryview, int] | None = None  # what was announced; the first bytes, and how many

    def receive(
        self, header: pb.InitialiseHeader, stream: Iterator[bytes], room: Callable[[int], memoryview],
        resumed: Callable[[int], None],
    ) -> Generator[pb.Received, None, memoryview]:  # fmt: skip
        """Says how far it is; gives all of them.

        Arguments:
            room: makes it.
            resumed: is told how many were here before, if any were.

        Raises:
            CorruptPayloadError: as `filling`, and `resumed_at`.
        """
        announced = pb.InitialiseHeader()
        announced.CopyFrom(header)
        announced.resumes = False
        what, (kept_of, buffer, filled) = announced.SerializeToString(), self._kept or (b"", memoryview(b""), 0)
        self._kept = None
        if kept_of != what or not header.resumes:
            buffer, filled = room(sum(header.part_bytes)), 0
        start, is_whole = 0, False
        try:
            if header.resumes:
                yield pb.Received(num_bytes=filled, checksum=zlib.crc32(buffer[:filled]))
                filled = start = resumed_at(read_header(stream, pb.Resume).start, filled)
            if start:
                resumed(start)
            progress = Progress()
            for filled in filling(stream, buffer, filled=start):
                if progress.is_due():
                    yield pb.Received(num_bytes=filled)
            is_whole = True
        finally:
            if not is_whole and filled < len(buffer):  # else it is the checksum that is another one
                self._kept = what, buffer, filled
        return buffer
