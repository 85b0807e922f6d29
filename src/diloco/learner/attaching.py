"""Attaching: check a model, its optimizers, a method and an exchange, join the run, and make the learner's driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from diloco.core.fragments import Experts
from diloco.core.method import Method
from diloco.exchange.base import Exchange, FlatModel, StartingState
from diloco.exchange.island import Ranks
from diloco.learner.compatibility import check_compatible, require_joiners
from diloco.learner.driver import LearnerDriver
from diloco.learner.experts import RoutedWork, UntrainedRows, chosen_experts
from diloco.learner.frozen import exchanged_tensors
from diloco.learner.island_model import described_by_all, static_of_all
from diloco.learner.master_weights import MasterWeightDetector
from diloco.learner.own_ranks import RanksOfLearner, island_of
from diloco.learner.partition import partition_of
from diloco.learner.pieces import Gather, read_dtensor
from diloco.learner.rewarm import Rewarm
from diloco.learner.roles import Buffers, ModelDescription, Static, described, require_answers
from diloco.learner.routing import RoutedTokens
from diloco.learner.state_dict import require_layout
from diloco.learner.tensors import LearnerTensors, trained_tensors
from diloco.learner.units import Units
from diloco.protocol.learner import LearnerCore
from diloco.protocol.rounds.base import Rules


def attach(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, method: Method | None, exchange: Exchange,
    ranks: RanksOfLearner | None, trains: Sequence[str] | None, trains_experts: str | None, overlap: int | None,
    buffers: Buffers | Mapping[str, Buffers], static: Static, gather: Gather | None,
    resume: Mapping[str, Any] | None, rewarm_steps: int | None,
) -> tuple[LearnerDriver, StartingState]:  # fmt: skip
    """Join the run; returns the driver, and the state that the learner starts from.

    Arguments:
        resume: the state that is loaded next; None: none is.
        others: as in `Learner`, whose errors it raises, before anything is joined where they can be known.
    """
    group = island_of(ranks, model, exchange)
    island = None if group is None else Ranks(exchange, group)
    own_exchange = exchange if island is None else island
    read = gather or read_dtensor
    with ExitStack() as undo:
        if island is not None:
            undo.callback(island.disconnect)  # otherwise the other ranks wait for this one
        agreed = own_exchange.method(method)

        def describe() -> ModelDescription:
            check_compatible(model, optimizers, agreed, exchange, gather)
            return described(model, agreed, buffers, static, read)

        whole = describe() if island is None else described_by_all(island.each("attaching", describe), island.group)
        answer = partial(require_answers, model, buffers, whole)
        if island is None:
            answer()
        else:
            island.each("the answers for buffers", answer)
        layout = whole.layout(agreed)
        if resume is not None and "layout" in resume:
            require_layout(resume["layout"], layout)
        units = Units(layout, read)
        held = exchanged_tensors(model, layout)
        partition = partition_of(layout, held, units, None if island is None else island.group)
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
        require_joiners(exchange, rewarm_steps)
        exchange.take(trained)
        routed = None
        if isinstance(agreed.fragments, Experts):
            routed = RoutedWork(RoutedTokens(model), layout, own_exchange)
            undo.callback(routed.close)

        def own_model() -> FlatModel:
            found = tensors.own_model()
            return found if island is None else replace(found, static=static_of_all(found.static, layout, island.group))

        opened = own_exchange.open(layout, agreed, own_model, overlap=overlap)
        core = LearnerCore(Rules.of(own, len(layout.fragments)), opened.versions, step=opened.step)
        master_weights = MasterWeightDetector(optimizers, layout, tensors.parameters, units)
        driver = LearnerDriver(
            agreed, layout, own_exchange, core, tensors, master_weights, trained, kept, routed, rewarm, opened
        )
        if any(opened.versions) and resume is None:
            rewarm.join()
        undo.pop_all()
    return driver, opened
