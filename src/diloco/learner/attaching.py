"""Attaching: check a model, its optimizers, a method and an exchange, join the run, and make the learner's driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from diloco.core.fragments import Experts
from diloco.core.method import Method
from diloco.errors import ConfigError
from diloco.exchange.base import Exchange, FlatModel, StartingState
from diloco.exchange.island import Ranks
from diloco.learner.driver import LearnerDriver
from diloco.learner.experts import RoutedTokens, RoutedWork, UntrainedRows, chosen_experts
from diloco.learner.frozen import exchanged_tensors
from diloco.learner.held import HeldExperts, held_experts, whole_model
from diloco.learner.island import RanksOfLearner, described_by_all, island_of, static_of_all
from diloco.learner.master_weights import MasterWeightDetector
from diloco.learner.optimizers import require_hooks, require_model_parameters
from diloco.learner.partition import partition_of
from diloco.learner.pieces import Gather, Units, read_dtensor
from diloco.learner.rewarm import Rewarm
from diloco.learner.roles import Buffers, ModelDescription, Static, described, require_answers
from diloco.learner.state_dict import require_layout
from diloco.learner.tensors import LearnerTensors, trained_tensors
from diloco.protocol.learner import LearnerCore
from diloco.protocol.rounds.base import Rules

MASTER_WEIGHTS = ("master_param", "master_params", "fp32_params", "param_fp32")
"""Usual names of an optimizer's own copies of parameters, as attributes or in its state."""


def attach(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, method: Method | None, exchange: Exchange,
    ranks: RanksOfLearner | None, trains: Sequence[str] | None, trains_experts: str | None, holds_experts: str | None,
    whole: nn.Module | None, overlap: int | None, buffers: Buffers | Mapping[str, Buffers], static: Static,
    gather: Gather | None, resume: Mapping[str, Any] | None, rewarm_steps: int | None,
) -> tuple[LearnerDriver, StartingState]:  # fmt: skip
    """Join the run; returns the driver, and the state that the learner starts from.

    Arguments:
        resume: the state that is loaded next; None: none is.
        others: as in `Learner`, whose errors it raises, before anything is joined where they can be known.
    """
    _require_exchange(exchange)
    _require_method(method)
    group = island_of(ranks, model, exchange)
    island = None if group is None else Ranks(exchange, group)
    own_exchange = exchange if island is None else island
    read = gather or read_dtensor
    with ExitStack() as undo:
        if island is not None:
            undo.callback(island.disconnect)  # otherwise the other ranks wait for this one
        agreed = own_exchange.method(method)
        held = None if holds_experts is None else held_experts(holds_experts, agreed, exchange, trains_experts)
        _require_part(whole, held, island)

        def describe() -> ModelDescription:
            _check_compatible(model, optimizers, agreed, exchange, gather)
            return described(model, agreed, buffers, static, read)

        found = describe() if island is None else described_by_all(island.each("attaching", describe), island.group)
        answer = partial(require_answers, model, buffers, found)
        if island is None:
            answer()
        else:
            island.each("the answers for buffers", answer)
        of_run = (found if held is None else held.described(found, agreed)).layout(agreed)
        layout = of_run if held is None else held.part(of_run)
        if resume is not None and "layout" in resume:
            require_layout(resume["layout"], layout)
        units = Units(layout, read)
        ranks_group = None if island is None else island.group
        partition = partition_of(layout, exchanged_tensors(model, layout), units, ranks_group)
        tensors = LearnerTensors(model, layout, agreed, partition, units)
        experts = chosen_experts(trains_experts, layout, agreed)
        trained = trained_tensors(layout, trains, experts, agreed)
        untrained = [
            place.spec
            for fragment, indices in zip(layout.fragments, trained, strict=True)
            for index, place in enumerate(fragment.tensors)
            if indices is not None and index not in indices
            if place.spec.origin is not None or (experts is not None and Experts.expert_of(place.spec) is not None)
        ]
        kept = UntrainedRows(tensors.parameters, untrained, units, optimizers)
        own = agreed if overlap is None else agreed.with_own_overlap(overlap)
        rewarm = Rewarm(optimizers, rewarm_steps)
        if island is not None:
            island.require_same("rewarm_steps", rewarm_steps)
            island.require_same("trains_experts", trains_experts)
            island.require_same("holds_experts", holds_experts)
        _require_joiners(exchange, rewarm_steps)
        fragments = None if held is None else held.fragments(len(layout.fragments))
        if fragments is not None:
            trained = [each if index in fragments else () for index, each in enumerate(trained)]
        exchange.take(trained, fragments, has_whole=fragments is None or whole is not None)
        routed = None
        if isinstance(agreed.fragments, Experts):
            routed = RoutedWork(RoutedTokens(model), layout, own_exchange)
            undo.callback(routed.close)

        def own_model() -> FlatModel:
            if held is not None:
                return whole_model(
                    whole, of_run, lambda it: described(it, agreed, buffers, static, read_dtensor).layout(agreed)
                )
            mine = tensors.own_model()
            return mine if island is None else replace(mine, static=static_of_all(mine.static, layout, island.group))

        opened = own_exchange.open(of_run, agreed, own_model, overlap=overlap)
        core = LearnerCore(Rules.of(own, len(layout.fragments)), opened.versions, step=opened.step)
        master_weights = MasterWeightDetector(optimizers, layout, tensors.parameters, units)
        driver = LearnerDriver(
            agreed, layout, own_exchange, core, tensors, master_weights, trained, kept, routed, rewarm, opened
        )
        if max(opened.versions) > 0 and resume is None:
            rewarm.join()
        undo.pop_all()
    return driver, opened


