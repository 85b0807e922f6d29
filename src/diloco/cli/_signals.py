"""Signals that end a command which has child processes."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


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
