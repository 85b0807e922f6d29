"""Checks, before a learner joins, that its model, optimizers, method and exchange work together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from diloco.core.method import Method
from diloco.errors import ConfigError
from diloco.exchange.base import Exchange
from diloco.learner.optimizers import require_hooks, require_model_parameters
from diloco.learner.pieces import Gather

MASTER_WEIGHTS = ("master_param", "master_params", "fp32_params", "param_fp32")


def require_exchange(exchange: object) -> None:
    """Raise ConfigError unless `exchange` is an exchange; an address is none."""
    if not isinstance(exchange, Exchange):
        raise ConfigError(
            f"Learner(exchange={exchange!r}) is no exchange; pass what diloco.connect(…) or Collective(…) "
            "returns, or what run_local gives."
        )


def require_method(method: object) -> None:
    """Raise ConfigError unless `method` is a method or None; a preset that was not called is none."""
    if method is not None and not isinstance(method, Method):
        preset = getattr(method, "__name__", None)
        raise ConfigError(
            f"Learner(method={preset or repr(method)}) is no method; call a preset, which returns one: "
            f"diloco.{preset or 'DiLoCo'}(…)."
        )


def require_joiners(exchange: Exchange, rewarm_steps: int | None) -> None:
    """Raise ConfigError for a re-warm-up that no learner of this exchange ever takes."""
    if rewarm_steps and not exchange.joins_late:
        raise ConfigError(
            f"rewarm_steps={rewarm_steps} has no effect over {type(exchange).__name__}: all of its learners start a "
            "run together or resume it, so none joins late and re-warms; leave rewarm_steps out."
        )


def check_compatible(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], method: Method, exchange: Exchange,
    gather: Gather | None,
) -> None:  # fmt: skip
    """Refuse a combination that cannot work.

    Raises:
        ConfigError: names the parts that do not fit, and what to use instead.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if gather is None and any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError(
            "FullyShardedDataParallel (FSDP1) flattens the parameters; use fully_shard (FSDP2; fsdp_version=2 in "
            "accelerate and transformers), or say with gather=… which piece of each parameter a rank holds "
            "(docs/islands.md)."
        )
    _check_tensors(model)
    require_model_parameters(optimizers, set(map(id, model.parameters())))
    for optimizer in optimizers:
        _refuse_master_weights(optimizer)
    if method.exchanged == "parameters":
        for optimizer in optimizers:
            if not _is_stateless(optimizer):
                raise ConfigError(
                    "averaging parameters at every step equals data parallel only without optimizer state, and "
                    f"{type(optimizer).__name__} keeps some; use DataParallel(average='gradients'), or DiLoCo."
                )
    if method.exchanged != "gradients":
        return
    if not exchange.gradients:
        raise ConfigError(
            "a syncer or an elastic group cannot run DataParallel on gradients: only the learners would hold the "
            "model, so a lost learner could not rejoin; use Collective over a process group, or a method that "
            "exchanges outer gradients."
        )
    require_hooks(optimizers[0])
    if len(optimizers) > 1:
        raise ConfigError(
            f"{method.name} exchanges all gradients before the optimizer's step, and {len(optimizers)} optimizers may "
            "step at different times; join them into one (diloco.training.optimizers.Chained), or use a method that "
            "exchanges outer gradients."
        )


def _check_tensors(model: nn.Module) -> None:
    """Refuse tensors that have no values yet, or that only TorchScript can access."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ConfigError(
            "the model holds a ScriptModule, whose tensors only TorchScript can access; attach to the model as it was "
            "before torch.jit.script, or use torch.compile."
        )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"{name!r} has no shape yet, as it belongs to a lazy module; run one batch through the model before "
                "the learner attaches."
            )
        if tensor.is_meta:
            raise ConfigError(
                f"{name!r} is on the meta device, where it has no values; call model.to_empty(device=…) and initialise "
                "it before the learner attaches."
            )


def _refuse_master_weights(optimizer: torch.optim.Optimizer) -> None:
    for attribute in MASTER_WEIGHTS:
        if any(attribute in state for state in optimizer.state.values()) or hasattr(optimizer, attribute):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps private master weights ({attribute!r}), which adopting a global "
                "value would not reach; use an optimizer that trains the model's own parameters."
            )


def _is_stateless(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.SGD) and all(group["momentum"] == 0 for group in optimizer.param_groups)
