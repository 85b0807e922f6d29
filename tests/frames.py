"""The messages of a stream, without flow control."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message

from diloco.exchange.wire.frames import LONGEST_CHUNK_BYTES, SendPace, streamed


class Unpaced(SendPace):
    """Sends as fast as the flow control of HTTP/2 permits."""

    def next_bytes(self) -> int:
        return LONGEST_CHUNK_BYTES

    def sent(self, num_bytes: int) -> None:
        pass


def frames(header: Message, *parts: memoryview) -> Iterator[bytes]:
    """Header, chunks of the parts, and checksum, as fast as the flow control of HTTP/2 permits."""
    return streamed(header, parts, Unpaced())
