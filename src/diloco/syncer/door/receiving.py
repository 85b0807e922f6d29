"""The bytes of an upload, as they arrive."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from diloco.errors import CorruptPayloadError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import filling, read_header
from diloco.exchange.wire.incoming import ArrivalReports
from diloco.run.uploads import KEPT_S


def resumed_at(start: int, received: int) -> int:
    """Where an upload goes on, of which so many bytes are here.

    Raises:
        CorruptPayloadError: elsewhere than there, or at the beginning.
    """
    if start not in (0, received):
        raise CorruptPayloadError(f"{received} bytes are here and the upload goes on at byte {start}; send it again.")
    return start


@dataclass(frozen=True)
class _Kept:
    """The first `filled` bytes of an upload, and what it announced."""

    announced: bytes
    buffer: memoryview
    filled: int
    cut_at_s: float


class IncomingModel:
    """The bytes of a run's initial model, as they arrive. Those of an upload that is cut off are kept for the next one
    that says the same, if it begins within `KEPT_S`; one upload at a time, and `look` from any thread.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._kept: _Kept | None = None

    @property
    def kept_bytes(self) -> int:
        """That wait for the next upload, of memory."""
        with self._lock:
            return 0 if self._kept is None else len(self._kept.buffer)

    def look(self) -> None:
        """Drop what has waited for too long."""
        with self._lock:
            if self._kept is not None and self._clock() - self._kept.cut_at_s >= KEPT_S:
                self._kept = None

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
        what = announced.SerializeToString()
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None and kept.announced == what and header.resumes:
            buffer, filled = kept.buffer, kept.filled
        else:
            kept = None  # its memory, before there is room for the other
            buffer, filled = room(sum(header.part_bytes)), 0
        start, is_whole = 0, False
        try:
            if header.resumes:
                yield pb.Received(num_bytes=filled, checksum=zlib.crc32(buffer[:filled]))
                filled = start = resumed_at(read_header(stream, pb.Resume).start, filled)
            if start:
                resumed(start)
            progress = ArrivalReports()
            for filled in filling(stream, buffer, filled=start):
                if progress.is_due():
                    yield pb.Received(num_bytes=filled)
            is_whole = True
        finally:
            if not is_whole and filled < len(buffer):  # else it is the checksum that is another one
                with self._lock:
                    self._kept = _Kept(what, buffer, filled, self._clock())
        return buffer
