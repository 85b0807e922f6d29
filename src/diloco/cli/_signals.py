"""Signals that end a command."""

import _thread
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def ending_by_signals(end: Callable[[], None], what: str | None, *, again: bool = True) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls `end` and prints a message; the second one quits at once.

    `end` runs on a thread of its own, since it may take locks that the interrupted code holds.

    Arguments:
        what: the work that is left until the end, for the message; None: print no message.
        again: False: ignore further signals, since a supervisor may send several (Slurm signals all processes of a
            step, and torchrun forwards a signal that its ranks have received already).
    """
    before: dict[int, Any] = {}
    is_announced = False

    def handle(number: int, _: object) -> None:
        nonlocal is_announced
        if what is not None and not is_announced:
            is_announced = True
            _write(f"stopping; {what}" + ("; a second signal quits at once" if again else ""))
        _thread.start_new_thread(end, ())  # the start of a `threading.Thread` takes such a lock, too
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


def _write(text: str) -> None:
    """Write to standard error without its buffer: the handler may have interrupted a buffered write."""
    head = "\n" if sys.stderr.isatty() else ""
    with suppress(OSError):
        os.write(2, f"{head}diloco: {text}\n".encode())


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that child processes are ended first.

    Signals after the first are ignored: a second one would interrupt the cleanup.
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
