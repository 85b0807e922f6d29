"""Large blocks are the system's and go back to it; small ones are the allocator's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from diloco.core import memory

LARGE = 8 << 20


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, LARGE])
def test_room_is_zero_and_can_be_written(num_bytes: int) -> None:
    room = memory.room(num_bytes)
    assert len(room) == num_bytes
    assert not any(room[: min(num_bytes, 4096)])
    room[:] = bytes([7]) * num_bytes
    assert bytes(room) == bytes([7]) * num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("num_bytes", [0, 1000, LARGE])
def test_a_tensor_has_the_elements_asked_for(dtype: torch.dtype, num_bytes: int) -> None:
    num_elements = num_bytes // dtype.itemsize
    tensor = memory.empty(num_elements, dtype)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((num_elements,), dtype, "cpu")
    alike = memory.empty_like(tensor.fill_(3))
    assert (alike.shape, alike.dtype) == (tensor.shape, dtype)
    assert torch.equal(alike.copy_(tensor), torch.full((num_elements,), 3, dtype=dtype))


@pytest.mark.skipif(sys.platform != "linux", reason="reads this process's mappings from /proc")
def test_a_large_block_goes_back_with_the_last_tensor_in_it() -> None:
    tensor = memory.empty(LARGE // 4)
    view, address = tensor[5:], tensor.data_ptr()
    del tensor
    assert _is_mapped(address)
    del view
    assert not _is_mapped(address)


def _is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)
