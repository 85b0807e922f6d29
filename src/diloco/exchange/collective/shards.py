"""How a fragment is divided over ranks, and what each rank keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from diloco.core.codecs import SEGMENT_ELEMENTS, Codec
from diloco.core.held import HeldFragment
from diloco.core.layout import Fragment, Placement
from diloco.core.merges import shard_of
from diloco.core.method import Method


@dataclass(frozen=True)
class Shards:
    """How a vector is divided over ranks: rank r owns a run of whole segments, which may be empty.

    `owner`: the one rank that owns all of it, where a merge needs whole fragments.
    """

    num_elements: int
    num_shards: int
    owner: int | None = None

    def segments(self, rank: int) -> tuple[int, int]:
        """First segment, and the one behind the last."""
        num_segments = -(-self.num_elements // SEGMENT_ELEMENTS)
        if self.owner is not None:
            return (0, num_segments) if rank == self.owner else (num_segments, num_segments)
        return rank * num_segments // self.num_shards, (rank + 1) * num_segments // self.num_shards

    def elements(self, rank: int) -> slice:
        """Of the fp32 vector."""
        start, stop = (min(segment * SEGMENT_ELEMENTS, self.num_elements) for segment in self.segments(rank))
        return slice(start, stop)

    def sizes_bytes(self, codec: Codec) -> list[int]:
        """Of every rank's part of the payload."""
        spans = (codec.segment_span(self.num_elements, *self.segments(rank)) for rank in range(self.num_shards))
        return [span.stop - span.start for span in spans]


@dataclass
class Held:
    """What this rank keeps of a fragment.

    Attributes:
        elements: of its shard.
        places, tensors: of its shard, as `shard_of` gives them.
        whole: as a learner; with an outer state where the outer optimizer is on the learners.
        own: its shard, as the shard's syncer. `own.theta` is a view of `whole.theta` from the first round on.
    """

    shards: Shards
    elements: slice
    places: tuple[Placement, ...]
    tensors: range
    whole: HeldFragment
    own: HeldFragment

    def take(self, whole: HeldFragment, own: HeldFragment) -> None:
        """A new version."""
        self.whole, self.own = whole, replace(own, theta=whole.theta[self.elements])


def first_held(method: Method, fragment: Fragment, theta: Tensor, rank: int, num_ranks: int) -> Held:
    """What `rank` keeps of a fragment at version 0, `theta`."""
    owner = fragment.index % num_ranks if method.needs_whole_fragments else None
    shards = Shards(theta.numel(), num_ranks, owner)
    elements = shards.elements(rank)
    whole = HeldFragment.first(method, fragment.index, theta)
    if method.outer_at == "syncer":
        whole = replace(whole, outer_state={})
    own = HeldFragment.first(method, fragment.index, theta[elements])
    return Held(shards, elements, *shard_of(fragment.tensors, elements), whole, own)
