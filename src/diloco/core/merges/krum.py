"""Multi-Krum: the mean of the contributions that are nearest to others. Blanchard et al. 2017, arXiv 1703.02757."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from diloco.core.choices import FROM_0, checked
from diloco.core.merges.decoding import Decoder
from diloco.core.merges.linear import LinearMerge
from diloco.core.merges.measures import Matrix, squared_distances
from diloco.core.merges.weighted_sum import WeightedSum, means_of


@dataclass(frozen=True)
class MultiKrum(LinearMerge[Sequence[Matrix]]):
    """The mean of the n − f contributions whose n − f − 2 nearest others are nearest; f = `num_byzantine`.

    Its guarantee needs n ≥ 2f + 3 learners. With fewer, each is compared with as many others as remain, at least one. A
    learner whose tensors no other learner trains cannot be judged, and is kept. Learners report their weights
    themselves, so weights do not count: all learners are equal.
    """

    elementwise: ClassVar[bool] = False
    weighted: ClassVar[bool] = False

    num_byzantine: int = checked(FROM_0, 1)

    def measure(self, decoder: Decoder) -> Sequence[Matrix]:
        judged = _counting(decoder)
        if len(judged) <= 2 or not self.num_byzantine:
            return []
        return squared_distances(decoder, _equal_means(decoder, judged))

    def coefficients(self, decoder: Decoder, measured: Sequence[Matrix]) -> list[WeightedSum]:
        kept = _counting(decoder)
        if measured:
            stretches = _equal_means(decoder, kept)
            looked_at = max(1, len(kept) - self.num_byzantine - 2)
            scores = {
                i: _score(
                    [_between(i, j, measured, stretches, decoder.num_elements) for j in kept if j != i], looked_at
                )
                for i in kept
            }
            kept = sorted(kept, key=lambda i: (scores[i], i))[: max(1, len(kept) - self.num_byzantine)]
        return _equal_means(decoder, kept)


def _counting(decoder: Decoder) -> list[int]:
    return [index for index, each in enumerate(decoder.contributions) if each.counts]


def _equal_means(decoder: Decoder, kept: Sequence[int]) -> list[WeightedSum]:
    """The plain mean of the `kept` contributions; all others are taken to train no tensor."""
    equal = [
        replace(each, weight=1.0) if index in kept else replace(each, tensors=frozenset())
        for index, each in enumerate(decoder.contributions)
    ]
    return means_of(equal, decoder.places)


def _between(i: int, j: int, squared: Sequence[Matrix], stretches: Sequence[WeightedSum], num_elements: int) -> float:
    """The squared distance of two contributions, from those of the stretches; inf if they share no tensor."""
    common = [s for s, each in enumerate(stretches) if i in each.counting and j in each.counting]
    shared = sum(stretches[s].num_elements for s in common)
    return math.fsum(squared[s][i][j] for s in common) * (num_elements / shared) if shared else math.inf


def _score(squared: Sequence[float], looked_at: int) -> float:
    """The sum of the `looked_at` smallest distances, scaled up if fewer are finite; 0 if none is."""
    nearest = sorted(each for each in squared if each < math.inf)[:looked_at]
    return math.fsum(nearest) * (looked_at / len(nearest)) if nearest else 0.0
