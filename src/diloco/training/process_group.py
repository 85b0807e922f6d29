"""Learners without a syncer: every rank that torchrun started is one, and they exchange over the process group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from diloco.core.fragments import Layout
from diloco.core.method import Method
from diloco.core.presets import DataParallel
from diloco.exchange.base import FlatModel, Overview, StartingState
from diloco.exchange.collective import Collective
from diloco.learner import Learner
from diloco.training.learners import AnyLearner
from diloco.training.loop import Attach, Together
from diloco.training.rank_group import RankGroup


class WarmStartedCollective(Collective):
    """A process group whose run has a beginning already: `step` inner steps and `tokens` tokens."""

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, step: int, tokens: int) -> None:
        super().__init__(process_group)
        self._step = step
        self._tokens_before = tokens

    def open(
        self, layout: Layout, method: Method, initial: Callable[[], FlatModel], *, overlap: int | None = None
    ) -> StartingState:
        opened = super().open(layout, method, initial, overlap=overlap)
        return replace(opened, step=self._step, run_tokens=self._tokens_before)

    @property
    def overview(self) -> Overview:
        overview = super().overview
        return replace(overview, run_tokens=self._tokens_before + (overview.run_tokens or 0))

    def state_dict(self) -> dict[str, Any]:
        """The state of `Collective`, with the tokens that came before."""
        return super().state_dict() | {"tokens_before": self._tokens_before}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        loaded = super().load_state_dict(state)
        self._tokens_before = state["tokens_before"]
        return loaded


def attach_over(
    process_group: dist.ProcessGroup, method: Method, trains: Sequence[str] = (), overlap: int | None = None
) -> Attach:
    """How one of the ranks becomes a learner by `method`; `trains` are name patterns of what it trains, none: all."""

    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, tokens: int) -> AnyLearner:
        exchange = WarmStartedCollective(process_group, step=steps, tokens=tokens)
        return Learner(model, optimizer, method=method, exchange=exchange, trains=trains or None, overlap=overlap)

    return attach


def together_over(process_group: dist.ProcessGroup, everyone: RankGroup) -> Together:
    """The warm start of such learners is data parallel, over the same group."""
    return Together(everyone, attach_over(process_group, DataParallel()))
