"""The first signal ends a command in good order; a second one, of either kind, at once."""

from __future__ import annotations

import os
import signal

import pytest

from diloco.cli._signals import ending_by_signals


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_after_the_first_signal_both_do_what_they_did_before(first: signal.Signals) -> None:
    kinds, ended = (signal.SIGINT, signal.SIGTERM), []
    before = [signal.getsignal(kind) for kind in kinds]
    with ending_by_signals(lambda: ended.append(first), None):
        assert [signal.getsignal(kind) for kind in kinds] != before
        os.kill(os.getpid(), first)
        assert (ended, [signal.getsignal(kind) for kind in kinds]) == ([first], before)
    assert [signal.getsignal(kind) for kind in kinds] == before


def test_under_a_supervisor_each_signal_asks_again(capfd: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    with ending_by_signals(lambda: ended.append(1), "writing a checkpoint", again=False):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert len(ended) == 2
    assert capfd.readouterr().err == "diloco: stopping; writing a checkpoint\n"
