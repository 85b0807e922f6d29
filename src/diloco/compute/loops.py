"""The compiled loops, as tensors call them: flat, contiguous, on the host.

What Numba needs to vectorise a loop: other views of an array as arguments of their own, since it does not know that one
made inside is contiguous; division as the hardware does it; no output in the memory of an input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from diloco.compute.compiling import inlined, loop, once, pointer
from diloco.core.codecs import SEGMENT_ELEMENTS, Codec
from diloco.core.codecs.blocks import SMALLEST_SCALE_BITS, ScaledBlocks
from diloco.core.codecs.floats import Cast
from diloco.core.merges.measures import BLOCK_ELEMENTS
from diloco.core.outer import Outer

_f32, _f64, _i32, _u8 = np.float32, np.float64, np.int32, np.uint8

# --- encoding ---------------------------------------------------------------------------------------------------------


def encode(codec: ScaledBlocks, x: Tensor, out: Tensor) -> int:
    """As `Codec.encode`. Returns the largest bits of |x|; `out` is undefined where they are those of inf or NaN."""
    return int(_encoder(codec)(x.numpy(), x.view(torch.int32).numpy(), out.numpy()))


@once
def _encoder(codec: ScaledBlocks) -> Callable[..., int]:
    assert codec.code_of is not None
    code_of, bits, block, smallest = inlined(codec.code_of), codec.code_bits, codec.block, SMALLEST_SCALE_BITS
    reciprocal, largest_scale, mask = _f32(1 / codec.levels), _f32(codec.largest_scale), 0x0F if bits == 4 else 0xFF

    @loop("int32(float32[::1], int32[::1], uint8[::1])")
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


@once
def _cast_encoder(codec: Cast) -> Callable[..., int]:
    assert codec.narrowed is not None
    narrowed = inlined(codec.narrowed)

    @loop(f"int32(int32[::1], int{8 * codec.dtype.itemsize}[::1])")
    def narrow(x_bits: Any, out: Any) -> Any:
        largest = _i32(0)
        for i in range(len(x_bits)):
            out[i] = narrowed(x_bits[i])
            largest = max(largest, x_bits[i] & _i32(0x7FFFFFFF))
        return largest

    return narrow


# --- decoding ---------------------------------------------------------------------------------------------------------


def can_read(codec: Codec, payload: Tensor) -> bool:
    """Whether loops can decode this payload: of this format, and at this address."""
    if not payload.is_contiguous():
        return False
    if isinstance(codec, Cast):
        return codec.widened is not None and payload.data_ptr() % codec.dtype.itemsize == 0
    return isinstance(codec, ScaledBlocks) and codec.value_of is not None


def _block_reader(codec: Codec) -> tuple[int, Callable[..., bool]]:
    """The length of blocks, and a function that decodes one: from the address of a payload, the number of its elements,
    and the first of the block, into an array. Returns whether it is valid.
    """
    segment, smallest = SEGMENT_ELEMENTS, SMALLEST_SCALE_BITS
    if isinstance(codec, Cast):
        assert codec.widened is not None
        size, widened, stored = codec.dtype.itemsize, inlined(codec.widened), np.dtype(f"i{codec.dtype.itemsize}").type

        @inlined
        def read_cast(address: int, _: int, start: int, into: Any) -> Any:
            cast, largest = carray(pointer(address + start * size), len(into), stored), _i32(0)
            for i in range(len(into)):
                bits = _i32(widened(_i32(cast[i])))
                into[i] = bits.view(_f32)
                largest = max(largest, bits & _i32(0x7FFFFFFF))
            return largest < 0x7F800000

        return 1024, read_cast

    assert isinstance(codec, ScaledBlocks)
    assert codec.value_of is not None
    value_of, bits, block, most = inlined(codec.value_of), codec.code_bits, codec.block, codec.largest_scale_bits
    segment_bytes, mask = segment // block * 2 + segment * bits // 8, 0x0F if bits == 4 else 0xFF

    @inlined
    def read_block(address: int, num_elements: int, start: int, into: Any) -> Any:
        width, number, b = len(into), start // segment, start % segment // block
        at = address + number * segment_bytes
        stored = carray(pointer(at + 2 * b), 2, _u8)
        bits_of_scale = _i32(_i32(stored[0]) | (_i32(stored[1]) << 8))
        scale = _i32(bits_of_scale << 16).view(_f32)
        num_blocks = (min(num_elements - number * segment, segment) + block - 1) // block
        half = (width + 1) // 2 if bits == 4 else width
        codes, high = carray(pointer(at + 2 * num_blocks + b * block * bits // 8), half, _u8), into[half:]
        for i in range(half):
            into[i] = value_of(_i32(codes[i]) & mask) * scale
        for i in range(width - half):
            high[i] = value_of(_i32(codes[i]) >> 4) * scale
        return bits_of_scale == 0 or smallest <= bits_of_scale <= most

    return block, read_block


def decode(codec: Codec, payload: Tensor, out: Tensor) -> bool:
    """As `Codec.decode`, of a payload that `can_read` allows. Returns whether it is valid."""
    return bool(_decoder(codec)(payload.data_ptr(), out.numpy()))


@once
def _decoder(codec: Codec) -> Callable[..., bool]:
    block, read = _block_reader(codec)

    @loop("boolean(int64, float32[::1])")
    def decode_blocks(address: int, out: Any) -> Any:
        valid = True
        for start in range(0, len(out), block):
            valid &= read(address, len(out), start, out[start : start + block])
        return valid

    return decode_blocks


def weighted_sum(
    codec: Codec, payloads: Sequence[Tensor], factors: Sequence[float], divisor: float, part: slice, out: Tensor
) -> bool:
    """Σ factor·decode(payload) / divisor, in this order, as `merges.linear.add_up`.

    Arguments:
        payloads: of the vector that `out` is, at least one; `can_read` allows them.
        part: the elements of `out` (fp32) that are written.

    Returns whether the blocks that were read are valid; the part is undefined otherwise.
    """
    addresses = np.array([each.data_ptr() for each in payloads])
    found = _summing(codec)(addresses, np.array(factors), _f32(divisor), out.numpy(), part.start, part.stop)
    return bool(found)


@once
def _summing(codec: Codec) -> Callable[..., bool]:
    block, read = _block_reader(codec)
    # Elements that are summed over all learners before the next ones: their sum stays in a core's first cache.
    chunk, tiny, huge = max(block, BLOCK_ELEMENTS // 2), float(np.finfo(_f32).tiny), float(np.finfo(_f32).max)

    @loop("boolean(int64[::1], float64[::1], float32, float32[::1], int64, int64)")
    def add_up(addresses: Any, factors: Any, divisor: Any, out: Any, first: int, last: int) -> Any:
        valid, decoded = True, np.empty(chunk, _f32)
        for low in range(first // block * block, last, chunk):
            begin, end = max(low, first), min(low + chunk, last)
            own, found = out[begin:end], decoded[begin - low : end - low]
            for m in range(len(addresses)):
                for start in range(low, end, block):
                    stop = min(start + block, len(out), (start // SEGMENT_ELEMENTS + 1) * SEGMENT_ELEMENTS)
                    valid &= read(addresses[m], len(out), start, decoded[start - low : stop - low])
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


# --- sums of products -------------------------------------------------------------------------------------------------


@inlined
def _folded(sums: Any) -> Any:
    """The sum of an array of a power of two: its upper half is added to its lower one until one element is left."""
    width = len(sums)
    while width > 1:
        width //= 2
        for i in range(width):
            sums[i] += sums[width + i]
    return sums[0]


def block_sums(x: Tensor, y: Tensor) -> list[float]:
    """Σ x·y of each block of BLOCK_ELEMENTS, whole ones."""
    sums = np.empty(x.numel() // BLOCK_ELEMENTS)
    _summer()(x.numpy(), y.numpy(), sums)
    found: list[float] = sums.tolist()
    return found


@once
def _summer() -> Callable[..., None]:
    half = BLOCK_ELEMENTS // 2

    @loop("void(float32[::1], float32[::1], float64[::1])")
    def sum_blocks(x: Any, y: Any, sums: Any) -> None:
        products = np.empty(half)
        for b in range(len(sums)):
            x_, y_ = x[2 * b * half : 2 * (b + 1) * half], y[2 * b * half : 2 * (b + 1) * half]
            for i in range(half):
                products[i] = _f64(x_[i]) * _f64(y_[i]) + _f64(x_[half + i]) * _f64(y_[half + i])
            sums[b] = _folded(products)

    return sum_blocks


def decoded_squares(codec: Codec, payload: Tensor, num_elements: int, first: int, last: int) -> list[float] | None:
    """Σ x² of each BLOCK_ELEMENTS of a decoded payload, from element `first` to `last`; the last block is padded
    with zeros. None: a block that was read is invalid."""
    sums = np.empty(-(-(last - first) // BLOCK_ELEMENTS))
    if not _squarer(codec)(payload.data_ptr(), num_elements, first, last, sums):
        return None
    found: list[float] = sums.tolist()
    return found


@once
def _squarer(codec: Codec) -> Callable[..., bool]:
    block, read = _block_reader(codec)
    half = BLOCK_ELEMENTS // 2

    @loop("boolean(int64, int64, int64, int64, float64[::1])")
    def square_blocks(address: int, num_elements: int, first: int, last: int, sums: Any) -> Any:
        valid, products = True, np.empty(half)
        decoded = np.empty((BLOCK_ELEMENTS // block + 2) * block, _f32)
        for b in range(len(sums)):
            begin, end = first + b * BLOCK_ELEMENTS, min(first + (b + 1) * BLOCK_ELEMENTS, last)
            aligned, stop = begin // block * block, begin
            for start in range(aligned, end, block):
                stop = min(start + block, num_elements, (start // SEGMENT_ELEMENTS + 1) * SEGMENT_ELEMENTS)
                valid &= read(address, num_elements, start, decoded[start - aligned : stop - aligned])
            x = decoded[begin - aligned : begin - aligned + BLOCK_ELEMENTS]
            for i in range(end - begin, BLOCK_ELEMENTS):
                x[i] = 0
            for i in range(half):
                products[i] = _f64(x[i]) * _f64(x[i]) + _f64(x[half + i]) * _f64(x[half + i])
            sums[b] = _folded(products)
        return valid

    return square_blocks


# --- outer steps ------------------------------------------------------------------------------------------------------


def outer_step(outer: Outer, params: Tensor, delta: Tensor, vector: Tensor, out: Tensor, new_vector: Tensor) -> None:
    """`Outer.step` of an optimizer with a formula. `out` may be `delta`, and `new_vector` may be `vector`."""
    into = [_apart(out, delta), _apart(new_vector, vector)]
    _stepper(outer)(*(each.numpy() for each in (params, delta, vector, *into)))
    for each, made in zip((out, new_vector), into, strict=True):
        if made is not each:
            each.copy_(made)


def _apart(out: Tensor, source: Tensor) -> Tensor:
    return torch.empty_like(out) if out.data_ptr() == source.data_ptr() else out


@once
def _stepper(outer: Outer) -> Callable[..., None]:
    step, a, b = _formula_of(outer)

    @loop("void(float32[::1], float32[::1], float32[::1], float32[::1], float32[::1])")
    def outer_steps(params: Any, delta: Any, vector: Any, out: Any, new_vector: Any) -> None:
        for i in range(len(params)):
            param, kept = step(a, b, params[i], delta[i], vector[i])
            out[i] = param
            new_vector[i] = kept

    return outer_steps


def _formula_of(outer: Outer) -> tuple[Callable[..., Any], Any, Any]:
    assert outer.formula is not None
    a, b = map(_f32, outer.constants)
    return inlined(outer.formula), a, b


def change(outer: Outer, params: Tensor, delta: Tensor, vector: Tensor, residual: Tensor | None, out: Tensor) -> bool:
    """Write Θ* − Θ + e of an outer step to `out`; no `residual` e: Θ* − Θ. Returns whether the optimizer's new state is
    finite."""
    e = params[:0] if residual is None else residual
    return bool(_changer(outer)(*(each.numpy() for each in (params, delta, vector, e, out))))


@once
def _changer(outer: Outer) -> Callable[..., bool]:
    step, a, b = _formula_of(outer)

    @loop("boolean(float32[::1], float32[::1], float32[::1], float32[::1], float32[::1])")
    def changes(params: Any, delta: Any, vector: Any, residual: Any, out: Any) -> Any:
        largest = _i32(0)
        for i in range(len(params)):
            param, kept = step(a, b, params[i], delta[i], vector[i])
            out[i] = param - params[i]
            largest = max(largest, _f32(kept).view(_i32) & _i32(0x7FFFFFFF))
        for i in range(len(residual)):
            out[i] += residual[i]
        return largest < 0x7F800000

    return changes


def land(
    outer: Outer, params: Tensor, vector: Tensor, residual: Tensor | None, sent: Tensor, new: Tensor,
    new_residual: Tensor,
) -> None:  # fmt: skip
    """From Δ in `new`, the sent change and the memory of a version, make the next one in place: the outer state, the
    residual Θ* − Θ + e − sent in `new_residual`, which may be `residual`, and Θ + sent in `new`, without denormals."""
    e = params[:0] if residual is None else residual
    arrays = (each.numpy() for each in (params, vector, e, sent, new, new_residual))
    _lander(outer)(*arrays, new.view(torch.int32).numpy())


@once
def _lander(outer: Outer) -> Callable[..., None]:
    step, a, b = _formula_of(outer)

    @loop("void(float32[::1], float32[::1], float32[::1], float32[::1], float32[::1], float32[::1], int32[::1])")
    def lands(params: Any, vector: Any, residual: Any, sent: Any, new: Any, new_residual: Any, new_bits: Any) -> None:
        kept, left, moved = np.empty(1024, _f32), np.empty(1024, _f32), np.empty(1024, _i32)
        for first in range(0, len(params), 1024):
            part = slice(first, first + 1024)
            p, d, v, s, r, bits = params[part], new[part], vector[part], sent[part], new_residual[part], new_bits[part]
            for i in range(len(p)):
                param, state = step(a, b, p[i], d[i], v[i])
                kept[i] = state
                left[i] = param - p[i]
            if len(residual):
                e = residual[part]
                for i in range(len(p)):
                    left[i] += e[i]
            for i in range(len(p)):
                found = _f32(s[i] + p[i]).view(_i32)
                moved[i] = found if found & 0x7F800000 else 0
            for i in range(len(p)):
                v[i] = kept[i]
                r[i] = left[i] - s[i]
                bits[i] = moved[i]

    return lands


def flush_denormals(x: Tensor) -> None:
    """As `memory.flush_denormals`."""
    _flusher()(x.view(torch.int32).numpy())


@once
def _flusher() -> Callable[..., None]:
    @loop("void(int32[::1])")
    def flush(bits: Any) -> None:
        flushed = np.empty(1024, _i32)  # in place, LLVM would store by mask, which is several times slower
        for first in range(0, len(bits), 1024):
            own = bits[first : first + 1024]
            for i in range(len(own)):
                flushed[i] = own[i] if own[i] & 0x7F800000 else 0
            for i in range(len(own)):
                own[i] = flushed[i]

    return flush
