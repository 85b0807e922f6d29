"""How a fragment's flat vector is divided over ranks: each keeps, encodes, sends and receives a run of whole segments.

Every codec encodes segment by segment (`codecs.SEGMENT_ELEMENTS`), so the payload of a whole vector is the payloads of
its shards, joined in rank order.
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
        """In the fragment's fp32 vector."""
        start, stop = (min(segment * SEGMENT_ELEMENTS, num_elements) for segment in (self.first, self.stop))
        return slice(start, stop)

    def payload(self, codec: Codec, num_elements: int) -> slice:
        """The bytes in the payload of the fragment."""
        return codec.segment_span(num_elements, self.first, self.stop)


def num_segments_of(num_elements: int) -> int:
    """Segments of a vector; the last one may be incomplete."""
    return -(-num_elements // SEGMENT_ELEMENTS)


@dataclass(frozen=True)
class Shards:
    """How a vector is divided over ranks: rank r owns a run of whole segments, which may be empty.

    Attributes:
        owner: the one rank that owns all of it, where a merge needs whole fragments.
        first: the first of the ranks that own one segment more than others, where they cannot all own equally many. The
            next ranks follow, and rank 0 after the last.
    """

    num_elements: int
    num_shards: int
    owner: int | None = None
    first: int = 0

    def segments(self, rank: int) -> Segments:
        """Of a rank's shard."""
        num_segments = num_segments_of(self.num_elements)
        if self.owner is not None:
            return Segments(0, num_segments) if rank == self.owner else Segments(num_segments, num_segments)
        each, left = divmod(num_segments, self.num_shards)
        own = each + ((rank - self.first) % self.num_shards < left)
        wrapped = max(0, self.first + left - self.num_shards)  # ranks from 0 on that own one more
        before = rank * each + min(rank, wrapped) + min(max(0, rank - self.first), left - wrapped)
        return Segments(before, before + own)

    def elements(self, rank: int) -> slice:
        """Of the fp32 vector."""
        return self.segments(rank).elements(self.num_elements)

    def payload(self, codec: Codec, rank: int) -> slice:
        """The bytes of a rank's shard in the payload of the whole vector."""
        return self.segments(rank).payload(codec, self.num_elements)

    def sizes_bytes(self, codec: Codec) -> list[int]:
        """Of every rank's part of the payload."""
        spans = (self.payload(codec, rank) for rank in range(self.num_shards))
        return [span.stop - span.start for span in spans]


def dealt(nums_elements: Iterable[int], num_shards: int) -> tuple[Shards, ...]:
    """The shards of all fragments of a model: no rank owns two segments more than another, however small each is."""
    shards, first = list[Shards](), 0
    for num_elements in nums_elements:
        shards.append(Shards(num_elements, num_shards, first=first))
        first = (first + num_segments_of(num_elements)) % num_shards
    return tuple(shards)
