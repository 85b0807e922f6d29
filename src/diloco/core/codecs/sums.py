"""Sums over a block that every device computes to the same bits, at every magnitude."""

import torch
from torch import Tensor

from diloco.core.codecs.codec import Scratch, magnitude_bits, refuse_nonfinite


def scaled(x: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Rows x (fp32 [rows, n]) times powers of two: (y fp32 [rows, w], exponent bits int32 [rows, 1] of each row's
    largest).

    A row's largest magnitude becomes one from 2 to below 4, so that neither sums nor squares overflow; a row without a
    normal number becomes zeros, and its exponent bits are 0. w is the next power of two, at least 2; what is beyond n
    is 0. Raises NonFiniteError on inf or NaN.
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
    """Values of the scale of `scaled`'s y, in place, as values of x; the last step rounds where the result is
    subnormal."""
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
