"""Symmetric integers with a scale, the quantisation step, for each block: int8 and int4."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from diloco.core.codecs.blocks import ScaledBlocks, pack_halves, unpack_halves
from diloco.core.codecs.codec import Scratch
from diloco.core.codecs.formats import INT8_BLOCK, NIBBLE_BLOCK


def _nearest_integers(x: Tensor, step: Tensor, levels: float, scratch: Scratch) -> Tensor:
    """round(x / step) to nearest, ties to even, within ±levels, as int8."""
    quotient = scratch.take("quotient", tuple(x.shape), torch.float32)
    torch.div(x, step, out=quotient)
    codes = scratch.take("integers", tuple(x.shape), torch.int8)
    return codes.copy_(quotient.round_().clamp_(-levels, levels))


@dataclass(frozen=True)
class Int8(ScaledBlocks):
    """Codes −127 to 127 in two's complement, one a byte; value = code · step; 8.0625 bits per element at block 256."""

    block: int = INT8_BLOCK
    family: ClassVar[str] = "int8"
    code_bits: ClassVar[int] = 8
    levels: ClassVar[float] = 127.0
    largest_scale: ClassVar[float] = (2 - 2**-7) * 2.0**120  # −128 steps, which no encoder writes, are finite still

    def _encode_blocks(self, x: Tensor, divisor: Tensor, codes: Tensor, scratch: Scratch) -> None:
        integers = _nearest_integers(x, divisor, self.levels, scratch)
        codes.copy_(integers.view(torch.uint8).flatten(1))

    @staticmethod
    def code_of(ratio: Any) -> Any:
        return np.int32(min(max(np.rint(ratio), np.float32(-127.0)), np.float32(127.0)))

    @staticmethod
    def value_of(code: Any) -> Any:
        return np.float32((code ^ 0x80) - 0x80)

    def _decode_blocks(self, codes: Tensor, scale: Tensor, largest: float, out: Tensor, scratch: Scratch) -> None:
        out.copy_(codes.view(torch.int8).view(out.shape))
        out.mul_(scale)


@dataclass(frozen=True)
class Int4(ScaledBlocks):
    """Codes −7 to 7 in two's complement, two a byte; value = code · step; 4.25 bits per element at block 64."""

    block: int = NIBBLE_BLOCK
    family: ClassVar[str] = "int4"
    code_bits: ClassVar[int] = 4
    levels: ClassVar[float] = 7.0
    largest_scale: ClassVar[float] = (2 - 2**-7) * 2.0**124  # −8 steps, which no encoder writes, are finite still

    def _encode_blocks(self, x: Tensor, divisor: Tensor, codes: Tensor, scratch: Scratch) -> None:
        integers = _nearest_integers(x, divisor, self.levels, scratch).view(torch.uint8)
        pack_halves(integers.bitwise_and_(scratch.constant(0x0F, torch.uint8)), codes, scratch)

    @staticmethod
    def code_of(ratio: Any) -> Any:
        return np.int32(min(max(np.rint(ratio), np.float32(-7.0)), np.float32(7.0)))

    @staticmethod
    def value_of(code: Any) -> Any:
        return np.float32((code ^ 0x08) - 0x08)

    def _decode_blocks(self, codes: Tensor, scale: Tensor, largest: float, out: Tensor, scratch: Scratch) -> None:
        sixteenfold = unpack_halves(codes, out.shape[-1], scratch).view(torch.int8)
        out.copy_(sixteenfold)
        out.mul_(scale / 16)
