"""Contributions clipped to the median norm, as in Covenant-72B."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import ClassVar

from diloco.core.merges.decoding import Decoder
from diloco.core.merges.linear import LinearMerge
from diloco.core.merges.measures import contribution_norms
from diloco.core.merges.weighted_sum import WeightedSum, means_of


@dataclass(frozen=True)
class MedianNormClip(LinearMerge[Sequence[float]]):
    """The weighted mean of contributions, each scaled down to the median norm if its own norm is larger."""

    elementwise: ClassVar[bool] = False

    def measure(self, decoder: Decoder) -> Sequence[float]:
        return contribution_norms(decoder)

    def coefficients(self, decoder: Decoder, measured: Sequence[float]) -> list[WeightedSum]:
        counting = [length for length, each in zip(measured, decoder.contributions, strict=True) if each.counts]
        limit = median(counting or [0.0])
        clips = [1.0 if length <= limit else limit / length for length in measured]
        means = means_of(decoder.contributions, decoder.places)
        return [replace(each, factors={i: f * clips[i] for i, f in each.factors.items()}) for each in means]
