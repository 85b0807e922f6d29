"""The ticker wakes when it was asked to, once a second otherwise, and knows when the process stood still."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from diloco.syncer.ticker import IDLE_S, Ticker

Ticks = queue.SimpleQueue[tuple[float, float]]
"""When, and how late."""


@pytest.fixture
def ticks() -> Ticks:
    return queue.SimpleQueue()


@pytest.fixture
def ticker(ticks: Ticks) -> Iterator[Ticker]:
    it = Ticker(lambda late_s: ticks.put((time.monotonic(), late_s)))
    it.start()
    yield it
    it.stop()


def test_idle_it_ticks_once_a_second(ticker: Ticker, ticks: Ticks) -> None:
    first, second = ticks.get(timeout=10)[0], ticks.get(timeout=10)[0]
    assert second - first > IDLE_S / 2  # each is noted a little after it began, by as much as the machine likes
    assert ticks.empty()


def test_it_wakes_at_the_time_it_was_asked_for_last(ticker: Ticker, ticks: Ticks) -> None:
    ticks.get(timeout=10)
    at = time.monotonic() + 0.3
    ticker.wake_at(at - 0.2)
    ticker.wake_at(at)
    ticked_at, late_s = ticks.get(timeout=10)
    assert ticked_at >= at
    assert ticked_at - late_s == pytest.approx(at, abs=0.5)  # that it planned; how late it is depends on the machine


def test_what_is_overdue_does_not_make_it_spin(ticks: Ticks) -> None:
    """A tick that always asks for the past."""

    def tick(late_s: float) -> None:
        ticks.put((time.monotonic(), late_s))
        ticker.wake_at(0.0)

    ticker = Ticker(tick)
    started = time.monotonic()
    ticker.start()
    for _ in range(20):
        last, _ = ticks.get(timeout=10)
    ticker.stop()
    assert last - started >= 20 * 0.01


def test_it_knows_that_the_process_stood_still() -> None:
    """Suspended between two ticks, as a machine that is paused."""
    script = (
        "import time; from diloco.syncer.ticker import Ticker; Ticker(lambda late: print(late, "
        "flush=True)).start(); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            threading.Event().wait(2.0)  # time itself is what is tested
            process.send_signal(signal.SIGCONT)
            while float(process.stdout.readline()) < 0.5:
                pass  # a tick that came before the signal; without a late one the child ends, and there is no number
        finally:
            process.kill()
