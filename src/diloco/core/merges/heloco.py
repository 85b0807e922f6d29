"""HeLoCo: outer gradients measured from old versions are turned towards the outer momentum. arXiv 2606.00271.

An outer gradient measured from an old version may point against the later movement of the model. Per tensor, with v the
outer gradient, m the outer momentum and c = cos(v, m):

    c ≥ c_ok        v as it is
    0 ≤ c < c_ok    rotated towards m until its cosine is c_ok, its norm kept
    c < 0           v without its component along m

then damped by age, v / (1 + damping·staleness), and averaged. Difference from the paper: the component against the
momentum is removed, and not shrunk by a schedule.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from diloco.core.choices import BELOW_1, checked
from diloco.core.merges.decoding import Decoder
from diloco.core.merges.linear import LinearMerge
from diloco.core.merges.measures import Measured, lengths_of, measure_tensors
from diloco.core.merges.weighted_sum import WeightedSum, counting_at
from diloco.errors import ConfigError


@dataclass(frozen=True)
class Angles:
    """‖m‖ of every tensor, and ‖v‖ and ⟨v, m⟩ of every contribution to it, by (tensor, contribution)."""

    momentum_norms: Mapping[int, float]
    measured: Mapping[tuple[int, int], Measured]


@dataclass(frozen=True)
class HeLoCo(LinearMerge[Angles]):
    """The weighted mean of outer gradients corrected towards the outer momentum.

    Attributes:
        threshold: c_ok, 0 to 1.
        damping: per version of staleness; 0: none.

    Without momentum (in the first steps) it is the damped mean. One pass over the contributions then, otherwise two.
    """

    elementwise: ClassVar[bool] = False

    threshold: float = checked(BELOW_1, 0.2)
    damping: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.damping, bool) or not 0 <= self.damping < math.inf:
            raise ConfigError(f"HeLoCo(damping=…) must be a finite number of at least 0, not {self.damping!r}.")

    def measure(self, decoder: Decoder) -> Angles:
        if decoder.momentum is None:
            return Angles({}, {})
        norms = dict(enumerate(lengths_of(decoder, [each.elements for each in decoder.places], decoder.momentum)))
        corrected = {index: counting_at(decoder.contributions, index) for index, length in norms.items() if length}
        return Angles(norms, measure_tensors(decoder, corrected, decoder.momentum))

    def coefficients(self, decoder: Decoder, measured: Angles) -> list[WeightedSum]:
        contributions = decoder.contributions
        largest = max(each.weight for each in contributions)
        sums = []
        for index, place in enumerate(decoder.places):
            factors, towards, total = {}, {}, 0.0
            for i in counting_at(contributions, index):
                own, along = 1.0, 0.0
                if found := measured.measured.get((index, i)):
                    own, along = self._corrected(found, measured.momentum_norms[index])
                share = contributions[i].weight_of(index) / largest
                damped = share / (1 + self.damping * contributions[i].staleness)
                factors[i] = own * damped
                if along:
                    towards[i] = along * damped
                total += share
            sums.append(WeightedSum(place.elements, factors, total or 1.0, towards))
        return sums

    def _corrected(self, v: Measured, m_norm: float) -> tuple[float, float]:
        """a, b of the corrected outer gradient a·v + b·m."""
        if v.norm == 0:
            return 1.0, 0.0
        cosine = v.along / (v.norm * m_norm)
        if cosine >= self.threshold:
            return 1.0, 0.0
        if cosine < 0:
            return 1.0, -v.along / m_norm**2
        # v' = ‖v‖·(c_ok·m̂ + √(1 − c_ok²)·û), û the direction of v without its component along m
        across = v.norm * math.sqrt(1 - cosine**2)
        own = v.norm * math.sqrt(1 - self.threshold**2) / across
        return own, v.norm * self.threshold / m_norm - own * v.along / m_norm**2
