"""Bulk bytes on a gRPC stream: a protobuf header, raw chunks, a checksum. No tensor passes through protobuf."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from diloco.core.buffers import new_buffer
from diloco.errors import CorruptPayloadError, translated
from diloco.exchange.wire.rpc import MAX_MESSAGE_BYTES

# How many bytes of a transfer may be in flight at once: arithmetic without a clock.
#
# A transfer that fills the buffers of a slow link delays all other traffic on it, such as heartbeats, by the depth of
# the buffers. So a sender measures the rate at which bytes are acknowledged, and has no more in flight than arrive in
# `QUEUE_S`; if the round trip over the empty link is longer than half of `QUEUE_S`, in the round trip plus that half.
# The window grows to the capacity of the link within a few round trips.

QUEUE_S, SHORT_QUEUE_S = 0.5, 0.05
"""The delay that a transfer may add to other traffic on the same link. A follower's adds the second, or half of its
round trip where that is more."""

FIRST_BYTES, FEWEST_BYTES, MOST_BYTES = 1 << 19, 1 << 17, 1 << 26
"""The window before the link was measured, its minimum and its maximum. The minimum takes 1 s at 1 Mbit/s."""

SHORTEST_CHUNK_BYTES, LONGEST_CHUNK_BYTES = 1 << 14, 1 << 19
"""gRPC copies each chunk several times: half a megabyte fits into a core's cache, is returned to the allocator
without a system call, and amortises the cost of a message in Python."""

CHUNKS = 8
"""The number of chunks in a window."""

MAX_UNACKNOWLEDGED = 4
"""A receiver acknowledges at least every so many chunks, and a sender may always have as many in flight: the window can
become smaller than the bytes that are not acknowledged."""

NUM_RATES = 8
"""Measured rates, of which the highest counts: a pause of the sender is not a property of the link."""


@dataclass(frozen=True)
class _Sent:
    """A chunk in flight: the bytes sent up to its end, and when; the bytes acknowledged by then, and since when."""

    sent_bytes: int
    at_s: float
    arrived_bytes: int
    arrived_at_s: float


class Window:
    """The window of one transfer.

    Arguments:
        start: bytes that had arrived before it.
        queue_s: the delay that it may add to other traffic.

    Attributes:
        limit_bytes: bytes that may be in flight.
        in_flight_bytes: bytes that are in flight.
    """

    def __init__(self, start: int = 0, queue_s: float = QUEUE_S) -> None:
        self.limit_bytes = max(FEWEST_BYTES, round(FIRST_BYTES * queue_s / QUEUE_S))
        self._queue_s = queue_s
        self.in_flight_bytes = 0
        self._sent: deque[_Sent] = deque()
        self._rates: deque[float] = deque(maxlen=NUM_RATES)
        self._shortest_s = math.inf
        self._arrived = (start, 0.0)  # bytes, and when they were acknowledged

    @property
    def chunk_bytes(self) -> int:
        """The size of the next chunk."""
        return max(SHORTEST_CHUNK_BYTES, min(LONGEST_CHUNK_BYTES, self.limit_bytes // CHUNKS))

    @property
    def has_room(self) -> bool:
        """Whether one more chunk may be sent."""
        return len(self._sent) < MAX_UNACKNOWLEDGED or self.in_flight_bytes + self.chunk_bytes <= self.limit_bytes

    def sent(self, now_s: float, num_bytes: int) -> None:
        """Record that a chunk is sent."""
        if not self._sent:  # idle time is no measure of the link
            self._arrived = self._arrived[0], now_s
        arrived_bytes, arrived_at_s = self._arrived
        self.in_flight_bytes += num_bytes
        self._sent.append(_Sent(arrived_bytes + self.in_flight_bytes, now_s, arrived_bytes, arrived_at_s))

    def arrived(self, now_s: float, num_bytes: int) -> None:
        """Record an acknowledgement of all bytes up to this number. One for bytes that were not sent is ignored."""
        newest = None
        while self._sent and self._sent[0].sent_bytes <= num_bytes:
            newest = self._sent.popleft()
        if newest is None:
            return
        self.in_flight_bytes -= newest.sent_bytes - self._arrived[0]
        self._arrived = newest.sent_bytes, now_s
        self._shortest_s = min(self._shortest_s, now_s - newest.at_s)
        taken_s = now_s - newest.arrived_at_s
        if taken_s > 0:
            self._rates.append((newest.sent_bytes - newest.arrived_bytes) / taken_s)
            queue_s = max(self._queue_s, min(self._shortest_s, QUEUE_S))
            wanted = max(self._rates) * max(self._queue_s, self._shortest_s + queue_s / 2)
            self.limit_bytes = round(min(max(wanted, FEWEST_BYTES), MOST_BYTES))


H = TypeVar("H", bound=Message)


class SendPace(Protocol):
    """The flow control of a stream's sender."""

    def next_bytes(self) -> int:
        """Block until the next chunk may be sent; returns its maximum size, 0 for an empty one while it goes on
        waiting."""

    def sent(self, num_bytes: int) -> None:
        """Record that a chunk is sent."""


