"""What each rank of an FSDP2 island keeps on the host for exchanging, and what it sends and receives.

    python -m benchmarks.islands [--quick]

Every case is a `torchrun` job of its own over gloo, and a syncer in this process. Before the learner attaches, a rank
holds its shard of the parameters and gradients. What is measured is the most that it takes on top from then on, by the
kernel (`VmHWM`), while it joins, initialises the run and takes four rounds, without error feedback and with it. Where
parameters are on a CPU, the redistribution before a send and after an adoption is in it too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import diloco
from benchmarks.memory import status_bytes
from diloco.syncer.server import Options, Syncer

WIDTH, LAYERS, FRAGMENTS = 2048, 32, 16
ROUNDS = 4
_INT4 = diloco.StreamingDiLoCo(sync_every=FRAGMENTS, overlap=1, codec="int4", fragments=diloco.Balanced(FRAGMENTS))
METHODS = {"int4": _INT4, "int4, error feedback": replace(_INT4, error_feedback=True)}


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for islands of 1, 2 and 4 ranks: the peak of the rank that has most, and the bytes of the one that sends
    most, each in parts of what one rank has."""
    rows: list[dict[str, Any]] = []
    sizes = (1, 2) if quick else (1, 2, 4)
    for name, num_ranks in ((name, size) for name in METHODS for size in sizes):
        ranks = measure(name, num_ranks, LAYERS // 2 if quick else LAYERS)
        for key, unit in (
            ("peak of joining", "models"), ("peak of training", "models"), ("peak of a checkpoint", "models"),
            ("sent", "MB"), ("received", "MB"),
        ):  # fmt: skip
            value = max(rank[key] for rank in ranks)
            what = f"{name}, {num_ranks} rank{'s' if num_ranks > 1 else ''}: {key}, of the rank with most"
            rows.append({"name": what, "value": value, "unit": unit, "ratio": None, "target": None, "met": None})
    return rows


def measure(method: str, num_ranks: int, num_layers: int) -> list[dict[str, float]]:
    """Of every rank: peak in models (fp32 sizes of all parameters), and megabytes sent and received."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        with Syncer("islands", METHODS[method], Options("127.0.0.1:0", directory / "state")) as syncer:
            case = json.dumps([syncer.address, num_layers, folder])
            subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
                 "-m", "benchmarks.islands", "--case", case],
                check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def live(address: str, num_layers: int, folder: str) -> None:
    """One rank of the island."""
    dist.init_process_group("gloo")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    num_parameters = num_layers * WIDTH * WIDTH
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # the first one imports modules
    exchange = diloco.connect(address, run="islands", learner="island", initialise=True)
    before = status_bytes("VmRSS")
    model_bytes = 4 * num_parameters
    _forget_peak()
    with diloco.Learner(model, optimizer, exchange=exchange) as learner:
        joining = (status_bytes("VmHWM") - before) / model_bytes
        _forget_peak()
        for _ in range(ROUNDS * FRAGMENTS):
            optimizer.step()
            learner.step()
        training = (status_bytes("VmHWM") - before) / model_bytes
        _forget_peak()
        learner.state_dict()  # waits for what is on its way
        saving = (status_bytes("VmHWM") - before) / model_bytes
        crossed = learner.metrics()["num_bytes"]
    sent, received = crossed["contributions"] / 1e6, crossed["updates"] / 1e6
    peaks = {"peak of joining": joining, "peak of training": training, "peak of a checkpoint": saving}
    result = peaks | {"sent": sent, "received": received}
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def _forget_peak() -> None:
    """VmHWM begins anew."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half of the parameters, and two ranks at most")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case:
        live(*json.loads(chosen.case))
        return
    for row in run(chosen.quick):
        print(f"{row['name']:72s}{row['value']:10.2f} {row['unit']}", flush=True)


if __name__ == "__main__":
    main()
