"""Screens refuse contributions for their norm, before the merge. EDiT, arXiv 2412.07210 (z-score of the norms)."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, pstdev

from diloco.core.choices import Choice, Registry, checked, positive
from diloco.core.codecs import Codec
from diloco.core.layout import Placement
from diloco.core.memory import Each, one_by_one
from diloco.core.merges.decoding import Decoder, Encoded
from diloco.core.merges.measures import contribution_norms
from diloco.errors import ConfigError


class Screen(Choice):
    """A rule that refuses contributions for their norm, before the merge."""

    @abstractmethod
    def refused(self, norms: Sequence[float]) -> tuple[int, ...]:
        """Indices of the refused contributions; never all of them."""


@dataclass(frozen=True)
class NormOutliers(Screen):
    """Refuse contributions whose norm is above `max_ratio` times the median norm."""

    max_ratio: float = checked(positive, 4.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_ratio < 1:
            raise ConfigError(f"NormOutliers(max_ratio={self.max_ratio}) refuses the median itself; use at least 1.")

    def refused(self, norms: Sequence[float]) -> tuple[int, ...]:
        limit = self.max_ratio * median(norms)
        return tuple(index for index, length in enumerate(norms) if length > limit)


@dataclass(frozen=True)
class NormZScore(Screen):
    """Refuse contributions whose norm is more than `threshold` standard deviations above the mean (EDiT, arXiv
    2412.07210).

    With n learners no z-score exceeds √(n − 1), so few learners need a low threshold.
    """

    threshold: float = checked(positive, 3.0)

    def refused(self, norms: Sequence[float]) -> tuple[int, ...]:
        mean, deviation = math.fsum(norms) / len(norms), pstdev(norms)
        return tuple(index for index, length in enumerate(norms) if length - mean > self.threshold * deviation > 0)


SCREENS: Registry[Screen] = Registry("screen", NormOutliers, NormZScore)


def refused_by(
    screen: Screen,
    codec: Codec,
    contributions: Sequence[Encoded],
    places: Sequence[Placement],
    num_elements: int,
    each: Each = one_by_one,
) -> tuple[str, ...]:
    """The learners whose contributions the screen refuses, in one pass over the contributions; arguments as of
    `merge_into`.

    A contribution without weight or tensors is not judged: with it, the median norm may be 0, and the only real work
    would be an outlier.

    Raises CorruptPayloadError: a payload of the wrong size or with inf or NaN in it; names the learner.
    """
    judged = [each for each in contributions if each.counts]
    if not judged:
        return ()
    norms = contribution_norms(Decoder(codec, judged, places, num_elements, each=each))
    return tuple(judged[index].learner for index in screen.refused(norms))
