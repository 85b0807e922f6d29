"""Signals that end a command."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def ending_by_signals(end: Callable[[], None], what: str | None, *, again: bool = True) -> Iterator[None]:
    """The first SIGINT or SIGTERM says that it ends and `what` it does until then, and calls `end`; the second quits at
    once.

    Arguments:
        what: None: nothing is said, by one of several processes.
        again: False: the second has no effect either, where a supervisor may send several of them (Slurm signals all
            processes of a step, and torchrun passes on what its ranks have heard already).
    """
    before: dict[int, Any] = {}
    is_said = False

    def handle(number: int, _: object) -> None:
        nonlocal is_said
        if what is not None and not is_said:
            is_said = True
            _say(f"stopping; {what}" + ("; again: quit at once" if again else ""))
        end()
        if again:
            for each, handler in before.items():
                signal.signal(each, handler)

    for each in (signal.SIGINT.value, signal.SIGTERM.value):
        before[each] = signal.signal(each, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    """On standard error, past its buffer: a handler may have interrupted a write to it."""
    head = "\n" if sys.stderr.isatty() else ""
    with suppress(OSError):
        os.write(2, f"{head}diloco: {text}\n".encode())


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP act like Ctrl-C, so that the child processes are ended first.

    The first of them is the only one that counts: a second one would interrupt the ending.
    """

    def interrupt(*_: object) -> None:
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handled = [each for each in numbers if signal.getsignal(each) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
