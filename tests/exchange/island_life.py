"""One rank of one island: a job of some shape that is one learner of a run over a syncer.

    python -m tests.exchange.island_life DIRECTORY RANK WORLD_SIZE

DIRECTORY/islands.json says which island each of the WORLD_SIZE processes belongs to. What an island learns follows from
its number and the step alone, so that islands of any shape can be compared with single processes: every rank sets its
piece of the same gradients.
"""

from __future__ import annotations

import json
import sys
import warnings
import zlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import isclose
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.exchange.scenarios import Result
from tests.exchange.worlds import TIMEOUT_S, join_world, write
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import diloco
from diloco.core.names import Parts, named_parameters
from diloco.errors import ExchangeError
from diloco.exchange.group import Group
from diloco.exchange.lanes import CommandLane, RankTask
from diloco.learner.models import joined
from diloco.learner.pieces import Box, Gather, Piece, read_dtensor

WIDTH, LAYERS = 96, 2
SHAPES = {
    "single": 1, "ddp": 2, "fsdp": 4, "fsdp, 2 ranks": 2, "hsdp": 4, "tp": 2, "fsdp and tp": 4, "stages": 2,
    "stages of fsdp": 4, "virtual stages": 2, "fsdp1": 2,
}  # fmt: skip


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


class Stage(nn.Module):
    """A pipeline stage: some layers of a model, under the names that they have in it."""

    def __init__(self, net: Net, index: int, num_stages: int) -> None:
        super().__init__()
        layers = range(index * LAYERS // num_stages, (index + 1) * LAYERS // num_stages)
        if index == 0:
            self.embed = net.embed
        self.layers = nn.ModuleDict({str(layer): net.layers[layer] for layer in layers})
        if index == num_stages - 1:
            self.head = net.head


def gather_fsdp1(model: nn.Module) -> Gather:
    """How FSDP1 holds parameters: each rank a run of the flattened ones."""
    held = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):
        flat = module._handle.flat_param
        for parameter, shape, shard in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
            start, size = (shard.intra_param_start_idx, shard.numel_in_shard) if shard.in_shard else (0, 0)
            held[parameter] = Box((shape.numel(),), (start,), (size,)), tuple(shape)

    def gather(name: str, tensor: Tensor) -> Piece:
        box, shape = held[tensor]
        return Piece(shape, box, tensor.detach().view(-1))

    return gather


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
        case "stages":
            return Stage(net, dist.get_rank(), 2)
        case "stages of fsdp":
            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "dp"))
            stage = Stage(net, mesh.get_local_rank("pp"), 2)
            fully_shard(stage, mesh=mesh["dp"])
            return stage
        case "virtual stages":
            return joined([Stage(net, index, 4) for index in (dist.get_rank(), 3 - dist.get_rank())])
        case "fsdp1":
            return FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
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


def set_gradients(model: nn.Module, learner: int, step: int, gather: Gather = read_dtensor) -> None:
    """The same for every shape of island: drawn whole, of which each rank takes its piece."""
    for name, parameter in named_parameters(model):
        piece = gather(name, parameter)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{learner} {step} {name}".encode()))
        whole = torch.randn(piece.box.shape, generator=generator)
        part = whole[piece.box.within(Box.whole(piece.box.shape))].contiguous()
        parameter.grad = like(parameter, part.view(piece.local.shape))


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
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in tensors.items()
    }


def whole_model(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        return {name: value.clone() for name, value in model.state_dict().items()}
    return full(dict(named_parameters(model)))


def evaluate(model: nn.Module) -> float:
    """A number that the parameters say, by a forward pass without a backward pass: after it, FSDP2 holds those of the
    root module whole. Pipeline stages have none; of FSDP1 the learner cannot undo it."""
    if isinstance(model, Stage | Parts | FullyShardedDataParallel):
        return 0.0
    with torch.no_grad():
        return float(model(torch.arange(53)).square().mean())


def evaluated(model: nn.Module, tensors: Mapping[str, Tensor]) -> float:
    """As `evaluate`, of the same model with these tensors, in one process."""
    if isinstance(model, Stage | Parts | FullyShardedDataParallel):
        return 0.0
    net = Net(seed=0)
    net.load_state_dict(dict(tensors))
    return evaluate(net)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Path) -> None:
    state = optimizer_state(model, optimizer)
    dcp.load({"optimizer": state}, checkpoint_id=saved, no_dist=not dist.is_initialized())
    set_optimizer_state_dict(model, optimizer, state)


PARTS = {0: ["layers.0.*"], 1: ["embed.*", "layers.[1-9].*"]}
"""What the islands train of the model in the run of this name; the last one trains all of it."""

