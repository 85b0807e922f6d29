"""The sender's end of a transfer: flow control by acknowledgements, and uploads that resume after a cut."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Self

from google.protobuf.message import Message

from diloco.errors import UnreachableError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import SendPace, Window, parse, streamed

Resumable = pb.PushHeader | pb.InitialiseHeader


def _checksum(parts: Iterable[memoryview], num_bytes: int) -> int | None:
    """CRC-32 of the first bytes of a payload; None: it has fewer."""
    checksum = 0
    for part in parts:
        if num_bytes == 0:
            break
        some = part[:num_bytes]
        checksum, num_bytes = zlib.crc32(some, checksum), num_bytes - len(some)
    return checksum if num_bytes == 0 else None


class Acknowledged(SendPace):
    """Flow control of a stream whose sender reads acknowledgements (`Received`) when it has to wait.

    Arguments:
        replies: those of the receiver. After their end, the rest is sent without waiting.
        start: bytes that the receiver has already.
    """

    def __init__(self, replies: Iterator[bytes], start: int) -> None:
        self._replies, self._window, self._has_replies = replies, Window(start), True

    def next_bytes(self) -> int:
        while self._has_replies and not self._window.has_room:
            if (reply := next(self._replies, None)) is None:
                self._has_replies = False
            else:
                self._window.arrived(time.monotonic(), parse(pb.Received, reply).num_bytes)
        return self._window.chunk_bytes

    def sent(self, num_bytes: int) -> None:
        self._window.sent(time.monotonic(), num_bytes)


class OutgoingUpload(SendPace):
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
                raise UnreachableError("the upload was broken off.")
            return self._window.chunk_bytes

    def sent(self, num_bytes: int) -> None:
        with self._changed:
            self._window.sent(time.monotonic(), num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
