"""Merges and screens that stand a few learners that lie, or have diverged.

    CoordinateMedian, TrimmedMean   per coordinate           Yin et al. 2018, arXiv 1803.01498
    GeometricMedian                 of whole fragments       Pillutla et al. 2019, arXiv 1912.13445 (Weiszfeld's iteration)
    MultiKrum                       of whole fragments       Blanchard et al. 2017, arXiv 1703.02757
    MedianNormClip                  of whole fragments       as in Covenant-72B: every contribution clipped to the median norm
    NormOutliers, NormZScore        refuse contributions     EDiT, arXiv 2412.07210 (z-score of the norms)

A weight is what a learner says of itself, so the coordinate's median, the trimmed mean and Krum count every learner the same; only
weight 0 leaves one out. Norms and distances of learners that train a part of the tensors: `distances`.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, pstdev
from typing import ClassVar

import torch
from torch import Tensor

from diloco.core.choices import Choice, choice_from_dict, fraction, positive, whole_number
from diloco.core.codecs import SEGMENT_ELEMENTS, Codec
from diloco.core.contributions import Encoded, stretches_of
from diloco.core.decoding import RUN_SEGMENTS, Reader, require_finite, runs
from diloco.core.distances import between, norms_of, squared_distances, to_mean
from diloco.core.layout import Placement
from diloco.core.merge import Mean, Merge
from diloco.errors import ConfigError

_ROUNDING = 1e-8  # a distance below this part of the largest is none: squares have 16 digits
_SORTED_ELEMENTS = 16384
"""How much of every vector is sorted at once, so that all of them stay in a processor's cache."""


