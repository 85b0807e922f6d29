"""One of three processes: ranks 0 and 1 are a DDP job and one learner, rank 2 is another.

    python -m tests.exchange.ranks_life DIRECTORY RANK WORLD_SIZE

The two learners exchange over a group of ranks 0 and 2, which rank 1 has no part in.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.exchange.scenarios import Net, Result, Scenario, finish, make_model, make_optimizer
from tests.exchange.worlds import join_world, write
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco import Collective, Learner, Method
from diloco.errors import DilocoError, UnknownRunError
from diloco.exchange.base import Overview

STEPS = 10
METHODS = {
    "diloco": diloco.DiLoCo(sync_every=3),
    "diloco, tokens": diloco.DiLoCo(sync_every=3, overlap=3, weight="tokens", codec="int4", error_feedback=True),
    "streaming": diloco.StreamingDiLoCo(
        sync_every=4, overlap=2, fragments=diloco.ByLayer(layers=2), error_feedback=True
    ),
    "data parallel": diloco.DataParallel(codec="int8"),
}
RESUMED = "streaming"


def tokens_of(rank: int) -> int:
    return 10 + 7 * rank


def backward(model: nn.Module, rank: int, step: int, scale: float = 1.0) -> None:
    """On data that only this rank has."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x, y = torch.randn(6, 24, generator=generator), torch.randn(6, 33, generator=generator)
    ((model(x) - y).square().mean() * scale).backward()


class Trainer:
    """A learner of ranks 0 and 1, or of rank 2 alone."""

    def __init__(
        self, groups: Groups, method: Method, layout_fault: bool = False, kind: type[Collective] = Collective
    ) -> None:
        self.rank = dist.get_rank()
        self.step = 0
        fault = "layout" if layout_fault and self.rank == 2 else ""
        self.module: Net = make_model(Scenario("", {}, fault=fault), 1 if fault else self.rank)
        self.optimizer = make_optimizer(Scenario("", {}), self.module)
        self.model: nn.Module = self.module
        if self.rank < 2:
            self.model = DistributedDataParallel(self.module, process_group=groups.job)
        exchange = kind(groups.learners, timeout_s=60)
        self.learner = Learner(self.model, self.optimizer, method=method, exchange=exchange)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            backward(self.model, self.rank, self.step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.learner.step(tokens=tokens_of(self.rank))


class Groups:
    """Of the DDP job, and of the learners' first ranks."""

    def __init__(self) -> None:
        self.job = dist.new_group([0, 1])
        self.learners = dist.new_group([0, 2])


def trains(groups: Groups, method: Method) -> Result:
    trainer = Trainer(groups, method)
    run_tokens = []
    for _ in range(STEPS):
        trainer.train(1)
        run_tokens.append(trainer.learner.run_tokens)
    result = finish(trainer.module, trainer.learner)
    result.facts["run_tokens"] = run_tokens
    trainer.learner.close()
    trainer.learner.close()
    return result


def resumes(groups: Groups, method: Method) -> Result:
    """After step 5, every rank from its own checkpoint."""
    trainer = Trainer(groups, method)
    trainer.train(5)
    saved, optimizer = trainer.learner.state_dict(), trainer.optimizer.state_dict()
    trainer.learner.close()
    other = Trainer(groups, method)
    other.optimizer.load_state_dict(optimizer)
    other.learner.load_state_dict(saved)
    other.step = 5
    other.train(STEPS - 5)
    result = finish(other.module, other.learner)
    other.learner.close()
    return result


def error_of(act: Any) -> list[str]:
    try:
        act()
    except DilocoError as error:
        return [type(error).__name__, str(error)]
    return []


def refuses(groups: Groups) -> Result:
    """Another model or method on the other learner, another method on a rank of the job; rank 1's checkpoint."""
    rank = dist.get_rank()
    method = METHODS["diloco"]
    wrong = replace(method, sync_every=7)
    facts = {
        "layout": error_of(lambda: Trainer(groups, method, layout_fault=True)),
        "method": error_of(lambda: Trainer(groups, wrong if rank == 2 else method)),
    }
    if rank < 2:
        facts["rank's method"] = error_of(lambda: Trainer(groups, wrong if rank == 1 else method))
    dist.barrier()
    trainer = Trainer(groups, method)
    trainer.train(3)
    state = trainer.learner.state_dict()
    trainer.learner.close()
    if rank < 2:
        other_ranks = [state]
        dist.broadcast_object_list(other_ranks, group=groups.job, group_src=1)
        state = other_ranks[0]
    other = Trainer(groups, method)
    facts["checkpoint"] = error_of(lambda: other.learner.load_state_dict(state))
    other.learner.close()
    return Result({}, facts)


def diverges(groups: Groups) -> Result:
    """NaN in the job's model; rank 0 finds it when it encodes, and all ranks hear of it."""
    trainer = Trainer(groups, METHODS["streaming"])
    trainer.train(5)
    if trainer.rank < 2:
        with torch.no_grad():
            trainer.module.head.bias[3] = torch.nan
    error = error_of(lambda: trainer.train(4))
    trainer.learner.close()
    return Result({}, {"error": error})


class NoPlace(Collective):
    """An exchange whose rank 0 hears that the run's pool has no place for its learner."""

    @property
    def overview(self) -> Overview:
        return replace(super().overview, drained=dist.get_rank() == 0)


def is_drained(groups: Groups) -> Result:
    trainer = Trainer(groups, METHODS["diloco"], kind=NoPlace)
    drained = []
    for _ in range(6):
        trainer.train(1)
        drained.append(trainer.learner.drained)
    trainer.learner.close()
    return Result({}, {"drained": drained})


class NoSuchRun(Collective):
    """An exchange that is refused when it asks for its run."""

    def method(self, given: Method | None) -> Method:
        raise UnknownRunError(f"rank {dist.get_rank()} found no run.")


def dials_from_rank_0_only(groups: Groups) -> Result:
    if dist.get_rank() == 2:
        return Result({}, {})
    trainer_model = DistributedDataParallel(Net(), process_group=groups.job)
    optimizer = make_optimizer(Scenario("", {}), trainer_model)
    return Result({}, {"error": error_of(lambda: Learner(trainer_model, optimizer, exchange=NoSuchRun()))})


def loses_the_other_learner(groups: Groups) -> Result:
    """The last one: the process of the other learner dies."""
    trainer = Trainer(groups, METHODS["diloco"])
    trainer.train(3)
    if trainer.rank == 2:
        os._exit(9)
    error = error_of(lambda: trainer.train(3))
    trainer.learner.close()
    return Result({}, {"error": error})


def main(directory: Path, rank: int, world_size: int) -> None:
    join_world(directory, rank, world_size)
    groups = Groups()
    for name, method in METHODS.items():
        write(directory, name, rank, trains(groups, method))
    write(directory, "resumed", rank, resumes(groups, METHODS[RESUMED]))
    for life in (refuses, diverges, is_drained, dials_from_rank_0_only, loses_the_other_learner):
        write(directory, life.__name__, rank, life(groups))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
