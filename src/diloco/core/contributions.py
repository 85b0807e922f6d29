"""What goes into a merge: who brings what, how much it counts, and who trains which tensors.

Contributions arrive encoded and stay so until `core.decoding` reads them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diloco.core.codecs import Codec
from diloco.core.layout import Placement, TensorSpec
from diloco.errors import ConfigError, CorruptPayloadError, LayoutError


@dataclass(frozen=True, eq=False)
class Encoded:
    """What one learner brings to a merge.

    Attributes:
        learner: its name.
        payloads: uint8 vectors, each the encoding of the same elements; what they decode to is added up, in this order
            (work that came too late for the round before, then fresh work).
        weight: how much it counts; finite, not negative.
        staleness: versions between the oldest base it was measured from and the round.
        factor: what its decoded values are multiplied by.
        tensors: indices into the merge's `places` of the tensors that this learner trains; None: all of them.
    """

    learner: str
    payloads: tuple[Tensor, ...]
    weight: float
    staleness: int = 0
    tensors: frozenset[int] | None = None
    factor: float = 1.0

    @property
    def counts(self) -> bool:
        """Whether anything of it is in a merge."""
        return self.weight > 0 and self.tensors != frozenset()


class _Contribution(Protocol):
    @property
    def learner(self) -> str: ...
    @property
    def round(self) -> int: ...
    @property
    def base(self) -> int: ...
    @property
    def tensors(self) -> tuple[int, ...] | None: ...


def encoded_of(
    contributions: Sequence[_Contribution],
    weights: Sequence[float],
    payloads: Sequence[Tensor],
    round_: int,
    tensors: range | None = None,
) -> list[Encoded]:
    """What each learner brings: its contributions (next to each other, late before fresh) become one.

    `weights` has one entry per learner, `payloads` one per contribution; `round_` is the one they are merged in. `tensors`: where the
    payloads are of a shard, the indices of its tensors in the fragment (`shard_of`). Raises ConfigError when the numbers do not fit.
    """
    learners = list(dict.fromkeys(contribution.learner for contribution in contributions))
    if len(weights) != len(learners) or len(payloads) != len(contributions):
        raise ConfigError(
            f"{len(contributions)} contributions of {len(learners)} learners need as many payloads and weights,"
            f" not {len(payloads)} and {len(weights)}."
        )
    encoded = []
    for learner, weight in zip(learners, weights, strict=True):
        own = [i for i, contribution in enumerate(contributions) if contribution.learner == learner]
        trained = [contributions[i].tensors for i in own]
        indices = {index for each in trained if each is not None for index in each}
        if tensors is not None:
            indices = {index - tensors.start for index in indices if index in tensors}
        encoded.append(
            Encoded(
                learner,
                tuple(payloads[i] for i in own),
                weight,
                max(round_ - contributions[i].base for i in own),
                None if None in trained else frozenset(indices),
            )
        )
    return encoded


def shard_of(places: Sequence[Placement], elements: slice) -> tuple[tuple[Placement, ...], range]:
    """The tensors of a shard of a fragment: those that intersect `elements`, clipped to it (then one-dimensional) and with
    offsets relative to its start, and their indices in `places`."""
    start, stop = elements.start, elements.stop
    found = [i for i, place in enumerate(places) if max(start, place.offset) < min(stop, end_of(place))]
    indices = range(found[0], found[-1] + 1) if found else range(0)
    clipped = []
    for place in places[indices.start : indices.stop]:
        first, last = max(start, place.offset), min(stop, end_of(place))
        spec = place.spec
        if last - first != spec.numel:
            spec = TensorSpec(spec.name, (last - first,), spec.dtype)
        clipped.append(Placement(spec, first - start))
    return tuple(clipped), indices


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tensors that the same learners train. `shares`: by index of the contribution, in [0, 1], the largest is 1."""

    elements: slice
    shares: Mapping[int, float]
    total: float

    @property
    def first(self) -> int:
        return next(iter(self.shares))

    @property
    def counting(self) -> list[int]:
        """Those of its learners whose weight is not 0."""
        return [index for index, share in self.shares.items() if share > 0]

    @property
    def num_elements(self) -> int:
        return int(self.elements.stop - self.elements.start)

    def within(self, run: slice) -> "Stretch | None":
        """The part of it in a run, relative to the run's start; None if there is none."""
        start, stop = max(self.elements.start, run.start), min(self.elements.stop, run.stop)
        if start >= stop:
            return None
        return Stretch(slice(start - run.start, stop - run.start), self.shares, self.total)


