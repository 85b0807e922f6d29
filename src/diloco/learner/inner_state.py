"""The inner optimizer's state of one learner for another one: as bytes (safetensors), by the parameters' names.

    "0/layers.0.weight/exp_avg"    optimizer 0, parameter, entry: a tensor of the parameter's shape, or of one number

Another learner of the run has the same optimizers over the same names (`InnerState.digest`), though it may be on
another kind of device. Hyperparameters are each learner's own and are not part of it. What comes from a peer is checked
as a stranger's: names, shapes and dtypes against what is here, every number finite. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.tensor import DTensor

from diloco.core.healing import INNER_ELEMENT_BYTES, INNER_TENSOR_BYTES
from diloco.errors import ConfigError, CorruptPayloadError, PayloadError
from diloco.learner.schedule_free import is_in_train_mode

KINDS = (int, float, bool)
"""Of plain values beside tensors: counters of steps."""


class InnerState:
    """The state of one learner's optimizers.

    Arguments:
        optimizers: that train the model.
        parameters: by their names in the layout.

    Raises:
        ConfigError: it cannot be another learner's: a parameter is sharded or not the model's, or an optimizer is
            schedule-free.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, Tensor]) -> None:
        self._optimizers = optimizers
        names = {id(each): name for name, each in parameters.items()}
        self._names: list[list[str]] = []
        for optimizer in optimizers:
            trained = [each for group in optimizer.param_groups for each in group["params"]]
            if any(isinstance(each, DTensor) for each in trained):
                raise ConfigError(
                    "a peer's inner state needs whole parameters, and this model's are sharded (DTensor); use "
                    "source='global'."
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
        """Of the optimizers' kinds and of the names, shapes and dtypes of what they train: 64 hexadecimal digits."""
        described = [
            [_kinds(optimizer), [[name, *_form(each)] for name, each in zip(names, _trained(optimizer), strict=True)]]
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
                        tensors[key] = value.detach().to("cpu", copy=True).contiguous()
                    elif isinstance(value, KINDS):
                        plain[key] = value
                    elif value is not None:
                        raise PayloadError(
                            f"the entry {entry!r} of {type(optimizer).__name__} is a {type(value).__name__}, which "
                            "cannot be sent to a peer."
                        )
        return lambda: save(tensors, metadata={"plain": json.dumps(plain)})

    @property
    def most_bytes(self) -> int:
        """That the state of these optimizers can need."""
        trained = [each for optimizer in self._optimizers for each in _trained(optimizer)]
        return INNER_TENSOR_BYTES + sum(INNER_ELEMENT_BYTES * each.numel() + INNER_TENSOR_BYTES for each in trained)

    def load(self, content: bytes) -> None:
        """Take a peer's state, which `snapshot` has encoded. All of it is checked before any of it is taken.

        Raises:
            CorruptPayloadError: it is damaged, or not of these optimizers and parameters, or not finite.
        """
        found = _read(content)
        states: list[dict[int, dict[str, Any]]] = [{} for _ in self._optimizers]
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
                _check(key, value, parameter)
            states[number].setdefault(index, {})[entry] = value
        if not any(states):
            raise CorruptPayloadError("a peer's inner state is empty.")
        for optimizer, state in zip(self._optimizers, states, strict=True):
            _load(optimizer, state)


def clear(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Begin afresh: the optimizers have no state, and the hyperparameters that they have now."""
    for optimizer in optimizers:
        if optimizer.state:
            _load(optimizer, {})


def _check(key: str, value: Tensor, parameter: Tensor) -> None:
    if value.dim() and value.shape != parameter.shape:
        raise CorruptPayloadError(
            f"a peer's inner state has {key!r} of shape {tuple(value.shape)}, and the parameter has "
            f"{tuple(parameter.shape)}."
        )
    if not torch.isfinite(value).all():
        raise CorruptPayloadError(f"a peer's inner state has {key!r} with numbers that are not finite.")


def _read(content: bytes) -> dict[str, Any]:
    try:
        tensors: dict[str, Any] = dict(load(content))
        (header_bytes,) = struct.unpack("<Q", content[:8])
        plain = json.loads(json.loads(content[8 : 8 + header_bytes])["__metadata__"]["plain"])
    except (SafetensorError, ValueError, KeyError, TypeError, struct.error) as error:
        raise CorruptPayloadError(f"a peer's inner state cannot be read ({error}).") from error
    if not isinstance(plain, dict) or not all(isinstance(value, KINDS) for value in plain.values()):
        raise CorruptPayloadError("a peer's inner state has values that are no numbers.")
    return tensors | plain


def _load(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    optimizer.load_state_dict({"state": dict(state), "param_groups": optimizer.state_dict()["param_groups"]})


def _trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _kinds(optimizer: torch.optim.Optimizer) -> list[str]:
    """Of an optimizer, or of those that it is made of (`diloco.training.optimizers.Chained`)."""
    parts = getattr(optimizer, "optimizers", ()) or (optimizer,)
    return [type(each).__qualname__ for each in parts]


def _form(tensor: Tensor) -> tuple[list[int], str]:
    return list(tensor.shape), str(tensor.dtype)
