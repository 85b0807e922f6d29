"""The inner optimizer's state of one learner for another one: as bytes (safetensors), by the parameters' names.

    "0/layers.0.weight/exp_avg"    optimizer 0, parameter, entry: a tensor of the parameter's shape, or of one number

A rank of several has the pieces of it that are its own: of the boxes of its parameters. Another learner of the run has
the same optimizers over the same boxes (`InnerState.digest`), though it may be on another kind of device.
Hyperparameters are each learner's own and are not part of it. What comes from a peer is checked as a stranger's: names,
shapes and dtypes against what is here, every number finite. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.tensor import DTensor

from diloco.core.healing import INNER_ELEMENT_BYTES, INNER_TENSOR_BYTES
from diloco.errors import ConfigError, CorruptPayloadError, PayloadError, first_line
from diloco.learner.inner_layout import KINDS, Entries, entries_of, made_by, parts_of
from diloco.learner.pieces import Gather, read_dtensor
from diloco.learner.schedule_free import is_in_train_mode
from diloco.plain_json import MALFORMED

States = list[dict[int, dict[str, Any]]]
"""Of each optimizer: by the number of a parameter, its entries."""


class InnerState:
    """The state of one learner's optimizers.

    Arguments:
        optimizers: that train the model.
        parameters: by their names in the layout.
        gather: which piece of each is here.

    Raises:
        ConfigError: it cannot be another learner's: a parameter is not the model's, an optimizer is schedule-free, or
            divided over ranks of which each has whole parameters.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, Tensor],
        gather: Gather = read_dtensor,
    ) -> None:
        self._optimizers, self._gather = optimizers, gather
        names = {id(each): name for name, each in parameters.items()}
        self._names: list[list[str]] = []
        for optimizer in optimizers:
            trained = [each for group in optimizer.param_groups for each in group["params"]]
            # By name: its module compiles scripts when it is imported.
            if "ZeroRedundancyOptimizer" in {each.__name__ for each in type(optimizer).__mro__}:
                raise ConfigError(
                    "ZeroRedundancyOptimizer divides the state of whole parameters over the ranks by a plan of its "
                    "own, which another learner's need not equal; use FSDP2, or source='global'."
                )
            if is_in_train_mode(optimizer) is not None:
                raise ConfigError(
                    f"{type(optimizer).__name__} is schedule-free: its state belongs to one learner's averages and "
                    "cannot be another's; use source='global'."
                )
            if any(id(each) not in names for each in trained):
                raise ConfigError(
                    f"{type(optimizer).__name__} trains tensors that are not the model's, so a peer's state has no "
                    "name for them; use source='global'."
                )
            self._names.append([names[id(each)] for each in trained])

    @property
    def digest(self) -> str:
        """Of the optimizers' kinds and of the names, boxes and dtypes of what they train: 64 hexadecimal digits."""
        described = [
            [
                _kinds(optimizer),
                [[name, *self._form(name, each)] for name, each in zip(names, _trained(optimizer), strict=True)],
            ]
            for optimizer, names in zip(self._optimizers, self._names, strict=True)
        ]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def snapshot(self) -> Callable[[], bytes]:
        """A copy of the state on the host, at a boundary; the function encodes it, on any thread.

        Raises:
            PayloadError: it has an entry that has no name in another process.
        """
        tensors: dict[str, Tensor] = {}
        plain: dict[str, int | float | bool] = {}
        for number, (optimizer, names) in enumerate(zip(self._optimizers, self._names, strict=True)):
            for name, parameter in zip(names, _trained(optimizer), strict=True):
                for entry, value in optimizer.state.get(parameter, {}).items():
                    key = f"{number}/{name}/{entry}"
                    if isinstance(value, Tensor):
                        tensors[key] = _local(key, value, parameter).to("cpu", copy=True).contiguous()
                    elif isinstance(value, KINDS):
                        plain[key] = value
                    elif value is not None:
                        raise PayloadError(
                            f"the entry {entry!r} of {type(optimizer).__name__} is a {type(value).__name__}, which "
                            "cannot be sent to a peer."
                        )
        return lambda: save(tensors, metadata={"plain": json.dumps(plain)})

    @cached_property
    def made(self) -> list[dict[tuple[int, int], Entries]]:
        """Of each optimizer, what it keeps of its parameters; see `made_by`.

        Raises:
            ConfigError: as that.
        """
        return [made_by(optimizer) for optimizer in self._optimizers]

    @property
    def most_bytes(self) -> int:
        """That the state of these optimizers can need."""
        trained = [_here(each) for optimizer in self._optimizers for each in _trained(optimizer)]
        return INNER_TENSOR_BYTES + sum(INNER_ELEMENT_BYTES * each.numel() + INNER_TENSOR_BYTES for each in trained)

    def read(self, content: bytes) -> States:
        """A peer's state, which `snapshot` has encoded, checked and not yet taken.

        Raises:
            CorruptPayloadError: it is damaged, or not of these optimizers and parameters, or not finite.
        """
        found = _read(content)
        states: States = [{} for _ in self._optimizers]
        places = {
            f"{number}/{name}": (number, index, parameter)
            for number, (optimizer, names) in enumerate(zip(self._optimizers, self._names, strict=True))
            for index, (name, parameter) in enumerate(zip(names, _trained(optimizer), strict=True))
        }
        for key, value in found.items():
            place, _, entry = key.rpartition("/")
            if place not in places:
                raise CorruptPayloadError(f"a peer's inner state has {key!r}, which is no parameter here.")
            number, index, parameter = places[place]
            if isinstance(value, Tensor):
                value = _placed(key, value, parameter)
            states[number].setdefault(index, {})[entry] = value
        if places and not any(states):
            raise CorruptPayloadError("a peer's inner state is empty.")
        for optimizer, state, made in zip(self._optimizers, states, self.made, strict=True):
            _require_entries(optimizer, state, made)
        return states

    def take(self, states: States) -> None:
        """Begin with what `read` has returned.

        Raises:
            CorruptPayloadError: an optimizer refuses it.
        """
        try:
            for optimizer, state in zip(self._optimizers, states, strict=True):
                _load(optimizer, state)
        except (RuntimeError, *MALFORMED) as error:
            raise CorruptPayloadError(
                f"a peer's inner state is refused by the optimizer ({type(error).__name__}: {first_line(error)})."
            ) from error

    def _form(self, name: str, parameter: Tensor) -> list[Any]:
        box = self._gather(name, parameter).box
        return [list(box.shape), list(box.offsets), list(box.sizes), str(parameter.dtype)]


