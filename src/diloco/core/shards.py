"""How a fragment's flat vector is divided over ranks: each keeps, encodes, sends and receives a run of whole segments.

Every codec encodes segment by segment (`codecs.SEGMENT_ELEMENTS`), so the payload of a whole vector is the payloads of
its shards, joined in rank order.
"""

from __future__ import annotations

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

    `owner`: the one rank that owns all of it, where a merge needs whole fragments.
    """

    num_elements: int
    num_shards: int
    owner: int | None = None

    def segments(self, rank: int) -> Segments:
        """Of a rank's shard."""
        num_segments = num_segments_of(self.num_elements)
        if self.owner is not None:
            return Segments(0, num_segments) if rank == self.owner else Segments(num_segments, num_segments)
        return Segments(rank * num_segments // self.num_shards, (rank + 1) * num_segments // self.num_shards)

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
