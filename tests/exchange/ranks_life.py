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
from tests.exchange.worlds import TIMEOUT_S, join_world, write
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import diloco
from diloco import Collective, Learner, Method
from diloco.errors import DilocoError, UnknownRunError
from diloco.exchange.base import Overview
from diloco.exchange.group import ranks_in
from diloco.learner.island import island_of

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


WRAPPERS = ("compiled", "replicate", "by hand, group", "by hand, mesh")
"""Ways in which the ranks of a job average their gradients, besides DDP."""


class Trainer:
    """A learner of ranks 0 and 1, or of rank 2 alone."""

    def __init__(
        self, groups: Groups, method: Method, layout_fault: bool = False, kind: type[Collective] = Collective,
        wrapper: str = "",
    ) -> None:  # fmt: skip
        self.rank = dist.get_rank()
        self.average_by_hand = False
        self.groups = groups
        self.step = 0
        fault = "layout" if layout_fault and self.rank == 2 else ""
        self.module: Net = make_model(Scenario("", {}, fault=fault), 1 if fault else self.rank)
        self.optimizer = make_optimizer(Scenario("", {}), self.module)
        self.model: nn.Module = self.module
        ranks = self.wrap(wrapper) if self.rank < 2 else None
        exchange = kind(groups.learners, timeout_s=TIMEOUT_S)
        self.learner = Learner(self.model, self.optimizer, method=method, exchange=exchange, ranks=ranks)

    def wrap(self, wrapper: str) -> dist.ProcessGroup | DeviceMesh | None:
        """Make the job's ranks average their gradients. Returns what the learner is to be told."""
        match wrapper:
            case "":
                self.model = DistributedDataParallel(self.module, process_group=self.groups.job)
            case "compiled":
                self.model = torch.compile(
                    DistributedDataParallel(self.module, process_group=self.groups.job), backend="eager"
                )
            case "replicate":
                self.model = replicate(self.module, process_group=self.groups.job)
            case "by hand, group":
                self.average_by_hand = True
                return self.groups.job
            case "by hand, mesh":
                self.average_by_hand = True
                return self.groups.mesh
        return None

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            backward(self.model, self.rank, self.step)
            if self.average_by_hand:
                for gradient in (p.grad for p in self.module.parameters() if p.grad is not None):
                    dist.all_reduce(gradient.div_(2), group=self.groups.job)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.learner.step(tokens=tokens_of(self.rank))


class Groups:
    """Of the job, also as a mesh of two dimensions, and of the learners' first ranks."""

    def __init__(self) -> None:
        self.job = dist.new_group([0, 1])
        self.learners = dist.new_group([0, 2])
        self.mesh = DeviceMesh("cpu", [[0], [1]])


def trains(groups: Groups, method: Method, wrapper: str = "") -> Result:
    trainer = Trainer(groups, method, wrapper=wrapper)
    run_tokens = []
    for _ in range(STEPS):
        trainer.train(1)
        run_tokens.append(trainer.learner.run_tokens)
    result = finish(trainer.module, trainer.learner)
    result.facts["run_tokens"] = run_tokens
    trainer.learner.close()
    trainer.learner.close()
    result.facts["after close"] = error_of(trainer.learner.global_state_dict) + error_of(trainer.learner.state_dict)
    trainer.learner.metrics()
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
    """Another model or method on the other learner, another method or re-warm-up on a rank of the job; rank 1's
    checkpoint."""
    rank = dist.get_rank()
    method = METHODS["diloco"]
    wrong = replace(method, sync_every=7)
    facts = {
        "layout": error_of(lambda: Trainer(groups, method, layout_fault=True)),
        "method": error_of(lambda: Trainer(groups, wrong if rank == 2 else method)),
    }
    if rank < 2:
        facts["rank's method"] = error_of(lambda: Trainer(groups, wrong if rank == 1 else method))
        stage = nn.Linear(4, 3 + rank)
        exchange = Collective(groups.learners)
        facts["rank's model"] = error_of(
            lambda: Learner(stage, SGD(stage.parameters()), method=method, exchange=exchange, ranks=groups.job)
        )
        whole, other_exchange = nn.Linear(4, 3), Collective(groups.learners)
        facts["rank's re-warm-up"] = error_of(
            lambda: Learner(
                whole,
                SGD(whole.parameters()),
                method=method,
                exchange=other_exchange,
                ranks=groups.job,
                rewarm_steps=rank,
            )
        )
    dist.barrier()
    trainer = Trainer(groups, method)
    calls = {0: trainer.learner.global_state_dict, 1: trainer.learner.step, 2: trainer.learner.metrics}
    facts["rank 0 alone"] = error_of(calls[rank])
    trainer.learner.close()
    dist.barrier()
    trainer = Trainer(groups, method)
    trainer.train(1)
    older = trainer.learner.state_dict()
    trainer.train(2)
    state = trainer.learner.state_dict()
    trainer.learner.close()
    other = Trainer(groups, method)
    facts["another step"] = error_of(lambda: other.learner.load_state_dict(older if rank == 1 else state))
    other.learner.close()
    dist.barrier()
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


class Dials(Collective):
    """An exchange that takes each process for a learner, unless it is told what the ranks are."""

    dials_out = True


def says_what_the_ranks_are(groups: Groups) -> Result:
    """Every rank is a learner of its own, and says so; what is refused."""

    def attach(model: nn.Module, ranks: Any = None) -> Learner:
        exchange = Dials(timeout_s=TIMEOUT_S)
        return Learner(model, make_optimizer(Scenario("", {}), model), method=METHODS["diloco"], exchange=exchange,
                       ranks=ranks)  # fmt: skip

    facts = {"nothing": error_of(lambda: attach(Net())), "unknown": error_of(lambda: attach(Net(), "own"))}
    if dist.get_rank() < 2:
        wrapped = DistributedDataParallel(Net(), process_group=groups.job)
        facts["contradiction"] = error_of(lambda: attach(wrapped, "self"))
    if dist.get_rank() < 2:
        late = replicate(Net(), process_group=groups.job)
        late(torch.ones(1, 24)).sum().backward()  # it is made only now
        facts["after a forward pass"] = ranks_in(island_of(None, late, Dials()))
    models: dict[str, nn.Module] = {
        name: DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        for name, group in (("a", groups.job), ("b", groups.learners))
        if dist.get_rank() in ranks_in(group)
    }
    if dist.get_rank() == 0:
        everything = nn.ModuleDict(models)
        facts["two groups"] = error_of(lambda: island_of(None, everything, Dials()))
    if dist.get_rank() == 1:
        facts["not a member"] = error_of(lambda: attach(Net(), groups.learners))
    with attach(Net(), "self") as learner:
        facts["name"] = learner.name
    return Result({}, facts)


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
    for wrapper in WRAPPERS:
        write(directory, wrapper, rank, trains(groups, METHODS["diloco"], wrapper))
    for life in (
        refuses, says_what_the_ranks_are, diverges, is_drained, dials_from_rank_0_only, loses_the_other_learner,
    ):  # fmt: skip
        write(directory, life.__name__, rank, life(groups))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
