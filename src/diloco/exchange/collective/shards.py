"""How a fragment is divided over ranks, and what each rank keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from diloco.core.codecs import SEGMENT_ELEMENTS, Codec
from diloco.core.fragments import digest
from diloco.core.layout import Fragment, Placement
from diloco.core.merges import shard_of
from diloco.core.method import Method


@dataclass(frozen=True)
class Shards:
    """How a vector is divided over ranks: rank r owns a run of whole segments; a short vector leaves some ranks with none.

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
    """What this rank keeps of a fragment: the whole of it, and of its own shard (`places`, `tensors`: `shard_of`) what a syncer keeps.

    Where the outer optimizer is on the learners, every rank keeps its whole state.
    """

    shards: Shards
    version: int
    theta: Tensor
    digest: str
    outer_state: Mapping[str, Tensor]
    places: tuple[Placement, ...]
    tensors: range
    residual: Tensor | None = None


def first_held(method: Method, fragment: Fragment, theta: Tensor, rank: int, num_ranks: int) -> Held:
    """What `rank` keeps of a fragment at version 0, `theta`."""
    owner = fragment.index % num_ranks if method.needs_whole_fragments else None
    shards = Shards(theta.numel(), num_ranks, owner)
    own = shards.elements(rank)
    outer_state = method.outer.init(theta.numel() if method.outer_at == "learners" else own.stop - own.start)
    places, tensors = shard_of(fragment.tensors, own)
    return Held(shards, 0, theta, digest(theta), outer_state, places, tensors)
