"""Elementwise work on long tensors, block by block.

A temporary of a block stays in the processor's cache, and its memory serves the next block. A temporary as long as a
fragment goes to memory and back, and the system hands out its pages one by one, which costs several times the
arithmetic.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 16
"""Enough to spread the cost of a call. With blocks four times as long the C library may free a temporary's pages."""

_EXPONENT = 0x7F800000
"""The bits of an fp32 number that are 0 in zeros and denormals only. Devices disagree on denormals."""


def blocks(x: Tensor) -> Iterator[slice]:
    """Slices of the first dimension that cover x, each of about BLOCK_ELEMENTS elements; an empty x has one.

    On another device than a processor: all of x, since calls cost more there than temporaries do.
    """
    rows = x.shape[0]
    step = max(1, BLOCK_ELEMENTS * rows // max(1, x.numel())) if x.device.type == "cpu" else max(1, rows)
    for first in range(0, max(1, rows), step):
        yield slice(first, first + step)


def flush_denormals(x: Tensor) -> Tensor:
    """Magnitudes below 2⁻¹²⁶ become +0, in place, so that devices with and without denormals hold the same bits."""
    for part in blocks(x):
        bits = x[part].view(torch.int32)
        bits.mul_(bits.bitwise_and(_EXPONENT).ne_(0))
    return x
