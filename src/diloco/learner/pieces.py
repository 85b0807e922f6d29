"""The piece of a tensor that a rank holds: the whole, or a box of a tensor that is sharded over the island's ranks; and
units, the rows that a parameter is cut into.

FSDP2, HSDP, tensor and expert parallelism hold parameters as DTensors, whose box is known (`read_dtensor`). A `Gather`
describes any other way of holding them.

A learner finds tensors by their names in the layout. The name of a unit leads to its whole parameter, as the model
holds it; `Units` cuts this process's piece of the parameter to the unit's rows.
"""

from __future__ import annotations

# Sharded tensors are held as boxes (a rank's rows, columns, or experts), flat vectors as runs of the row-major order.
# To move elements between the two, a box is cut into sub-boxes whose elements are all in one run. A sub-box is a
# strided view of the flat vector and a slice of the box, so no index tensor is needed.
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from diloco.core.layout import Layout, Origin, TensorSpec
from diloco.errors import ConfigError, LayoutError
from diloco.protocol.units import Ranges


@dataclass(frozen=True)
class Box:
    """A box of a tensor of this shape: `sizes[d]` indices from `offsets[d]` on, in every dimension d."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box of a whole tensor."""
        return cls(shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the whole tensor in row-major order, in elements."""
        return tuple(prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @property
    def first(self) -> int:
        """The index of its first element in the whole tensor's row-major order."""
        return sum(offset * stride for offset, stride in zip(self.offsets, self.strides, strict=True))

    @property
    def last(self) -> int:
        """The index of its last element in that order; the box must not be empty."""
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
    """`cut` of the part of the tensor at the indices `fixed`; `start` and `stop` are relative to that part."""
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


@dataclass(frozen=True, eq=False)
class Piece:
    """The piece of a tensor that this rank holds.

    Attributes:
        shape: of the whole tensor.
        box: the elements of the piece. Its shape may be another one with the same elements in the same row-major order,
            such as (numel,) for a piece of a flattened tensor.
        local: its memory, of the shape `box.sizes`. Writing it writes the model.
    """

    shape: tuple[int, ...]
    box: Box
    local: Tensor


class Gather(Protocol):
    """A function that describes how the ranks of an island hold the tensors of its model."""

    def __call__(self, name: str, tensor: Tensor) -> Piece:
        """The piece of a parameter, or of its gradient, in this rank.

        Arguments:
            name: of the parameter.
            tensor: as the model holds it.
        """


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor in this process."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def read_dtensor(name: str, tensor: Tensor) -> Piece:
    """The `Gather` of plain tensors, whose piece is the whole, and of DTensors.

    Raises:
        ConfigError: a DTensor with partial sums.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Piece(shape, Box.whole(shape), tensor.detach())
    for placement in tensor.placements:
        if placement.is_partial():
            raise ConfigError(
                f"parameter {name!r} has the placement {placement} over its device mesh, and only shards and replicas "
                "can be exchanged; redistribute it, or describe what each rank holds with gather=…."
            )
    sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local().detach()
    assert tuple(local.shape) == tuple(sizes)
    if local.numel() == 0:
        offsets = (0,) * len(shape)
    return Piece(shape, Box(shape, tuple(offsets), tuple(sizes)), local)


def parameter_of(spec: TensorSpec) -> str:
    """The name of the parameter or buffer that holds a tensor of a layout."""
    return spec.name if spec.origin is None else spec.origin.parameter


class Units:
    """The `Gather` of a layout's tensors. A unit is given by its name and its whole parameter, or that one's gradient.

    Arguments:
        gather: of the parameters.
    """

    def __init__(self, layout: Layout, gather: Gather = read_dtensor) -> None:
        self._gather = gather
        self._units = layout.units()
        self._specs = {spec.name: spec for units in self._units.values() for spec in units}

    def __call__(self, name: str, tensor: Tensor) -> Piece:
        """The piece of a tensor that this rank holds; of a unit, of its rows."""
        spec = self._specs.get(name)
        if spec is None or spec.origin is None:
            return self._gather(name, tensor)
        return rows_of(self._gather(spec.origin.parameter, tensor), spec.origin, spec.shape[0])

    def local(self, name: str, tensor: Tensor) -> Tensor:
        """The memory of that piece."""
        return self(name, tensor).local

    def parameter(self, name: str) -> str:
        """The name of the parameter or buffer that holds this tensor."""
        spec = self._specs.get(name)
        return name if spec is None else parameter_of(spec)

    def rows(self, name: str, parameter: Tensor, rows: Ranges, tensor: Tensor) -> list[Tensor]:
        """The memory of some rows, in this rank, of a tensor that is held as a parameter is, such as its gradient.

        Arguments:
            name, parameter: the whole parameter.
            rows: of it; none: all elements.
            tensor: the parameter itself, its gradient, or state of an optimizer.
        """
        piece, own = self._gather(name, parameter), local_of(tensor)
        piece = replace(piece, local=own if own.shape == piece.local.shape else own.view(piece.local.shape))
        if not rows:
            return [piece.local]
        return [rows_of(piece, Origin(name, first, piece.shape[0]), stop - first).local for first, stop in rows]

    def by_name(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by their names in the layout; those that are cut occur once for each of their units."""
        found = {}
        for parameter, tensor in tensors.items():
            names = [spec.name for spec in self._units.get(parameter, ())] or [parameter]
            found.update(dict.fromkeys(names, tensor))
        return found

    def joined(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Local values by the names of parameters: those of units are joined, in the order of their rows."""
        found = {name: value for name, value in values.items() if name not in self._specs}
        for parameter, units in self._units.items():
            if units[0].name in values:
                found[parameter] = torch.cat([values[spec.name] for spec in units])
        return found


def rows_of(piece: Piece, origin: Origin, num_rows: int) -> Piece:
    """A parameter's piece cut to `num_rows` rows from `origin.first` on; empty where this rank holds none of them.

    Raises:
        LayoutError: the box has another shape than the parameter, whose rows are no whole rows of it.
    """
    box, row = piece.box, prod(piece.shape[1:])
    per_index = max(1, prod(box.shape[1:]))  # elements; another number than `row` where the parameter is flattened
    start, stop = (index * row for index in (origin.first, origin.first + num_rows))
    if start % per_index or stop % per_index:
        raise LayoutError(
            f"row {origin.first} of {origin.parameter!r} is not at a whole row of its box {box}; give the box the "
            "parameter's shape, or one dimension (gather=…)."
        )
    first, last = start // per_index, stop // per_index
    low = min(max(first, box.offsets[0]), last)
    size = max(0, min(last, box.offsets[0] + box.sizes[0]) - low)
    sizes = (size, *box.sizes[1:])
    offsets = (low - first, *box.offsets[1:]) if prod(sizes) else (0,) * len(sizes)
    at = low - box.offsets[0] if size else 0
    shape = (last - first, *box.shape[1:])
    return Piece((num_rows, *piece.shape[1:]), Box(shape, offsets, sizes), piece.local[at : at + size])