def room_for(num_bytes: int) -> memoryview:
    """A buffer for the bytes that a header announces; the system allocates it page by page, as they arrive.

    Raises:
        CorruptPayloadError: this machine has not so much memory.
    """
    failed, advice = f"there is no memory for {num_bytes} bytes", "use one version of diloco on both sides"
    with translated((MemoryError, OSError, OverflowError), CorruptPayloadError, failed, advice):
        return new_buffer(num_bytes)


def streamed(
    header: Message, parts: Iterable[memoryview], pace: SendPace, *, start: int = 0, checksum: int = 0
) -> Iterator[bytes]:
    """The messages of one stream: header, chunks of the parts one after the other, CRC-32 of all their bytes.

    Arguments:
        parts: of the payload; an iterator may make them one after the other.
        pace: waits before a chunk if enough bytes are in flight.
        start, checksum: the receiver has this many bytes already, with this CRC-32.
    """
    yield header.SerializeToString()
    for part in parts:
        while start < len(part):
            chunk = part[start : start + pace.next_bytes()]
            start += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
            pace.sent(len(chunk))
            yield bytes(chunk)
        start -= len(part)
    yield checksum.to_bytes(4, "little")


def parse(kind: type[H], data: bytes) -> H:
    """The message that is all of `data`.

    Raises:
        CorruptPayloadError: it is not a `kind`.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise CorruptPayloadError(
            f"{len(data)} bytes are not a {kind.DESCRIPTOR.name}; use one version of diloco on both sides."
        ) from error


def read_header(stream: Iterator[bytes], kind: type[H], most_bytes: int = MAX_MESSAGE_BYTES) -> H:
    """The first message of a stream. `most_bytes`: a longer one is not parsed.

    Raises:
        CorruptPayloadError: the stream is empty, or the message is too long or not a `kind`.
    """
    try:
        first = next(stream)
    except StopIteration as error:
        raise CorruptPayloadError("the stream ended before its header; send it again.") from error
    if len(first) > most_bytes:
        raise CorruptPayloadError(
            f"a {kind.DESCRIPTOR.name} has {len(first)} bytes, and the maximum is {most_bytes}; use one version of "
            "diloco on both sides."
        )
    return parse(kind, first)


def verified(stream: Iterator[bytes], num_bytes: int, *, filled: int = 0, checksum: int = 0) -> Iterator[bytes]:
    """The chunks of a stream up to this many bytes; the checksum that follows is compared after the last one. The first
    `filled` bytes were received before, and have this checksum.

    Raises:
        CorruptPayloadError: too few or too many bytes, or another checksum.
    """
    while filled < num_bytes:
        chunk = next(stream, None)
        if chunk is None:
            raise CorruptPayloadError(f"the stream ended after {filled} of {num_bytes} bytes; send it again.")
        filled += len(chunk)
        if filled > num_bytes:
            raise CorruptPayloadError(
                f"the stream carries more than the {num_bytes} bytes it announced; send it again."
            )
        checksum = zlib.crc32(chunk, checksum)
        yield chunk
    trailer = next(stream, None)
    if trailer is None or len(trailer) != 4:
        raise CorruptPayloadError(f"the stream of {num_bytes} bytes does not end with its checksum; send it again.")
    if int.from_bytes(trailer, "little") != checksum:
        raise CorruptPayloadError(
            f"the checksum of {num_bytes} bytes does not match: they were damaged on the way; send them again."
        )


def filling(stream: Iterator[bytes], buffer: memoryview, *, filled: int = 0) -> Iterator[int]:
    """Fill `buffer` with the chunks of a stream and compare the checksum that follows; yields the bytes filled after
    each chunk. The first `filled` bytes were received before.

    Raises:
        CorruptPayloadError: too few or too many bytes, or another checksum.
    """
    for chunk in verified(stream, len(buffer), filled=filled, checksum=zlib.crc32(buffer[:filled])):
        buffer[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
        yield filled
