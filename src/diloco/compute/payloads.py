"""Compiled loops over payloads: encode, decode, sum up.

What Numba needs to vectorise a loop: other views of an array as arguments of their own, since it does not know that one
made inside is contiguous; division as the hardware does it; no output in the memory of an input; lengths that it knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from diloco.compute.compiling import inlined, loop, pointer
from diloco.compute.vectors import folded
from diloco.core.codecs import SEGMENT_ELEMENTS, Codec
from diloco.core.codecs.blocks import SMALLEST_SCALE_BITS, ScaledBlocks
from diloco.core.codecs.floats import Cast
from diloco.core.merges.measures import BLOCK_ELEMENTS

_f32, _f64, _i32, _u8 = np.float32, np.float64, np.int32, np.uint8


def encode(codec: ScaledBlocks, x: Tensor, out: Tensor) -> int:
    """As `Codec.encode`. Returns the largest bits of |x|; `out` is undefined where they are those of inf or NaN."""
    return int(_encoder(codec)(x.numpy(), x.view(torch.int32).numpy(), out.numpy()))


@cache
def _encoder(codec: ScaledBlocks) -> Callable[..., int]:
    assert codec.code_of is not None
    code_of, bits, block, smallest = inlined(codec.code_of), codec.code_bits, codec.block, SMALLEST_SCALE_BITS
    reciprocal, largest_scale, mask = _f32(1 / codec.levels), _f32(codec.largest_scale), 0x0F if bits == 4 else 0xFF

    @loop("int32(float32[::1], int32[::1], uint8[::1])", codec.name)
    def encode_blocks(x: Any, x_bits: Any, out: Any) -> Any:
        largest, at = _i32(0), 0
        for first in range(0, len(x), SEGMENT_ELEMENTS):
            stop = min(first + SEGMENT_ELEMENTS, len(x))
            at_scale, at = at, at + 2 * ((stop - first + block - 1) // block)
            for start in range(first, stop, block):
                width = min(block, stop - start)
                own, own_bits = x[start : start + width], x_bits[start : start + width]
                magnitude = _i32(0)
                for i in range(width):
                    magnitude = max(magnitude, own_bits[i] & _i32(0x7FFFFFFF))
                largest = max(largest, magnitude)
                found = _f32(min(_i32(magnitude).view(_f32) * reciprocal, largest_scale)).view(_i32)
                scale: Any = (found + 0x7FFF + ((found >> 16) & 1)) >> 16  # to bf16, ties to even
                scale = scale if scale >= smallest else 0
                divisor = _i32(scale << 16).view(_f32) if scale else _f32(math.inf)
                out[at_scale], out[at_scale + 1] = scale & 0xFF, scale >> 8
                half = (width + 1) // 2 if bits == 4 else width
                codes, high = out[at : at + half], own[half:]
                for i in range(half):
                    codes[i] = _u8(code_of(own[i] / divisor) & mask)
                for i in range(width - half):
                    codes[i] |= _u8(code_of(high[i] / divisor) << 4)
                at_scale, at = at_scale + 2, at + half
        return largest

    return encode_blocks


def encode_cast(codec: Cast, x: Tensor, out: Tensor) -> int:
    """As `Codec.encode`, of a payload that begins where its elements may. Returns the largest bits of |x|."""
    return int(_cast_encoder(codec)(x.view(torch.int32).numpy(), out.numpy().view(f"i{codec.dtype.itemsize}")))


@cache
def _cast_encoder(codec: Cast) -> Callable[..., int]:
    assert codec.narrowed is not None
    narrowed = inlined(codec.narrowed)

    @loop(f"int32(int32[::1], int{8 * codec.dtype.itemsize}[::1])", codec.name)
    def narrow(x_bits: Any, out: Any) -> Any:
        largest = _i32(0)
        for i in range(len(x_bits)):
            out[i] = narrowed(x_bits[i])
            largest = max(largest, x_bits[i] & _i32(0x7FFFFFFF))
        return largest

    return narrow


def can_read(codec: Codec, payload: Tensor) -> bool:
    """Whether loops can decode this payload, or a cast encode into it: of this format, and at this address."""
    if not payload.is_contiguous():
        return False
    if isinstance(codec, Cast):
        return codec.widened is not None and payload.data_ptr() % codec.dtype.itemsize == 0
    return isinstance(codec, ScaledBlocks) and codec.value_of is not None


def _reader(codec: Codec) -> tuple[int, Callable[..., bool]]:
    """The length of blocks, and a function that decodes some of a vector's: from the address of the payload, the
    number of the vector's elements, and the first element and the one after the last (the beginnings of blocks, or the
    vector's end), into an array. Returns whether they are valid.
    """
    segment, smallest = SEGMENT_ELEMENTS, SMALLEST_SCALE_BITS
    if isinstance(codec, Cast):
        assert codec.widened is not None
        size, widened, stored = codec.dtype.itemsize, inlined(codec.widened), np.dtype(f"i{codec.dtype.itemsize}").type

        @inlined
        def read_cast(address: int, _: int, first: int, last: int, into: Any) -> Any:
            cast, largest = carray(pointer(address + first * size), last - first, stored), _i32(0)
            for i in range(last - first):
                bits = _i32(widened(_i32(cast[i])))
                into[i] = bits.view(_f32)
                largest = max(largest, bits & _i32(0x7FFFFFFF))
            return largest < 0x7F800000

        return 1, read_cast

    assert isinstance(codec, ScaledBlocks)
    assert codec.value_of is not None
    value_of, bits, block, most = inlined(codec.value_of), codec.code_bits, codec.block, codec.largest_scale_bits
    code_bytes, codes_a_byte, mask = block * bits // 8, 8 // bits, 0x0F if bits == 4 else 0xFF
    half, segment_bytes = block // codes_a_byte, segment // block * (2 + code_bytes)

    @inlined
    def read_in_segment(address: int, num_elements: int, first: int, into: Any) -> Any:
        whole, num_blocks = len(into) // block, (len(into) + block - 1) // block
        scales = carray(pointer(address + first // block * 2), 2 * num_blocks, _u8)
        codes_at = (num_elements + block - 1) // block * 2 + first // block * code_bytes
        codes = carray(pointer(address + codes_at), num_blocks * code_bytes, _u8)
        valid: Any = True
        for b in range(num_blocks):
            stored, at, to = _i32(_i32(scales[2 * b]) | (_i32(scales[2 * b + 1]) << 8)), b * code_bytes, b * block
            scale = _i32(stored << 16).view(_f32)
            valid &= stored == 0 or smallest <= stored <= most
            if b < whole:
                for i in range(half):
                    code = _i32(codes[at + i])
                    into[to + i] = value_of(code & mask) * scale
                    if codes_a_byte == 2:
                        into[to + half + i] = value_of(code >> 4) * scale
            else:
                low = (len(into) - to + codes_a_byte - 1) // codes_a_byte
                for i in range(len(into) - to):
                    code = _i32(codes[at + i] & mask if i < low else codes[at + i - low] >> 4)
                    into[to + i] = value_of(code) * scale
        return valid

    @inlined
    def read_blocks(address: int, num_elements: int, first: int, last: int, into: Any) -> Any:
        valid, low = True, first
        while low < last:
            begins = low // segment * segment
            high, size = min(begins + segment, last), min(num_elements - begins, segment)
            part = into[low - first : high - first]
            valid &= read_in_segment(address + low // segment * segment_bytes, size, low - begins, part)
            low = high
        return valid

    return block, read_blocks


def decode(codec: Codec, payload: Tensor, out: Tensor) -> bool:
    """As `Codec.decode`, of a payload that `can_read` allows. Returns whether it is valid."""
    return bool(_decoder(codec)(payload.data_ptr(), out.numpy()))


@cache
def _decoder(codec: Codec) -> Callable[..., bool]:
    _, read = _reader(codec)

    @loop("boolean(int64, float32[::1])", codec.name)
    def decode_blocks(address: int, out: Any) -> Any:
        return read(address, len(out), 0, len(out), out)

    return decode_blocks


def weighted_sum(
    codec: Codec, payloads: Sequence[Tensor], num_elements: int, factors: Sequence[float], divisor: float, first: int,
    out: Tensor,
) -> bool:  # fmt: skip
    """Σ factor·decode(payload) / divisor, in this order, as `merges.linear.add_up`.

    Arguments:
        payloads: of vectors of `num_elements`, at least one; `can_read` allows them.
        out: fp32, for the elements from `first` on.

    Returns whether the blocks with these elements are valid; `out` is undefined otherwise.
    """
    return bool(_summing(codec)(_addresses(payloads), num_elements, np.array(factors), divisor, first, out.numpy()))


def _addresses(payloads: Sequence[Tensor]) -> Any:
    return np.array([each.data_ptr() for each in payloads], np.int64)


@cache
def _summing(codec: Codec) -> Callable[..., bool]:
    block, read = _reader(codec)
    # Elements that are summed over all learners before the next ones: their sum stays in a core's first cache.
    chunk, tiny, huge = max(block, BLOCK_ELEMENTS // 2), float(np.finfo(_f32).tiny), float(np.finfo(_f32).max)

    @loop("boolean(int64[::1], int64, float64[::1], float32, int64, float32[::1])", codec.name)
    def add_up(addresses: Any, num_elements: int, factors: Any, divisor: Any, first: int, out: Any) -> Any:
        valid, decoded, last = True, np.empty(chunk, _f32), first + len(out)
        for low in range(first // block * block, last, chunk):
            begin, end = max(low, first), min(low + chunk, last)
            own, found = out[begin - first : end - first], decoded[begin - low : end - low]
            stop = min((end + block - 1) // block * block, num_elements)
            for m in range(len(addresses)):
                valid &= read(addresses[m], num_elements, low, stop, decoded)
                factor, narrow = factors[m], _f32(factors[m])
                if factor != 0 and not tiny <= abs(factor) <= huge:
                    for i in range(len(own)):
                        share = _f32(_f64(found[i]) * factor)
                        own[i] = own[i] + share if m else share
                elif m:
                    for i in range(len(own)):
                        own[i] += found[i] * narrow
                else:
                    for i in range(len(own)):
                        own[i] = found[i] * narrow
            if divisor != 1:
                for i in range(len(own)):
                    own[i] /= divisor
        return valid

    return add_up


def decoded_squares(
    codec: Codec, payloads: Sequence[Tensor], num_elements: int, first: int, last: int
) -> list[list[float]] | None:
    """Σ x² of each BLOCK_ELEMENTS of decoded payloads, from element `first` to `last`; the last block is padded
    with zeros. None: a block that was read is invalid."""
    sums = np.empty((len(payloads), -(-(last - first) // BLOCK_ELEMENTS)))
    is_valid = _squarer(codec)(_addresses(payloads), num_elements, first, last, sums)
    return [*sums.tolist()] if is_valid else None


@cache
def _squarer(codec: Codec) -> Callable[..., bool]:
    block, read = _reader(codec)
    half = BLOCK_ELEMENTS // 2

    @loop("boolean(int64[::1], int64, int64, int64, float64[:, ::1])", codec.name)
    def square_blocks(addresses: Any, num_elements: int, first: int, last: int, sums: Any) -> Any:
        valid, products = True, np.empty(half)
        decoded = np.empty((BLOCK_ELEMENTS // block + 2) * block, _f32)
        for m in range(len(addresses)):
            for b in range(sums.shape[1]):
                begin, end = first + b * BLOCK_ELEMENTS, min(first + (b + 1) * BLOCK_ELEMENTS, last)
                aligned = begin // block * block
                stop = min((end + block - 1) // block * block, num_elements)
                valid &= read(addresses[m], num_elements, aligned, stop, decoded)
                x = decoded[begin - aligned : begin - aligned + BLOCK_ELEMENTS]
                for i in range(end - begin, BLOCK_ELEMENTS):
                    x[i] = 0
                for i in range(half):
                    products[i] = _f64(x[i]) * _f64(x[i]) + _f64(x[half + i]) * _f64(x[half + i])
                sums[m, b] = folded(products)
        return valid

    return square_blocks
