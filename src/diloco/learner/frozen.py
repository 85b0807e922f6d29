"""The tensors of a model that are not exchanged: frozen parameters and persistent buffers. They are the run's, and stay as they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from diloco.core.layout import Layout
from diloco.errors import LayoutError


class FrozenState:
    """Takes them over from the run, and notices when training changes one.

    A change is found by comparing values with a copy, since code may write through `.data` or put another tensor in its place.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._places = {spec.name: _place(model, spec.name) for spec in layout.static}
        self._copies: dict[str, Tensor] = {}

    def values(self) -> dict[str, Tensor]:
        """Host copies of all of them as they are now."""
        return {name: self._current(name).detach().to("cpu", copy=True) for name in self._places}

    def counters(self) -> dict[str, Tensor]:
        """Host copies of those that training may change: buffers that are no floating-point numbers, such as a number of batches."""
        current = {name: self._current(name) for name in self._places if name not in self._copies}
        return {name: each.to("cpu", copy=True) for name, each in current.items() if not isinstance(each, nn.Parameter)}

    def load_counters(self, values: Mapping[str, Tensor]) -> None:
        """They become what `counters` gave."""
        for name, value in values.items():
            self._current(name).copy_(value)

    @torch.no_grad()
    def adopt(self, values: Mapping[str, Tensor]) -> None:
        """They become the run's."""
        for name, value in values.items():
            self._current(name).copy_(value)
        self._copies = {
            name: current.detach().clone()
            for name in self._places
            if (current := self._current(name)).is_floating_point()
        }

    def check(self, part: int, num_parts: int) -> None:
        """Look at every `num_parts`-th floating-point tensor, from number `part` on, so that the work is spread over the sends of a round.

        Raises:
            LayoutError: training changed one, so that learners would silently differ.
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


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Where a tensor lives, so that it is found without building the model's whole state dict."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
