"""A request to stop training, from a signal."""

from collections.abc import Callable

STOP_AFTER_S = 0.2
"""How long a learner that is told to stop waits for others, if it does."""


class Stopping:
    """Whether a part of a run is to stop. Signal handlers and any thread may call any method.

    Attributes:
        is_asked: it is.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._interrupt: Callable[[float], None] | None = None

    def ask(self) -> None:
        """Stop after the current step, or where the part waits for others."""
        self.is_asked = True
        if self._interrupt is not None:
            self._interrupt(STOP_AFTER_S)

    def interrupts(self, interrupt: Callable[[float], None]) -> None:
        """What ends the waiting of this part from now on, after so many seconds (`Exchange.interrupt`)."""
        self._interrupt = interrupt
        if self.is_asked:
            interrupt(STOP_AFTER_S)
