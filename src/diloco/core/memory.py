"""Host memory for what is as large as a fragment.

The C library's allocator keeps freed blocks of less than 32 MiB, cuts them up for smaller ones, and so comes to hold
several times what a learner or a syncer uses. Memory that is asked of the system goes back to it with the last tensor
in it. In huge pages it is also there sooner: filling fresh small pages takes as long as receiving.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20


def room(num_bytes: int) -> memoryview:
    """A new writable buffer of zeros."""
    if _is_small(num_bytes):
        return memoryview(bytearray(num_bytes))
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(buffer)


def new_vector(num_elements: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """As `torch.empty`, of shape [num_elements]."""
    num_bytes = num_elements * dtype.itemsize
    if _is_small(num_bytes) or (device is not None and device.type != "cpu"):
        return torch.empty(num_elements, dtype=dtype, device=device)
    return torch.frombuffer(room(num_bytes), dtype=dtype)


def new_like(tensor: Tensor) -> Tensor:
    """As `torch.empty_like`."""
    return new_vector(tensor.numel(), tensor.dtype, tensor.device).view(tensor.shape)


def _is_small(num_bytes: int) -> bool:
    """Or there are no huge pages on this platform."""
    return num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE")
