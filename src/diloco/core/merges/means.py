"""Weighted means: of all contributions, of a coordinate's senders, and of contributions clipped to the median norm."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import ClassVar

import torch
from torch import Tensor

from diloco.core.merges.coordinates import CoordinateMerge
from diloco.core.merges.decoding import Decoder
from diloco.core.merges.linear import LinearMerge
from diloco.core.merges.measures import contribution_norms
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


@dataclass(frozen=True)
class SenderMean(CoordinateMerge):
    """Every coordinate's weighted mean over its senders, the learners whose decoded value is not zero; 0 without
    senders.

    For sparse contributions: SparseLoCo's reference implementation (arXiv 2508.15706) divides by the number of a
    coordinate's senders, and not by that of all learners. With dense contributions it is the mean. A learner is no
    sender of tensors that it does not train.
    """

    def combine(self, values: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
        senders = torch.zeros_like(out)
        out.zero_()
        for value, weight in zip(values, weights, strict=True):
            senders.add_(value.sign().abs_().mul_(weight))  # several times faster than value.ne(0.0).float()
            out.add_(value.mul_(weight))
        out.div_(senders.masked_fill_(senders == 0.0, 1.0))


@dataclass(frozen=True)
class MedianNormClip(LinearMerge[Sequence[float]]):
    """The weighted mean of contributions, each scaled down to the median norm if its own norm is larger, as in
    Covenant-72B."""

    elementwise: ClassVar[bool] = False

    def measure(self, decoder: Decoder) -> Sequence[float]:
        return contribution_norms(decoder)

    def coefficients(self, decoder: Decoder, measured: Sequence[float]) -> list[WeightedSum]:
        counting = [length for length, each in zip(measured, decoder.contributions, strict=True) if each.counts]
        limit = median(counting or [0.0])
        clips = [1.0 if length <= limit else limit / length for length in measured]
        means = means_of(decoder.contributions, decoder.places)
        return [replace(each, factors={i: f * clips[i] for i, f in each.factors.items()}) for each in means]