class _ByCoordinate(Merge):
    """Sort the values of every coordinate, cut some at each end, average the rest; a run of all learners at a time."""

    elementwise: ClassVar[bool] = True
    weighted: ClassVar[bool] = False

    @abstractmethod
    def _cut(self, count: int) -> int:
        """How many of `count` values are cut at each end."""

    def merge(
        self, codec: Codec, contributions: Sequence[Encoded], places: Sequence[Placement], num_elements: int,
        momentum: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        stretches = stretches_of(codec, contributions, places, num_elements)
        device = contributions[0].payloads[0].device
        merged = torch.zeros(num_elements, dtype=torch.float32, device=device)
        reader = Reader(codec, 0, device)
        values = torch.empty(len(contributions), min(num_elements, RUN_SEGMENTS * SEGMENT_ELEMENTS), device=device)
        for part, span in runs(codec, num_elements):
            rows = values[:, : part.stop - part.start]
            for row, each in zip(rows, contributions, strict=True):
                reader.read(each, span, row)
            for stretch in stretches:
                piece = stretch.within(part)
                if piece is None or not piece.counting:
                    continue
                counting = piece.counting
                cut = self._cut(len(counting))
                count = torch.tensor(float(len(counting) - 2 * cut), device=device)
                own = [rows[index, piece.elements].split(_SORTED_ELEMENTS) for index in counting]
                for total, *values_ in zip(merged[part][piece.elements].split(_SORTED_ELEMENTS), *own, strict=True):
                    for value in _sorted(values_)[cut : len(counting) - cut]:
                        total.add_(value)
                    total.div_(count)
            require_finite(merged[part])
        return merged


@dataclass(frozen=True)
class TrimmedMean(_ByCoordinate):
    """Per coordinate the mean of what is left when ⌊trim·n⌋ of n values are cut at each end; `trim` from 0 to below 0.5."""

    trim: float = 0.25

    def __post_init__(self) -> None:
        object.__setattr__(self, "trim", fraction("TrimmedMean(trim=…)", self.trim, below_one=True))
        if self.trim >= 0.5:
            raise ConfigError(f"TrimmedMean(trim={self.trim}) leaves nothing; use less than 0.5.")

    def _cut(self, count: int) -> int:
        return math.floor(self.trim * count)


@dataclass(frozen=True)
class CoordinateMedian(_ByCoordinate):
    """Per coordinate the median; of an even number, the mean of the two in the middle."""

    def _cut(self, count: int) -> int:
        return (count - 1) // 2


def _sorted(values: Sequence[Tensor]) -> list[Tensor]:
    """Vectors of the same values, the smallest of every coordinate in the first; `values` are overwritten.

    Batcher's merge exchange (Knuth, The Art of Computer Programming 3, algorithm 5.2.2M): comparisons that do not depend on the
    values, so that whole vectors are compared at once, several times faster than `torch.sort` along a strided dimension.
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


class _MeanOfTrusted(Merge):
    """The weighted mean of contributions as far as they are trusted: some scaled, weighed anew or left out."""

    elementwise: ClassVar[bool] = False

    def merge(
        self, codec: Codec, contributions: Sequence[Encoded], places: Sequence[Placement], num_elements: int,
        momentum: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        trusted = self._trusted(codec, contributions, places, num_elements)
        return Mean().merge(codec, trusted, places, num_elements)

    @abstractmethod
    def _trusted(
        self, codec: Codec, contributions: Sequence[Encoded], places: Sequence[Placement], num_elements: int
    ) -> Sequence[Encoded]:
        """What goes into the mean."""


@dataclass(frozen=True)
class MedianNormClip(_MeanOfTrusted):
    """The weighted mean of contributions that are scaled down to the median norm where theirs is larger."""

    def _trusted(
        self, codec: Codec, contributions: Sequence[Encoded], places: Sequence[Placement], num_elements: int
    ) -> Sequence[Encoded]:
        stretches_of(codec, contributions, places, num_elements)  # checks
        norms = norms_of(codec, contributions, num_elements, places)
        limit = median([length for length, each in zip(norms, contributions, strict=True) if each.counts] or [0.0])
        return [
            each if length <= limit else replace(each, factor=each.factor * limit / length)
            for each, length in zip(contributions, norms, strict=True)
        ]


@dataclass(frozen=True)
class GeometricMedian(_MeanOfTrusted):
    """The point with the smallest sum of weighted distances, by a fixed number of Weiszfeld steps from the mean.

    z ← Σ (w/‖v − z‖)·v / Σ (w/‖v − z‖). Every z is a mean, so that the distances between contributions say how far they are from it:
    two passes over the contributions, however many steps.
    """

    iterations: int = 8

    def __post_init__(self) -> None:
        whole_number("GeometricMedian(iterations=…)", self.iterations, minimum=1)

    def _trusted(
        self, codec: Codec, contributions: Sequence[Encoded], places: Sequence[Placement], num_elements: int
    ) -> Sequence[Encoded]:
        stretches = stretches_of(codec, contributions, places, num_elements)
        weights = [each.weight for each in contributions]
        counting = sorted({i for stretch in stretches for i in stretch.counting})
        if len(counting) > 2:  # every point between two is as good
            squared = squared_distances(codec, contributions, stretches, num_elements)
            for _ in range(self.iterations):
                distances = to_mean(weights, squared, stretches, num_elements)
                nearest = max(min(distances[i] for i in counting), _ROUNDING * max(distances)) or 1.0
                weights = [
                    each.weight * (nearest / max(distance, nearest))
                    for each, distance in zip(contributions, distances, strict=True)
                ]
        return [replace(each, weight=weight) for each, weight in zip(contributions, weights, strict=True)]


@dataclass(frozen=True)
class MultiKrum(_MeanOfTrusted):
    """The mean of the n − f contributions whose n − f − 2 nearest others are nearest; f = `num_byzantine`.

    Its guarantee needs n ≥ 2f + 3 learners. With fewer it looks at as many others as there are left, at least one. A learner that trains
    what nobody else does cannot be judged, and is kept.
    """

    weighted: ClassVar[bool] = False

    num_byzantine: int = 1

    def __post_init__(self) -> None:
        whole_number("MultiKrum(num_byzantine=…)", self.num_byzantine, minimum=0)

    def _trusted(
        self, codec: Codec, contributions: Sequence[Encoded], places: Sequence[Placement], num_elements: int
    ) -> Sequence[Encoded]:
        stretches_of(codec, contributions, places, num_elements)  # checks
        counting = [replace(each, weight=1.0) for each in contributions if each.counts] or contributions
        num = len(counting)
        if num > 2 and self.num_byzantine:
            stretches = stretches_of(codec, counting, places, num_elements)
            squared = between(squared_distances(codec, counting, stretches, num_elements), stretches, num_elements)
            looked_at = max(1, num - self.num_byzantine - 2)
            scores = [_score(squared[i][:i] + squared[i][i + 1 :], looked_at) for i in range(num)]
            kept = sorted(sorted(range(num), key=lambda i: (scores[i], i))[: max(1, num - self.num_byzantine)])
            counting = [counting[i] for i in kept]
        return counting


def _score(squared: Sequence[float], looked_at: int) -> float:
    """The sum of the smallest; where there are fewer to look at, as if there were enough; 0 where there is none."""
    nearest = sorted(each for each in squared if each < math.inf)[:looked_at]
    return math.fsum(nearest) * (looked_at / len(nearest)) if nearest else 0.0


# --- screens ----------------------------------------------------------------------------------------------------------------


class Screen(Choice):
    """Which contributions are refused for their norm, before the merge."""

    @abstractmethod
    def refused(self, norms: Sequence[float]) -> tuple[int, ...]:
        """Indices of the contributions that are left out; never all of them."""


@dataclass(frozen=True)
class NormOutliers(Screen):
    """Refuse what is longer than `max_ratio` times the median norm."""

    max_ratio: float = 4.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_ratio", positive("NormOutliers(max_ratio=…)", self.max_ratio))
        if self.max_ratio < 1:
            raise ConfigError(f"NormOutliers(max_ratio={self.max_ratio}) refuses the median itself; use at least 1.")

    def refused(self, norms: Sequence[float]) -> tuple[int, ...]:
        limit = self.max_ratio * median(norms)
        return tuple(index for index, length in enumerate(norms) if length > limit)


@dataclass(frozen=True)
class NormZScore(Screen):
    """Refuse what is more than `threshold` standard deviations longer than the mean norm (EDiT, arXiv 2412.07210).

    With n learners no z-score exceeds √(n − 1), so few learners need a low threshold.
    """

    threshold: float = 3.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", positive("NormZScore(threshold=…)", self.threshold))

    def refused(self, norms: Sequence[float]) -> tuple[int, ...]:
        mean, deviation = math.fsum(norms) / len(norms), pstdev(norms)
        return tuple(index for index, length in enumerate(norms) if length - mean > self.threshold * deviation > 0)


SCREENS: tuple[type[Screen], ...] = (NormOutliers, NormZScore)


def screen_from_dict(values: Mapping[str, object]) -> Screen:
    """Read back `Screen.to_dict()`."""
    return choice_from_dict("screen", SCREENS, values)
