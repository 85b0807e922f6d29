"""The first signal ends a command in good order; a second one, of either kind, at once."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from diloco.cli._signals import ending_by_signals


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_after_the_first_signal_both_do_what_they_did_before(first: signal.Signals) -> None:
    kinds, ended = (signal.SIGINT, signal.SIGTERM), threading.Event()
    before = [signal.getsignal(kind) for kind in kinds]
    with ending_by_signals(ended.set, None):
        assert [signal.getsignal(kind) for kind in kinds] != before
        os.kill(os.getpid(), first)
        assert [signal.getsignal(kind) for kind in kinds] == before
    assert [signal.getsignal(kind) for kind in kinds] == before
    assert ended.wait(60)


def test_a_signal_ends_a_command_that_holds_a_lock_which_the_end_takes() -> None:
    """As `Connection` while it dials."""
    lock, ended = threading.Lock(), threading.Event()

    def end() -> None:
        assert lock.acquire(timeout=60)  # a test that fails must end, too
        ended.set()
        lock.release()

    with ending_by_signals(end, None):
        with lock:
            os.kill(os.getpid(), signal.SIGINT)
            assert not ended.is_set()
        assert ended.wait(60)


def test_under_a_supervisor_each_signal_asks_again(capfd: pytest.CaptureFixture[str]) -> None:
    ended = threading.Semaphore(0)
    with ending_by_signals(ended.release, "writing a checkpoint", again=False):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert all(ended.acquire(timeout=60) for _ in range(2))
    assert capfd.readouterr().err == "diloco: stopping; writing a checkpoint\n"
