"""The terms of a linear merge: for each stretch of elements, the factor of every contribution."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diloco.core.layout import Placement
from diloco.core.merges.decoding import Encoded


@dataclass(frozen=True)
class WeightedSum:
    """(Σ_m factor_m·v_m + Σ_m toward_m·momentum) / divisor over neighbouring elements; 0 without factors.

    Attributes:
        elements: of the merged vector.
        factors: by index of the contribution, in merge order.
        divisor: of the sum.
        towards: factors of the outer momentum, by contribution; each is added after its contribution.
        length: the norm to which the sum is scaled; None: it is not scaled.
        shortest: with `length`, a sum shorter than this has no direction, and is replaced by the weighted mean.
    """

    elements: slice
    factors: Mapping[int, float]
    divisor: float = 1.0
    towards: Mapping[int, float] = field(default_factory=dict)
    length: float | None = None
    shortest: float = 0.0

    @property
    def counting(self) -> list[int]:
        """The contributions whose factor is not 0."""
        return [index for index, factor in self.factors.items() if factor > 0]

    @property
    def num_elements(self) -> int:
        return int(self.elements.stop - self.elements.start)


def weights_at(contributions: Sequence[Encoded], index: int) -> dict[int, float]:
    """The weights with which a tensor is merged, by contribution, of those that train it."""
    return {i: each.weight_of(index) for i, each in enumerate(contributions) if each.trains(index)}


def counting_at(contributions: Sequence[Encoded], index: int) -> list[int]:
    """The contributions with a weight in the merge of a tensor."""
    return [i for i, weight in weights_at(contributions, index).items() if weight > 0]


def mean_of(weights: Mapping[int, float], elements: slice) -> WeightedSum:
    """The weighted mean of these elements.

    Weights are divided by the largest, so equal ones are exactly 1. If all weights are 0, the sum has no factors.
    """
    largest = max(weights.values(), default=0.0)
    if largest == 0:
        return WeightedSum(elements, {})
    shares = {i: weight / largest for i, weight in weights.items()}
    return WeightedSum(elements, shares, math.fsum(shares.values()))


def means_of(contributions: Sequence[Encoded], places: Sequence[Placement]) -> list[WeightedSum]:
    """The weighted mean, for each stretch of neighbouring tensors that the same learners train with equal weights."""
    stretches: list[tuple[dict[int, float], slice]] = []
    for index, place in enumerate(places):
        weights = weights_at(contributions, index)
        if stretches and stretches[-1][0] == weights:
            stretches[-1] = weights, slice(stretches[-1][1].start, place.elements.stop)
        else:
            stretches.append((weights, place.elements))
    return [mean_of(weights, elements) for weights, elements in stretches]
