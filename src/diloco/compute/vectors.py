"""Compiled loops over fp32 vectors: sums of products, outer steps, adoptions, denormals."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.compute.compiling import inlined, loop
from diloco.core.adopt import Adopt
from diloco.core.merges.measures import BLOCK_ELEMENTS
from diloco.core.outer import Outer

_f32, _f64, _i32 = np.float32, np.float64, np.int32

_CHUNK = 1024
"""Elements whose results wait in a core's first cache. Results in the memory of an input would stop the vectoriser."""

_FIVE = ", ".join(5 * ["float32[::1]"])


@inlined
def folded(sums: Any) -> Any:
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
    return [*sums.tolist()]


@cache
def _summer() -> Callable[..., None]:
    half = BLOCK_ELEMENTS // 2

    @loop("void(float32[::1], float32[::1], float64[::1])")
    def sum_blocks(x: Any, y: Any, sums: Any) -> None:
        products = np.empty(half)
        for b in range(len(sums)):
            x_, y_ = x[2 * b * half : 2 * (b + 1) * half], y[2 * b * half : 2 * (b + 1) * half]
            for i in range(half):
                products[i] = _f64(x_[i]) * _f64(y_[i]) + _f64(x_[half + i]) * _f64(y_[half + i])
            sums[b] = folded(products)

    return sum_blocks


# --- outer steps: of an optimizer with a formula ----------------------------------------------------------------------


def outer_step(outer: Outer, params: Tensor, delta: Tensor, vector: Tensor, out: Tensor, new_vector: Tensor) -> bool:
    """`Outer.step`. `out` may be `delta`, and `new_vector` may be `vector`. Returns whether both results are finite."""
    arrays = (each.numpy() for each in (params, delta, vector, out, new_vector))
    return bool(_stepper(type(outer))(*_constants(outer), *arrays))


def _constants(outer: Outer) -> tuple[Any, Any]:
    a, b = outer.constants
    return _f32(a), _f32(b)


@cache
def _stepper(kind: type[Outer]) -> Callable[..., bool]:
    step = inlined(kind.formula)

    @loop(f"boolean(float32, float32, {_FIVE})", kind.__name__)
    def outer_steps(a: Any, b: Any, params: Any, delta: Any, vector: Any, out: Any, new_vector: Any) -> Any:
        moved, kept, largest = np.empty(_CHUNK, _f32), np.empty(_CHUNK, _f32), _i32(0)
        for first in range(0, len(params), _CHUNK):
            part = slice(first, first + _CHUNK)
            p, d, v, new_p, new_v = params[part], delta[part], vector[part], out[part], new_vector[part]
            for i in range(len(p)):
                param, state = step(a, b, p[i], d[i], v[i])
                moved[i] = param
                kept[i] = state
            for i in range(len(p)):
                largest = max(largest, _f32(moved[i]).view(_i32) & _i32(0x7FFFFFFF))
            for i in range(len(p)):
                largest = max(largest, _f32(kept[i]).view(_i32) & _i32(0x7FFFFFFF))
            for i in range(len(p)):
                new_p[i] = moved[i]
                new_v[i] = kept[i]
        return largest < 0x7F800000

    return outer_steps


def change(outer: Outer, params: Tensor, delta: Tensor, vector: Tensor, residual: Tensor | None, out: Tensor) -> bool:
    """Write Θ* − Θ + e of an outer step to `out`; no `residual` e: Θ* − Θ. Returns whether the optimizer's new state is
    finite."""
    e = params[:0] if residual is None else residual
    return bool(_changer(type(outer))(*_constants(outer), *(each.numpy() for each in (params, delta, vector, e, out))))


@cache
def _changer(kind: type[Outer]) -> Callable[..., bool]:
    step = inlined(kind.formula)

    @loop(f"boolean(float32, float32, {_FIVE})", kind.__name__)
    def changes(a: Any, b: Any, params: Any, delta: Any, vector: Any, residual: Any, out: Any) -> Any:
        largest = _i32(0)
        for i in range(len(params)):
            param, state = step(a, b, params[i], delta[i], vector[i])
            out[i] = param - params[i]
            largest = max(largest, _f32(state).view(_i32) & _i32(0x7FFFFFFF))
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
    _lander(type(outer))(*_constants(outer), *arrays, new.view(torch.int32).numpy())


@cache
def _lander(kind: type[Outer]) -> Callable[..., None]:
    step = inlined(kind.formula)

    @loop(f"void(float32, float32, {_FIVE}, float32[::1], int32[::1])", kind.__name__)
    def lands(
        a: Any, b: Any, params: Any, vector: Any, residual: Any, sent: Any, new: Any, new_residual: Any, new_bits: Any
    ) -> None:
        kept, left, moved = np.empty(_CHUNK, _f32), np.empty(_CHUNK, _f32), np.empty(_CHUNK, _i32)
        for first in range(0, len(params), _CHUNK):
            part = slice(first, first + _CHUNK)
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


# --- adoptions: by a rule with a formula ------------------------------------------------------------------------------


def adopt(rule: Adopt, constants: tuple[float, float], own: Tensor, theta: Tensor, origin: Tensor) -> None:
    """`Adopt.adopt` of `own` and the global values `theta`, into `own`, which may be `origin`."""
    _adopter(type(rule))(*map(_f32, constants), *(each.numpy() for each in (own, theta, origin)))


@cache
def _adopter(kind: type[Adopt]) -> Callable[..., None]:
    formula = inlined(kind.formula)

    @loop("void(float32, float32, float32[::1], float32[::1], float32[::1])", kind.__name__)
    def adopts(a: Any, b: Any, own: Any, theta: Any, origin: Any) -> None:
        adopted = np.empty(_CHUNK, _f32)
        for first in range(0, len(own), _CHUNK):
            part = slice(first, first + _CHUNK)
            new, whole, before = own[part], theta[part], origin[part]
            for i in range(len(new)):
                adopted[i] = formula(a, b, new[i], whole[i], before[i])
            for i in range(len(new)):
                new[i] = adopted[i]

    return adopts


# --- denormals --------------------------------------------------------------------------------------------------------


def flush_denormals(x: Tensor) -> None:
    """As `memory.flush_denormals`."""
    _flush(x.view(torch.int32).numpy())


# Compiled when this module is imported: where Numba cannot compile, nothing here can be used.
@loop("void(int32[::1])")
def _flush(bits: Any) -> None:
    flushed = np.empty(_CHUNK, _i32)  # in place, LLVM would store by mask, which is several times slower
    for first in range(0, len(bits), _CHUNK):
        own = bits[first : first + _CHUNK]
        for i in range(len(own)):
            flushed[i] = own[i] if own[i] & 0x7F800000 else 0
        for i in range(len(own)):
            own[i] = flushed[i]
