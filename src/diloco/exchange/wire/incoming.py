"""The receiver's end of a transfer: acknowledgements, and the bytes of a download that are kept after a cut."""

from __future__ import annotations

import queue
import time
import zlib
from collections.abc import Iterator

from diloco.errors import CorruptPayloadError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import MAX_UNACKNOWLEDGED, filling, read_header, room_for
from diloco.exchange.wire.values import message_of

ACKNOWLEDGE_AFTER_S = 0.01
"""A receiver acknowledges a chunk so long after its last acknowledgement, or once `MAX_UNACKNOWLEDGED` have arrived."""


class ArrivalReports:
    """When a receiver acknowledges the bytes that have arrived."""

    def __init__(self) -> None:
        self._reported_at = time.monotonic()
        self._num_chunks = 0

    def is_due(self) -> bool:
        """Record a chunk; return whether to acknowledge it."""
        self._num_chunks += 1
        now = time.monotonic()
        if now - self._reported_at < ACKNOWLEDGE_AFTER_S and self._num_chunks < MAX_UNACKNOWLEDGED:
            return False
        self._reported_at, self._num_chunks = now, 0
        return True


class Download:
    """A part of the model that is fetched, over one call after the other until it is whole.

    Arguments:
        request: asks for it.

    Attributes:
        header: as sent last; None: nothing has come.
        buffer: its payload, filled to `filled`.
        resumed_bytes: that were not fetched again.
    """

    def __init__(self, request: pb.PullRequest) -> None:
        self.header: pb.PullHeader | None = None
        self.buffer = memoryview(b"")
        self.filled = self.resumed_bytes = 0
        self._what = _what(request)

    def is_for(self, request: pb.PullRequest) -> bool:
        """Whether a request is for the same part."""
        return _what(request) == self._what

    def ask(self, request: pb.PullRequest) -> None:
        """Add the received bytes to the request."""
        if (header := self.header) is not None and self.filled:
            checksum = zlib.crc32(self.buffer[: self.filled])
            kept = message_of(pb.Kept, header, payload_bytes=header.num_bytes, num_bytes=self.filled, checksum=checksum)
            request.kept.CopyFrom(kept)

    def read(self, stream: Iterator[bytes], acknowledge: queue.SimpleQueue[bytes | None]) -> Iterator[None]:
        """Receive an answer; yields after each chunk.

        Raises:
            CorruptPayloadError: the answer is damaged; no byte of it is kept.
        """
        header = read_header(stream, pb.PullHeader)
        if header.url:  # the bytes are read there
            self.header, self.filled = header, 0
            yield
            return
        if header.start not in (0, self.filled):
            raise CorruptPayloadError(f"the syncer resumes at byte {header.start} instead of {self.filled}.")
        if header.start == 0:
            self.buffer = room_for(header.num_bytes)
        self.header, self.filled = header, header.start
        self.resumed_bytes += header.start
        yield
        try:
            progress = ArrivalReports()
            for filled in filling(stream, self.buffer, filled=header.start):
                self.filled = filled
                if progress.is_due():
                    acknowledge.put(pb.Received(num_bytes=filled).SerializeToString())
                yield
        except CorruptPayloadError:
            self.header, self.filled = None, 0
            raise


def start_of(kept: pb.Kept, header: pb.PullHeader, payload: memoryview) -> int:
    """The byte at which a payload is resumed for a receiver that has kept these; 0: it is sent whole."""
    theirs = kept.version, kept.lossless, kept.digest, kept.payload_bytes
    if theirs != (header.version, header.lossless, header.digest, header.num_bytes) or kept.num_bytes > len(payload):
        return 0
    return kept.num_bytes if zlib.crc32(payload[: kept.num_bytes]) == kept.checksum else 0


def _what(request: pb.PullRequest) -> bytes:
    """The fields of a request that name a part of the model."""
    part = pb.PullRequest(run=request.run, base=request.base)
    if request.static:
        part.static = True
    else:
        part.fragment = request.fragment
    if request.HasField("segments"):
        part.segments.CopyFrom(request.segments)
    return part.SerializeToString(deterministic=True)
