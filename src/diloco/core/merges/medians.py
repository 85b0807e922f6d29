"""Coordinate-wise median and trimmed mean: robust to learners that lie or have diverged. Yin et al. 2018, arXiv
1803.01498."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from diloco.core.choices import BELOW_1, checked
from diloco.core.merges.coordinates import CoordinateMerge
from diloco.errors import ConfigError


class _Trimmed(CoordinateMerge):
    """Sort the values of every coordinate, cut some at each end, average the rest.

    Learners report their weights themselves, so weights do not count, except that weight 0 leaves a learner out.
    """

    weighted: ClassVar[bool] = False

    @abstractmethod
    def _cut(self, count: int) -> int:
        """The number of values, of `count`, that are cut at each end."""

    def combine(self, values: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
        cut = self._cut(len(values))
        lowest, *others = sorted_vectors(values)[cut : len(values) - cut]
        torch.add(lowest, 0.0, out=out)  # a sum of −0 alone is +0
        for value in others:
            out.add_(value)
        out.div_(torch.tensor(float(len(values) - 2 * cut), device=out.device))


@dataclass(frozen=True)
class TrimmedMean(_Trimmed):
    """Per coordinate the mean without the ⌊trim·n⌋ largest and smallest of n values; `trim` from 0 to below 0.5."""

    trim: float = checked(BELOW_1, 0.25)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trim >= 0.5:
            raise ConfigError(f"TrimmedMean(trim={self.trim}) leaves nothing; use less than 0.5.")

    def _cut(self, count: int) -> int:
        return math.floor(self.trim * count)


@dataclass(frozen=True)
class CoordinateMedian(_Trimmed):
    """Per coordinate the median; of an even number, the mean of the two in the middle."""

    def _cut(self, count: int) -> int:
        return (count - 1) // 2


def sorted_vectors(values: Sequence[Tensor]) -> list[Tensor]:
    """Vectors of the same values, the smallest of every coordinate in the first; `values` are overwritten.

    Batcher's merge exchange (Knuth, The Art of Computer Programming 3, algorithm 5.2.2M): comparisons that do not
    depend on the values, so that whole vectors are compared at once, several times faster than `torch.sort` along a
    strided dimension.
    """
    values, spare = list(values), torch.empty_like(values[0])
    top = 1 << max(0, (len(values) - 1).bit_length() - 1)
    p = top if len(values) > 1 else 0
    while p:
        q, r, distance = top, 0, p
        while distance:
            for i in range(len(values) - distance):
                if i & p == r:
                    low, high = values[i], values[i + distance]
                    torch.minimum(low, high, out=spare)
                    torch.maximum(low, high, out=high)
                    values[i], spare = spare, low
            distance, q, r = q - p, q // 2, p
        p //= 2
    return values
