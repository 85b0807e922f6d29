"""A learner's models as one module, and checks that the module keeps the parameters that were attached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NoReturn

from torch import nn
from torch.distributed.fsdp import FSDPModule

from diloco.core.fragments import describe
from diloco.core.names import Parts, buffer_holders, named_buffers, named_parameters
from diloco.errors import ConfigError, LayoutError


def joined(model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module]) -> nn.Module:
    """One module that contains all models. A model given by name contributes tensors with that name as prefix.

    Raises:
        ConfigError: there is no model, it is no module, a name cannot be that of a submodule, or two parts hold a
            tensor of one name.
    """
    if isinstance(model, nn.Module):
        return model
    if not model or not isinstance(model, Mapping | Sequence):
        raise ConfigError(f"Learner(model={model!r}) is not a model; pass a module, modules by name, or parts of one.")
    if isinstance(model, Sequence):
        return _whole(model)
    root = nn.Module()
    for name, each in model.items():
        try:
            root.add_module(name, each)
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"Learner(model={{{name!r}: …}}) has an invalid name of a model: {error}; choose another."
            ) from error
    return root


def _whole(parts: Sequence[nn.Module]) -> Parts:
    seen: set[str] = set()
    for part in parts:
        if not isinstance(part, nn.Module):
            raise ConfigError(f"Learner(model=[…]) has a {type(part).__name__}; pass the parts of a model, as modules.")
        names = {spec.name for spec in chain(*describe(part))}
        if twice := seen & names:
            raise ConfigError(
                f"two parts of the model have a tensor {min(twice)!r}, so one of them would not be exchanged; pass "
                "parts with the names that they have in the whole model, or different models as {name: model}."
            )
        seen |= names
    return Parts(parts)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Those whose parameters are sharded by FSDP2."""
    return [each for each in model.modules() if isinstance(each, FSDPModule)]


def reshard(modules: Sequence[FSDPModule]) -> None:
    """Replace whole parameters by their shards, which the next forward pass gathers again.

    Between the passes parameters are sharded, except in the root module after a forward pass without a backward pass,
    as in an evaluation. Whole tensors are then in the place of the shards, and the next forward pass uses them,
    whatever was written to the shards meanwhile.
    """
    for module in modules:
        module.reshard()


class Registered:
    """The parameters of a model when the learner was attached, which are the ones exchanged, and the modules of its
    persistent buffers. Training may replace a buffer, but not the module that holds it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = dict(named_parameters(model))
        self._holders = buffer_holders(model)

    def check(self) -> None:
        """Compare the model's parameters with those at attaching, by identity, and its buffers by their modules. A
        buffer without floating-point values may be added (`learner.frozen`).

        Raises:
            LayoutError: a parameter or buffer was added, replaced or removed; names it.
        """
        now, holders = dict(named_parameters(self._model)), buffer_holders(self._model)
        for name, parameter in self._parameters.items():
            if now.get(name) is not parameter and parameter.requires_grad:
                _refuse(f"parameter {name!r}", "replaced by another tensor" if name in now else "removed")
        for name, module in self._holders.items():
            if holders.get(name) is not module:
                _refuse(f"buffer {name!r}", "replaced with its module" if name in holders else "removed")
        for name in (each for each in now if each not in self._parameters):
            _refuse(f"parameter {name!r}", "added")
        for name, buffer in named_buffers(self._model):
            if name in holders and name not in self._holders and buffer.is_floating_point():
                _refuse(f"buffer {name!r}", "added")


def _refuse(what: str, happened: str) -> NoReturn:
    raise LayoutError(
        f"{what} was {happened} after the learner was attached, so that its values would not be exchanged; complete "
        "the model before attaching and change tensors in place, or close this learner and attach a new one."
    )
