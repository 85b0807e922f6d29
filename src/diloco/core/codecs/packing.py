"""Codes of one or two bits as bytes."""

import torch
from torch import Tensor

from diloco.core.codecs.codec import Scratch


def pack(codes: Tensor, bits: int, out: Tensor, scratch: Scratch) -> None:
    """Pack codes uint8 [rows, n], each of `bits` = 1 or 2, into out uint8 [rows, m = ⌈n · bits / 8⌉].

    Byte i holds elements i, i + m, i + 2m, …, the first in its lowest bits; elements that do not exist are 0.
    """
    (rows, n), m = codes.shape, out.shape[1]
    if n * bits < 8 * m:
        padded = scratch.take("padded codes", (rows, 8 // bits * m), torch.uint8)
        padded[:, :n] = codes
        padded[:, n:] = 0
        codes = padded
    packed = scratch.take("packed", (rows, m), torch.uint8).copy_(codes[:, :m])
    shifted = scratch.take("shifted", (rows, m), torch.uint8)
    for i, part in enumerate(codes.split(m, 1)[1:], start=1):
        packed.bitwise_or_(torch.mul(part, scratch.constant(1 << i * bits, torch.uint8), out=shifted))
    out.copy_(packed)


def unpack(packed: Tensor, bits: int, scratch: Scratch) -> Tensor:
    """The codes of packed uint8 [rows, m]: uint8 [rows, 8m / bits], with those of the elements that do not exist."""
    rows, m = packed.shape
    codes = scratch.take("codes", (rows, 8 // bits * m), torch.uint8)
    for i, part in enumerate(codes.split(m, 1)):
        torch.bitwise_right_shift(packed, scratch.constant(i * bits, torch.uint8), out=part)
    return codes.bitwise_and_(scratch.constant((1 << bits) - 1, torch.uint8))
