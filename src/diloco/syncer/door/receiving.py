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


class IncomingBytes:
    """An upload as it arrives, resumed where an earlier one was interrupted.

    Arguments:
        buffer: with room for the whole upload.
        kept: bytes at its beginning that an earlier upload has left.

    Attributes:
        filled: bytes at its beginning that may be kept.
    """

    def __init__(self, buffer: memoryview, kept: int) -> None:
        self.filled, self._buffer = kept, buffer

    def reports(
        self, stream: Iterator[bytes], resumed: Callable[[int], None], *, resumes: bool
    ) -> Iterator[pb.Received]:
        """Receive the rest; yields progress reports.

        Arguments:
            resumed: called with the number of bytes that are not sent again, if any.
            resumes: whether the sender asks how many bytes are kept.

        Raises:
            CorruptPayloadError: as `filling`, or the sender resumes neither where it was interrupted nor at 0.
        """
        try:
            if resumes:
                yield pb.Received(num_bytes=self.filled, checksum=zlib.crc32(self._buffer[: self.filled]))
                if (start := read_header(stream, pb.Resume).start) not in (0, self.filled):
                    raise CorruptPayloadError(
                        f"the upload resumes at byte {start}, but {self.filled} bytes were received; send it again."
                    )
                self.filled = start
            if self.filled:
                resumed(self.filled)
            progress = ArrivalReports()
            for filled in filling(stream, self._buffer, filled=self.filled):
                self.filled = filled
                if progress.is_due():
                    yield pb.Received(num_bytes=filled)
        except CorruptPayloadError:
            if self.filled == len(self._buffer):  # complete, with a wrong checksum
                self.filled = 0
            raise


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
            CorruptPayloadError: as `IncomingBytes.reports`.
        """
        announced = pb.InitialiseHeader()
        announced.CopyFrom(header)
        announced.resumes = False
        what = announced.SerializeToString()
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None and kept.announced == what and header.resumes:
            buffer, incoming = kept.buffer, IncomingBytes(kept.buffer, kept.filled)
        else:
            kept = None  # frees its memory before more is reserved
            buffer = room(sum(header.part_bytes))
            incoming = IncomingBytes(buffer, 0)
        is_whole = False
        try:
            for received in incoming.reports(stream, resumed, resumes=header.resumes):
                yield pb.InitialiseReply(received=received)
            is_whole = True
        finally:
            if not is_whole and incoming.filled:
                with self._lock:
                    self._kept = _Kept(what, buffer, incoming.filled, self._clock())
        return buffer
