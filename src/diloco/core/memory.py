"""Long tensors: host memory that is used again (`buffers`), and elementwise work block by block.

The temporary of a block stays in the processor's cache, and its memory is reused for the next block. A temporary as
long as a fragment is written to memory and read back, and the system maps its pages one by one, which costs several
times the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from diloco.core import arithmetic
from diloco.core.buffers import is_small, new_buffer

S = TypeVar("S")
T = TypeVar("T")


class Each(Protocol):
    """Applies a function to items, in any number of threads, and gives the results in the items' order.

    An error is raised in its place in that order; no call is under way any more then.
    """

    def __call__(self, function: Callable[[S], T], items: Iterable[S], /) -> Iterable[T]: ...


def one_by_one(function: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """`Each` in the calling thread."""
    return map(function, items)


def new_vector(num_elements: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """As `torch.empty`, of shape [num_elements]."""
    num_bytes = num_elements * dtype.itemsize
    if is_small(num_bytes) or (device is not None and device.type != "cpu"):
        return torch.empty(num_elements, dtype=dtype, device=device)
    return torch.frombuffer(new_buffer(num_bytes), dtype=dtype)


def new_like(tensor: Tensor) -> Tensor:
    """As `torch.empty_like`."""
    return new_vector(tensor.numel(), tensor.dtype, tensor.device).view(tensor.shape)


BLOCK_ELEMENTS = 1 << 16
"""Enough to spread the cost of a call. With blocks four times as long the C library may unmap a temporary's pages."""

_EXPONENT = 0x7F800000
"""The exponent bits of an fp32 number: all 0 in zeros and denormals only."""


def blocks(x: Tensor) -> Iterator[slice]:
    """Slices of the first dimension that cover x, each of about BLOCK_ELEMENTS elements; an empty x has one.

    On a GPU, one slice for all of x: calls cost more there than temporaries do.
    """
    rows = x.shape[0]
    step = max(1, BLOCK_ELEMENTS * rows // max(1, x.numel())) if x.device.type == "cpu" else max(1, rows)
    for first in range(0, max(1, rows), step):
        yield slice(first, first + step)


def flush_denormals(x: Tensor) -> Tensor:
    """Set magnitudes below 2⁻¹²⁶ to +0, in place, so that devices with and without denormals hold the same bits."""
    if x.device.type == "cpu" and (loops := arithmetic.loops()) is not None:
        loops.flush_denormals(x)
        return x
    for part in blocks(x):
        bits = x[part].view(torch.int32)
        bits.mul_(bits.bitwise_and(_EXPONENT).ne_(0))
    return x


def is_finite(x: Tensor) -> bool:
    """Whether x, which is not empty, has neither inf nor NaN; in one pass without a temporary."""
    low, high = torch.aminmax(x)
    return math.isfinite(low) and math.isfinite(high)
