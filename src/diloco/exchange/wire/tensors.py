"""Tensors as the bytes of a transfer, and back."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from diloco.errors import ConfigError, CorruptPayloadError, translated
from diloco.escaping import MALFORMED


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, without a copy; the view keeps the tensor alive."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigError(
            f"a {tensor.device.type} tensor with strides {tensor.stride()} cannot be sent; make it contiguous on the "
            "CPU."
        )
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return memoryview(b"")
    memory: Any = (ctypes.c_char * num_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memoryview(memory).cast("B")


def tensor_of(buffer: bytearray | memoryview, dtype: torch.dtype = torch.uint8) -> Tensor:
    """A tensor over a writable buffer, without a copy; it keeps the buffer alive."""
    return torch.frombuffer(buffer, dtype=dtype) if len(buffer) else torch.empty(0, dtype=dtype)


def tensors_of(buffer: bytes | memoryview, what: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file that was received.

    Raises:
        CorruptPayloadError: `what` is not a safetensors file.
    """
    with translated(
        (SafetensorError, *MALFORMED), CorruptPayloadError, f"{what} are not a safetensors file", "send it again"
    ):
        return load(bytes(buffer))
