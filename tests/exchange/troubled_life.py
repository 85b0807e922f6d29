"""One rank of an island that gets into trouble: each life is one kind of it, over a syncer of its own.

    python -m tests.exchange.troubled_life DIRECTORY RANK WORLD_SIZE

DIRECTORY/lives.json says where each rank dials in each life.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.exchange.island_life import Net, full, set_gradients, shaped
from tests.exchange.scenarios import Result
from tests.exchange.worlds import TIMEOUT_S, join_world, write
from torch import nn

import diloco
from diloco.core.names import named_parameters
from diloco.errors import DilocoError
from diloco.exchange.base import Exchange

SHAPE, WORLD_SIZE = "fsdp, 2 ranks", 2
STEPS = 12


class Life:
    """A learner that trains: a rank of an island, or a single process.

    Attributes:
        store: over which the test and the ranks hear of each other.
        num_steps: that it has taken, as any incarnation.
    """

    def __init__(
        self, model: nn.Module, exchange: Exchange, store: dist.Store | None = None,
        method: diloco.Method | None = None, ranks: dist.ProcessGroup | None = None, buffers: Any = "refuse",
    ) -> None:  # fmt: skip
        self.model, self.store, self.num_steps = model, store, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        self.learner = diloco.Learner(
            model, self.optimizer, method=method, exchange=exchange, ranks=ranks, buffers=buffers
        )

    def train(self, last: int) -> None:
        while self.learner.steps < last:
            self.step()

    def step(self) -> None:
        self.compute()
        self.end_step()

    def end_step(self) -> None:
        self.num_steps += 1
        self.learner.step(tokens=5)

    def compute(self) -> None:
        set_gradients(self.model, 1, self.learner.steps + 1)
        for frozen in (each for each in self.model.parameters() if not each.requires_grad):
            frozen.grad = None
        self.optimizer.step()

    def say(self, what: str) -> None:
        assert self.store is not None
        self.store.set(f"{what}, rank {dist.get_rank()}", "")

    def wait_for(self, what: str) -> None:
        assert self.store is not None
        self.store.wait([what])

    def result(self) -> Result:
        self.learner.state_dict()  # answers that are on their way
        weights = full(self.learner.global_state_dict())
        own = {f"own.{name}": value for name, value in full(dict(named_parameters(self.model))).items()}
        return Result(weights | own, {**self.learner.metrics(), "num_steps": self.num_steps})


def error_of(act: Callable[[], object]) -> list[str]:
    try:
        act()
    except DilocoError as error:
        return [type(error).__name__, str(error)]
    return []


def trains(life: Life) -> Result:
    life.train(STEPS)
    return life.result()


def is_given_up(life: Life) -> Result:
    """Rank 1 is late for its boundary; rank 0 waits there, with news that it has taken in already."""
    life.train(4)
    life.wait_for("version 1 is here")
    life.compute()
    if dist.get_rank() == 1:
        life.wait_for("a new incarnation has started")
    life.say("goes on")
    life.end_step()
    life.train(STEPS)
    return life.result()


def is_replaced(life: Life) -> Result:
    """Another process joins under its name, between two steps."""
    life.train(4)
    life.say("trains")
    life.wait_for("replaced")

    def trains_on() -> None:
        while True:
            life.step()

    return Result({}, {"error": error_of(trains_on)})


def moves(life: Life) -> Result:
    """The address that it trains over goes away; there is another one."""
    life.train(4)
    life.say("trains")
    life.wait_for("the first address is gone")
    life.train(STEPS)
    return life.result()


def runs_asynchronously(life: Life) -> Result:
    life.wait_for("the other learner trains")
    while min(life.learner.versions) < 2 or life.learner.metrics()["merges"] < 2:
        life.step()
    return life.result()


def calls_different_methods(life: Life) -> Result:
    learner, rank = life.learner, dist.get_rank()
    facts = {
        "state": error_of((learner.state_dict, lambda: learner.load_state_dict({}))[rank]),
        "model": error_of((learner.global_state_dict, learner.state_dict)[rank]),
    }
    life.train(2)
    facts["step"] = error_of((life.step, learner.distributed_state_dict)[rank])
    life.train(STEPS)
    return Result({}, facts | {"versions": list(learner.versions)})


class Frozen(nn.Module):
    """A pipeline stage that trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 5).requires_grad_(False)