def _require_exchange(exchange: object) -> None:
    """Raise ConfigError unless `exchange` is an exchange; an address is none."""
    if not isinstance(exchange, Exchange):
        raise ConfigError(
            f"Learner(exchange={exchange!r}) is not an exchange; pass what diloco.connect(…) or Collective(…) "
            "returns, or what run_local gives."
        )


def _require_method(method: object) -> None:
    """Raise ConfigError unless `method` is a method or None; a preset that was not called is none."""
    if method is not None and not isinstance(method, Method):
        preset = getattr(method, "__name__", None)
        raise ConfigError(
            f"Learner(method={preset or repr(method)}) is not a method; call a preset, which returns one: "
            f"diloco.{preset or 'DiLoCo'}(…)."
        )


def _require_part(whole: nn.Module | None, held: HeldExperts | None, island: Ranks | None) -> None:
    """Raise ConfigError for a whole model that has no effect."""
    if whole is not None and held is None:
        raise ConfigError("Learner(whole=…) has no effect on a learner that holds the whole model; leave it out.")
    if whole is not None and island is not None:
        raise ConfigError(
            "a learner of several ranks that holds a part of the experts cannot initialise the run; let a learner of "
            "one process do it, and leave whole out."
        )


def _require_joiners(exchange: Exchange, rewarm_steps: int | None) -> None:
    """Raise ConfigError for a re-warm-up that no learner of this exchange ever takes."""
    if rewarm_steps and not exchange.joins_late:
        raise ConfigError(
            f"rewarm_steps={rewarm_steps} has no effect over {type(exchange).__name__}: all of its learners start a "
            "run together or resume it, so none joins late and re-warms; leave rewarm_steps out."
        )


def _check_compatible(
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
            if not isinstance(optimizer, torch.optim.SGD) or any(group["momentum"] for group in optimizer.param_groups):
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


def _refuse_master_weights(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that trains tensors of its own, under one of their usual names."""
    for attribute in MASTER_WEIGHTS:
        if any(attribute in state for state in optimizer.state.values()) or hasattr(optimizer, attribute):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps private master weights ({attribute!r}), which adopting a global "
                "value would not reach; use an optimizer that trains the model's own parameters."
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
