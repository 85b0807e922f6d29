"""One of two ranks of a job that is one learner, and heals or gives its state:
python -m tests.syncer.healing_ranks_life DIRECTORY ADDRESS NAME RANK KIND SOURCE

KIND: "ddp" or "fsdp". SOURCE "": it is the founder, and trains until DIRECTORY/end is there. Otherwise it heals, and
leaves. Its pieces of the moments after each step are in `NAME-RANK.pt`, with how it has healed.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.syncer.runs import RUN, Net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco.core.healing import Source


def moments(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    state: Any = optimizer.state_dict()["state"]
    return [
        {name: (it.to_local() if isinstance(it, DTensor) else it).clone() for name, it in state[index].items()}
        for index in sorted(state)
    ]


def train(learner: diloco.Learner, end: Path) -> dict[int, Any]:
    """Until the end is asked for; all ranks see it at the same step."""
    past: dict[int, Any] = {}
    generator = torch.Generator().manual_seed(learner.rank[0])
    model: Any = learner.model
    is_over = torch.zeros(())
    while not is_over:
        model(torch.randn(5, 4, generator=generator)).square().mean().backward()
        learner.optimizer.step()  # type: ignore[union-attr]
        learner.optimizer.zero_grad()  # type: ignore[union-attr]
        past[learner.steps + 1] = moments(learner.optimizer)  # type: ignore[arg-type]
        learner.step(tokens=5)
        is_over.fill_(end.exists())
        dist.broadcast(is_over, 0)
        if min(learner.versions) >= 1:
            (end.parent / "under-way").touch()
    return past


def main(directory: Path, address: str, name: str, rank: int, kind: str, source: Source | str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory / name}", rank=rank, world_size=2)
    model: nn.Module = Net()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exchange = diloco.connect(address, run=RUN, learner=name, initialise=not source, join_timeout_s=60)
    heal = diloco.Heal("peer", rewarm_steps=3, timeout_s=60.0) if source == "peer" else None
    with diloco.Learner(model, optimizer, exchange=exchange, heal=heal) as learner:
        past = train(learner, directory / "end") if not source else {learner.steps: moments(optimizer)}
    healed = None if learner.healed is None else asdict(learner.healed)
    torch.save({"past": past, "healed": healed, "factor": learner.lr_factor}, directory / f"{name}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], sys.argv[6])
