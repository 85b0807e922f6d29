"""Whether a measure grows: its slope after a warm-up, robust against steps, spikes and noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

MOST_POINTS = 200
"""Samples that are compared pairwise; more are thinned out evenly."""

SIGNIFICANT = 5.0
"""Standard errors by which the rises must outnumber the falls: once in some million series without a trend."""


@dataclass(frozen=True)
class Growth:
    """Of one measure.

    Attributes:
        per_hour: the median of the slopes between all pairs of samples (Theil and Sen).
        total: what that is over the time that was looked at.
        standard_errors: by which rises outnumber falls (Kendall).
    """

    per_hour: float
    total: float
    standard_errors: float

    def is_leak(self, allowed_per_hour: float, allowed: float) -> bool:
        """Whether it grows, and faster than is allowed for it, by more than `allowed` in all."""
        is_large = self.per_hour > allowed_per_hour and self.total > allowed
        return is_large and self.standard_errors > SIGNIFICANT


def growth(samples: Sequence[tuple[float, float]], warm_up_s: float) -> Growth:
    """Of samples (seconds, value) in ascending order, without those of the first `warm_up_s`."""
    kept = [each for each in samples if each[0] >= samples[0][0] + warm_up_s] if samples else []
    kept = kept[:: max(1, math.ceil(len(kept) / MOST_POINTS))]
    if len(kept) < 8:
        return Growth(0.0, 0.0, 0.0)
    pairs = [
        (later[0] - first[0], later[1] - first[1]) for first, later in combinations(kept, 2) if later[0] > first[0]
    ]
    per_s = statistics.median(rise / seconds for seconds, rise in pairs)
    num = len(kept)
    excess = sum((rise > 0) - (rise < 0) for _, rise in pairs)
    error = math.sqrt(num * (num - 1) * (2 * num + 5) / 18)
    return Growth(3600 * per_s, per_s * (kept[-1][0] - kept[0][0]), excess / error)
