"""E3M0, the 4-bit float of Streaming DiLoCo (arXiv 2501.18512, section 2.4): a sign and 3 bits of exponent."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from diloco.core.codecs.blocks import ScaledBlocks, pack_halves, unpack_halves
from diloco.core.codecs.codec import Scratch
from diloco.core.codecs.formats import NIBBLE_BLOCK


@dataclass(frozen=True)
class E3M0(ScaledBlocks):
    """Code 0 is zero, code c = 1 … 7 is s · 2^(c − 7), s the block's absmax in bf16; the sign is bit 3; 4.25 bits at
    block 64.

    Nearest rounding, ties away from zero: |x| / s from 2^-7 up is code 1, from 1.5 · 2^(c − 8) up code c ≥ 2. Zeros
    keep their sign.
    """

    block: int = NIBBLE_BLOCK
    family: ClassVar[str] = "e3m0"
    code_bits: ClassVar[int] = 4
    levels: ClassVar[float] = 1.0
    largest_scale: ClassVar[float] = (2 - 2**-7) * 2.0**127

    def _encode_blocks(self, x: Tensor, divisor: Tensor, codes: Tensor, scratch: Scratch) -> None:
        shape = tuple(x.shape)
        ratio = scratch.take("ratio", shape, torch.float32)
        bits = torch.div(x, divisor, out=ratio).view(torch.int32)
        # |ratio| < 2, so bits 22 to 29 are the exponent and the first bit of the mantissa: k = 2 · exponent + that bit.
        k = scratch.take("codes", shape, torch.uint8).copy_(
            bits.bitwise_right_shift_(scratch.constant(22, torch.int32))
        )
        sign = (
            scratch.take("signs", shape, torch.uint8)
            .copy_(bits.bitwise_right_shift_(scratch.constant(6, torch.int32)))
            .bitwise_and_(scratch.constant(0x08, torch.uint8))
        )
        # k = 240 starts at 2^-7. With j = k − 239: j = 0 is code 0; 1, 2 and 3 are code 1; from there two j's a code.
        k.clamp_min_(239).sub_(239)
        lowest = scratch.take("lowest", shape, torch.uint8)
        torch.clamp_max(k, 1, out=lowest)
        k.bitwise_right_shift_(1)
        pack_halves(torch.maximum(k, lowest, out=k).bitwise_or_(sign), codes, scratch)

    @staticmethod
    def code_of(ratio: Any) -> Any:
        bits = np.float32(ratio).view(np.int32)
        magnitude: Any = bits & 0x7FFFFFFF
        at_least: Any = max(magnitude, 0x3C400000)  # 1.5 · 2^-7, from where codes are 2 and more
        code = (at_least - 0x3BC00000) >> 23
        return (code if magnitude >= 0x3C000000 else 0) | ((bits >> 28) & 0x08)

    @staticmethod
    def value_of(code: Any) -> Any:
        exponent_and_sign = ((code << 23) | (code << 28)) & 0x83800000  # of ± 2^(c − 127), or ± 0 for code 0
        return np.int32(exponent_and_sign).view(np.float32) * np.float32(2.0**120)

    def _decode_blocks(self, codes: Tensor, scale: Tensor, largest: float, out: Tensor, scratch: Scratch) -> None:
        nibbles = unpack_halves(codes, out.shape[-1], scratch).view(torch.int8)
        # The exponent bits of the code become those of an fp16 number, of value ± 2^(c − 15), or ± 0 for code 0.
        halves = scratch.take("halves", tuple(out.shape), torch.int16).copy_(nibbles)
        halves.mul_(scratch.constant(64, torch.int16)).bitwise_and_(scratch.constant(0x9C00 - 0x10000, torch.int16))
        out.copy_(halves.view(torch.float16))
        # The missing 2^8 goes with the scale, unless it would overflow there.
        if largest < 2.0**119:
            out.mul_(scale * 256)
        else:
            out.mul_(256).mul_(scale)
