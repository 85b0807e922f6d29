"""One rank of an island, or a learner of one process, whose model has a frozen base or running statistics.

python -m tests.exchange.frozen_life DIRECTORY RANK WORLD_SIZE      ranks 0 and 1 are one island, rank 2 is alone
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.exchange.island_life import full, set_gradients
from tests.exchange.scenarios import Result, failed
from tests.exchange.worlds import TIMEOUT_S, join_world, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco.errors import DilocoError

WIDTH, STEPS = 64, 7


class Adapted(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)).requires_grad_(False)
        torch.manual_seed(seed)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)


class Normed(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)


def lora(number: int, *, is_island: bool, other_base: bool) -> nn.Module:
    model = Adapted(number)
    if other_base:
        model.base[1].weight.data[3, 5] += 1e-6
    if is_island:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def normed(number: int, *, is_island: bool) -> nn.Module:
    model = Normed(number)
    return DistributedDataParallel(model) if is_island else model


def live(model: nn.Module, exchange: Any, number: int, **options: Any) -> Result:
    """Train; returns the global model, and what this rank holds of the statistics."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    try:
        with diloco.Learner(model, optimizer, exchange=exchange, **options) as learner:
            for step in range(1, STEPS + 1):
                set_gradients(model, number, step)
                for name, parameter in model.named_parameters():
                    if not parameter.requires_grad:
                        parameter.grad = None
                        assert "base" in name
                optimizer.step()
                if isinstance(plain, Normed):
                    spread(plain.norm, number, step)
                learner.step(tokens=5)
            learner.state_dict()
            own = {f"own.{name}": each.clone() for name, each in plain.named_buffers()}
            facts = {"num_bytes": learner.metrics()["num_bytes"]}
            return Result(own | full(learner.global_state_dict()), facts)
    except DilocoError as error:
        exchange.close()
        return failed(error)


def spread(norm: nn.BatchNorm1d, number: int, step: int) -> None:
    """As a forward pass would: other statistics on each rank."""
    rank = dist.get_rank()
    norm(
        torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(100 * number + 10 * rank + step)) * (1 + number)
    )


def main(directory: Path, process: int) -> None:
    addresses: dict[str, str] = json.loads((directory / "addresses.json").read_text())
    number, rank, size = (0, process, 2) if process < 2 else (1, 0, 1)
    place = directory / f"learner-{number}"
    place.mkdir(exist_ok=True)
    join_world(place, rank, size)
    for name, address in addresses.items():
        exchange = diloco.connect(
            address, run=name, learner=f"learner-{number}", initialise=number == 0, join_timeout_s=TIMEOUT_S
        )
        if name == "lora":
            model = lora(number, is_island=size > 1, other_base=False)
            result = live(model, exchange, number, static="digest")
        elif name == "exchanged":  # the run's base is that of the first learner
            model = lora(number, is_island=size > 1, other_base=number == 1)
            result = live(model, exchange, number, static="exchange")
        else:
            result = live(normed(number, is_island=size > 1), exchange, number, buffers="average")
        write(directory, name, process, result)
        if name == "lora" and number == 1:  # and once more, with another base
            exchange = diloco.connect(address, run=name, learner="other", join_timeout_s=TIMEOUT_S)
            model = lora(number, is_island=False, other_base=True)
            write(directory, "other base", process, live(model, exchange, number, static="digest"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
