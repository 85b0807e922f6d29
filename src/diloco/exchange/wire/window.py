"""How many bytes of a transfer may be on their way at once: arithmetic without a clock.

A transfer that fills the buffers of a slow link delays whatever else crosses it, heartbeats among it, by as long as the
buffers are deep. So a sender measures how fast bytes arrive, as their receiver says, and lets no more be on their way
than arrive in `QUEUE_S`; where answers take long even over an empty link, in half of that more than they take. The
window grows within a few round trips to what the link carries.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

QUEUE_S = 0.5
"""What a transfer may add to the time that other traffic takes over the same link."""

FIRST_BYTES, FEWEST_BYTES, MOST_BYTES = 1 << 19, 1 << 17, 1 << 26
"""On their way before anything is known of the link, and at least and at most. The least is 1 s at 1 Mbit/s."""

SHORTEST_CHUNK_BYTES, LONGEST_CHUNK_BYTES = 1 << 14, 1 << 19
"""gRPC copies each chunk several times: half a megabyte stays in a core's cache and is given back to the allocator
without a system call, and is enough to spread what a message costs in Python."""

CHUNKS = 8
"""In a window."""

CHUNKS_UNSAID = 4
"""A receiver speaks after so many chunks at the latest, so that a sender may always have as many on their way: the
window can become smaller than what its receiver has not spoken of."""

NUM_RATES = 8
"""Measured rates, of which the highest counts: a pause of the sender is not one of the link."""


@dataclass(frozen=True)
class _Sent:
    """A chunk: the bytes sent with it, when; and how many had arrived by then, and since when."""

    sent_bytes: int
    at_s: float
    arrived_bytes: int
    arrived_at_s: float


class Window:
    """The window of one transfer.

    Arguments:
        start: bytes that had arrived before it.

    Attributes:
        limit_bytes: that may be on their way.
        in_flight_bytes: that are.
    """

    def __init__(self, start: int = 0) -> None:
        self.limit_bytes = FIRST_BYTES
        self.in_flight_bytes = 0
        self._sent: deque[_Sent] = deque()
        self._rates: deque[float] = deque(maxlen=NUM_RATES)
        self._shortest_s = math.inf
        self._arrived = (start, 0.0)  # bytes, and when it was heard

    @property
    def chunk_bytes(self) -> int:
        """Of the next chunk."""
        return max(SHORTEST_CHUNK_BYTES, min(LONGEST_CHUNK_BYTES, self.limit_bytes // CHUNKS))

    @property
    def has_room(self) -> bool:
        """Whether one more chunk may be sent."""
        return len(self._sent) < CHUNKS_UNSAID or self.in_flight_bytes + self.chunk_bytes <= self.limit_bytes

    def sent(self, now_s: float, num_bytes: int) -> None:
        """A chunk goes out."""
        if not self._sent:  # what was idle is no measure of the link
            self._arrived = self._arrived[0], now_s
        arrived_bytes, arrived_at_s = self._arrived
        self.in_flight_bytes += num_bytes
        self._sent.append(_Sent(arrived_bytes + self.in_flight_bytes, now_s, arrived_bytes, arrived_at_s))

    def arrived(self, now_s: float, num_bytes: int) -> None:
        """The receiver has so many bytes, since the beginning. What it says of bytes that were not sent is ignored."""
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
            wanted = max(self._rates) * max(QUEUE_S, self._shortest_s + QUEUE_S / 2)
            self.limit_bytes = round(min(max(wanted, FEWEST_BYTES), MOST_BYTES))
