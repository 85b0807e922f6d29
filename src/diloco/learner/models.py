"""The models that a learner trains as one module, and whether they still hold the parameters that it exchanges."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from diloco.core.fragments import describe
from diloco.core.names import Parts, buffer_holders, named_buffers, named_parameters
from diloco.errors import ConfigError, LayoutError


def joined(model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module]) -> nn.Module:
    """One module that holds all models. The names of a model's tensors begin with its own name, where it has one.

    Raises:
        ConfigError: there is no model, it is no module, a name cannot be that of a submodule, or two parts hold a
            tensor of one name.
    """
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, Mapping | Sequence):
        raise ConfigError(f"Learner(model=…) is a {type(model).__name__}; pass a module, or modules by name.")
    if not model:
        raise ConfigError(f"Learner(model={model}) has no model; pass a model, models by name, or the parts of one.")
    if isinstance(model, Sequence):
        return _whole(model)
    root = nn.Module()
    for name, each in model.items():
        try:
            root.add_module(name, each)
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"Learner(model={{{name!r}: …}}) is no name of a model: {error}; choose another."
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


def listed(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> tuple[torch.optim.Optimizer, ...]:
    """All optimizers.

    Raises:
        ConfigError: there is none, or one is no optimizer.
    """
    optimizers = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    if not optimizers:
        raise ConfigError("Learner(optimizer=[]) has no optimizer; pass those that train the model.")
    for each in optimizers:
        if not hasattr(each, "param_groups"):
            raise ConfigError(
                f"Learner(optimizer=…) has a {type(each).__name__}, which is no optimizer; pass those that train the "
                "model."
            )
    return optimizers


def require_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError unless the optimizer calls hooks at its steps, as those of torch do."""
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise ConfigError(
            f"{type(optimizer).__name__} calls no hooks at its steps, as a wrapper around an optimizer may not; give "
            "Learner the optimizer inside it, or call learner.step() after each step, with outer gradients exchanged."
        )


class FullyShardedModules:
    """The modules of a model that `fully_shard` (FSDP2) was applied to.

    Between the passes their parameters are sharded, but for those of the root module after a forward pass that no
    backward pass has followed, as in an evaluation. These are whole: other tensors in the place of the shards, which
    the next forward pass takes as they are, whatever was written to the shards meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        kind: type | None = getattr(fsdp, "FSDPModule", None)  # Any: torch's own class is no nn.Module
        self._modules: list[Any] = [] if kind is None else [each for each in model.modules() if isinstance(each, kind)]

    def reshard(self) -> None:
        """Put the shards into their places; the next forward pass gathers them anew."""
        for module in self._modules:
            module.reshard()


class Registered:
    """The parameters of a model as they were when the learner was attached: only these are exchanged.

    Also which modules hold its persistent buffers. Training may replace a buffer, but not the module around it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = dict(named_parameters(model))
        self._holders = buffer_holders(model)

    def check(self) -> None:
        """Compare the model's parameters with those at attaching, by identity, and its buffers by their modules.

        Raises:
            LayoutError: a parameter or buffer was added, replaced or removed; names it.
        """
        now = dict(named_parameters(self._model))
        for name, parameter in self._parameters.items():
            if now.get(name) is not parameter and parameter.requires_grad:
                what = "replaced by another tensor" if name in now else "removed"
                raise LayoutError(
                    f"parameter {name!r} was {what} after the learner was attached, so training would no longer be "
                    "exchanged; change parameters in place, or close this learner and attach a new one."
                )
        for name in now:
            if name not in self._parameters:
                raise LayoutError(
                    f"parameter {name!r} was added after the learner was attached, so it would never be exchanged; "
                    "complete the model first, or close this learner and attach a new one."
                )
        self._check_buffers()

    def _check_buffers(self) -> None:
        """A buffer without floating-point values may be added: it would be the learner's own (`learner.frozen`)."""
        now = buffer_holders(self._model)
        for name, module in self._holders.items():
            if now.get(name) is not module:
                raise LayoutError(
                    f"buffer {name!r} was {'replaced with its module' if name in now else 'removed'} after the learner "
                    "was attached; keep it, or close this learner and attach a new one."
                )
        for name, buffer in named_buffers(self._model):
            if name in now and name not in self._holders and buffer.is_floating_point():
                raise LayoutError(
                    f"buffer {name!r} was added after the learner was attached, so it would be neither exchanged nor "
                    "compared; complete the model first, or close this learner and attach a new one."
                )
