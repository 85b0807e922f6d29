"""The weighted mean of contributions."""

from dataclasses import dataclass
from typing import ClassVar

from diloco.core.merges.decoding import Decoder
from diloco.core.merges.linear import LinearMerge
from diloco.core.merges.weighted_sum import WeightedSum, means_of


@dataclass(frozen=True)
class Mean(LinearMerge[None]):
    """Δ = (Σ_m w_m·Δ_m) / (Σ_m w_m), per tensor over the learners that train it, summed in fp32 in the order given.

    Weights are divided by the largest first, so equal weights are exactly 1 and one contributor's outer gradient is
    returned bit for bit. DiLoCo (arXiv 2311.08105, algorithm 1) with uniform weights; weights by tokens for unequal
    shards; per-tensor contributors as for learners that train a part of the experts (SPES, arXiv 2602.11543).

    >>> one, two = (codec.encode(torch.tensor(values)) for values in ([1.0, 2.0], [3.0, 6.0]))
    >>> contributions = [Encoded("a", (one,), 1.0), Encoded("b", (two,), 3.0)]
    >>> merge_into(mean := torch.empty(2), Mean(), codec, contributions, places)   # [2.5, 5.0]
    """

    elementwise: ClassVar[bool] = True

    def measure(self, decoder: Decoder) -> None:
        return None

    def coefficients(self, decoder: Decoder, measured: None) -> list[WeightedSum]:
        return means_of(decoder.contributions, decoder.places)
