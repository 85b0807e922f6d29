"""The duration of a learner's inner steps, and of the waits inside its calls of `step`."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

BOUNDS_S = (0.0, 0.001, 0.01, 0.1, 1.0, 10.0, math.inf)
"""Of the times by which calls of `step` are counted."""


def bound_of(seconds: float) -> str:
    """The bound under which a time is counted, as in `Timing.histogram`."""
    return f"{BOUNDS_S[bisect_left(BOUNDS_S, seconds)]:g}"


class Timing:
    """Measures a learner's inner steps and the time in which it waits for updates.

    Arguments:
        now_s: the time in seconds from an arbitrary origin (`Exchange.now_s`).

    Attributes:
        step_s: moving average of the time of an inner step, without `Learner.step`; deadlines are multiples of it.
        blocked_s: total time spent waiting.
        num_blocked: number of waits.
        histogram: calls of `step` by the time for which they were blocked: counts by upper bound in seconds, "0" to
            "inf"; the calls under "0" were not blocked.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self.step_s: float | None = None
        self.blocked_s = 0.0
        self.num_blocked = 0
        self.histogram = dict.fromkeys(map(bound_of, BOUNDS_S), 0)
        self._blocked_before_s = 0.0
        self._ended_at: float | None = None

    def step_begins(self) -> None:
        """`Learner.step` begins: an inner step was taken since its last call returned."""
        if self._ended_at is not None:
            taken_s = self._now_s() - self._ended_at
            self.step_s = taken_s if self.step_s is None else 0.9 * self.step_s + 0.1 * taken_s
        self._blocked_before_s = self.blocked_s

    def step_ends(self) -> None:
        """`Learner.step` returns."""
        self.histogram[bound_of(self.blocked_s - self._blocked_before_s)] += 1
        self._ended_at = self._now_s()

    def waited(self, seconds: float) -> None:
        """Count a wait for updates."""
        self.blocked_s += seconds
        self.num_blocked += 1
