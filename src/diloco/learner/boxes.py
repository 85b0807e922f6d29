"""Boxes of a tensor, and which of their elements are in a run of its row-major order.

Sharded tensors are held as boxes (a rank's rows, columns, or experts), flat vectors as runs. To move elements between
the two, a box is cut into sub-boxes whose elements are all in one run: inside the flat vector a sub-box is a strided
view, inside the box it is a slice, so no index is ever made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """A box of a tensor of this shape: `sizes[d]` indices from `offsets[d]` on, in every dimension d."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls(shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of the whole tensor in row-major order, in elements."""
        return tuple(prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @property
    def first(self) -> int:
        """The place of its first element in the whole tensor's row-major order."""
        return sum(offset * stride for offset, stride in zip(self.offsets, self.strides, strict=True))

    @property
    def last(self) -> int:
        """The place of its last element there; of a box that is not empty."""
        return self.first + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    def within(self, other: Box) -> tuple[slice, ...]:
        """The slices that cut it out of `other`, a box of the same tensor that contains it."""
        return tuple(
            slice(mine - theirs, mine - theirs + size)
            for mine, theirs, size in zip(self.offsets, other.offsets, self.sizes, strict=True)
        )


def cut(box: Box, start: int, stop: int) -> Iterator[Box]:
    """The sub-boxes that make up the elements of `box` from `start` to `stop` of the tensor's row-major order.

    In each dimension there are at most a partial first row, whole rows and a partial last row, so a box of D dimensions
    is cut into at most 2 D + 1.
    """
    return _cut(box, 0, (), max(start, 0), min(stop, prod(box.shape)))


def _cut(box: Box, dim: int, fixed: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Of the part of the tensor at the indices `fixed`; `start` and `stop` are relative to that part."""
    if start >= stop or box.numel == 0:
        return
    if dim == len(box.shape):
        yield Box(box.shape, fixed, (1,) * len(fixed))
        return
    row = prod(box.shape[dim + 1 :])
    low, high = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    first_whole, last_whole = -(-start // row), stop // row
    if start % row and low <= start // row < high:
        at = start // row
        yield from _cut(box, dim + 1, (*fixed, at), start - at * row, min(stop - at * row, row))
    rows = range(max(first_whole, low), min(last_whole, high))
    if rows:
        rest = slice(dim + 1, None)
        yield Box(
            box.shape, (*fixed, rows.start, *box.offsets[rest]), ((1,) * len(fixed)) + (len(rows), *box.sizes[rest])
        )
    if stop % row and low <= last_whole < high and (first_whole <= last_whole):
        yield from _cut(box, dim + 1, (*fixed, last_whole), 0, stop - last_whole * row)
