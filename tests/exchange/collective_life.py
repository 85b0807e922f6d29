"""One process of the world that test_collective.py looks at.

python -m tests.exchange.collective_life DIRECTORY RANK WORLD_SIZE
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tests.exchange.scenarios import Net, Result, Scenario, inner_gradient, make_model, make_optimizer
from tests.exchange.worlds import TIMEOUT_S, join_world, write
from torch import nn

import diloco
from diloco import Collective, Learner, Method
from diloco.core.quorum import AllLive
from diloco.errors import DilocoError

STREAMING = diloco.StreamingDiLoCo(sync_every=4, overlap=2, fragments=diloco.ByLayer(layers=2), offsets=(1, 3, 4))


class Trainer:
    """A model, its optimizer and its learner over a new Collective."""

    def __init__(self, rank: int, method: Method, steps: int = 0, overlap: int | None = None) -> None:
        scenario = Scenario("", method.to_dict())
        self.rank = rank
        self.step = 0
        self.model: Net = make_model(scenario, rank)
        self.optimizer = make_optimizer(scenario, self.model)
        self.exchange = Collective(timeout_s=TIMEOUT_S)
        self.learner = Learner(self.model, self.optimizer, method=method, exchange=self.exchange, overlap=overlap)
        self.train(steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            inner_gradient(self.model, self.rank, self.step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.learner.step(tokens=10 + 7 * self.rank)


def error_of(act: Any) -> list[str]:
    try:
        act()
    except DilocoError as error:
        return [type(error).__name__, str(error)]
    return []


def counts_the_same_run_tokens_at_every_step(rank: int) -> dict[str, Any]:
    """With the user's own collectives in between."""
    trainer = Trainer(rank, STREAMING)
    heard, sums = [], []
    for step in range(1, 13):
        trainer.train(1)
        heard.append(trainer.learner.run_tokens)
        own = torch.tensor([rank + step])
        dist.all_reduce(own)
        sums.append(int(own))
    trainer.learner.close()
    return {"run_tokens": heard, "sums": sums}


def counts_the_same_run_tokens_with_overlaps_of_their_own(rank: int) -> dict[str, Any]:
    """Learner 0 has its answers earlier than the method says, and learner 1 later."""
    trainer = Trainer(rank, STREAMING, overlap={0: 1, 1: 4}.get(rank))
    heard = []
    for _ in range(12):
        trainer.train(1)
        heard.append(trainer.learner.run_tokens)
    trainer.learner.close()
    return {"run_tokens": heard}


def counts_bytes(rank: int) -> dict[str, Any]:
    trainer = Trainer(rank, diloco.DiLoCo(sync_every=2, codec=("int8", "bf16")), steps=4)
    num_bytes = dict(trainer.exchange.num_bytes)
    trainer.learner.close()
    return {"num_bytes": num_bytes, "num_parameters": trainer.learner.layout.num_parameters}


def refuses_methods_that_need_a_syncer(rank: int) -> dict[str, Any]:
    method = diloco.DiLoCo(sync_every=2)
    return {
        "wait": error_of(lambda: Trainer(rank, replace(method, wait=False))),
        "quorum": error_of(lambda: Trainer(rank, replace(method, quorum=AllLive(at_least=4)))),
    }


def refuses_a_re_warm_up(rank: int) -> dict[str, Any]:
    """All learners begin together, so none ever re-warms. To ask for none has its effect."""
    method = diloco.DiLoCo(sync_every=2)
    scenario = Scenario("", method.to_dict())
    model = make_model(scenario, rank)
    optimizer = make_optimizer(scenario, model)

    def attach(rewarm_steps: int) -> None:
        Learner(model, optimizer, method=method, exchange=Collective(), rewarm_steps=rewarm_steps).close()

    return {"five": error_of(lambda: attach(5)), "none": error_of(lambda: attach(0))}


def refuses_to_be_used_twice(rank: int) -> dict[str, Any]:
    trainer = Trainer(rank, diloco.DiLoCo(sync_every=2), steps=2)

    def again() -> None:
        Learner(trainer.model, trainer.optimizer, method=trainer.learner.method, exchange=trainer.exchange)

    open_, state = error_of(again), trainer.exchange.state_dict()
    trainer.learner.close()
    return {
        "open": open_, "closed": error_of(again), "state": error_of(lambda: trainer.exchange.load_state_dict(state))
    }  # fmt: skip


def refuses_checkpoints_that_do_not_fit(rank: int) -> dict[str, Any]:
    """Swapped between ranks; of another number of learners; not of the same moment. Each on a new exchange."""
    method = diloco.DiLoCo(sync_every=2)
    trainer = Trainer(rank, method, steps=2)
    early = trainer.exchange.state_dict()
    trainer.train(2)
    late = trainer.exchange.state_dict()
    trainer.learner.close()
    swapped = early | {"rank": {0: 1, 1: 0}.get(rank, rank)}
    states = {"swapped": swapped, "larger": early | {"world_size": 4}, "moments": late if rank == 1 else early}
    errors = {}
    for name, state in states.items():
        other = Trainer(rank, method)
        errors[name] = error_of(lambda other=other, state=state: other.exchange.load_state_dict(state))
        other.learner.close()
    return errors


