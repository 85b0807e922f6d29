"""The base of chunked codecs: the loop over chunks, sums with the same bits on every device, and packed codes."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from diloco.core.codecs.codec import Codec, Scratch, magnitude_bits, refuse_nonfinite, whole_and_rest
from diloco.core.codecs.formats import SEGMENT_ELEMENTS
from diloco.errors import CorruptPayloadError


def scaled(x: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Rows x (fp32 [rows, n]) times powers of two: (y fp32 [rows, w], exponent bits int32 [rows, 1] of each row's
    largest).

    A row's largest magnitude becomes one from 2 to below 4, so that neither sums nor squares overflow; a row without a
    normal number becomes zeros, and its exponent bits are 0. w is the next power of two, at least 2; elements beyond n
    are 0. Raises NonFiniteError on inf or NaN.
    """
    rows, n = x.shape
    largest = magnitude_bits(x, scratch).amax(-1, keepdim=True)
    refuse_nonfinite(int(largest.amax()))
    exponent = largest.bitwise_right_shift_(23)
    y = scratch.take("scaled", (rows, max(2, 1 << (n - 1).bit_length())), torch.float32)
    torch.mul(x, power_of_two(255 - exponent).masked_fill_(exponent == 0, 0.0), out=y[:, :n])
    y[:, n:] = 0.0
    return y, exponent


def unscale(y: Tensor, exponent: Tensor) -> Tensor:
    """Bring values from the scale of `scaled`'s y back to that of x, in place; only subnormal results are rounded."""
    return y.mul_(0.5).mul_(power_of_two(exponent))


def power_of_two(exponent_bits: Tensor) -> Tensor:
    """2^(e − 127) in fp32 for exponent bits 1 ≤ e ≤ 254 (int32); 0 for e = 0."""
    return exponent_bits.bitwise_left_shift(23).view(torch.float32)


def fold(x: Tensor) -> Tensor:
    """Sums over the last dimension, a power of two: its upper half is added to its lower one until one element is left.

    The order is part of the formats that need it. `x` is overwritten.
    """
    while x.shape[-1] > 1:
        x, upper = x.chunk(2, -1)
        x.add_(upper)
    return x


def pack(codes: Tensor, bits: int, out: Tensor, scratch: Scratch) -> None:
    """Pack codes uint8 [rows, n], each of `bits` = 1 or 2, into out uint8 [rows, m = ⌈n · bits / 8⌉].

    Byte i holds elements i, i + m, i + 2m, …, the first in its lowest bits; elements beyond n are 0.
    """
    (rows, n), m = codes.shape, out.shape[1]
    if n * bits < 8 * m:
        padded = scratch.take("padded codes", (rows, 8 // bits * m), torch.uint8)
        padded[:, :n] = codes
        padded[:, n:] = 0
        codes = padded
    packed = scratch.take("packed", (rows, m), torch.uint8).copy_(codes[:, :m])
    shifted = scratch.take("shifted", (rows, m), torch.uint8)
    for i, part in enumerate(codes.split(m, 1)[1:], start=1):
        packed.bitwise_or_(torch.mul(part, scratch.constant(1 << i * bits, torch.uint8), out=shifted))
    out.copy_(packed)


def unpack(packed: Tensor, bits: int, scratch: Scratch) -> Tensor:
    """The codes of packed uint8 [rows, m]: uint8 [rows, 8m / bits], including the padding."""
    rows, m = packed.shape
    codes = scratch.take("codes", (rows, 8 // bits * m), torch.uint8)
    for i, part in enumerate(codes.split(m, 1)):
        torch.bitwise_right_shift(packed, scratch.constant(i * bits, torch.uint8), out=part)
    return codes.bitwise_and_(scratch.constant((1 << bits) - 1, torch.uint8))


# Elements whose scratch stays near a core; measured, see benchmarks/codecs.py.
_CPU_CACHED_ELEMENTS = 8 * SEGMENT_ELEMENTS


class Chunked(Codec):
    """A segment's elements form chunks of `chunk_elements`; only the last one of a segment can be shorter.

    A concrete codec encodes, decodes and checks chunks of equal length, one per row.
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
        for x_, out_ in self._few(x, out):
            self.encode_chunks(x_, out_, scratch)

    def decode_rows(self, payload: Tensor, out: Tensor, scratch: Scratch) -> None:
        for out_, payload_ in self._few(out, payload):
            self.decode_chunks(payload_, out_, scratch)

    def check_rows(self, payload: Tensor, num_elements: int, scratch: Scratch) -> None:
        for width, _, payload_bytes in self._chunks(num_elements):
            self.check_chunks(payload[:, payload_bytes].view(-1, self.chunk_bytes(width)), width, scratch)

    def _few(self, x: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of segments and their payloads, a few at a time, so that their scratch stays in cache."""
        for width, elements, payload_bytes in self._chunks(x.shape[1]):
            own = x[:, elements].view(-1, width)
            step = max(1, _CPU_CACHED_ELEMENTS // width) if x.device.type == "cpu" else len(own)
            own_bytes = payload[:, payload_bytes].view(-1, self.chunk_bytes(width))
            yield from zip(own.split(step), own_bytes.split(step), strict=True)

    def _chunks(self, num_elements: int) -> Iterator[tuple[int, slice, slice]]:
        """(width of a chunk, elements, bytes) of a segment's whole chunks and of its shorter last one."""
        for part in whole_and_rest(num_elements, self.chunk_elements):
            payload_bytes = slice(self.encoded_bytes(part.start), self.encoded_bytes(part.stop))
            yield min(self.chunk_elements, part.stop - part.start), part, payload_bytes


def checked_means(stored: Tensor, dtype: torch.dtype, name: str, scratch: Scratch) -> Tensor:
    """The means of a codebook (uint8 [rows, bytes]), bf16 or fp32; CorruptPayloadError on what is neither +0 nor a
    normal number."""
    means = scratch.take("means", (len(stored), stored.shape[1] // dtype.itemsize), dtype)
    means.view(torch.uint8).copy_(stored)  # a payload may start at any address
    whole, mantissa_bits = (torch.int16, 7) if dtype == torch.bfloat16 else (torch.int32, 23)
    bits = means.view(whole)
    magnitude = bits.bitwise_and(torch.iinfo(whole).max)
    if bool(((magnitude >= 0xFF << mantissa_bits) | ((magnitude < 1 << mantissa_bits) & (bits != 0))).any()):
        raise corrupt(name, "a codebook mean that is inf, NaN, -0 or subnormal")
    return means


def corrupt(name: str, what: str) -> CorruptPayloadError:
    """The error of a payload whose content no encoder writes."""
    return CorruptPayloadError(f"the {name} payload holds {what}; send it again")


def short(value: float) -> str:
    """A number as in codec names: "0.5", and "4" for 4.0."""
    return str(value).removesuffix(".0")
