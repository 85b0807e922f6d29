"""Cutting boxes into runs: every element of the box that is in the run, once, and no other."""

from itertools import product
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.learner.pieces import Box, cut


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Box, int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    start, stop = sorted(draw(st.integers(-2, prod(shape) + 2)) for _ in range(2))
    return Box(shape, offsets, sizes), start, stop


@settings(max_examples=600, deadline=None, derandomize=True)
@given(boxes())
def test_sub_boxes_are_the_elements_of_the_box_in_the_run(case: tuple[Box, int, int]) -> None:
    box, start, stop = case
    places = torch.arange(prod(box.shape)).view(box.shape)
    mine = places[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
    expected = sorted(p for p in mine.flatten().tolist() if start <= p < stop)
    found: list[int] = []
    parts = list(cut(box, start, stop))
    for part in parts:
        sub = mine[part.within(box)]
        assert tuple(sub.shape) == part.sizes
        strided = [
            part.first + sum(i * s for i, s in zip(index, part.strides, strict=True))
            for index in product(*map(range, part.sizes))
        ]
        assert sub.flatten().tolist() == strided  # the same elements in the flat vector
        found.extend(strided)
    assert sorted(found) == expected
    assert len(parts) <= 2 * len(box.shape) + 1
