"""The geometric median of whole contributions, by Weiszfeld's iteration. Pillutla et al. 2019, arXiv 1912.13445."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from diloco.core.choices import FROM_1, checked
from diloco.core.merges.decoding import Decoder
from diloco.core.merges.linear import LinearMerge
from diloco.core.merges.measures import Matrix, squared_distances
from diloco.core.merges.weighted_sum import WeightedSum, means_of

_ROUNDING = 1e-8  # a distance below this part of the largest is rounding: squares have 16 digits


@dataclass(frozen=True)
class GeometricMedian(LinearMerge[Sequence[Matrix]]):
    """The point with the smallest sum of weighted distances, by a fixed number of Weiszfeld steps from the mean.

    z ← Σ (w/‖v − z‖)·v / Σ (w/‖v − z‖). Every z is a weighted mean, so its distances to the contributions follow from
    those between contributions: two passes over the contributions, for any number of steps.
    """

    elementwise: ClassVar[bool] = False
    weighs_tensors: ClassVar[bool] = False

    iterations: int = checked(FROM_1, 8)

    def measure(self, decoder: Decoder) -> Sequence[Matrix]:
        stretches = means_of(decoder.contributions, decoder.places)
        counting = {index for stretch in stretches for index in stretch.counting}
        return (
            squared_distances(decoder, stretches) if len(counting) > 2 else []
        )  # of two, every point between them is a median

    def coefficients(self, decoder: Decoder, measured: Sequence[Matrix]) -> list[WeightedSum]:
        stretches = means_of(decoder.contributions, decoder.places)
        if not measured:
            return stretches
        counting = sorted({index for stretch in stretches for index in stretch.counting})
        weights = [each.weight for each in decoder.contributions]
        for _ in range(self.iterations):
            distances = _to_mean(weights, measured, stretches, decoder.num_elements)
            nearest = max(min(distances[i] for i in counting), _ROUNDING * max(distances)) or 1.0
            weights = [
                each.weight * (nearest / max(distance, nearest))
                for each, distance in zip(decoder.contributions, distances, strict=True)
            ]
        trusted = [replace(each, weight=weight) for each, weight in zip(decoder.contributions, weights, strict=True)]
        return means_of(trusted, decoder.places)


def _to_mean(
    weights: Sequence[float], squared: Sequence[Matrix], stretches: Sequence[WeightedSum], num_elements: int
) -> list[float]:
    """‖v_i − z‖ of every contribution, z the mean with these weights, without z: ‖v_i − z‖² = Σ_j a_j·D_ij − ½ Σ_jk
    a_j·a_k·D_jk

    with the squared distances D and the weights a, of sum 1, for each stretch separately. 0 for a contribution without
    weight in all stretches.
    """
    sums, lengths = [0.0] * len(weights), [0] * len(weights)
    for matrix, stretch in zip(squared, stretches, strict=True):
        total = math.fsum(weights[i] for i in stretch.counting)
        shares = {i: weights[i] / total for i in stretch.counting}
        to_all = {i: math.fsum(share * matrix[i][j] for j, share in shares.items()) for i in shares}
        spread = math.fsum(share * to_all[i] for i, share in shares.items()) / 2
        for i in shares:
            sums[i] += max(0.0, to_all[i] - spread)
            lengths[i] += stretch.num_elements
    return [math.sqrt(sum_ * (num_elements / n)) if n else 0.0 for sum_, n in zip(sums, lengths, strict=True)]
