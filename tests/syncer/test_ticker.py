"""The ticker wakes when it was asked to, once a second otherwise, and knows when the process stood still."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import pytest

from diloco.syncer.threads import IDLE_S, Ticker

BEGINNING_S = 100.0

Ticks = queue.SimpleQueue[tuple[float, float]]
"""When, and how late."""


class Clock:
    """Seconds that pass when it is told so. The ticker still waits in real time, and looks here how long it was."""

    def __init__(self) -> None:
        self.now_s = BEGINNING_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ticks() -> Ticks:
    return queue.SimpleQueue()


@pytest.fixture
def ticker(ticks: Ticks, clock: Clock) -> Iterator[Ticker]:
    it = Ticker(lambda late_s: ticks.put((clock.now_s, late_s)), clock)
    it.start()
    yield it
    it.stop()


def test_idle_it_ticks_once_a_second(ticker: Ticker, ticks: Ticks, clock: Clock) -> None:
    for number in range(1, 4):
        clock.now_s = BEGINNING_S + number * IDLE_S
        assert ticks.get() == (clock.now_s, 0.0)
    assert ticks.empty()


def test_it_wakes_at_the_time_it_was_asked_for_last(ticker: Ticker, ticks: Ticks, clock: Clock) -> None:
    ticker.wake_at(BEGINNING_S + 0.25)
    ticker.wake_at(BEGINNING_S + 0.5)
    clock.now_s = BEGINNING_S + 0.625
    assert ticks.get() == (clock.now_s, 0.125)


def test_it_knows_that_the_process_stood_still(ticker: Ticker, ticks: Ticks, clock: Clock) -> None:
    """Suspended between two ticks, as a machine that is paused."""
    clock.now_s += 10.0
    assert ticks.get() == (clock.now_s, 10.0 - IDLE_S)


def test_what_is_overdue_does_not_make_it_spin(ticks: Ticks) -> None:
    """A tick that always asks for the past."""

    def tick(late_s: float) -> None:
        ticks.put((time.monotonic(), late_s))
        ticker.wake_at(0.0)

    ticker = Ticker(tick)
    started = time.monotonic()
    ticker.start()
    for _ in range(20):
        last, _ = ticks.get()
    ticker.stop()
    assert last - started >= 20 * 0.01
