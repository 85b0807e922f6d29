"""Learners of the reference trainer: one without an exchange, and the ranks of a process group."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco.config import TrainTable
from diloco.core.fragments import Layout
from diloco.core.method import Method
from diloco.errors import CheckpointError
from diloco.exchange.base import FlatModel, Overview, StartingState
from diloco.exchange.collective import Collective
from diloco.learner import Learner
from diloco.learner.models import fsdp_modules, reshard
from diloco.training.mixture import buffer_roles


class StandaloneLearner:
    """A learner without an exchange: the data-parallel baseline, the warm start, the isolated learner.

    It has the methods of `diloco.Learner` that the trainer calls. Every step counts as `tokens_per_step` tokens of the
    run: the baseline and the warm start train that many, and an isolated learner would together with its peers. So all
    of them stop after the same number of steps.
    """

    versions: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()
    layout: Layout | None = None
    drained = False
    lr_factor = 1.0
    dealt: tuple[int, ...] = ()

    def __init__(self, model: nn.Module, tokens_per_step: int) -> None:
        self._model = model
        self._tokens_per_step = tokens_per_step
        self.steps = 0
        self.run_tokens = 0

    def step(self, *, tokens: int) -> None:
        """Count one inner step."""
        self.steps += 1
        self.run_tokens += self._tokens_per_step

    def log(self, *, training_loss: float | None = None, held_out_loss: float | None = None) -> None:
        """Do nothing: no syncer receives losses."""

    def global_state_dict(self) -> Mapping[str, Tensor]:
        """The learner's own model, which is the global one without an exchange."""
        return {name: tensor.detach() for name, tensor in self._model.state_dict().items()}

    @contextmanager
    def global_model(self) -> Iterator[None]:
        """As of `Learner`; the learner's own model is the global one."""
        yield
        reshard(fsdp_modules(self._model))

    def state_dict(self, *, whole: bool = False) -> dict[str, Any]:
        """The counters, the same on every rank."""
        return {"type": "alone", "steps": self.steps, "run_tokens": self.run_tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue from saved counters. Raises CheckpointError for the state of a learner with an exchange."""
        if state.get("type") != "alone":
            raise CheckpointError("the checkpoint was written by a learner with an exchange; resume it with one")
        self.steps = int(state["steps"])
        self.run_tokens = int(state["run_tokens"])
        return True

    def metrics(self) -> dict[str, Any]:
        """No counters: nothing is exchanged."""
        return {}

    def finish(self, timeout_s: float = 0.0, *, ends_run: bool | None = None) -> bool:
        """Do nothing: no round waits for this learner, and its model is the final one."""
        return True

    def close(self) -> None:
        """Do nothing: there is no exchange to leave."""


AnyLearner = Learner | StandaloneLearner


class Holding(NamedTuple):
    """What a learner holds.

    Attributes:
        experts, whole: the arguments `holds_experts` and `whole` of `Learner`.
        is_dealt: the syncer has dealt it these experts.
        again: this learner was part of the run just before, with other experts.
    """

    experts: str | None = None
    whole: nn.Module | None = None
    is_dealt: bool = False
    again: bool = False


Attach = Callable[[nn.Module, torch.optim.Optimizer, int, int, Holding], AnyLearner]
"""Makes the learner that exchanges: (model, inner optimizer, inner steps done, tokens that the run has trained, what
the model holds)."""


Deal = Callable[[Method, int], tuple[int, ...]]
"""Asks the syncer which groups of experts this learner is to hold, of the run's method and how many (`Exchange.deal`).
"""


class WarmStartedCollective(Collective):
    """A process group whose run has already made `step` inner steps and trained `tokens` tokens."""

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
        """The state of `Collective`, with the tokens of the warm start."""
        return super().state_dict() | {"tokens_before": self._tokens_before}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        loaded = super().load_state_dict(state)
        self._tokens_before = state["tokens_before"]
        return loaded


def attach_to_group(process_group: dist.ProcessGroup, method: Method, table: TrainTable) -> Attach:
    """A function that makes each rank of a process group a learner by `method`. `table`: [train] of its run file."""

    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, tokens: int, _: Holding) -> AnyLearner:
        exchange = WarmStartedCollective(process_group, step=steps, tokens=tokens)
        # Data parallel over the tokens of all ranks moves every bias alike; otherwise merges average them.
        buffers = buffer_roles(model, "local" if method.exchanged == "gradients" else "average")
        return Learner(
            model, optimizer, method=method, exchange=exchange, trains=table.trains or None,
            trains_experts=table.trains_experts, overlap=table.overlap, buffers=buffers,
        )  # fmt: skip

    return attach
