"""What goes into a merge: one encoded contribution of each learner, its weight, and the tensors that the learner
trains."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from diloco.core.layout import Placement
from diloco.errors import ConfigError
from diloco.protocol.contribution import Contribution


@dataclass(frozen=True, eq=False)
class Encoded:
    """What one learner brings to a merge.

    Attributes:
        learner: its name.
        payloads: uint8 vectors, each the encoding of the same elements; what they decode to is added up, in this order
            (work that came too late for the round before, then fresh work).
        weight: how much it counts; finite, not negative.
        staleness: versions between the oldest base it was measured from and the round.
        tensors: indices into the merge's `places` of the tensors that this learner trains; None: all of them.
    """

    learner: str
    payloads: tuple[Tensor, ...]
    weight: float
    staleness: int = 0
    tensors: frozenset[int] | None = None

    @property
    def counts(self) -> bool:
        """Whether anything of it is in a merge."""
        return self.weight > 0 and self.tensors != frozenset()

    def trains(self, index: int) -> bool:
        """Whether the learner trains the tensor of this index in the merge's `places`."""
        return self.tensors is None or index in self.tensors


def encoded_of(
    contributions: Sequence[Contribution],
    weights: Sequence[float],
    payloads: Sequence[Tensor],
    round_: int,
    tensors: range | None = None,
) -> list[Encoded]:
    """What each learner brings: its contributions (next to each other, late before fresh) become one.

    `weights` has one entry per learner, `payloads` one per contribution; `round_` is the one they are merged in.
    `tensors`: where the payloads are of a shard, the indices of its tensors in the fragment (`shard_of`). Raises
    ConfigError when the numbers do not fit.
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
    """The tensors of a shard of a fragment: those that intersect `elements`, clipped to it (then one-dimensional) and
    with offsets relative to its start, and their indices in `places`."""
    start, stop = elements.start, elements.stop
    found = [i for i, place in enumerate(places) if max(start, place.offset) < min(stop, place.elements.stop)]
    indices = range(found[0], found[-1] + 1) if found else range(0)
    clipped = []
    for place in places[indices.start : indices.stop]:
        first, last = max(start, place.offset), min(stop, place.elements.stop)
        spec = place.spec
        if last - first != spec.numel:
            spec = replace(spec, shape=(last - first,))
        clipped.append(Placement(spec, first - start))
    return tuple(clipped), indices
