"""How long a syncer that was killed takes until it serves again, by the size of the model that it has to read.

    python -m benchmarks.restart [--gb SIZE ...] [--times N] [--json]

For each size a syncer is given a model of so many GB (fp32), merges two versions of it and is killed with SIGKILL. Then
the pages of its files are dropped from the system's cache, and the time runs from the start of the process until a
viewer has its answer, and until a learner's first pull has brought the whole model. A tiny model gives the start-up:
Python, torch and the port. Goal: 2 s for each GB, and the start-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import diloco
from benchmarks.processes import SyncerProcess, run_file
from diloco.exchange.dialling import fetch_status
from diloco.following.follower import newest_model

RUN, LEARNER = "restarted", "learner"
GOAL_S_PER_GB = 2.0
TINY_GB = 1e-4
WIDTH = 4096
"""Of the model's matrices, where it is large enough for one."""


@dataclass(frozen=True)
class Row:
    """One size. Times are medians, with the worst beside them.

    Attributes:
        model_gb: of the parameters in fp32. state_gb: of all files of the state directory.
        serves_s, worst_s: from the process's start until a viewer is answered.
        s_per_gb: of `serves_s` beyond the tiny model's, for each GB of the model; None for the tiny one.
        pulled_s: until the whole model has been fetched from it.
    """

    model_gb: float
    state_gb: float
    times: int
    serves_s: float
    worst_s: float
    s_per_gb: float | None
    pulled_s: float


def run(sizes_gb: Sequence[float], times: int) -> list[Row]:
    """A row for the tiny model and one for each size."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="diloco-restart-") as name:
        for index, size_gb in enumerate((TINY_GB, *sizes_gb)):
            print(f"restarting with {size_gb:g} GB …", file=sys.stderr)
            directory = Path(name) / str(index)
            directory.mkdir()
            rows.append(_measure(directory, size_gb, times, rows[0].serves_s if rows else None))
    return rows


def _measure(directory: Path, size_gb: float, times: int, startup_s: float | None) -> Row:
    syncer = SyncerProcess(directory, run_file(RUN, preset="DiLoCo", sync_every=1))
    try:
        model_gb = _publish(syncer.address, size_gb)
        serves, pulled, state_gb = [], [], 0.0
        for _ in range(times):
            syncer.kill()
            state_gb = _forget(directory / "state") / 1e9
            began = time.monotonic()
            syncer.start()
            fetch_status(syncer.address, run=RUN)
            serves.append(time.monotonic() - began)
            model = newest_model(syncer.address, run=RUN).state_dict()
            pulled.append(time.monotonic() - began)
            num_bytes = sum(value.numel() for value in model.values()) * 4
            if num_bytes != round(model_gb * 1e9):
                raise RuntimeError(f"{num_bytes} bytes of a model of {model_gb} GB came back")
    finally:
        syncer.kill()
    median = statistics.median(serves)
    return Row(
        model_gb, state_gb, times, median, max(serves),
        None if startup_s is None else (median - startup_s) / model_gb, statistics.median(pulled),
    )  # fmt: skip


def _publish(address: str, size_gb: float) -> float:
    """Train two versions of a model of about this size; returns the size that it has."""
    width = min(WIDTH, int((size_gb * 1e9 / 4) ** 0.5))
    layers = [nn.Linear(width, width, bias=False) for _ in range(max(1, round(size_gb * 1e9 / 4 / width**2)))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    exchange = diloco.connect(address, run=RUN, learner=LEARNER, initialise=True)
    with diloco.Learner(model, optimizer, exchange=exchange) as learner:
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
            optimizer.step()
            learner.step(tokens=1)
        if learner.versions != (2,):
            raise RuntimeError(f"two steps have led to the versions {learner.versions}")
    return sum(parameter.numel() for parameter in model.parameters()) * 4 / 1e9


def _forget(directory: Path) -> int:
    """Drop every file's pages from the system's cache, as after a restart of the machine. Returns the files' bytes."""
    num_bytes = 0
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                num_bytes += os.fstat(file).st_size
            finally:
                os.close(file)
    return num_bytes


def show(rows: Sequence[Row], console: Console) -> None:
    """One line a size."""
    table = Table(box=None, pad_edge=False)
    for title in ("model", "state", "times", "serves after", "worst", "s/GB", "whole model fetched after"):
        table.add_column(title, justify="right")
    for row in rows:
        color = "" if row.s_per_gb is None else "green" if row.s_per_gb <= GOAL_S_PER_GB else "red"
        table.add_row(
            f"{row.model_gb:.2f} GB", f"{row.state_gb:.2f} GB", str(row.times), f"{row.serves_s:.2f} s",
            f"{row.worst_s:.2f} s", "" if row.s_per_gb is None else f"[{color}]{row.s_per_gb:.2f}[/]",
            f"{row.pulled_s:.2f} s",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0, 2.0], help="models' sizes; default: 1 2")
    parser.add_argument("--times", type=int, default=3, help="restarts of each; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args()
    rows = run(chosen.gb, chosen.times)
    if chosen.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        show(rows, Console())


if __name__ == "__main__":
    main()
