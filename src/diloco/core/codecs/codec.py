"""The base of all wire codecs: segments, exact sizes, validation. And error feedback, for any codec."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from diloco.core import arithmetic
from diloco.core.codecs.formats import SEGMENT_ELEMENTS, WireFormat, wire_format
from diloco.core.memory import new_like, new_vector
from diloco.errors import ConfigError, CorruptPayloadError, NonFiniteError

# Equal segments are handled several at a time: enough to spread what calling torch costs, few enough to stay in cache.
# Other devices take many, since there the launches cost. Bits do not depend on the grouping.
_CPU_GROUP_SEGMENTS = 16
_DEVICE_GROUP_SEGMENTS = 256

_NONFINITE_BITS = 0x7F800000
"""As integers, the bits of every inf or NaN without its sign are at least this, those of every finite number below."""


class Scratch:
    """Buffers reused from one group of segments to the next within one call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._constants: dict[tuple[int, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The buffer of this name and shape; its content is undefined."""
        buffer = self._buffers.get((name, shape))
        if buffer is None:
            buffer = new_vector(math.prod(shape), dtype, self._device).view(shape)
            self._buffers[name, shape] = buffer
        return buffer

    def constant(self, value: int, dtype: torch.dtype) -> Tensor:
        """A number as a 0-dimensional tensor, with which an operation starts faster than with a Python number."""
        constant = self._constants.get((value, dtype))
        if constant is None:
            constant = self._constants[value, dtype] = torch.tensor(value, dtype=dtype)
        return constant


class Codec(ABC):
    """A wire format for fp32 vectors; concrete codecs are frozen dataclasses, so equal parameters mean equal codecs.

    `core.codecs.formats` defines its name and sizes. A concrete codec encodes, decodes and checks segments of equal
    length, one per row (`encode_rows`, `decode_rows`, `check_rows`). Encoding is deterministic, and decoding gives the
    same bits on every device.

    Raises ConfigError on parameters that the format does not allow.
    """

    cpu_group_segments: ClassVar[int] = _CPU_GROUP_SEGMENTS
    device_group_segments: ClassVar[int] = _DEVICE_GROUP_SEGMENTS

    def __post_init__(self) -> None:
        wire_format(self.name)

    family: ClassVar[str]
    """Of a format without parameters, its name."""

    @property
    def name(self) -> str:
        """The name that `codec_from_name` turns back into this codec."""
        return self.family

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back every vector bit for bit."""
        return False

    @cached_property
    def format(self) -> WireFormat:
        """The wire format of this name, with its sizes."""
        return wire_format(self.name)

    def encoded_bytes(self, num_elements: int) -> int:
        """Exact payload bytes of a vector, or a segment of one, of `num_elements` elements; 0 for none."""
        return self.format.encoded_bytes(num_elements)

    @abstractmethod
    def encode_rows(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Encode segments: x fp32 [rows, m] into out uint8 [rows, encoded_bytes(m)]; NonFiniteError on inf or NaN."""

    @abstractmethod
    def decode_rows(self, payload: Tensor, out: Tensor, scratch: Scratch) -> None:
        """Decode segments: payload uint8 [rows, encoded_bytes(m)] into out fp32 [rows, m]; raises as `check_rows`."""

    @abstractmethod
    def check_rows(self, payload: Tensor, num_elements: int, scratch: Scratch) -> None:
        """CorruptPayloadError unless every row (uint8 [rows, encoded_bytes(m)]) decodes to finite numbers only."""

    def segment_span(self, num_elements: int, start_segment: int, stop_segment: int) -> slice:
        """The bytes of segments start ≤ i < stop in a payload, which are the payload of these elements alone."""
        num_segments = math.ceil(num_elements / SEGMENT_ELEMENTS)
        if not 0 <= start_segment <= stop_segment <= num_segments:
            raise ConfigError(
                f"segments {start_segment} to {stop_segment} do not exist in a vector of {num_segments}; "
                f"stay within 0 to {num_segments}"
            )
        start, stop = (
            self.encoded_bytes(min(i * SEGMENT_ELEMENTS, num_elements)) for i in (start_segment, stop_segment)
        )
        return slice(start, stop)

    def encode(self, x: Tensor, out: Tensor | None = None, scratch: Scratch | None = None) -> Tensor:
        """The payload (uint8 [encoded_bytes(n)]) of x (fp32 [n], contiguous), written into `out` if given.

        `scratch`: of x's device, for callers that encode many vectors of one length; None: the call has its own.

        Raises NonFiniteError on inf or NaN and on values the format cannot hold, ConfigError on a wrong tensor.
        """
        _require(x, torch.float32, None, "input of encode")
        arithmetic.prepare(x.numel(), x.device)
        if out is None:
            out = new_vector(self.encoded_bytes(x.numel()), torch.uint8, x.device)
        _require(out, torch.uint8, self.encoded_bytes(x.numel()), "output of encode")
        self._encode(x.detach(), out, scratch or Scratch(x.device))
        return out

    def decode(
        self, payload: Tensor, num_elements: int, out: Tensor | None = None, scratch: Scratch | None = None
    ) -> Tensor:
        """The vector (fp32 [num_elements]) that `payload` (uint8, contiguous) encodes, written into `out` if given.

        `scratch`: of the payload's device, for callers that decode many payloads of one length; None: the call has its
            own.

        Raises CorruptPayloadError on a wrong size or content that is not finite (`out` may be partly written then),
        ConfigError on a wrong tensor.
        """
        self._require_size(payload, num_elements)
        arithmetic.prepare(num_elements, payload.device)
        if out is None:
            out = new_vector(num_elements, device=payload.device)
        _require(out, torch.float32, num_elements, "output of decode")
        self._decode(payload, out, scratch or Scratch(payload.device))
        return out

    def check(self, payload: Tensor, num_elements: int) -> None:
        """CorruptPayloadError unless `payload` has the size of `num_elements` elements and decodes to finite ones."""
        self._require_size(payload, num_elements)
        scratch = Scratch(payload.device)
        for elements, payload_bytes, rows in self._groups(num_elements, payload.device):
            self.check_rows(payload[payload_bytes].view(rows, -1), (elements.stop - elements.start) // rows, scratch)

    def _encode(self, x: Tensor, out: Tensor, scratch: Scratch) -> None:
        """`encode`, once its arguments are checked."""
        for elements, payload_bytes, rows in self._groups(x.numel(), x.device):
            self.encode_rows(x[elements].view(rows, -1), out[payload_bytes].view(rows, -1), scratch)

    def _decode(self, payload: Tensor, out: Tensor, scratch: Scratch) -> None:
        """`decode`, once its arguments are checked."""
        if (loops := arithmetic.reading(self, payload)) is not None and loops.decode(self, payload, out):
            return  # otherwise what follows decodes or raises
        for elements, payload_bytes, rows in self._groups(out.numel(), out.device):
            self.decode_rows(payload[payload_bytes].view(rows, -1), out[elements].view(rows, -1), scratch)

    def _require_size(self, payload: Tensor, num_elements: int) -> None:
        _require(payload, torch.uint8, None, "payload")
        expected = self.encoded_bytes(num_elements)
        if payload.numel() != expected:
            raise CorruptPayloadError(
                f"a {self.name} payload of {num_elements} elements has {expected} bytes, not {payload.numel()}; "
                "send it again"
            )

    def _groups(self, num_elements: int, device: torch.device) -> Iterator[tuple[slice, slice, int]]:
        """(elements, payload bytes, rows) of each group of equally long segments."""
        most = SEGMENT_ELEMENTS * (self.cpu_group_segments if device.type == "cpu" else self.device_group_segments)
        for part in whole_and_rest(num_elements, SEGMENT_ELEMENTS):
            for start in range(part.start, part.stop, most):
                stop = min(start + most, part.stop)
                payload_bytes = slice(self.encoded_bytes(start), self.encoded_bytes(stop))
                yield slice(start, stop), payload_bytes, math.ceil((stop - start) / SEGMENT_ELEMENTS)


def compress(
    codec: Codec, x: Tensor, residual: Tensor | None, decay: float = 1.0, *,
    out: Tensor | None = None, left: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Error feedback: total = x + decay · residual; returns (payload of total, new residual = total − decode(payload)),
    fp32 [n].

    The product is rounded, then the sum. A residual of None is zeros. The payload is written into `out` and the new
    residual into `left` if they are given; `left` may be `x`. Raises as `Codec.encode`, ConfigError on a decay that is
    not from 0 to 1. Karimireddy et al. 2019, arXiv 1901.09847, algorithm 2; a decay below 1: SparseLoCo, arXiv
    2508.15706.
    """
    _require(x, torch.float32, None, "input of compress")
    if not 0 <= decay <= 1:
        raise ConfigError(
            f"the decay of error feedback must be from 0 to 1, not {decay}; 1 keeps all of it, and SparseLoCo uses 0.95"
        )
    left = new_like(x) if left is None else left
    _require(left, torch.float32, x.numel(), "new residual of compress")
    total = x.detach()
    if residual is not None:
        _require(residual, torch.float32, x.numel(), "residual of compress")
        total = torch.add(total, residual if decay == 1 else residual * decay, out=left)
    payload = codec.encode(total, out)
    if codec.lossless:
        return payload, left.zero_()
    return payload, torch.sub(total, codec.decode(payload, total.numel()), out=left)


def whole_and_rest(num_elements: int, size: int) -> list[slice]:
    """The elements of all whole parts of this size, and those of a shorter last one."""
    end = num_elements - num_elements % size
    return [part for part in (slice(0, end), slice(end, num_elements)) if part.start < part.stop]


def magnitude_bits(x: Tensor, scratch: Scratch) -> Tensor:
    """The bits of |x| (fp32) as int32, which order as the magnitudes do, with inf and then NaN on top."""
    bits = scratch.take("magnitude", tuple(x.shape), torch.int32)
    return torch.bitwise_and(x.view(torch.int32), scratch.constant(0x7FFFFFFF, torch.int32), out=bits)


def refuse_nonfinite(largest_bits: int) -> None:
    """Raise NonFiniteError if the largest `magnitude_bits` of an input are those of inf or NaN."""
    if largest_bits >= _NONFINITE_BITS:
        value = "inf" if largest_bits == _NONFINITE_BITS else "NaN"
        raise NonFiniteError(
            f"a vector that holds {value} cannot be encoded; find out where training diverged, "
            "and send finite values only"
        )


def _require(tensor: Tensor, dtype: torch.dtype, num_elements: int | None, role: str) -> None:
    if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        raise ConfigError(
            f"the {role} must be a contiguous 1-D tensor of {dtype}, "
            f"not a {layout} {tensor.dim()}-D tensor of {tensor.dtype}"
        )
    if num_elements is not None and tensor.numel() != num_elements:
        raise ConfigError(f"the {role} must have {num_elements} elements, not {tensor.numel()}")
