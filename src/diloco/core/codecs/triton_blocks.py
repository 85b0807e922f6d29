"""The block formats on a GPU, with one pass over memory each way: whole segments of int8, int4 and e3m0.

The arithmetic is that of `integers.py` and `e3m0.py`, so the bits are theirs: a division rounded to nearest, no fused
multiply-add, rounding done on integers. Triton comes with torch's CUDA builds. With `TRITON_INTERPRET=1` in the
environment before its first import, the kernels run on CPU tensors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from diloco.core.codecs.formats import SCALE_BYTES, SEGMENT_ELEMENTS

_PROGRAM_ELEMENTS = 4096

_INT8, _INT4, _E3M0 = (tl.constexpr(i) for i in range(3))
_KINDS = {"int8": _INT8, "int4": _INT4, "e3m0": _E3M0}
_SMALLEST_SCALE_BITS = tl.constexpr((127 - 120) << 7)  # `blocks.SMALLEST_SCALE` in bf16
_ROUNDS_TO_INTEGERS = tl.constexpr(1.5 * 2.0**23)  # fp32 numbers of this size are the whole numbers
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)


def encode(x: Tensor, out: Tensor, family: str, block: int, levels: float, largest_scale: float) -> int:
    """Encode segments: x fp32 [rows, 32768] into out uint8 [rows, bytes], both contiguous.

    Returns:
        The largest bits of |x|; `out` is undefined where they are those of inf or NaN.
    """
    largest = torch.zeros(1, dtype=torch.int32, device=x.device)
    grid, sizes = _launch(x, out, block)
    with torch.cuda.device_of(x):
        _encode_blocks[grid](
            x, out, largest, x.numel() // block, 1 / levels, largest_scale, levels=levels, kind=_KINDS[family],
            **sizes, enable_fp_fusion=False,
        )  # fmt: skip
    return int(largest)


def decode(payload: Tensor, out: Tensor, family: str, block: int) -> None:
    """Decode segments whose scales were checked: payload uint8 [rows, bytes] into out fp32 [rows, 32768]."""
    grid, sizes = _launch(out, payload, block)
    with torch.cuda.device_of(out):
        _decode_blocks[grid](payload, out, out.numel() // block, kind=_KINDS[family], **sizes, enable_fp_fusion=False)


def _launch(elements: Tensor, payload: Tensor, block: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid of programs, and the sizes for which a kernel is compiled."""
    blocks = max(1, _PROGRAM_ELEMENTS // block)
    sizes = {
        "half": block // 2,
        "segment_blocks": SEGMENT_ELEMENTS // block,
        "segment_bytes": payload.shape[1],
        "blocks": blocks,
    }
    return (triton.cdiv(elements.numel() // block, blocks),), sizes


@triton.jit
def _places(num_blocks, kind: tl.constexpr, half: tl.constexpr, segment_blocks: tl.constexpr,
            segment_bytes: tl.constexpr, blocks: tl.constexpr):  # fmt: skip
    """Of this program's blocks: whether each exists, where its scale is; of its first half: elements, code bytes."""
    block = tl.program_id(0).to(tl.int64) * blocks + tl.arange(0, blocks)
    column = tl.arange(0, half)[None, :]
    segment, place = (block // segment_blocks) * segment_bytes, block % segment_blocks
    code_bytes = half * 2 if kind == _INT8 else half
    codes = segment + segment_blocks * _SCALE_BYTES + place * code_bytes
    return (
        block < num_blocks,
        segment + place * _SCALE_BYTES,
        block[:, None] * (2 * half) + column,
        (codes[:, None] + column),
    )


@triton.jit
def _codes_of(x, divisor, levels: tl.constexpr, kind: tl.constexpr):
    """The code of each x / divisor, as int32."""
    ratio = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
    if kind == _E3M0:  # as E3M0._encode_blocks
        bits = ratio.to(tl.int32, bitcast=True)
        k = tl.maximum((bits >> 22) & 0xFF, 239) - 239
        return tl.maximum(k >> 1, tl.minimum(k, 1)) | ((bits >> 28) & 0x08)
    nearest = tl.minimum(tl.maximum(ratio, -levels), levels) + _ROUNDS_TO_INTEGERS
    return nearest.to(tl.int32, bitcast=True) & (0xFF if kind == _INT8 else 0x0F)


@triton.jit
def _encode_blocks(x, out, largest, num_blocks, reciprocal, largest_scale, levels: tl.constexpr, kind: tl.constexpr,
                   half: tl.constexpr, segment_blocks: tl.constexpr, segment_bytes: tl.constexpr,
                   blocks: tl.constexpr):  # fmt: skip
    exists, scale_at, at, codes_at = _places(num_blocks, kind, half, segment_blocks, segment_bytes, blocks)
    mask = exists[:, None]
    first = tl.load(x + at, mask=mask, other=0.0)
    second = tl.load(x + at + half, mask=mask, other=0.0)
    magnitude = tl.maximum(
        first.to(tl.int32, bitcast=True) & 0x7FFFFFFF, second.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    )
    absmax = tl.max(magnitude, 1)
    tl.atomic_max(largest, tl.max(absmax, 0))

    scale = tl.minimum(absmax.to(tl.float32, bitcast=True) * reciprocal, largest_scale).to(tl.int32, bitcast=True)
    scale = (scale + 0x7FFF + ((scale >> 16) & 1)) >> 16  # to bf16, to nearest, ties to even
    scale = tl.where(scale < _SMALLEST_SCALE_BITS, 0, scale)
    divisor = tl.where(scale == 0, 0x7F800000, scale << 16).to(tl.float32, bitcast=True)
    tl.store(out + scale_at, (scale & 0xFF).to(tl.uint8), mask=exists)  # a payload may start at any address
    tl.store(out + scale_at + 1, (scale >> 8).to(tl.uint8), mask=exists)

    first_codes = _codes_of(first, divisor, levels, kind)
    second_codes = _codes_of(second, divisor, levels, kind)
    if kind == _INT8:
        tl.store(out + codes_at, first_codes.to(tl.uint8), mask=mask)
        tl.store(out + codes_at + half, second_codes.to(tl.uint8), mask=mask)
    else:
        tl.store(out + codes_at, (first_codes | (second_codes << 4)).to(tl.uint8), mask=mask)


@triton.jit
def _values_of(codes, scale, kind: tl.constexpr):
    """The value of each code (int32); exact, since codes have few bits and scales are not small."""
    if kind == _E3M0:
        power = tl.where((codes & 0x07) == 0, 0, ((codes & 0x07) + 120) << 23) | ((codes & 0x08) << 28)
        unscaled = power.to(tl.float32, bitcast=True)
    elif kind == _INT4:
        unscaled = ((codes ^ 0x08) - 0x08).to(tl.float32)
    else:
        unscaled = ((codes ^ 0x80) - 0x80).to(tl.float32)
    return unscaled * scale[:, None]


@triton.jit
def _decode_blocks(payload, out, num_blocks, kind: tl.constexpr, half: tl.constexpr, segment_blocks: tl.constexpr,
                   segment_bytes: tl.constexpr, blocks: tl.constexpr):  # fmt: skip
    exists, scale_at, at, codes_at = _places(num_blocks, kind, half, segment_blocks, segment_bytes, blocks)
    mask = exists[:, None]
    scale = tl.load(payload + scale_at, mask=exists, other=0).to(tl.int32) << 16
    scale |= tl.load(payload + scale_at + 1, mask=exists, other=0).to(tl.int32) << 24
    factor = scale.to(tl.float32, bitcast=True)
    first = tl.load(payload + codes_at, mask=mask, other=0).to(tl.int32)
    if kind == _INT8:
        second = tl.load(payload + codes_at + half, mask=mask, other=0).to(tl.int32)
    else:
        second = first >> 4
        first &= 0x0F
    tl.store(out + at, _values_of(first, factor, kind), mask=mask)
    tl.store(out + at + half, _values_of(second, factor, kind), mask=mask)
