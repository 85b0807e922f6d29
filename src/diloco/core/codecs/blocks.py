"""Block formats, a bf16 scale for each block and then the codes: their layout, scales, and packing of 4-bit codes."""

import functools
import math
import struct
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from diloco.core import arithmetic
from diloco.core.codecs.codec import Codec, Scratch, magnitude_bits, refuse_nonfinite, whole_and_rest
from diloco.core.codecs.formats import SCALE_BYTES, SEGMENT_ELEMENTS, wire_format
from diloco.errors import CorruptPayloadError

SMALLEST_SCALE = 2.0**-120
"""Blocks that would need a smaller scale are sent as zeros: devices differ in how they treat subnormal values."""
SMALLEST_SCALE_BITS = (127 - 120) << 7
# Segments whose scratch stays in a core's L2 cache; measured, see benchmarks/codecs.py.
_CPU_CACHED_SEGMENTS = 8
_LARGEST_KERNEL_BLOCK = 4096
"""Elements; larger blocks do not fit the registers of a GPU's program."""


@dataclass(frozen=True)
class ScaledBlocks(Codec):
    """A segment is [scales of its blocks: bf16][codes of its blocks]; the last block of a segment may be shorter.

    A scale is absmax · fl32(1 / levels) in fp32, at most `largest_scale`, rounded to nearest even in bf16, and 0 if
    that is below SMALLEST_SCALE. Codes have so few bits that code · scale is exact in fp32, whatever computes it.
    """

    block: int
    cpu_group_segments: ClassVar[int] = 64
    device_group_segments: ClassVar[int] = 2048  # the kernels have no scratch
    code_bits: ClassVar[int]
    levels: ClassVar[float]
    largest_scale: ClassVar[float]

    code_of: ClassVar[Any] = None
    """The code of x / divisor as a whole number, of which the lowest `code_bits` count, for compiled loops: fp32 as
    `numpy.float32`, never NaN where the code is used. None: torch computes it."""
    value_of: ClassVar[Any] = None
    """The value of a code (`numpy.int32`, from 0) at scale 1, as `numpy.float32`."""

    @cached_property
    def largest_scale_bits(self) -> int:
        """The bits of `largest_scale` in bf16."""
        return _bf16_bits(self.largest_scale)

    @property
    def name(self) -> str:
        return self.family if self.block == wire_format(self.family).sizes.block else f"{self.family}:{self.block}"

    @abstractmethod
    def _encode_blocks(self, x: Tensor, divisor: Tensor, codes: Tensor, scratch: Scratch) -> None:
        """Write the codes (uint8 [rows, bytes]) of x / divisor: fp32 [rows, blocks, width] / [rows, blocks, 1].

        The divisor is the scale, or inf where that is 0.
        """

    @abstractmethod
    def _decode_blocks(self, codes: Tensor, scale: Tensor, largest: float, out: Tensor, scratch: Scratch) -> None:
        """Write codes (uint8 [rows, bytes]) times scale (fp32 [rows, blocks, 1]) into out (fp32 [rows, blocks, width]).

        No scale is larger than `largest`.
        """

    def encode_rows(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        num_elements = x.shape[1]
        if (kernels := self._kernels(x.device, num_elements)) is not None:
            refuse_nonfinite(kernels.encode(x, out, self.family, self.block, self.levels, self.largest_scale))
            return
        for x_, out_ in zip(self._in_cache(x), self._in_cache(out), strict=True):
            scales, codes = self._split(out_, num_elements)
            for elements, blocks, code_bytes in self._parts(num_elements):
                part = self._blocks(x_[:, elements], blocks, scratch)
                stored, divisor = self._scales(part, scratch)
                scale_bytes = slice(blocks.start * SCALE_BYTES, blocks.stop * SCALE_BYTES)
                scales[:, scale_bytes] = stored.view(part.shape[0], -1).view(torch.uint8)
                self._encode_blocks(part, divisor, codes[:, code_bytes], scratch)

    def decode_rows(self, payload: Tensor, out: Tensor, scratch: Scratch) -> None:
        rows, num_elements = out.shape
        codes = self._split(payload, num_elements)[1]
        stored, largest = self._checked_scales(payload, num_elements, scratch)
        if (kernels := self._kernels(out.device, num_elements)) is not None:
            kernels.decode(payload, out, self.family, self.block)
            return
        scales = stored.float()
        for elements, blocks, code_bytes in self._parts(num_elements):
            width = elements.stop - elements.start
            whole_bytes = width * self.code_bits % 8 == 0
            if whole_bytes:
                part = out[:, elements].view(rows, blocks.stop - blocks.start, -1)
            else:
                part = scratch.take("padded", (rows, 1, width + 1), torch.float32)
            operands = (codes[:, code_bytes], scales[:, blocks].unsqueeze(-1), part)
            for codes_, scale_, part_ in zip(*map(self._in_cache, operands), strict=True):
                self._decode_blocks(codes_, scale_, largest, part_, scratch)
            if not whole_bytes:
                out[:, elements] = part[:, 0, :width]

    def check_rows(self, payload: Tensor, num_elements: int, scratch: Scratch) -> None:
        self._checked_scales(payload, num_elements, scratch)

    def _kernels(self, device: torch.device, num_elements: int) -> ModuleType | None:
        """`triton_blocks`, which computes the same bits on a GPU; None: use the torch operations of this module."""
        if device.type != "cuda" or num_elements != SEGMENT_ELEMENTS or self.block > _LARGEST_KERNEL_BLOCK:
            return None
        return gpu_kernels()

    def _encode(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        if (loops := arithmetic.loops()) is None or self.code_of is None or x.device.type != "cpu":
            super()._encode(x, out, scratch)
        else:
            refuse_nonfinite(loops.encode(self, x, out))

    def _in_cache(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Few rows at a time, so that their scratch stays in cache; scales, being small, are read for more at once."""
        step = _CPU_CACHED_SEGMENTS if rows.device.type == "cpu" else len(rows)
        return tuple(rows.split(step))

    def _split(self, payload: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
        scale_bytes = math.ceil(num_elements / self.block) * SCALE_BYTES
        return payload[:, :scale_bytes], payload[:, scale_bytes:]

    def _parts(self, num_elements: int) -> Iterator[tuple[slice, slice, slice]]:
        """(elements, blocks, code bytes) of a segment's full blocks and of its shorter last one."""
        for part in whole_and_rest(num_elements, self.block):
            blocks = slice(part.start // self.block, math.ceil(part.stop / self.block))
            yield part, blocks, slice(part.start * self.code_bits // 8, math.ceil(part.stop * self.code_bits / 8))

    def _blocks(self, x: Tensor, blocks: slice, scratch: Scratch) -> Tensor:
        """x [rows, m] as [rows, blocks, width]; a block whose codes do not fill whole bytes is padded with a zero."""
        if x.shape[1] * self.code_bits % 8 == 0:
            return x.view(x.shape[0], blocks.stop - blocks.start, -1)
        padded = scratch.take("padded", (x.shape[0], 1, x.shape[1] + 1), torch.float32)
        padded[:, 0, :-1] = x
        padded[:, 0, -1] = 0.0
        return padded

    def _scales(self, x: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """(bf16 scale, fp32 divisor) of each block, [rows, blocks, 1]; the divisor of a scale of 0 is inf."""
        absmax_bits = magnitude_bits(x, scratch).amax(-1, keepdim=True)
        refuse_nonfinite(int(absmax_bits.amax()))
        scale = absmax_bits.view(torch.float32).mul_(1 / self.levels).clamp_max_(self.largest_scale).bfloat16()
        zero = scale < SMALLEST_SCALE
        return scale.masked_fill_(zero, 0.0), scale.float().masked_fill_(zero, math.inf)

    def _checked_scales(self, payload: Tensor, num_elements: int, scratch: Scratch) -> tuple[Tensor, float]:
        """(scales bf16 [rows, blocks], the largest of them)."""
        stored = self._split(payload, num_elements)[0]
        scales = scratch.take("scales", (payload.shape[0], stored.shape[1] // SCALE_BYTES), torch.bfloat16)
        scales.view(torch.uint8).copy_(stored)  # a payload may start at any address, a bf16 value may not
        bits = scales.view(torch.int16)  # order as the values do; a sign makes them negative
        smallest, largest = int(bits.amin()), int(bits.amax())
        if smallest == 0:
            smallest = int(bits.masked_fill(bits == 0, SMALLEST_SCALE_BITS).amin())
        # Below are signs and scales with subnormal products, above NaN and scales with products that are not finite.
        if smallest < SMALLEST_SCALE_BITS or largest > self.largest_scale_bits:
            raise CorruptPayloadError(
                f"the {self.name} payload holds a scale that is neither 0 nor within {SMALLEST_SCALE:.3g} to "
                f"{self.largest_scale:.3g}; send it again"
            )
        return scales, float(scales.amax())


@functools.cache
def gpu_kernels() -> ModuleType | None:
    """The module `triton_blocks`; None where torch came without Triton."""
    return import_module("diloco.core.codecs.triton_blocks") if find_spec("triton") else None


def pack_halves(codes: Tensor, out: Tensor, scratch: Scratch) -> None:
    """Pack 4-bit codes uint8 [rows, blocks, width] (each ≤ 15) into out uint8 [rows, blocks · width / 2].

    Byte i of a block holds element i in its low half and element i + width / 2 in its high half.
    """
    rows, blocks, width = codes.shape
    halves = _as_words(codes.view(rows * blocks, width), width // 2)
    low = scratch.take("low", tuple(out.shape), torch.uint8)
    high = scratch.take("high", tuple(out.shape), torch.uint8)
    low.view(halves.dtype).view(rows * blocks, -1).copy_(halves[:, : halves.shape[1] // 2])
    high.view(halves.dtype).view(rows * blocks, -1).copy_(halves[:, halves.shape[1] // 2 :])
    torch.bitwise_or(low, high.mul_(scratch.constant(16, torch.uint8)), out=out)


def unpack_halves(packed: Tensor, width: int, scratch: Scratch) -> Tensor:
    """The codes of packed uint8 [rows, bytes], each in the *high* half of its byte: uint8 [rows, blocks, width]."""
    rows, num_bytes = packed.shape
    blocks = num_bytes // (width // 2)
    low = scratch.take("low", (rows, num_bytes), torch.uint8)
    high = scratch.take("high", (rows, num_bytes), torch.uint8)
    torch.mul(packed, scratch.constant(16, torch.uint8), out=low)
    torch.bitwise_and(packed, scratch.constant(0xF0, torch.uint8), out=high)
    codes = scratch.take("nibbles", (rows, blocks, width), torch.uint8)
    words = [_as_words(half.view(rows * blocks, -1), width // 2) for half in (low, high)]
    torch.cat(words, 1, out=_as_words(codes.view(rows * blocks, width), width // 2))
    return codes


def _as_words(rows_of_bytes: Tensor, half: int) -> Tensor:
    """The same bytes in units of 4, if half a block has whole ones: torch moves rows of fp32 several times faster."""
    return rows_of_bytes.view(torch.float32) if half % 4 == 0 else rows_of_bytes


def _bf16_bits(value: float) -> int:
    """The bits of a positive value that bf16 represents exactly."""
    return int.from_bytes(struct.pack(">f", value)[:2])
