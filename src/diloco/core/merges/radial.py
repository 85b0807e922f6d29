"""Radial-directional averaging: the mean of the lengths in the direction of the mean of the directions. Decoupled
DiLoCo, arXiv 2604.21428.

The mean of M nearly orthogonal outer gradients is shorter than each of them by √M; the norm of this merge does not
depend on M. Difference from the paper: where the directions cancel, its formula is undefined, and the weighted mean is
used.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from diloco.core.merges.decoding import Decoder
from diloco.core.merges.linear import LinearMerge
from diloco.core.merges.measures import Measured, measure_tensors
from diloco.core.merges.weighted_sum import WeightedSum, counting_at, mean_of, weights_at

CANCELLED = 1e-3
"""Directions cancel if their mean is shorter than this."""

Norms = Mapping[tuple[int, int], Measured]


@dataclass(frozen=True)
class RadialDirectional(LinearMerge[Norms]):
    """Per tensor: RDA = (Σ w‖v‖ / Σ w) · φ(Σ w φ(v)), with φ(x) = x/‖x‖ and φ(0) = 0.

    Attributes:
        averaged: tensors whose name matches one of these patterns (shell style) are averaged instead: embeddings, whose
            rows are trained by different learners at different times.

    A tensor that only one learner trains becomes that learner's, bit for bit. Two passes over the contributions: norms,
    then the sum of directions, which is scaled to its length afterwards.
    """

    elementwise: ClassVar[bool] = False

    averaged: tuple[str, ...] = ("*embed*", "*wte*", "*wpe*")

    def __post_init__(self) -> None:
        object.__setattr__(self, "averaged", tuple(self.averaged))

    def measure(self, decoder: Decoder) -> Norms:
        return measure_tensors(decoder, self._directed(decoder))

    def coefficients(self, decoder: Decoder, measured: Norms) -> list[WeightedSum]:
        directed, contributions = self._directed(decoder), decoder.contributions
        sums = []
        for index, place in enumerate(decoder.places):
            learners = directed.get(index, [])
            norms = {i: measured[index, i].norm for i in learners}
            if not any(norms.values()):
                sums.append(mean_of(weights_at(contributions, index), place.elements))
                continue
            weights = {i: contributions[i].weight_of(index) for i in learners}
            total = math.fsum(weights.values())
            sums.append(
                WeightedSum(
                    place.elements,
                    {i: weights[i] / length for i, length in norms.items() if length},
                    length=math.fsum(weights[i] * length for i, length in norms.items()) / total,
                    shortest=CANCELLED * total,
                )
            )
        return sums

    def _directed(self, decoder: Decoder) -> dict[int, list[int]]:
        """The tensors that are merged by direction, with the contributions that count for them."""
        directed = {}
        for index, place in enumerate(decoder.places):
            learners = counting_at(decoder.contributions, index)
            if place.spec.is_averaged:  # the merge of statistics is their mean, and not a longer vector
                continue
            if len(learners) > 1 and not any(fnmatchcase(place.spec.name, pattern) for pattern in self.averaged):
                directed[index] = learners
        return directed
