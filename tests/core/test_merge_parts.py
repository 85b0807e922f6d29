"""What merges are built from: sorting vectors, sums that every device takes in one order, and memory that learners do
not add to."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.whole_vectors import merged_vector
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diloco.core.codecs import FP32, SEGMENT_ELEMENTS, Int4
from diloco.core.layout import Placement, TensorSpec
from diloco.core.merges import MERGES, Encoded, Mean, Merge, MultiKrum, RadialDirectional, merge_into
from diloco.core.merges.decoding import RUN_SEGMENTS
from diloco.core.merges.measures import BLOCK_ELEMENTS, block_sums, pieces_of
from diloco.core.merges.medians import sorted_vectors

RUN_ELEMENTS = RUN_SEGMENTS * SEGMENT_ELEMENTS


@pytest.mark.parametrize("num", range(1, 9))
def test_a_sorting_network_sorts_every_sequence_of_zeros_and_ones(num: int) -> None:
    """Which is enough for it to sort anything (Knuth's 0-1 principle)."""
    columns = torch.tensor(list(itertools.product((0.0, 1.0), repeat=num))).T.contiguous()
    expected = columns.sort(dim=0).values
    assert torch.equal(torch.stack(sorted_vectors(list(columns))), expected)


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_any_number_of_vectors_is_sorted(num: int, seed: int) -> None:
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
    assert math.fsum(block_sums(x, y)) == math.fsum(halves(one * other) for one, other in zip(*blocks, strict=True))
    assert block_sums(x) == [halves(block * block) for block in blocks[0]]


def test_lengths_do_not_depend_on_the_number_of_threads() -> None:
    x = torch.randn(300_000)
    alone = block_sums(x)
    torch.set_num_threads(4)
    assert block_sums(x) == alone


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


# --- run by run -------------------------------------------------------------------------------------------------------


SIZES = (RUN_ELEMENTS - 5, 77, 2 * RUN_ELEMENTS + 4099, 3)
"""Tensors that end within a run, lie in one, and go on over several."""


def tensors(*sizes: int) -> list[Placement]:
    offsets = itertools.accumulate(sizes, initial=0)
    return [
        Placement(TensorSpec(f"w{i}", (size,), "float32"), at)
        for i, (size, at) in enumerate(zip(sizes, offsets, strict=False))
    ]


def random_contributions(num: int, num_elements: int) -> list[Encoded]:
    vectors = torch.randn(num, num_elements, generator=torch.Generator().manual_seed(num))
    return [Encoded(str(i), (Int4().encode(vector),), 1.0 + i) for i, vector in enumerate(vectors)]


@pytest.mark.parametrize("how", [kind() for kind in MERGES], ids=str)
def test_a_run_is_final_when_it_is_said_to_be(how: Merge) -> None:
    """Overwriting it, as an outer step does, changes nothing of what comes after it."""
    places, num_elements = tensors(*SIZES), sum(SIZES)
    contributions, momentum = random_contributions(3, num_elements), torch.randn(num_elements)
    whole = merged_vector(how, Int4(), contributions, places, num_elements, momentum)
    out, end = torch.empty(num_elements), 0

    def final(run: slice) -> None:
        nonlocal end
        assert run.start == end
        assert run.start % SEGMENT_ELEMENTS == 0
        assert torch.equal(out[run], whole[run])
        out[run].fill_(math.nan)
        end = run.stop

    merge_into(out, how, Int4(), contributions, places, momentum, final=final)
    assert end == num_elements


def test_lengths_are_those_of_tensors_over_all_their_runs() -> None:
    places, num_elements = tensors(*SIZES), sum(SIZES)
    contributions = random_contributions(4, num_elements)
    merged = merged_vector(RadialDirectional(), Int4(), contributions, places, num_elements)
    decoded = [Int4().decode(each.payloads[0], num_elements) for each in contributions]
    for place in places:
        lengths = [
            each.weight * float(vector[place.elements].double().norm())
            for each, vector in zip(contributions, decoded, strict=True)
        ]
        expected = math.fsum(lengths) / math.fsum(each.weight for each in contributions)
        assert merged[place.elements].double().norm() == pytest.approx(expected, rel=1e-6)


def test_directions_that_cancel_over_several_runs_give_the_mean() -> None:
    places, num_elements = tensors(*SIZES), sum(SIZES)
    vector = torch.randn(num_elements)
    other = vector.clone()
    other[places[2].elements] *= -0.5  # the tensor that goes on over several runs
    contributions = [Encoded(str(i), (FP32().encode(each),), 1.0) for i, each in enumerate((vector, other))]
    merged, mean = (
        merged_vector(how, FP32(), contributions, places, num_elements) for how in (RadialDirectional(), Mean())
    )
    assert torch.equal(merged[places[2].elements], mean[places[2].elements])
    torch.testing.assert_close(merged, mean, rtol=1e-5, atol=1e-6)


@dataclass(frozen=True)
class Counting(Int4):
    """Counts the elements that are decoded."""

    value_of: ClassVar[Any] = None  # loops cannot read it, so `decode_rows` does
    decoded: list[int] = field(default_factory=list)

    def decode_rows(self, payload: Tensor, out: Tensor, scratch: Any) -> None:
        self.decoded.append(out.numel())
        super().decode_rows(payload, out, scratch)


@pytest.mark.parametrize("how", [kind() for kind in MERGES], ids=str)
def test_contributions_are_decoded_once_or_twice(how: Merge) -> None:
    """Pieces of tensors that are measured one after the other share a segment at most."""
    codec, num_elements, places = Counting(), sum(SIZES), tensors(*SIZES)
    contributions, momentum = random_contributions(3, num_elements), torch.randn(num_elements)
    merged_vector(how, codec, contributions, places, num_elements, momentum)
    measured, kept = 0 if how.elementwise else 3, 2 if isinstance(how, MultiKrum) else 3
    num_pieces = len(list(pieces_of([(each.elements, None) for each in places])))
    assert 0 <= sum(codec.decoded) - (measured + kept) * num_elements <= measured * num_pieces * SEGMENT_ELEMENTS
