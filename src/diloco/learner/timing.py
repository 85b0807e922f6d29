"""How long a learner's inner steps take, and how long its calls of `step` were blocked."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable


class Histogram:
    """How many calls of `step` were blocked for how long."""

    BOUNDS_S = (0.0, 0.001, 0.01, 0.1, 1.0, 10.0)

    def __init__(self) -> None:
        self._counts = [0] * (len(self.BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        """One call."""
        self._counts[bisect_left(self.BOUNDS_S, seconds)] += 1

    def as_dict(self) -> dict[str, int]:
        """By upper bound in seconds; "0" were not blocked."""
        names = [*(f"{bound:g}" for bound in self.BOUNDS_S), "inf"]
        return dict(zip(names, self._counts, strict=True))


class Timing:
    """A learner's clock.

    Arguments:
        now_s: the time in seconds from an arbitrary beginning (`Exchange.now_s`).

    Attributes:
        step_s: an inner step's own time, without what `step` itself takes, as a moving average: what deadlines are measured in.
        blocked_s, num_blocked: waiting for answers, in all.
        histogram: the same by calls of `step`.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.step_s: float | None = None
        self.blocked_s = 0.0
        self.num_blocked = 0
        self.histogram = Histogram()
        self._blocked_before_s = 0.0
        self._ended_at: float | None = None

    def step_begins(self) -> None:
        """`step` is called: an inner step has been taken since its last call ended."""
        if self._ended_at is not None:
            taken_s = self._now_s() - self._ended_at
            self.step_s = taken_s if self.step_s is None else 0.9 * self.step_s + 0.1 * taken_s
        self._blocked_before_s = self.blocked_s

    def step_ends(self) -> None:
        """It returns."""
        self.histogram.add(self.blocked_s - self._blocked_before_s)
        self._ended_at = self._now_s()

    def wait_while(self, missing: Callable[[], bool], wait: Callable[[], None]) -> bool:
        """Call `wait` as long as something is `missing`, and count the time; whether anything was."""
        if not missing():
            return False
        started = self._now_s()
        while missing():
            wait()
        self.blocked_s += self._now_s() - started
        self.num_blocked += 1
        return True
