"""Shards of a fragment's flat vector: each rank stores, encodes, sends and receives a run of whole segments.

Every codec encodes segment by segment (`codecs.SEGMENT_ELEMENTS`), so the payload of a whole vector is the
concatenation of its shards' payloads in rank order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diloco.core.codecs import SEGMENT_ELEMENTS, Codec


@dataclass(frozen=True)
class Segments:
    """A run of whole segments of a fragment, from `first` to before `stop`; it may be empty."""

    first: int
    stop: int

    def elements(self, num_elements: int) -> slice:
        """Their elements in the fragment's fp32 vector."""
        start, stop = (min(segment * SEGMENT_ELEMENTS, num_elements) for segment in (self.first, self.stop))
        return slice(start, stop)

    def payload_span(self, codec: Codec, num_elements: int) -> slice:
        """Their bytes in the payload of the fragment."""
        return codec.segment_span(num_elements, self.first, self.stop)


def num_segments_of(num_elements: int) -> int:
    """The number of segments of a vector; the last one may be incomplete."""
    return -(-num_elements // SEGMENT_ELEMENTS)


@dataclass(frozen=True)
class Shards:
    """The division of a vector over ranks: rank r owns a run of whole segments, which may be empty.

    Attributes:
        owner: the rank that owns the whole vector, where a merge needs whole fragments; None: all ranks share it.
        first: if the segments do not divide evenly, ranks from `first` on (cyclically) own one segment more.
    """

    num_elements: int
    num_shards: int
    owner: int | None = None
    first: int = 0

    def segments(self, rank: int) -> Segments:
        """The segments of a rank's shard."""
        num_segments = num_segments_of(self.num_elements)
        if self.owner is not None:
            return Segments(0, num_segments) if rank == self.owner else Segments(num_segments, num_segments)
        each, left = divmod(num_segments, self.num_shards)
        own = each + ((rank - self.first) % self.num_shards < left)
        wrapped = max(0, self.first + left - self.num_shards)  # ranks from 0 on that own one segment more
        before = rank * each + min(rank, wrapped) + min(max(0, rank - self.first), left - wrapped)
        return Segments(before, before + own)

    def elements(self, rank: int) -> slice:
        """The elements of a rank's shard."""
        return self.segments(rank).elements(self.num_elements)

    def payload_span(self, codec: Codec, rank: int) -> slice:
        """The bytes of a rank's shard in the payload of the whole vector."""
        return self.segments(rank).payload_span(codec, self.num_elements)

    def sizes_bytes(self, codec: Codec) -> list[int]:
        """The bytes of every rank's part of the payload."""
        spans = (self.payload_span(codec, rank) for rank in range(self.num_shards))
        return [span.stop - span.start for span in spans]


def even_shards(nums_elements: Iterable[int], num_shards: int) -> tuple[Shards, ...]:
    """The shards of all fragments of a model; in total, no rank owns two segments more than another."""
    shards, first = list[Shards](), 0
    for num_elements in nums_elements:
        shards.append(Shards(num_elements, num_shards, first=first))
        first = (first + num_segments_of(num_elements)) % num_shards
    return tuple(shards)
