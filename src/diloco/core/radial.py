"""Radial-directional averaging: the mean of the lengths in the direction of the mean of the directions. Decoupled DiLoCo, arXiv 2604.21428.

The mean of M nearly orthogonal outer gradients is shorter than each of them by √M; this merge keeps its norm independent of M. What
differs from the paper: where the directions cancel, its formula is not defined, and the weighted mean is taken.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import Tensor

from diloco.core.codecs import Codec
from diloco.core.contributions import Encoded, end_of
from diloco.core.decoding import Reader, require_finite
from diloco.core.distances import norm, times
from diloco.core.layout import Placement
from diloco.core.merge import Mean, Merge

CANCELLED = 1e-3
"""Below this length of the mean direction there is none."""


@dataclass(frozen=True)
class RadialDirectional(Merge):
    """Per tensor: RDA = (Σ w‖v‖ / Σ w) · φ(Σ w φ(v)), with φ(x) = x/‖x‖ and φ(0) = 0.

    Attributes:
        averaged: tensors whose name matches one of these patterns (shell style) are averaged instead: embeddings, whose rows are
            trained by different learners at different times.

    A tensor that one learner alone trains is that learner's, bit for bit. Three passes over the contributions.
    """

    elementwise: ClassVar[bool] = False

    averaged: tuple[str, ...] = ("*embed*", "*wte*", "*wpe*")

    def __post_init__(self) -> None:
        object.__setattr__(self, "averaged", tuple(self.averaged))

    def merge(
        self, codec: Codec, contributions: Sequence[Encoded], places: Sequence[Placement], num_elements: int,
        momentum: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        mean = Mean().merge(codec, contributions, places, num_elements)
        counting = [each for each in contributions if each.weight > 0]
        if len(counting) == 1:
            return mean
        reader = Reader(codec, num_elements, mean.device)
        norms = self._norms(reader, counting, places)
        directions = torch.zeros_like(mean)
        for each, own in zip(counting, norms, strict=True):
            vector = reader.whole(each)
            for index, place in enumerate(places):
                if own[index]:
                    part = slice(place.offset, end_of(place))
                    directions[part].add_(times(vector[part], each.weight / own[index]))
        for index, place in enumerate(places):
            train = [i for i, each in enumerate(counting) if each.tensors is None or index in each.tensors]
            if len(train) < 2 or any(fnmatchcase(place.spec.name, pattern) for pattern in self.averaged):
                continue
            part = slice(place.offset, end_of(place))
            total = math.fsum(counting[i].weight for i in train)
            length = norm(directions[part])
            if length / total >= CANCELLED:
                radius = math.fsum(counting[i].weight * norms[i][index] for i in train) / total
                mean[part] = times(directions[part], radius / length)
        require_finite(mean)
        return mean

    def _norms(
        self, reader: Reader, contributions: Sequence[Encoded], places: Sequence[Placement]
    ) -> list[list[float]]:
        """By contribution and tensor; 0 for what a learner does not train."""
        norms = []
        for each in contributions:
            vector = reader.whole(each)
            trains = [each.tensors is None or index in each.tensors for index in range(len(places))]
            norms.append(
                [norm(vector[place.offset : end_of(place)]) if trains[i] else 0.0 for i, place in enumerate(places)]
            )
        return norms
