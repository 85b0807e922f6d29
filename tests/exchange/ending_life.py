"""A learner's life to the end of its run's budget. As a process of its own:

python -m tests.exchange.ending_life DIRECTORY METHOD RANK WORLD_SIZE [ADDRESS] [--dies]

Over a process group, or over the syncer at ADDRESS. With `--dies` the process kills itself after its third step;
without, it waits after its fifth step for the end of its standard input.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tests.exchange.scenarios import Result
from tests.exchange.worlds import TIMEOUT_S, join_world, write
from torch import nn

import diloco
from diloco import Method
from diloco.exchange.base import Exchange

LEARNERS, TOKENS, DIES_AT, WAITS_AT = 3, 500, 3, 5

THREE = diloco.Balanced(3)

METHODS: dict[str, Method] = {
    "diloco": diloco.DiLoCo(sync_every=5, codec="int8"),
    "streaming": diloco.StreamingDiLoCo(sync_every=6, overlap=3, fragments=THREE),
    "eager": diloco.EagerDiLoCo(sync_every=4),
    "sparse": diloco.SparseLoCo(sync_every=5),
    "decoupled": diloco.DecoupledDiLoCo(sync_every=6, fragments=THREE),
    "async": diloco.AsyncDiLoCo(learners=LEARNERS, sync_every=5),
    "data parallel": diloco.DataParallel(),
}


def live(
    method: Method | None, index: int, exchange: Exchange, after: Mapping[int, Callable[[], object]] = {}
) -> Result:  # fmt: skip
    """Every learner starts from a model of its own, has its own data, and counts its own number of tokens a step.
    `after`: what it does after which of its steps."""
    torch.manual_seed(index)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with diloco.Learner(model, optimizer, method=method, exchange=exchange) as learner:
        while not learner.done:
            x = torch.randn(4, 8)
            (model(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=4 + index)
            if (action := after.get(int(learner.metrics()["tokens"]) // (4 + index))) is not None:
                action()
        is_final = learner.finish()
        facts = {"is_final": is_final, "versions": list(learner.versions), "digests": list(learner.digests)}
        return Result(dict(learner.global_state_dict()), facts)


def _main(directory: Path, method: str, rank: int, world_size: int, *more: str) -> None:
    torch.set_num_threads(1)
    if not more:
        join_world(directory, rank, world_size)
        exchange: Exchange = diloco.Collective(timeout_s=TIMEOUT_S, tokens=TOKENS)
        result = live(METHODS[method], rank, exchange)
        torch.distributed.destroy_process_group()
    else:
        exchange = diloco.connect(
            more[0], run="ends", learner=f"learner-{rank}", initialise="if-empty", join_timeout_s=TIMEOUT_S
        )
        dies = {DIES_AT: lambda: os.kill(os.getpid(), signal.SIGKILL)}
        result = live(None, rank, exchange, dies if "--dies" in more else {WAITS_AT: sys.stdin.read})
    write(directory, "end", rank, result)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
