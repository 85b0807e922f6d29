"""HeLoCo: outer gradients of learners that ran on old versions, turned towards the outer momentum. arXiv 2606.00271.

An outer gradient measured from an old version may point against where the model has gone since. Per tensor, with v the outer gradient,
m the outer momentum and c = cos(v, m):

    c ≥ c_ok        v as it is
    0 ≤ c < c_ok    rotated towards m until its cosine is c_ok, its norm kept
    c < 0           v without its component along m

then damped by age, v / (1 + damping·staleness), and averaged. What differs from the paper: the component against the momentum is
removed and not shrunk by a schedule.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from diloco.core.choices import fraction
from diloco.core.codecs import Codec
from diloco.core.contributions import Encoded, end_of, stretches_of
from diloco.core.decoding import Reader, require_finite
from diloco.core.distances import inner_product, norm, times
from diloco.core.layout import Placement
from diloco.core.merge import Merge
from diloco.errors import ConfigError


@dataclass(frozen=True)
class HeLoCo(Merge):
    """The weighted mean of outer gradients corrected towards the outer momentum.

    Attributes:
        threshold: c_ok, 0 to 1.
        damping: per version of staleness; 0: none.

    Without momentum (the first steps) it is the damped mean. One pass over the contributions.
    """

    elementwise: ClassVar[bool] = False

    threshold: float = 0.2
    damping: float = 0.25

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", fraction("HeLoCo(threshold=…)", self.threshold, below_one=True))
        if isinstance(self.damping, bool) or not 0 <= self.damping < math.inf:
            raise ConfigError(f"HeLoCo(damping=…) must be a finite number of at least 0, not {self.damping!r}.")

    def merge(
        self, codec: Codec, contributions: Sequence[Encoded], places: Sequence[Placement], num_elements: int,
        momentum: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        stretches_of(codec, contributions, places, num_elements)  # checks
        device = contributions[0].payloads[0].device
        reader = Reader(codec, num_elements, device)
        merged = torch.zeros(num_elements, dtype=torch.float32, device=device)
        largest = max(each.weight for each in contributions)
        totals = [0.0] * len(places)
        lengths = [0.0 if momentum is None else norm(momentum[place.offset : end_of(place)]) for place in places]
        for each in contributions:
            vector = reader.whole(each)
            share = each.weight / largest
            for index, place in enumerate(places):
                if share == 0 or (each.tensors is not None and index not in each.tensors):
                    continue
                part = slice(place.offset, end_of(place))
                own, along = 1.0, 0.0
                if momentum is not None and lengths[index]:
                    own, along = self._corrected(vector[part], momentum[part], lengths[index])
                damped = share / (1 + self.damping * each.staleness)
                merged[part].add_(vector[part].mul(own * damped))
                if along and momentum is not None:
                    merged[part].add_(times(momentum[part], along * damped))
                totals[index] += share
        for place, total in zip(places, totals, strict=True):
            if total:
                merged[place.offset : end_of(place)].div_(torch.tensor(total, dtype=torch.float32, device=device))
        require_finite(merged)
        return merged

    def _corrected(self, v: Tensor, m: Tensor, m_norm: float) -> tuple[float, float]:
        """a, b of the corrected outer gradient a·v + b·m."""
        v_norm = norm(v)
        if v_norm == 0:
            return 1.0, 0.0
        along = inner_product(v, m)
        cosine = along / (v_norm * m_norm)
        if cosine >= self.threshold:
            return 1.0, 0.0
        if cosine < 0:
            return 1.0, -along / m_norm**2
        # v' = ‖v‖·(c_ok·m̂ + √(1 − c_ok²)·û), û the direction of v without its component along m
        across = v_norm * math.sqrt(1 - cosine**2)
        own = v_norm * math.sqrt(1 - self.threshold**2) / across
        return own, v_norm * self.threshold / m_norm - own * along / m_norm**2
