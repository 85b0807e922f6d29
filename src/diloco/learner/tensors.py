"""A learner's tensors and the versions they belong to: parameters, anchors, origins, frozen tensors, snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from diloco.core.adopt import Adopt, Eager
from diloco.core.elementwise import blocks
from diloco.core.fragments import Layout, gather, scatter
from diloco.core.method import Method
from diloco.errors import ConfigError
from diloco.exchange.base import Model
from diloco.learner.frozen import FrozenState
from diloco.learner.snapshots import Snapshots


class LearnerTensors:
    """What a learner holds of a model.

    Attributes:
        parameters: the trainable ones, by their names in the layout.
        anchors: per fragment the newest global value adopted, flat fp32 on the host: what outer gradients are measured from.
        origins: by fragment, where work has been sent since without an adoption: the parameters as they were sent.
        snapshots, static: buffers of what is sent; frozen parameters and buffers.
    """

    def __init__(self, model: nn.Module, layout: Layout, method: Method) -> None:
        self._model, self._layout, self._how = model, layout, method.adopt
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.anchors: list[Tensor] = []
        self.origins: dict[int, Tensor] = {}
        self.snapshots = Snapshots(layout)
        self.static = FrozenState(model, layout)
        self._aliases = _aliases(model)

    def own_model(self) -> Model:
        """The model as it is here, for whoever initialises the run."""
        fragments = tuple(gather(fragment, self.parameters).cpu() for fragment in self._layout.fragments)
        return Model(fragments, self.static.values())

    def take(self, model: Model, *, write: bool) -> None:
        """A new incarnation: anchors, frozen tensors and (`write`) parameters become the run's, and nothing is on its way."""
        self.anchors = list(model.fragments)
        self.origins.clear()
        if write:
            for fragment, theta in enumerate(model.fragments):
                self.write(fragment, theta)
        self.static.adopt(model.static)

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of every parameter; zeros where there was none."""
        found = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found[name] = parameter.grad
        return found

    def adopt(self, fragment: int, theta: Tensor, *, just_sent: bool) -> None:
        """The parameters become what the method's rule makes of them and a global fragment.

        `just_sent`: the fragment was sent at this very boundary, so nothing was trained since.
        """
        origin = None
        if self._how.needs_origin and not just_sent:
            origin = self.origins.get(fragment, self.anchors[fragment])
        self.write(fragment, theta, how=self._how, origin=origin)

    @torch.no_grad()
    def write(
        self,
        fragment: int,
        flat: Tensor,
        tensors: Mapping[str, Tensor] | None = None,
        how: Adopt | None = None,
        origin: Tensor | None = None,
    ) -> None:
        """A fragment's tensors (the parameters, unless given) become `flat`, or `how` of themselves and `flat`."""
        tensors = self.parameters if tensors is None else tensors
        layout = self._layout.fragments[fragment]
        device = tensors[layout.names[0]].device
        origins = {} if origin is None else scatter(layout, origin.to(device))
        for name, value in scatter(layout, flat.to(device)).items():
            own = tensors[name]
            if how is None:
                own.copy_(value)
            else:
                _adopt_into(own, how, value.to(own.device), origins.get(name))

    def adopted(self, fragment: int, theta: Tensor) -> None:
        """The learner holds this version now."""
        self.anchors[fragment] = theta
        self.origins.pop(fragment, None)

    def measure_from(self, fragments: Iterable[int], *, here: bool) -> None:
        """What is measured next of these starts from the parameters as they are (`here`), or from what was last adopted."""
        for fragment in fragments:
            if here:
                self.origins[fragment] = gather(self._layout.fragments[fragment], self.parameters).cpu()
            else:
                self.origins.pop(fragment, None)

    def end_boundary(self, sent: Iterable[int], *, keep: bool) -> None:
        """What is measured next of fragments that were sent and not adopted starts from here."""
        if keep:
            self.measure_from(sent, here=True)

    def state_dict(self, fragments: Sequence[Tensor] | None) -> dict[str, Tensor]:
        """These fragments in the shape of the model's `state_dict`, host tensors in its dtypes; None: the model as it is."""
        values: dict[str, Tensor] = {}
        for layout, flat in zip(self._layout.fragments, fragments or (), strict=fragments is not None):
            values.update(scatter(layout, flat))
        state = {}
        for name, own in self._model.state_dict().items():
            source = values.get(self._aliases.get(name, name))
            state[name] = own.to("cpu", copy=True) if source is None else source.to(own.dtype, copy=True)
        return state

    def learner_state(self) -> dict[str, Any]:
        """For `Learner.state_dict`."""
        return {
            "anchors": {str(f): anchor for f, anchor in enumerate(self.anchors)},
            "origins": {str(f): origin for f, origin in self.origins.items()},
            "parameters": {name: p.detach().to("cpu", copy=True) for name, p in self.parameters.items()},
            "counters": self.static.counters(),
        }

    @torch.no_grad()
    def load_learner_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `learner_state`."""
        self.anchors = [state["anchors"][str(f)] for f in range(len(self.anchors))]
        self.origins = {int(f): origin for f, origin in state["origins"].items()}
        for name, parameter in self.parameters.items():
            parameter.copy_(state["parameters"][name])
        self.static.load_counters(state["counters"])


def _adopt_into(own: Tensor, how: Adopt, value: Tensor, origin: Tensor | None) -> None:
    """A parameter becomes `how` of itself and the global `value`; nothing was trained since an `origin` of None."""
    origin = own if origin is None else origin
    if own.is_contiguous():  # of any other, the blocks are whole rows
        own, value, origin = own.view(-1), value.view(-1), origin.view(-1)
    for part in blocks(own):
        mine = own[part]
        mine.copy_(how.adopt(mine.float(), value[part], origin[part].float()))


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every name of a tied parameter in `state_dict`, to the one name it has in the layout."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        name: first[id(value)]
        for name, value in model.state_dict(keep_vars=True).items()
        if id(value) in first and first[id(value)] != name
    }


def trained_tensors(layout: Layout, patterns: Sequence[str] | None, method: Method) -> list[tuple[int, ...] | None]:
    """Per fragment the indices of the tensors whose name matches one of `patterns` (shell style, case-sensitive); None: all of them.

    Raises:
        ConfigError: a pattern that no tensor matches, or a method under which all must be trained.
    """
    if patterns is None:
        return [None] * len(layout.fragments)
    if isinstance(method.adopt, Eager):
        raise ConfigError(
            f"{method.name} replaces a learner's own part of every mean, and where learners train parts that is another "
            "part for every tensor; train all of the model, or use DelayedDiLoCo."
        )
    names = [name for fragment in layout.fragments for name in fragment.names]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"trains={pattern!r} matches no parameter of the model; its first is {names[0]!r}.")
    trained: list[tuple[int, ...] | None] = []
    for fragment in layout.fragments:
        found = tuple(i for i, name in enumerate(fragment.names) if any(fnmatchcase(name, each) for each in patterns))
        trained.append(None if len(found) == len(fragment.names) else found)
    return trained
