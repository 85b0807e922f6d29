"""Large blocks are the system's and go back to it; small ones are the allocator's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from diloco.core.buffers import new_buffer
from diloco.core.memory import new_like, new_vector

LARGE = 8 << 20


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, LARGE])
def test_room_is_zero_and_can_be_written(num_bytes: int) -> None:
    buffer = new_buffer(num_bytes)
    assert len(buffer) == num_bytes
    assert not any(buffer[: min(num_bytes, 4096)])
    buffer[:] = bytes([7]) * num_bytes
    assert bytes(buffer) == bytes([7]) * num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("num_bytes", [0, 1000, LARGE])
def test_a_tensor_has_the_elements_asked_for(dtype: torch.dtype, num_bytes: int) -> None:
    num_elements = num_bytes // dtype.itemsize
    tensor = new_vector(num_elements, dtype)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((num_elements,), dtype, "cpu")
    assert torch.equal(tensor.fill_(3), torch.full((num_elements,), 3, dtype=dtype))


@pytest.mark.parametrize("shape", [(), (0,), (7,), (LARGE // 8, 2)])
def test_a_tensor_like_another_has_its_shape(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=torch.int64)
    alike = new_like(tensor)
    assert (alike.shape, alike.dtype, alike.device) == (tensor.shape, tensor.dtype, tensor.device)


@pytest.mark.skipif(sys.platform != "linux", reason="reads this process's mappings from /proc")
def test_a_large_block_goes_back_with_the_last_tensor_in_it() -> None:
    tensor = new_vector(LARGE // 4)
    view, address = tensor[5:], tensor.data_ptr()
    del tensor
    assert _is_mapped(address)
    del view
    assert not _is_mapped(address)


def _is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)
