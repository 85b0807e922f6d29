"""Chunked formats: a segment is the encodings of its chunks, one after the other, each of an exactly known size."""

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from diloco.core.codecs.codec import Codec, Scratch
from diloco.core.codecs.formats import SEGMENT_ELEMENTS
from diloco.errors import CorruptPayloadError

# Elements whose scratch stays near a core; measured, see benchmarks/codecs.py.
_CPU_CACHED_ELEMENTS = 8 * SEGMENT_ELEMENTS


class Chunked(Codec):
    """A segment's elements form chunks of `chunk_elements`; only the last one of a segment can be shorter.

    A concrete codec says how equally long chunks, one a row, are encoded, decoded and checked.
    """

    cpu_group_segments: ClassVar[int] = 64

    @property
    def chunk_elements(self) -> int:
        """Elements of a whole chunk; divides SEGMENT_ELEMENTS."""
        return self.format.sizes.block

    def chunk_bytes(self, num_elements: int) -> int:
        """Exact bytes of a chunk of 1 ≤ `num_elements` ≤ `chunk_elements` elements."""
        return self.format.sizes.block_bytes(num_elements)

    @abstractmethod
    def encode_chunks(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Encode chunks: x fp32 [chunks, n] into out uint8 [chunks, chunk_bytes(n)]; NonFiniteError on inf or NaN."""

    @abstractmethod
    def decode_chunks(self, payload: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Decode chunks: payload uint8 [chunks, chunk_bytes(n)] into out fp32 [chunks, n]; raises as `check_chunks`."""

    @abstractmethod
    def check_chunks(self, payload: Tensor, num_elements: int, scratch: Scratch) -> None:
        """CorruptPayloadError unless every chunk (uint8 [chunks, chunk_bytes(n)]) decodes to finite numbers only."""

    def encode_rows(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        for width, elements, payload_bytes in self._chunks(x.shape[1]):
            own_bytes = self.chunk_bytes(width)
            parts = x[:, elements].view(-1, width), out[:, payload_bytes].view(-1, own_bytes)
            for x_, out_ in zip(*(self._in_cache(part, width) for part in parts), strict=True):
                self.encode_chunks(x_, out_, scratch)

    def decode_rows(self, payload: Tensor, out: Tensor, scratch: Scratch) -> None:
        for width, elements, payload_bytes in self._chunks(out.shape[1]):
            own_bytes = self.chunk_bytes(width)
            parts = payload[:, payload_bytes].view(-1, own_bytes), out[:, elements].view(-1, width)
            for payload_, out_ in zip(*(self._in_cache(part, width) for part in parts), strict=True):
                self.decode_chunks(payload_, out_, scratch)

    def check_rows(self, payload: Tensor, num_elements: int, scratch: Scratch) -> None:
        for width, _, payload_bytes in self._chunks(num_elements):
            self.check_chunks(payload[:, payload_bytes].view(-1, self.chunk_bytes(width)), width, scratch)

    def _chunks(self, num_elements: int) -> list[tuple[int, slice, slice]]:
        """(width of a chunk, elements, bytes) of a segment's whole chunks and of its shorter last one."""
        num_full, tail = divmod(num_elements, self.chunk_elements)
        end, end_bytes = num_full * self.chunk_elements, num_full * self.chunk_bytes(self.chunk_elements)
        parts = [(self.chunk_elements, slice(0, end), slice(0, end_bytes))] if num_full else []
        if tail:
            stop_bytes = end_bytes + self.chunk_bytes(tail)
            parts.append((tail, slice(end, num_elements), slice(end_bytes, stop_bytes)))
        return parts

    def _in_cache(self, chunks: Tensor, width: int) -> tuple[Tensor, ...]:
        """A few chunks at a time, so that their scratch stays in cache."""
        step = max(1, _CPU_CACHED_ELEMENTS // width) if chunks.device.type == "cpu" else len(chunks)
        return tuple(chunks[first : first + step] for first in range(0, len(chunks), step))


def corrupt(name: str, what: str) -> CorruptPayloadError:
    """The error of a payload whose content no encoder writes."""
    return CorruptPayloadError(f"the {name} payload holds {what}; send it again")


def short(value: float) -> str:
    """A number as names hold it: "0.5", and "4" for 4.0."""
    return str(value).removesuffix(".0")