def clear(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Begin afresh: the optimizers have no state, and the hyperparameters that they have now."""
    for optimizer in optimizers:
        if optimizer.state:
            _load(optimizer, {})


def _here(tensor: Tensor) -> Tensor:
    """What of a tensor this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local(key: str, value: Tensor, parameter: Tensor) -> Tensor:
    """What of an entry this rank holds.

    Raises:
        PayloadError: it is not divided over the ranks as its parameter is.
    """
    if isinstance(parameter, DTensor) and value.dim():
        if not isinstance(value, DTensor) or value.placements != parameter.placements:
            raise PayloadError(f"the entry {key!r} is not divided over the ranks as its parameter is.")
    elif isinstance(value, DTensor):
        raise PayloadError(f"the entry {key!r} is a number that ranks share as a DTensor, which cannot be sent.")
    return _here(value).detach()


def _placed(key: str, value: Tensor, parameter: Tensor) -> Tensor:
    """A peer's entry, as the parameter is divided over the ranks.

    Raises:
        CorruptPayloadError: it has another shape than what is here of the parameter, or is not finite.
    """
    here = _here(parameter)
    if value.dim() and value.shape != here.shape:
        raise CorruptPayloadError(
            f"a peer's inner state has {key!r} of shape {tuple(value.shape)}, and the parameter has "
            f"{tuple(here.shape)} here."
        )
    if not torch.isfinite(value).all():
        raise CorruptPayloadError(f"a peer's inner state has {key!r} with numbers that are not finite.")
    if not isinstance(parameter, DTensor) or not value.dim():
        return value
    return DTensor.from_local(
        value.to(here.device), parameter.device_mesh, parameter.placements, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


def _require_entries(
    optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Any]], made: Mapping[tuple[int, int], Entries]
) -> None:
    """Every parameter has what the optimizer makes in its first step: what is missing would be missed in a later one.
    Parameters of one group, with as many dimensions, have the same."""
    index, known = 0, dict[tuple[int, int], Entries]()
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if index in state:
                alike, entries = (number, parameter.dim()), entries_of(state[index])
                if lacking := made[alike] - entries:
                    raise CorruptPayloadError(
                        f"a peer's inner state lacks {_names(lacking)!r} of a parameter, which "
                        f"{type(optimizer).__name__} needs."
                    )
                if known.setdefault(alike, entries) != entries:
                    raise CorruptPayloadError(
                        f"a peer's inner state has {_names(entries)!r} of one parameter and {_names(known[alike])!r} "
                        "of another one."
                    )
            index += 1


def _names(entries: Entries) -> list[str]:
    return sorted(name for name, _ in entries)


def _read(content: bytes) -> dict[str, Any]:
    try:
        tensors: dict[str, Any] = dict(load(content))
        (header_bytes,) = struct.unpack("<Q", content[:8])
        plain = json.loads(json.loads(content[8 : 8 + header_bytes])["__metadata__"]["plain"])
    except (SafetensorError, struct.error, *MALFORMED) as error:
        raise CorruptPayloadError(f"a peer's inner state cannot be read ({first_line(error)}).") from error
    if not isinstance(plain, dict) or not all(isinstance(value, KINDS) for value in plain.values()):
        raise CorruptPayloadError("a peer's inner state has values that are no numbers.")
    return tensors | plain


def _load(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    optimizer.load_state_dict({"state": dict(state), "param_groups": optimizer.state_dict()["param_groups"]})


def _trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _kinds(optimizer: torch.optim.Optimizer) -> list[str]:
    """Of an optimizer, or of those that it is made of (`diloco.training.optimizers.Chained`)."""
    return [type(each).__qualname__ for each in parts_of(optimizer)]