class UsersError(Exception):
    """Of the training loop."""


def fails_on_one_rank(life: Life) -> Result:
    """Rank 1 fails inside a boundary, after rank 0 has offered its part of a contribution and before it has."""
    rank, facts = dist.get_rank(), dict[str, Any]()
    try:
        with life.learner:
            life.train(3)
            if rank == 1:
                life.learner._exchange.offer = fails  # type: ignore[method-assign]
            life.train(STEPS)
    except (UsersError, DilocoError) as error:
        facts["error"] = type(error).__name__
    return Result({}, facts | {"threads": followers()})


def followers() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("diloco-follow")]


def fails(*_: object) -> None:
    raise UsersError


def attaches(exchange: Exchange, buffers: Any) -> Result:
    """As two stages of a pipeline, of which the second trains nothing."""
    stage = Net(seed=1) if dist.get_rank() == 0 else Frozen()
    life = Life(stage, exchange, ranks=dist.group.WORLD, buffers=buffers)
    with life.learner:
        return trains(life)


def attaches_twice(connect: Callable[[], Exchange]) -> Result:
    """The second time the run is there already."""
    buffers = {"frozen.bias": "local"}
    result, again = attaches(connect(), buffers), connect()
    result.facts["again"] = error_of(lambda: attaches(again, buffers))
    again.close()
    result.facts["threads"] = followers()
    return result


def is_refused(connect: Callable[[], Exchange]) -> Result:
    """What is wrong is on rank 1."""
    exchange = connect()
    facts = {
        "pattern": error_of(lambda: attaches(exchange, {"froze.*": "local"})),
        "answer": error_of(lambda: attaches(exchange, {"frozen.*": "local" if dist.get_rank() == 0 else "locl"})),
    }
    return Result({}, facts)


def joins_from_the_store(name: str, connect: Callable[..., Exchange], directory: Path) -> Result:
    """A run that others have trained, over a syncer that refers to its bucket."""
    store = dist.FileStore(str(directory / f"{name}.store"), -1)
    store.wait(["an object is not whole"])
    life = Life(shaped(Net(seed=3), SHAPE), connect(initialise=False))
    with life.learner:
        joined = {f"joined.{key}": value for key, value in full(life.learner.global_state_dict()).items()}
        life.train(life.learner.steps + STEPS)
        result = life.result()
    return Result(result.tensors | joined, result.facts)


LIVES: dict[str, Callable[[Life], Result]] = {
    "given up": is_given_up,
    "replaced": is_replaced,
    "cut": trains,
    "moves": moves,
    "decoupled": runs_asynchronously,
    "asynchronous": runs_asynchronously,
    "calls": calls_different_methods,
    "fails": fails_on_one_rank,
}
ATTACHES: dict[str, Callable[[Callable[[], Exchange]], Result]] = {"stages": attaches_twice, "refused": is_refused}
JOINS = ("damaged", "short", "gone")


def main(directory: Path, rank: int, world_size: int) -> None:
    join_world(directory, rank, world_size)
    for name, addresses in json.loads((directory / "lives.json").read_text()).items():
        connect = partial(
            diloco.connect, addresses[rank], run=name, learner="island", initialise=True, join_timeout_s=TIMEOUT_S
        )
        if name in JOINS:
            write(directory, name, rank, joins_from_the_store(name, connect, directory))
            continue
        if name in ATTACHES:
            write(directory, name, rank, ATTACHES[name](connect))
            continue
        exchange = connect()
        exchange.remind_after_s = 0.001
        life = Life(shaped(Net(seed=1), SHAPE), exchange, dist.FileStore(str(directory / f"{name}.store"), -1))
        write(directory, name, rank, LIVES[name](life))
        life.learner.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