def trains_parts_of_many_tensors(rank: int) -> dict[str, Any]:
    """Which of ten thousand tensors a learner trains is more than a frame holds. By the last digit of its name."""
    model = nn.Module()
    for i in range(10_000):
        model.register_parameter(f"w{i}", nn.Parameter(torch.zeros(1)))
    trains = {1: ["w*[0369]"], 2: ["w*[124578]"]}.get(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Learner(
        model, optimizer, method=diloco.LocalSGD(sync_every=1), exchange=Collective(timeout_s=TIMEOUT_S), trains=trains
    ) as learner:
        for parameter in model.parameters():
            parameter.grad = torch.full((1,), float(rank))
        optimizer.step()
        learner.step(tokens=1)
        ends = torch.cat(list(model.parameters())).detach()
    return {"first": ends[:4].tolist(), "last": ends[-4:].tolist()}


def notices_different_bits(rank: int) -> dict[str, Any]:
    """A bit of the copy of the fragment that learner 1 holds has flipped."""
    trainer = Trainer(rank, diloco.DiLoCo(sync_every=2, codec="e3m0"), steps=2)
    if rank == 1:
        trainer.exchange._fragments[0].whole.theta[5] += 1.0
    error = error_of(lambda: trainer.train(2))
    again = error_of(trainer.exchange.poll)
    trainer.learner.close()
    return {"error": error, "again": again, "versions": trainer.learner.versions}


def notices_learners_out_of_step(rank: int) -> dict[str, Any]:
    """Learner 2 begins at another step, so that it sends another fragment."""
    trainer = Trainer(rank, STREAMING)
    if rank == 2:
        trainer.learner._core.step = 2
    error = error_of(lambda: trainer.train(4))
    trainer.learner.close()
    return {"error": error}


def notices_a_learner_that_stops_early(rank: int) -> dict[str, Any]:
    trainer = Trainer(rank, diloco.DiLoCo(sync_every=2))
    error = error_of(lambda: trainer.train(2 if rank == 0 else 4))
    trainer.learner.close()
    trainer.learner.close()
    return {"error": error}


def notices_a_silent_learner(rank: int) -> dict[str, Any]:
    """Learner 1 does not come back from its step until the others have given it up."""
    trainer = Trainer(rank, diloco.DiLoCo(sync_every=2))
    group, gloo, limit = trainer.exchange._group, trainer.exchange._group._gloo, timedelta(seconds=3)

    def receive(*given: Any) -> Any:
        return SimpleNamespace(wait=partial(gloo.recv(*given).wait, limit))

    # Only from here on: a limit that gloo is given holds for connecting too, which a busy machine may hold up.
    group._timeout_s, group._gloo = limit.total_seconds(), SimpleNamespace(send=gloo.send, recv=receive)
    dist.barrier()
    error = [] if rank == 1 else error_of(lambda: trainer.train(2))
    dist.barrier()
    trainer.learner.close()
    return {"error": error}


def finishes_what_others_wait_for(rank: int) -> dict[str, Any]:
    """Learner 1 fails right after it has sent; the others still get the answer."""
    trainer = Trainer(rank, replace(STREAMING, offsets=(1, 1, 1)), steps=1)
    if rank == 1:
        trainer.learner.close()
    else:
        trainer.train(2)
    versions = trainer.learner.versions
    trainer.learner.close()
    return {"versions": versions}


def notices_a_killed_learner(rank: int) -> dict[str, Any]:
    """The last one: learner 2 is gone for good."""
    trainer = Trainer(rank, diloco.DiLoCo(sync_every=2), steps=2)
    if rank == 2:
        os._exit(9)
    error = error_of(lambda: trainer.train(2))
    trainer.learner.close()
    return {"error": error}


LIVES = [
    counts_the_same_run_tokens_at_every_step, counts_the_same_run_tokens_with_overlaps_of_their_own, counts_bytes,
    refuses_methods_that_need_a_syncer, refuses_a_re_warm_up, refuses_to_be_used_twice,
    refuses_checkpoints_that_do_not_fit, trains_parts_of_many_tensors, notices_different_bits,
    notices_learners_out_of_step,
    notices_a_learner_that_stops_early, notices_a_silent_learner, finishes_what_others_wait_for,
    notices_a_killed_learner,
]  # fmt: skip


def main(directory: Path, rank: int, world_size: int) -> None:
    join_world(directory, rank, world_size)
    for life in LIVES:
        write(directory, life.__name__, rank, Result({}, life(rank)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
