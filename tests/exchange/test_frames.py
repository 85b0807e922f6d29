"""The window of a transfer, over a link in virtual time: it fills the link, and no more of its buffers than it says."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import pytest

from diloco.exchange.wire.frames import FEWEST_BYTES, QUEUE_S, SHORT_QUEUE_S, SHORTEST_CHUNK_BYTES, Window
from diloco.exchange.wire.incoming import MAX_UNACKNOWLEDGED

MBIT = 1e6 / 8


@dataclass
class Outcome:
    taken_s: float
    longest_queue_s: float  # in the second half


def carry(window: Window, num_bytes: int, bytes_s: float, latency_s: float, *, chunks_unsaid: int = 1) -> Outcome:
    """Send over a link with buffers without end. The receiver speaks of every `chunks_unsaid`th chunk."""
    now = free_at = longest = 0.0
    sent = arrived = unsaid = 0
    news: list[tuple[float, int]] = []  # when the sender hears of how many bytes
    while arrived < num_bytes:
        if sent < num_bytes and window.has_room:
            chunk = min(window.chunk_bytes, num_bytes - sent)
            window.sent(now, chunk)
            sent, free_at = sent + chunk, max(now, free_at) + chunk / bytes_s
            unsaid += 1
            if unsaid == chunks_unsaid or sent == num_bytes:
                heapq.heappush(news, (free_at + 2 * latency_s, sent))
                unsaid = 0
            if sent > num_bytes / 2:
                longest = max(longest, free_at - now)
            continue
        now, arrived = heapq.heappop(news)
        window.arrived(now, arrived)
    return Outcome(now, longest)


@pytest.mark.parametrize("queue_s", [QUEUE_S, SHORT_QUEUE_S])
@pytest.mark.parametrize("latency_s", [0.0005, 0.02, 0.15])
@pytest.mark.parametrize("mbit_s", [2, 10, 100, 1000])
def test_a_transfer_fills_its_link_and_little_of_the_buffers(mbit_s: int, latency_s: float, queue_s: float) -> None:
    bytes_s = mbit_s * MBIT
    num_bytes = round(20 * bytes_s)
    found = carry(Window(queue_s=queue_s), num_bytes, bytes_s, latency_s)
    grows_s = (8 if queue_s == QUEUE_S else 16) * latency_s  # a short window grows more slowly
    assert found.taken_s < 1.15 * num_bytes / bytes_s + grows_s
    queue_s = max(queue_s, latency_s)
    chunk_s = max(SHORTEST_CHUNK_BYTES / bytes_s, queue_s / 8)
    assert found.longest_queue_s <= max(queue_s + 2 * chunk_s, FEWEST_BYTES / bytes_s + chunk_s)


def test_a_receiver_that_speaks_of_few_chunks_never_stops_the_sender() -> None:
    """What it has not spoken of may be more than the window, where that has become small."""
    window = Window()
    carry(window, 200_000_000, 1000 * MBIT, 0.01, chunks_unsaid=MAX_UNACKNOWLEDGED)
    for minute in range(1, 31):  # the link becomes slow
        assert window.in_flight_bytes == 0
        while window.has_room:
            window.sent(60.0 * minute, window.chunk_bytes)
        window.arrived(60.0 * minute + 50.0, 1 << 60)
    assert window.limit_bytes == FEWEST_BYTES
    window.sent(3000.0, 1 << 19)
    window.sent(3000.0, 1 << 19)
    assert window.in_flight_bytes > window.limit_bytes
    assert window.has_room


def test_what_was_never_sent_does_not_arrive() -> None:
    window = Window()
    window.arrived(1.0, 10_000)
    assert window.in_flight_bytes == 0
    window.sent(2.0, 1000)
    window.arrived(3.0, 999)
    assert window.in_flight_bytes == 1000
    window.arrived(3.0, 10_000)
    assert window.in_flight_bytes == 0
    window.sent(4.0, 1000)
    window.arrived(5.0, 1000)  # said again
    assert window.in_flight_bytes == 1000
