"""Receiving an upload, resumed where an earlier one was interrupted."""

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
    """The byte at which an upload continues, of which `received` bytes are kept.

    Raises:
        CorruptPayloadError: the sender continues neither at `received` nor at 0.
    """
    if start not in (0, received):
        raise CorruptPayloadError(
            f"the upload resumes at byte {start}, but {received} bytes were received; send it again."
        )
    return start


@dataclass(frozen=True)
class _Kept:
    """The first `filled` bytes of an interrupted upload, and its announcement."""

    announced: bytes
    buffer: memoryview
    filled: int
    cut_at_s: float


class IncomingModel:
    """Receives the run's initial model, one upload at a time. The received part of an interrupted upload is kept for
    the next upload with the same announcement, if that begins within `KEPT_S`. Any thread may call `drop_expired`.

    Arguments:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._kept: _Kept | None = None

    def drop_expired(self) -> None:
        """Drop an upload that was kept for `KEPT_S`."""
        with self._lock:
            if self._kept is not None and self._clock() - self._kept.cut_at_s >= KEPT_S:
                self._kept = None

    def receive(
        self, header: pb.InitialiseHeader, stream: Iterator[bytes], room: Callable[[int], memoryview],
        resumed: Callable[[int], None],
    ) -> Generator[pb.InitialiseReply, None, memoryview]:  # fmt: skip
        """Yield progress reports; return the buffer of the whole model.

        Arguments:
            room: reserves memory.
            resumed: called with the number of bytes kept from an earlier upload, if any.

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
            kept = None  # frees its memory before more is reserved
            buffer, filled = room(sum(header.part_bytes)), 0
        start, is_whole = 0, False
        try:
            if header.resumes:
                checksum = zlib.crc32(buffer[:filled])
                yield pb.InitialiseReply(received=pb.Received(num_bytes=filled, checksum=checksum))
                filled = start = resumed_at(read_header(stream, pb.Resume).start, filled)
            if start:
                resumed(start)
            progress = ArrivalReports()
            for filled in filling(stream, buffer, filled=start):
                if progress.is_due():
                    yield pb.InitialiseReply(received=pb.Received(num_bytes=filled))
            is_whole = True
        finally:
            if not is_whole and filled < len(buffer):  # a whole buffer means that the checksum is wrong
                with self._lock:
                    self._kept = _Kept(what, buffer, filled, self._clock())
        return buffer
