"""The input of a merge: each learner's encoded contribution, its weight, and the tensors that the learner trains."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from diloco.core.layout import Placement


@dataclass(frozen=True, eq=False)
class Encoded:
    """One learner's contribution to a merge.

    Attributes:
        learner: its name.
        payloads: uint8 vectors, each an encoding of the same elements; their decoded values are summed in this order
            (work that was late for the round before, then new work).
        weight: finite, not negative.
        staleness: versions between the oldest base of its outer gradients and the round.
        tensors: indices into the merge's `places` of the tensors that this learner trains; None: all of them.
    """

    learner: str
    payloads: tuple[Tensor, ...]
    weight: float
    staleness: int = 0
    tensors: frozenset[int] | None = None

    @property
    def counts(self) -> bool:
        """Whether it changes the merge: it has a weight, and its learner trains some tensor."""
        return self.weight > 0 and self.tensors != frozenset()

    def trains(self, index: int) -> bool:
        """Whether the learner trains the tensor of this index in the merge's `places`."""
        return self.tensors is None or index in self.tensors


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
