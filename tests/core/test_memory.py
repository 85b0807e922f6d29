"""Large blocks are used again once nothing uses them; beyond a few they go back to the system."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from diloco.core.buffers import MOST_KEPT, new_buffer
from diloco.core.memory import new_like, new_vector

LARGE = 8 << 20


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, LARGE])
def test_room_can_be_written(num_bytes: int) -> None:
    buffer = new_buffer(num_bytes)
    assert (len(buffer), buffer.format, buffer.readonly) == (num_bytes, "B", False)
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


def test_a_block_is_used_again_once_no_tensor_is_in_it() -> None:
    tensor = new_vector(LARGE // 4)
    view, address = tensor[5:], tensor.data_ptr()
    del tensor
    assert new_vector(LARGE // 4).data_ptr() != address
    del view
    smaller = new_vector(LARGE // 4 - 100)
    assert smaller.data_ptr() == address


@pytest.mark.skipif(sys.platform != "linux", reason="reads this process's mappings from /proc")
def test_few_blocks_are_kept_and_a_request_that_none_fits_returns_as_many_bytes() -> None:
    tensors = [new_vector(LARGE // 4) for _ in range(3 * MOST_KEPT)]
    addresses = [each.data_ptr() for each in tensors]
    tensors.clear()
    assert 0 < sum(map(_is_mapped, addresses)) <= MOST_KEPT
    longer = new_vector(MOST_KEPT * LARGE // 4 - 1)
    within = range(longer.data_ptr(), longer.data_ptr() + longer.nbytes)
    assert not any(_is_mapped(each) for each in addresses if each not in within)


def test_threads_that_take_and_release_never_share_a_block() -> None:
    def work(mark: int) -> bool:
        held = []
        for turn in range(40):
            held.append(new_vector(LARGE // 4 + turn % 3, torch.int32).fill_(mark))
            if len(held) > 2 + mark % 3:
                held.pop(turn % 2)
        return all(bool((each == mark).all()) for each in held)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def _is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)
