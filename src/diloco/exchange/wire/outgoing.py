"""The sender's end of a transfer: flow control by acknowledgements, learners' downloads before those of followers,
uploads that resume after a cut."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from google.protobuf.message import Message

from diloco.closing import Closing
from diloco.errors import UnreachableError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import LONGEST_CHUNK_BYTES, QUEUE_S, SHORT_QUEUE_S, SendPace, Window, parse, streamed

Resumable = pb.PushHeader | pb.InitialiseHeader

LEARNERS_SHARE = 64
"""While learners download, they are sent so many bytes for each byte that is sent to followers."""

MOST_SPARE_BYTES = 8 * LONGEST_CHUNK_BYTES
"""That may be sent to followers at once while learners download."""

WAIT_S = 1.0
"""A follower that waits for learners is sent an empty chunk so often: it knows that the syncer lives."""


def _checksum(parts: Iterable[memoryview], num_bytes: int) -> int | None:
    """CRC-32 of the first bytes of a payload; None: it has fewer."""
    checksum = 0
    for part in parts:
        if num_bytes == 0:
            break
        some = part[:num_bytes]
        checksum, num_bytes = zlib.crc32(some, checksum), num_bytes - len(some)
    return checksum if num_bytes == 0 else None


class LearnersFirst:
    """The order of downloads that share one link: those of learners, then those of followers. Any thread may call any
    method.

    While a learner downloads, followers get a part of `1 / LEARNERS_SHARE`: they slow no download by more than that.
    One that downloads nearly all the time, as on a slow link of its own, leaves them no more.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_downloads, self._spare_bytes = 0, 0.0

    @contextmanager
    def download(self) -> Iterator[None]:
        """A learner downloads during the block."""
        with self._changed:
            self._num_downloads += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_downloads -= 1
                if not self._num_downloads:
                    self._spare_bytes = 0.0
                    self._changed.notify_all()

    def sent(self, num_bytes: int) -> None:
        """Record bytes of a learner's download."""
        with self._changed:
            self._spare_bytes = min(self._spare_bytes + num_bytes / LEARNERS_SHARE, MOST_SPARE_BYTES)
            if self._spare_bytes >= LONGEST_CHUNK_BYTES:
                self._changed.notify()

    def take(self, num_bytes: int, wait_s: float = 0.0) -> int:
        """How many bytes may be sent to a follower, after at most `wait_s`: `num_bytes`, or 0."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._num_downloads or self._spare_bytes >= num_bytes, wait_s):
                return 0
            self._spare_bytes = max(0.0, self._spare_bytes - num_bytes)
        return num_bytes


class Acknowledged(SendPace):
    """Flow control of a download, whose sender reads acknowledgements (`Received`) when it has to wait.

    Arguments:
        replies: those of the receiver. After their end, the rest is sent without waiting.
        link: which learners and followers share.
        start: bytes that the receiver has already.
        is_follower: whether the receiver is a follower, which adds less delay, and waits for learners.
    """

    def __init__(
        self, replies: Iterator[bytes], link: LearnersFirst, start: int = 0, *, is_follower: bool = False
    ) -> None:
        self._replies, self._link, self._is_follower, self._has_replies = replies, link, is_follower, True
        self._window = Window(start, SHORT_QUEUE_S if is_follower else QUEUE_S)

    def next_bytes(self) -> int:
        while self._has_replies and not self._window.has_room:
            if (reply := next(self._replies, None)) is None:
                self._has_replies = False
            else:
                self._window.arrived(time.monotonic(), parse(pb.Received, reply).num_bytes)
        num_bytes = self._window.chunk_bytes
        return self._link.take(num_bytes, WAIT_S) if self._is_follower else num_bytes

    def sent(self, num_bytes: int) -> None:
        if num_bytes:  # a follower that waits is sent nothing
            self._window.sent(time.monotonic(), num_bytes)
        if not self._is_follower:
            self._link.sent(num_bytes)


class OutgoingUpload(Closing, SendPace):
    """The messages of an upload, made on one thread while another receives acknowledgements; a context manager around
    the call.

    Arguments:
        header: if it has `resumes`, the upload waits until the receiver has sent how many bytes it has kept.
        parts: returns the parts of the payload; called again if the upload resumes.

    Attributes:
        resumed_bytes: bytes that were not sent again.
    """

    def __init__(self, header: Message, parts: Callable[[], Iterable[memoryview]]) -> None:
        self.resumed_bytes = 0
        self._header, self._parts = header, parts
        self._resumes = isinstance(header, Resumable) and header.resumes
        self._window = Window()
        self._changed = threading.Condition()
        self._kept: pb.Received | None = None
        self._is_over = False

    def messages(self) -> Iterator[bytes]:
        """The messages to send. They end early once the call is over."""
        try:
            if self._resumes:
                yield from self._resumed(self._header)
            else:
                yield from streamed(self._header, self._parts(), self)
        except UnreachableError:  # the call is over, and raises the reason
            return

    def _resumed(self, header: Message) -> Iterator[bytes]:
        yield header.SerializeToString()
        with self._changed:
            self._changed.wait_for(lambda: self._kept is not None or self._is_over)
            kept = self._kept
        if kept is None:
            return
        if (checksum := _checksum(self._parts(), kept.num_bytes)) != kept.checksum:
            checksum = kept.num_bytes = 0
        self.resumed_bytes, self._window = kept.num_bytes, Window(kept.num_bytes)
        resume = pb.Resume(start=kept.num_bytes)
        yield from streamed(resume, self._parts(), self, start=kept.num_bytes, checksum=checksum)

    def heard(self, received: pb.Received) -> None:
        """Receive an acknowledgement."""
        with self._changed:
            if self._resumes and self._kept is None:
                self._kept = received
            else:
                self._window.arrived(time.monotonic(), received.num_bytes)
            self._changed.notify_all()

    def next_bytes(self) -> int:
        """As `SendPace`. Raises UnreachableError: the call is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._window.has_room or self._is_over)
            if self._is_over:
                raise UnreachableError("the upload was interrupted.")
            return self._window.chunk_bytes

    def sent(self, num_bytes: int) -> None:
        with self._changed:
            self._window.sent(time.monotonic(), num_bytes)

    def close(self) -> None:
        """The call is over."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
