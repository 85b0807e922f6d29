"""Floats without scales, little endian: fp32 (lossless), bf16 and fp16 (rounded to nearest, ties to even)."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from diloco.core import arithmetic
from diloco.core.codecs.codec import Codec, Scratch, magnitude_bits, refuse_nonfinite
from diloco.errors import CorruptPayloadError, NonFiniteError

_INFINITY = 0x7F800000


class Cast(Codec):
    """Elements cast to one dtype, in order."""

    dtype: ClassVar[torch.dtype]

    narrowed: ClassVar[Any] = None
    """From the bits of an fp32 number (`numpy.int32`) those of the cast, for compiled loops. None: torch does it."""
    widened: ClassVar[Any] = None
    """From the bits of the cast, as `numpy.int32`, those of the fp32 number."""
    too_large: ClassVar[int] = _INFINITY
    """The bits of the smallest fp32 magnitude whose cast is not finite."""

    def _encode(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        if (loops := arithmetic.reading(self, out)) is None or loops.encode_cast(self, x, out) >= self.too_large:
            super()._encode(x, out, scratch)  # raises in the second case

    @abstractmethod
    def _largest_bits(self, cast: Tensor, scratch: Scratch) -> int:
        """The largest bits, without signs, of the cast values."""

    def decode_rows(self, payload: Tensor, out: Tensor, scratch: Scratch) -> None:
        out.copy_(self._checked(payload, out.shape[1], scratch))

    def check_rows(self, payload: Tensor, num_elements: int, scratch: Scratch) -> None:
        self._checked(payload, num_elements, scratch)

    def _checked(self, payload: Tensor, num_elements: int, scratch: Scratch) -> Tensor:
        starts = payload.data_ptr(), payload.storage_offset(), payload.stride(0)
        if not any(start % self.dtype.itemsize for start in starts):
            cast = payload.view(self.dtype)
        else:  # a payload may start at any address, a cast value may not
            cast = scratch.take("cast", (payload.shape[0], num_elements), self.dtype)
            cast.view(torch.uint8).copy_(payload)
        if self._largest_bits(cast, scratch) >= _infinity_bits(self.dtype):
            raise CorruptPayloadError(
                f"the {self.name} payload holds inf or NaN; the sender must send finite values only"
            )
        return cast


@dataclass(frozen=True)
class FP32(Cast):
    """IEEE binary32, bit for bit."""

    family: ClassVar[str] = "fp32"
    dtype: ClassVar[torch.dtype] = torch.float32

    @staticmethod
    def narrowed(bits: Any) -> Any:
        return bits

    widened = narrowed

    @property
    def lossless(self) -> bool:
        return True

    def _largest_bits(self, cast: Tensor, scratch: Scratch) -> int:
        return int(magnitude_bits(cast, scratch).amax())

    def encode_rows(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        refuse_nonfinite(self._largest_bits(x, scratch))
        out.copy_(x.view(torch.uint8))


class _Half(Cast):
    """A 16-bit format: values that would round to inf are refused."""

    wider: ClassVar[str]

    def _largest_bits(self, cast: Tensor, scratch: Scratch) -> int:
        bits = scratch.take("half magnitude", tuple(cast.shape), torch.int16)
        return int(torch.bitwise_and(cast.view(torch.int16), 0x7FFF, out=bits).amax())

    def encode_rows(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        cast = scratch.take("cast", tuple(x.shape), self.dtype)
        cast.copy_(x)
        if self._largest_bits(cast, scratch) >= _infinity_bits(self.dtype):
            refuse_nonfinite(int(magnitude_bits(x, scratch).amax()))
            raise NonFiniteError(
                f"a magnitude of {float(x.abs().amax()):.8g} overflows {self.name}, "
                f"which ends at {torch.finfo(self.dtype).max:.8g}; use {self.wider}"
            )
        out.copy_(cast.view(torch.uint8))


@dataclass(frozen=True)
class BF16(_Half):
    """bfloat16: the range of fp32, 8 bits of precision; largest value 0x7F7F ≈ 3.39e38."""

    family: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    wider: ClassVar[str] = "fp32"
    too_large: ClassVar[int] = 0x7F7F8000  # half a step above the largest value

    @staticmethod
    def narrowed(bits: Any) -> Any:
        return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16

    @staticmethod
    def widened(bits: Any) -> Any:
        return bits << 16


@dataclass(frozen=True)
class FP16(_Half):
    """IEEE binary16: 11 bits of precision, largest value 65504; magnitudes of at most 2^-25 become zero."""

    family: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16
    wider: ClassVar[str] = "bf16 or fp32"


def _infinity_bits(dtype: torch.dtype) -> int:
    return {torch.float32: _INFINITY, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[dtype]
