"""Units of a layout in one process: the rows of a parameter that a unit is, and parameters joined from their units.

A learner finds tensors by their names in the layout. The name of a unit leads to its whole parameter, as the model
holds it; `Units` cuts this process's piece of the parameter to the unit's rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from diloco.core.layout import Layout, Origin, TensorSpec
from diloco.errors import LayoutError
from diloco.learner.pieces import Box, Gather, Piece, local_of, read_dtensor
from diloco.protocol.units import Ranges


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
            f"row {origin.first} of {origin.parameter!r} is no whole number of rows of its box {box}; give the box the "
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
