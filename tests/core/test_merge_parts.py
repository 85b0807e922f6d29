"""What merges are built from: sorting vectors, sums that every device takes in one order, and memory that learners do not add to."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diloco.core.codecs import Int4
from diloco.core.layout import Placement, TensorSpec
from diloco.core.merges import MERGES, Encoded, Merge, merged_vector
from diloco.core.merges.decoding import RUN_ELEMENTS
from diloco.core.merges.measures import BLOCK_ELEMENTS, inner_product, norm
from diloco.core.merges.medians import sorted_vectors


@pytest.mark.parametrize("num", range(1, 9))
def test_a_sorting_network_sorts_every_sequence_of_zeros_and_ones(num: int) -> None:
    """Which is enough for it to sort anything (Knuth's 0-1 principle)."""
    columns = torch.tensor(list(itertools.product((0.0, 1.0), repeat=num))).T.contiguous()
    expected = columns.sort(dim=0).values
    assert torch.equal(torch.stack(sorted_vectors(list(columns))), expected)


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_any_number_of_vectors_issorted_vectors(num: int, seed: int) -> None:
    values = torch.randn(num, 9, generator=torch.Generator().manual_seed(seed))
    expected = values.sort(dim=0).values
    assert torch.equal(torch.stack(sorted_vectors(list(values))), expected)


def halves(block: Tensor) -> float:
    """A block's sum as docs say it is taken."""
    values = block.double().tolist()
    while len(values) > 1:
        middle = len(values) // 2
        values = [low + high for low, high in zip(values[:middle], values[middle:], strict=True)]
    return float(values[0])


@pytest.mark.parametrize(
    "num_elements", [0, 1, 4095, BLOCK_ELEMENTS, 3 * BLOCK_ELEMENTS + 1, 64 * BLOCK_ELEMENTS + 4099]
)
def test_lengths_are_sums_in_one_order(num_elements: int) -> None:
    x, y = torch.randn(2, num_elements) * 10.0 ** torch.randint(-6, 6, (num_elements,))
    padded = torch.zeros(2, -(-num_elements // BLOCK_ELEMENTS) * BLOCK_ELEMENTS)
    padded[:, :num_elements] = torch.stack([x, y])
    blocks = padded.double().view(2, -1, BLOCK_ELEMENTS)
    assert inner_product(x, y) == math.fsum(halves(one * other) for one, other in zip(*blocks, strict=True))
    assert norm(x) == math.sqrt(math.fsum(halves(block * block) for block in blocks[0]))


def test_lengths_do_not_depend_on_the_number_of_threads() -> None:
    x, before = torch.randn(300_000), torch.get_num_threads()
    alone = norm(x)
    torch.set_num_threads(4)
    try:
        assert norm(x) == alone
    finally:
        torch.set_num_threads(before)


class Memory(TorchDispatchMode):
    """The most bytes that tensors made inside hold at any one time; those of `given` do not count."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._given = {each.untyped_storage().data_ptr() for each in given}
        self._num_tensors: Counter[int] = Counter()
        self._num_bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in self._given:
                storage = made.untyped_storage()
                self._num_tensors[storage.data_ptr()] += 1
                self._num_bytes[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(made, self._freed, storage.data_ptr())
        self.peak_bytes = max(self.peak_bytes, sum(self._num_bytes.values()))
        return result

    def _freed(self, pointer: int) -> None:
        self._num_tensors[pointer] -= 1
        if not self._num_tensors[pointer]:
            del self._num_bytes[pointer]


def peak_bytes(how: Merge, num_learners: int, num_elements: int) -> int:
    payload, momentum = Int4().encode(torch.ones(num_elements)), torch.ones(num_elements)
    contributions = [Encoded(str(i), (payload,), 1.0) for i in range(num_learners)]
    places = [Placement(TensorSpec("w", (num_elements,), "float32"), 0)]
    memory = Memory([payload, momentum])
    with memory:
        merged_vector(how, Int4(), contributions, places, num_elements, momentum)
    return memory.peak_bytes


@pytest.mark.parametrize("how", [kind() for kind in MERGES], ids=str)
def test_memory_is_a_few_fragments_and_a_run_of_every_learner_at_most(how: Merge) -> None:
    num_elements = 3 * RUN_ELEMENTS
    few, many = (peak_bytes(how, num_learners, num_elements) for num_learners in (3, 9))
    assert 4 * num_elements <= few <= 8 * 4 * num_elements
    assert many - few <= 6 * 4 * RUN_ELEMENTS + 2**17  # a run of each, where values are compared, and small change
