"""One rank of one island: a job of some shape that is one learner of a run over a syncer.

    python -m tests.exchange.island_life DIRECTORY RANK WORLD_SIZE

DIRECTORY/islands.json says which island each of the WORLD_SIZE processes belongs to. What an island learns follows from
its number and the step alone, so that islands of any shape can be compared with single processes: every rank sets its
piece of the same gradients.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.exchange.scenarios import Result
from tests.exchange.worlds import join_world, write
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco.learner.pieces import read_dtensor

WIDTH, LAYERS = 96, 2
SHAPES = {"single": 1, "ddp": 2, "fsdp": 4, "fsdp, 2 ranks": 2, "hsdp": 4, "tp": 2, "fsdp and tp": 4}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(53, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 53)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def shaped(net: Net, shape: str) -> nn.Module:
    """The model as the ranks of an island of this shape hold it."""
    size = dist.get_world_size()
    match shape:
        case "ddp":
            return DistributedDataParallel(net)
        case "fsdp" | "fsdp, 2 ranks":
            _fully_shard(net, init_device_mesh("cpu", (size,)))
        case "hsdp":
            _fully_shard(net, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards")))
        case "tp":
            _parallelize(net, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))
        case "fsdp and tp":
            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
            _parallelize(net, mesh["tp"])
            _fully_shard(net, mesh["dp"])
    return net


def _fully_shard(net: Net, mesh: Any) -> None:
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)


def _parallelize(net: Net, mesh: Any) -> None:
    for layer in net.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def set_gradients(model: nn.Module, learner: int, step: int) -> None:
    """The same for every shape of island: drawn whole, of which each rank takes its piece."""
    for index, (name, parameter) in enumerate(model.named_parameters()):
        name = name.removeprefix("module.")
        generator = torch.Generator().manual_seed(1_000_003 * learner + 1009 * step + index)
        whole = torch.randn(parameter.shape, generator=generator)
        box = read_dtensor(name, parameter).box
        piece = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].contiguous()
        parameter.grad = like(parameter, piece)


def like(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


def full(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors, by torch's own gathering."""
    return {
        name.removeprefix("module."): (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in tensors.items()
    }


def live(model: nn.Module, exchange: Any, given: diloco.Method | None, number: int, steps: int) -> Result:
    """Train; returns the global model and the learner's own, whole, and what this rank kept and sent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    with diloco.Learner(model, optimizer, method=given, exchange=exchange) as learner:
        for step in range(1, steps + 1):
            set_gradients(model, number, step)
            optimizer.step()
            learner.step(tokens=5)
        state = learner.state_dict()  # answers that are on their way
        own = {f"own.{name}": value for name, value in full(dict(model.named_parameters())).items()}
        metrics = learner.metrics()
        facts = {
            "anchors": [anchor.numel() for anchor in state["anchors"].values()],
            **{key: metrics[key] for key in ("versions", "num_bytes", "merges")},
        }
        return Result(own | full(learner.global_state_dict()), facts)


def main(directory: Path, process: int) -> None:
    run: dict[str, Any] = json.loads((directory / "islands.json").read_text())
    of_process = [(number, shape) for number, shape in enumerate(run["shapes"]) for _ in range(SHAPES[shape])]
    number, shape = of_process[process]
    first = of_process.index((number, shape))
    place = directory / f"island-{number}"
    place.mkdir(exist_ok=True)
    join_world(place, process - first, SHAPES[shape])
    for name, address in run["addresses"].items():
        exchange = diloco.connect(
            address, run=name, learner=f"island-{number}", initialise=number == run["initialises"], join_timeout_s=60
        )
        model = shaped(Net(seed=number), shape)
        result = live(model, exchange, None, number, run["steps"])
        write(directory, name, process, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