EXPERTS = {0: "0-63", 1: "48-95"}
"""The same in the run "experts", in which rows of some parameters count as experts."""


def live(
    model: nn.Module, exchange: Any, given: diloco.Method | None, number: int, steps: range, saved: Path | None = None,
    *, trains: Sequence[str] | None = None, trains_experts: str | None = None,
) -> Result:  # fmt: skip
    """Train these steps; returns the global model and the learner's own, whole, and what this rank kept and sent.

    `saved`: where the checkpoint of this island is: written at the end by learners that begin with step 1, read by
    others.
    """
    trained = [p for name, p in model.named_parameters() if any(fnmatchcase(name, f"*{it}") for it in trains or ["*"])]
    # Without a decay, rows that get no gradients would stay by themselves.
    decay = 0.1 if trains_experts else 0.0
    optimizer = torch.optim.SGD(
        [{"params": trained}], lr=0.05, momentum=0.5, weight_decay=decay
    )  # a stage may have none
    gather = gather_fsdp1(model) if isinstance(model, FullyShardedDataParallel) else read_dtensor
    ranks = dist.group.WORLD if isinstance(model, Stage | Parts | FullyShardedDataParallel) else None
    held = list(model.children()) if isinstance(model, Parts) else model
    with diloco.Learner(
        held,
        optimizer,
        method=given,
        exchange=exchange,
        ranks=ranks,
        gather=gather,
        trains=trains,
        trains_experts=trains_experts,
    ) as learner:
        if saved is not None and steps.start > 1:
            assert learner.load_distributed_state_dict(saved)
            load_optimizer(model, optimizer, saved)
        for step in steps:
            set_gradients(model, number, step, gather)
            optimizer.step()
            evaluate(model)
            learner.step(tokens=5)
        state = learner.state_dict()  # answers that are on their way
        if saved is not None and steps.start == 1:
            entries = {"learner": learner.distributed_state_dict(), "optimizer": optimizer_state(model, optimizer)}
            dcp.save(entries, checkpoint_id=saved, no_dist=not dist.is_initialized())
        own = {f"own.{name}": value for name, value in whole_model(model).items()}
        before = evaluate(model)
        with learner.global_model():
            inside = evaluate(model)
            swapped = whole_model(model)
        assert isclose(inside, evaluated(model, swapped), rel_tol=1e-5)
        assert evaluate(model) == before
        if not isinstance(model, FullyShardedDataParallel):
            exported = full(learner.global_state_dict())
            assert all(torch.equal(exported[name], value) for name, value in swapped.items())
        metrics = learner.metrics()
        facts = {
            "anchors": [anchor.numel() for anchor in state["anchors"].values()],
            **{key: metrics[key] for key in ("versions", "num_bytes", "merges")},
        }
        return Result(own | swapped, facts)


def run_out_of_memory() -> None:
    """On the last rank, by what is no error of this package's."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise MemoryError("no room")


def require_that_a_failure_is_told() -> None:
    lane = CommandLane(Group(None, timeout_s=TIMEOUT_S))
    if dist.get_rank() > 0:
        lane.follow(lambda _: RankTask(run_out_of_memory))
        return
    last = dist.get_world_size() - 1
    with pytest.raises(ExchangeError, match=f"rank {last} of this learner failed: MemoryError: no room"):
        lane.lead({}, RankTask(run_out_of_memory))
    lane.end()


def main(directory: Path, process: int) -> None:
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process that saves and loads
    run: dict[str, Any] = json.loads((directory / "islands.json").read_text())
    of_process = [(number, shape) for number, shape in enumerate(run["shapes"]) for _ in range(SHAPES[shape])]
    number, shape = of_process[process]
    first = of_process.index((number, shape))
    place = directory / f"island-{number}"
    place.mkdir(exist_ok=True)
    join_world(place, process - first, SHAPES[shape])
    for name, address in run["addresses"].items():
        begins = number == run["initialises"] and run["steps"][0] == 1
        exchange = diloco.connect(
            address, run=name, learner=f"island-{number}", initialise=begins, join_timeout_s=TIMEOUT_S
        )
        model = shaped(Net(seed=number), shape)
        saved = directory.parent / f"{name}, island {number}" if run["saves"] else None
        trains = PARTS.get(number) if name == "parts" else None
        experts = EXPERTS.get(number) if name == "experts" else None
        steps = range(*run["steps"])
        result = live(model, exchange, None, number, steps, saved, trains=trains, trains_experts=experts)
        write(directory, name, process, result)
    if SHAPES[shape] > 1:
        require_that_a_failure_is_told()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
