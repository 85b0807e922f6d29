"""Differences between arms in pairs of the same seed, and what their intervals carry: yes, no, or neither."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TIE = 0.01
"""Nats per byte: pairs scatter by about half of it at this scale."""

STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Half of a 95 % interval ÷ the standard error, for this many pairs (Student's t)."""

Holds = bool | None
"""Yes or no, or None where the interval lies on both sides."""


@dataclass(frozen=True)
class Gap:
    """Paired differences of loss, by seed; `a - b` of two gaps to one arm is the gap between the two."""

    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float:
        return statistics.mean(self.by_seed.values())

    @property
    def num_seeds(self) -> int:
        return len(self.by_seed)

    @property
    def error(self) -> float:
        """Standard error of the mean; 0 of a single pair, which has none."""
        return statistics.stdev(self.by_seed.values()) / math.sqrt(self.num_seeds) if self.num_seeds > 1 else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """95 %; without limits for a single pair."""
        half = STUDENT[self.num_seeds] * self.error if self.num_seeds > 1 else math.inf
        return self.mean - half, self.mean + half

    def __sub__(self, other: Gap) -> Gap:
        return Gap({seed: self.by_seed[seed] - other.by_seed[seed] for seed in self.by_seed if seed in other.by_seed})

    def __neg__(self) -> Gap:
        return Gap({seed: -each for seed, each in self.by_seed.items()})

    def __str__(self) -> str:
        return with_error(self.mean, self.error, self.num_seeds)

    def in_words(self, digits: int = 3) -> str:
        """The mean, and the interval in brackets."""
        mean, low, high = (f"{each:+.{digits}f}" for each in (self.mean, *self.interval))
        return f"{mean} ({low} to {high})"


Gaps = Mapping[str, Gap]


def with_error(mean: float, error: float, num_seeds: int) -> str:
    """As it stands in a table."""
    return f"{mean:+.3f} ± {error:.3f}" if num_seeds > 1 else f"{mean:+.3f}"


def below(gap: Gap, limit: float) -> Holds:
    """Whether all of the interval is below the limit; False: all of it is above."""
    low, high = gap.interval
    return True if high < limit else False if low > limit else None


def every(conditions: Iterable[Holds]) -> Holds:
    """Whether all hold: one that does not decides, then one that is not known."""
    found = list(conditions)
    return False if False in found else None if None in found else True


def opposite(condition: Holds) -> Holds:
    """What is not known stays so."""
    return None if condition is None else not condition
