"""A learner's tensors: parameters, anchors, origins, frozen state, and the choice of those that this learner trains."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diloco.core.adopt import Adopt, Eager
from diloco.core.fragments import Experts, Layout
from diloco.core.layout import TensorSpec
from diloco.core.method import Method
from diloco.core.names import canonical_key, named_buffers, named_parameters
from diloco.errors import CheckpointError, ConfigError
from diloco.exchange.base import FlatModel
from diloco.exchange.group import device_of
from diloco.learner.device import DeviceUploads, Snapshots
from diloco.learner.frozen import FrozenState, averaged_tensors, exchanged_tensors
from diloco.learner.models import Registered
from diloco.learner.partition import Partition
from diloco.learner.pieces import Units, parameter_of


class LearnerTensors:
    """The tensors that one process of a learner holds of its model.

    Attributes:
        parameters: the trainable parameters of the model and its averaged tensors, as the model holds them, by their
            names in the layout; that of a unit is the whole parameter.
        anchors: per fragment, the newest value adopted of the part that this process exchanges, flat fp32 on the host;
            outer gradients are measured from it.
        origins: by fragment, that part of the parameters as it was last sent, flat fp32 on the host; only of fragments
            that were sent since their last adoption.
        partition: the part of each fragment that this process exchanges.
        snapshots: takes snapshots of fragments to send.
        uploads: copies versions to adopt to the parameters' device.
        frozen: frozen parameters and buffers.
        registered: the model's parameters at attaching.
    """

    def __init__(self, model: nn.Module, layout: Layout, method: Method, partition: Partition, units: Units) -> None:
        self._model, self._layout, self._adopt, self.partition = model, layout, method.adopt, partition
        self._units = units
        self.parameters = exchanged_tensors(model, layout)
        self.anchors: list[Tensor] = []
        self.origins: dict[int, Tensor] = {}
        device = device_of(self.parameters)
        self.snapshots, self.uploads = Snapshots(partition, device), DeviceUploads(device)
        self.frozen = FrozenState(model, layout, units)
        self.registered = Registered(model)
        self._aliases = _aliases(model, {units.parameter(name): each for name, each in self.parameters.items()})
        self._averaged = {spec.name for spec in averaged_tensors(layout)}

    def own_model(self) -> FlatModel:
        """The present model of this process, with which it may initialise the run."""
        fragments = tuple(
            self.partition.gather(fragment.index, self.parameters, of_first=True).cpu()
            for fragment in self._layout.fragments
        )
        return FlatModel(fragments, self.frozen.values())

    def parts_here(self) -> list[Tensor]:
        """The present parameters by fragment, as the part that this process exchanges: flat fp32 on the host."""
        return [self._here(fragment.index) for fragment in self._layout.fragments]

    def pieces_of(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """The value of `own_parameters` for parameters given as the parts of every fragment."""
        dtypes = {place.spec.name: place.spec.dtype for each in self._layout.fragments for place in each.tensors}
        pieces: dict[str, Tensor] = {}
        for fragment, part in enumerate(parts):
            for name, value in self.partition.spread(fragment, part, torch.device("cpu")).items():
                pieces[name] = value.to(getattr(torch, dtypes[name]), copy=True)
        return pieces

    def _here(self, fragment: int) -> Tensor:
        return self.partition.gather(fragment, self.parameters).cpu()

    def load_model(self, thetas: Sequence[Tensor], static: Mapping[str, Tensor], *, write: bool) -> None:
        """Start a new incarnation: load the run's anchors, frozen tensors and, with `write`, parameters."""
        self.anchors = list(thetas)
        self.origins.clear()
        if write:
            for fragment, theta in enumerate(thetas):
                self.write(fragment, theta)
        self.frozen.adopt(static)

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of every parameter; a parameter without one gets zeros."""
        found = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found[name] = parameter.grad
        return found

    def adopt(self, fragment: int, theta: Tensor, *, just_sent: bool) -> None:
        """Apply the method's adoption rule to a fragment's parameters and its new global value.

        Arguments:
            theta: the global value, flat fp32, on the host or the parameters' device.
            just_sent: the fragment was sent at this boundary, so no work was done since the send.
        """
        origin = None
        if self._adopt.needs_origin and not just_sent:
            origin = self.origins.get(fragment, self.anchors[fragment])
        self.write(fragment, theta, how=self._adopt, origin=origin)

    @torch.no_grad()
    def write(
        self,
        fragment: int,
        flat: Tensor,
        tensors: Mapping[str, Tensor] | None = None,
        how: Adopt | None = None,
        origin: Tensor | None = None,
    ) -> None:
        """Set a fragment's tensors in place: to `flat`, or to `how` of their present values and `flat`.

        Arguments:
            flat: flat fp32.
            tensors: by name; None: the parameters.
            origin: for `how`, the values at the last send; None: the present values.
        """
        tensors = self.parameters if tensors is None else tensors
        device = device_of(tensors)
        origins = {} if origin is None else self.partition.spread(fragment, origin, device)
        for name, value in self.partition.spread(fragment, flat, device).items():
            own = self.partition.local(name, tensors[name])
            if how is None or (
                how.needs_origin and name in self._averaged
            ):  # Θ + (θ − θ_sent) may leave an averaged tensor's range
                own.copy_(value)
            else:
                how.adopt_into(own, value.to(own.device), origins.get(name))

    def set_anchor(self, fragment: int, theta: Tensor) -> None:
        """Measure the fragment's next outer gradients from `theta`, a version that the learner has adopted."""
        self.anchors[fragment] = theta
        self.origins.pop(fragment, None)

    def measure_from(self, fragments: Iterable[int], *, here: bool) -> None:
        """Measure the next outer gradients of these fragments from the present parameters (`here`) or the anchors."""
        for fragment in fragments:
            if here:
                self.origins[fragment] = self._here(fragment)
            else:
                self.origins.pop(fragment, None)

    def model_state_dict(self, fragments: Sequence[Tensor] | None) -> dict[str, Tensor]:
        """The model's `state_dict` under canonical names, on the host, with the values of these flat parts.

        None: with its own values. Sharded tensors are sharded as in the model. The base is left out, if there is one.
        """
        values: dict[str, Tensor] = {}
        for fragment, part in enumerate(fragments or ()):
            values.update(self.partition.spread(fragment, part, torch.device("cpu")))
        values, state = self._units.joined(values), {}
        held = {spec.name for spec in self._layout.static} | {
            *map(self._units.parameter, self.parameters),
            *self._aliases,
        }
        for key, own in self._model.state_dict().items():
            name = canonical_key(self._model, key)
            if self._layout.base and name not in held:  # a base tensor, which the run does not hold
                continue
            source = values.get(self._aliases.get(name, name))
            state[name] = (
                own.to("cpu", copy=True) if source is None else _like(name, own, source.to(own.dtype, copy=True))
            )
        return state

    @property
    def has_made_keys(self) -> bool:
        """Whether hooks add computed tensors to the model's `state_dict`, such as parts of a fused projection."""
        tensors = chain(named_parameters(self._model), named_buffers(self._model))
        known = {*self._aliases, *(name for name, _ in tensors)}
        made = (key for key, own in self._model.state_dict().items() if isinstance(own, Tensor))
        return any(canonical_key(self._model, key) not in known for key in made)

    def own_parameters(self) -> dict[str, Tensor]:
        """Host copies of this process's pieces of the parameters, in their own dtypes."""
        return {name: own.to("cpu", copy=True) for name, own in self._local_parameters()}

    def require_pieces(self, own: Mapping[str, Tensor]) -> None:
        """Raise CheckpointError unless `own`, of a checkpoint, has this process's pieces of the parameters."""
        for name, local in self._local_parameters():
            if name not in own or own[name].shape != local.shape:
                held = f"a piece of the shape {tuple(own[name].shape)}" if name in own else "nothing"
                raise CheckpointError(
                    f"in the checkpoint this rank has {held} of parameter {name!r}, and it holds one of the shape "
                    f"{tuple(local.shape)}; resume with the parallelism that it was saved with."
                )

    @torch.no_grad()
    def restore_parameters(self, own: Mapping[str, Tensor]) -> None:
        """Restore the values that `own_parameters` returned."""
        for name, local in self._local_parameters():
            local.copy_(own[name])

    def state_dict(self) -> dict[str, Any]:
        """The tensors of `Learner.state_dict`."""
        return {
            "anchors": {str(f): anchor for f, anchor in enumerate(self.anchors)},
            "origins": {str(f): origin for f, origin in self.origins.items()},
            "parameters": self.own_parameters(),
            "counters": self.frozen.counters(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.anchors = [state["anchors"][str(f)] for f in range(len(self.anchors))]
        self.origins = {int(f): origin for f, origin in state["origins"].items()}
        self.restore_parameters(state["parameters"])
        self.frozen.load_counters(state["counters"])

    def _local_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """This process's piece of every parameter, by name."""
        return ((name, self.partition.local(name, parameter)) for name, parameter in self.parameters.items())


def _like(name: str, own: Tensor, local: Tensor) -> Tensor:
    """The local values as a tensor that is sharded as `own`."""
    if not isinstance(own, DTensor):
        if local.shape != own.shape:
            raise ConfigError(
                f"the model gathers {name!r} for its state_dict, and this rank has only a piece of its global value; "
                "take model.state_dict() inside learner.global_model()."
            )
        return local
    return DTensor.from_local(
        local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )


def _aliases(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """The further names that tied parameters have in `state_dict`, each with the parameter's name in the layout."""
    first = {id(parameter): name for name, parameter in parameters.items()}
    return {
        name: first[id(value)]
        for key, value in model.state_dict(keep_vars=True).items()
        if id(value) in first and first[id(value)] != (name := canonical_key(model, key))
    }


def trained_tensors(
    layout: Layout, patterns: Sequence[str] | None, experts: Collection[int] | None, method: Method
) -> list[tuple[int, ...] | None]:
    """Which tensors a learner trains.

    Arguments:
        patterns: of the tensors' names, shell style and case-sensitive, or of the parameters that units are rows of;
            None: all tensors are trained.
        experts: of a mixture; None: all of them are trained.

    Returns:
        Per fragment the indices of the tensors trained; None: all of the fragment's.

    Raises:
        ConfigError: a pattern matches no tensor, or the method needs all tensors trained.
    """
    if patterns is None and experts is None:
        return [None] * len(layout.fragments)
    if isinstance(patterns, str):
        raise ConfigError(f"trains={patterns!r} is one text; pass a list of patterns, as in trains=[{patterns!r}].")
    if isinstance(method.adopt, Eager):
        raise ConfigError(
            f"trains=… cannot be used with {method.name}, which replaces the learner's own share of every mean: that "
            "share would differ from tensor to tensor; train the whole model, or use DelayedDiLoCo."
        )
    names = [name for each in layout.fragments for p in each.tensors for name in (p.spec.name, parameter_of(p.spec))]
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"trains={pattern!r} matches no parameter of the model; its first is {names[0]!r}.")

    def is_trained(spec: TensorSpec) -> bool:
        expert, names = Experts.expert_of(spec), (spec.name, parameter_of(spec))
        chosen = experts is None or expert is None or expert in experts
        return chosen and (patterns is None or any(fnmatchcase(name, each) for name in names for each in patterns))

    trained: list[tuple[int, ...] | None] = []
    for fragment in layout.fragments:
        found = tuple(index for index, place in enumerate(fragment.tensors) if is_trained(place.spec))
        trained.append(None if len(found) == len(fragment.names) else found)
    return trained