def stretches_of(
    codec: Codec, contributions: Sequence[Encoded], places: Sequence[Placement], num_elements: int
) -> list[Stretch]:
    """Check everything that can be checked before decoding, and say who trains what."""
    _check(codec, contributions, places, num_elements)
    if all(contribution.tensors is None for contribution in contributions):
        return [_stretch(contributions, range(len(contributions)), slice(0, num_elements))]
    stretches: list[tuple[list[int], slice]] = []
    for index, place in enumerate(places):
        trained_by = [i for i, each in enumerate(contributions) if each.tensors is None or index in each.tensors]
        if stretches and stretches[-1][0] == trained_by:
            stretches[-1] = trained_by, slice(stretches[-1][1].start, end_of(place))
        else:
            stretches.append((trained_by, slice(place.offset, end_of(place))))
    return [_stretch(contributions, trained_by, elements) for trained_by, elements in stretches]


def _stretch(contributions: Sequence[Encoded], trained_by: Sequence[int], elements: slice) -> Stretch:
    """Weights divided by the largest of those who train it, so equal ones are exactly 1; nobody's where all are 0."""
    largest = max((contributions[i].weight for i in trained_by), default=0.0)
    if largest == 0:
        return Stretch(elements, {}, 0.0)
    shares = {i: contributions[i].weight / largest for i in trained_by}
    return Stretch(elements, shares, math.fsum(shares.values()))


def _check(codec: Codec, contributions: Sequence[Encoded], places: Sequence[Placement], num_elements: int) -> None:
    if not contributions:
        raise ConfigError("a merge needs at least one contribution.")
    for each in contributions:
        if not math.isfinite(each.weight) or each.weight < 0:
            raise ConfigError(f"the weight of {each.learner} must be finite and not negative, not {each.weight!r}.")
        if not each.payloads:
            raise ConfigError(f"{each.learner} brings no payload to the merge; leave it out.")
        for index in each.tensors or ():
            if not 0 <= index < len(places):
                raise LayoutError(
                    f"{each.learner} trains tensor {index}, and there are tensors 0 to {len(places) - 1}."
                )
    if not any(each.weight for each in contributions):
        raise ConfigError(f"the weights of all {len(contributions)} contributions are 0; at least one must count.")
    end = 0
    for place in places:
        if place.offset != end:
            raise LayoutError(
                f"tensor {place.spec.name!r} begins at element {place.offset}, and the one before ends at {end}."
            )
        end = end_of(place)
    if end != num_elements:
        raise LayoutError(f"the tensors of a merge have {end} elements together, and its contributions {num_elements}.")
    _check_sizes(codec, contributions, num_elements)


def _check_sizes(codec: Codec, contributions: Sequence[Encoded], num_elements: int) -> None:
    expected_bytes = codec.encoded_bytes(num_elements)
    for learner, payload in ((each.learner, payload) for each in contributions for payload in each.payloads):
        if payload.dtype != torch.uint8 or payload.shape != (expected_bytes,):
            raise CorruptPayloadError(
                f"the contribution of {learner} is {tuple(payload.shape)} {str(payload.dtype).removeprefix('torch.')},"
                f" and {num_elements} elements in {codec.name} are {expected_bytes} bytes."
            )


def untrained(contribution: Encoded, places: Sequence[Placement]) -> list[slice]:
    """The elements of the tensors that a learner does not train. What its payloads say of them is noise: 2 bits cannot say 0."""
    if contribution.tensors is None:
        return []
    return [slice(p.offset, end_of(p)) for index, p in enumerate(places) if index not in contribution.tensors]


def end_of(place: Placement) -> int:
    return place.offset + place.spec.numel
