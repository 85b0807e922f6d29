"""One learner of `benchmarks.control`, a process of its own: what its heartbeats take, without bulk and beside it.

It joins, waits until the file GO is there, and then trains a model whose contributions and updates are far more than
its link carries, until the file STOP is there. It prints "ready" once it has the run's model; and in the end as JSON
when each heartbeat began, and how long its answer took (null: there was none). Then it leaves, or is killed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import diloco
from diloco.errors import DilocoError
from diloco.exchange.connection import Connection

WIDTH, NUM_LAYERS = 512, 4
STEP_S = 0.02
READY = "ready"

Heartbeats = list[tuple[float, float | None]]


class Timed:
    """`Connection.call`, with the times of heartbeats."""

    def __init__(self) -> None:
        self.heartbeats: Heartbeats = []
        self._call = Connection.call
        Connection.call = self  # type: ignore[assignment,method-assign]

    def __get__(self, connection: Connection, kind: type[Connection]) -> Any:
        def call(channel: str, method: str, *arguments: Any, **options: Any) -> Any:
            began_at = time.time()
            took_s = None
            try:
                reply = self._call(connection, channel, method, *arguments, **options)
                took_s = time.time() - began_at
                return reply
            finally:
                if method == "Heartbeat":
                    self.heartbeats.append((began_at, took_s))

        return call


def model() -> nn.Module:
    """4 MB."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))


def live(address: str, run: str, name: str, *, keys: Path, initialise: bool, go: Path, stop: Path) -> None:
    """One learner's life."""
    timed = Timed()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    exchange = diloco.connect(address, run=run, learner=name, keys=keys, initialise=initialise)
    with diloco.Learner(net, optimizer, exchange=exchange) as learner:
        print(READY, flush=True)
        while not go.exists():
            time.sleep(STEP_S)
        while not stop.exists():
            time.sleep(STEP_S)
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
            optimizer.step()
            learner.step(tokens=1)
        print(json.dumps(list(timed.heartbeats)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("run")
    parser.add_argument("name")
    parser.add_argument("--keys", type=Path, required=True)
    parser.add_argument("--initialise", action="store_true")
    parser.add_argument("--go", type=Path, required=True)
    parser.add_argument("--stop", type=Path, required=True)
    its = parser.parse_args()
    torch.set_num_threads(1)
    try:
        live(its.address, its.run, its.name, keys=its.keys, initialise=its.initialise, go=its.go, stop=its.stop)
    except DilocoError as error:
        raise SystemExit(f"{its.name}: {error}") from None


if __name__ == "__main__":
    main()
