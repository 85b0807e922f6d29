"""Frozen parameters and persistent buffers: the static tensors of a layout.

They are part of the run's model. Learners receive them when they join and never exchange them, so training must not
change them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from diloco.core.layout import Layout
from diloco.core.names import holder
from diloco.errors import LayoutError


class FrozenState:
    """The static tensors of one learner's model: loads the run's values, and detects that training changes one.

    Detection compares values with a copy, because code may write through `.data` or replace the tensor.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._places = {spec.name: holder(model, spec.name) for spec in layout.static}
        self._copies: dict[str, Tensor] = {}

    def values(self) -> dict[str, Tensor]:
        """Host copies of the current values, by name."""
        return {name: self._current(name).detach().to("cpu", copy=True) for name in self._places}

    def counters(self) -> dict[str, Tensor]:
        """Host copies of the buffers that training may change: those without floating-point values, such as counts."""
        current = {name: self._current(name) for name in self._places if name not in self._copies}
        return {name: each.to("cpu", copy=True) for name, each in current.items() if not isinstance(each, nn.Parameter)}

    @torch.no_grad()
    def load_counters(self, values: Mapping[str, Tensor]) -> None:
        """Restore what `counters` returned."""
        for name, value in values.items():
            self._current(name).copy_(value)

    @torch.no_grad()
    def adopt(self, values: Mapping[str, Tensor]) -> None:
        """Load the run's values."""
        for name, value in values.items():
            self._current(name).copy_(value)
        self._copies = {
            name: current.detach().clone()
            for name in self._places
            if (current := self._current(name)).is_floating_point()
        }

    def check(self, part: int, num_parts: int) -> None:
        """Compare one part of the floating-point tensors with the run's: each send of a round checks another part.

        Arguments:
            part: index of the part, from 0 to `num_parts` − 1.

        Raises:
            LayoutError: training changed a tensor, so learners would silently differ.
        """
        for name in list(self._copies)[part::num_parts]:
            if not torch.equal(self._current(name), self._copies[name]):
                raise LayoutError(
                    f"training changed {name!r}, which is not a trainable parameter, so learners would drift apart; "
                    "use a model without running statistics (LayerNorm or GroupNorm for BatchNorm)."
                )

    def _current(self, name: str) -> Tensor:
        module, attribute = self._places[name]
        tensor = getattr(module, attribute)
        assert isinstance(tensor, Tensor)
        return tensor
