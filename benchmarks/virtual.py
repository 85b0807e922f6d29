"""What training in virtual time costs beside training itself.

64 learners of 0.1 million parameters train in one process over modelled links, and as many bare inner steps are taken
of as many models, the one and the other in turns, on one thread. Times are of the processor, so that other work on the
machine tells less.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

import diloco
from diloco.core.method import Method
from diloco.exchange.local import Local, run_virtual
from diloco.exchange.virtual.run import VirtualRun
from diloco.planning.network import Network, Route

NUM_LEARNERS = 64
NUM_STEPS = 30
WIDTH = 56
BATCH, LENGTH = 8, 64
TARGET = 1.3

METHODS = {
    "DiLoCo, H = 30": diloco.DiLoCo(sync_every=30),
    "Streaming, int4, P = 3, H = 30": diloco.StreamingDiLoCo(
        sync_every=30, overlap=2, fragments=diloco.Balanced(3), codec="int4"
    ),
    "Decoupled, int4, P = 3, H = 30": diloco.DecoupledDiLoCo(
        sync_every=30, overlap=2, fragments=diloco.Balanced(3), codec="int4"
    ),
}


def run(quick: bool) -> list[dict[str, Any]]:
    """One row per method: seconds that a step of a learner costs, and the ratio to a bare step."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_row(name, method, num_pairs=1 if quick else 3) for name, method in METHODS.items()]
    finally:
        torch.set_num_threads(num_threads)


def _row(name: str, method: Method, num_pairs: int) -> dict[str, Any]:
    pairs = [(_simulated(method), _bare()) for _ in range(num_pairs)]
    seconds = statistics.median(simulated for simulated, _ in pairs) / (NUM_LEARNERS * NUM_STEPS)
    ratio = statistics.median(simulated / bare for simulated, bare in pairs)
    return {
        "name": f"64 learners, {name}",
        "value": seconds,
        "unit": "s",
        "ratio": ratio,
        "target": TARGET,
        "met": ratio <= TARGET,
    }


class _Part:
    """A small decoder on random bytes, and its inner optimizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.model = nn.Sequential(nn.Embedding(256, WIDTH), nn.TransformerEncoder(layer, 3), nn.Linear(WIDTH, 256))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._batch = torch.randint(256, (BATCH, LENGTH + 1))

    def step(self) -> None:
        logits = self.model(self._batch[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), self._batch[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _bare() -> float:
    parts = [_Part(index) for index in range(NUM_LEARNERS)]
    started = time.process_time()
    for _ in range(NUM_STEPS):
        for part in parts:
            part.step()
    return time.process_time() - started


def _simulated(method: Method) -> float:
    times: list[float] = []

    def life(index: int, exchange: Local) -> None:
        part = _Part(index)
        with diloco.Learner(part.model, part.optimizer, method=method, exchange=exchange) as learner:
            times.append(time.process_time())
            for _ in range(NUM_STEPS):
                part.step()
                learner.step(tokens=BATCH * LENGTH)
            times.append(time.process_time())

    links = {f"{way}-{i}": 1e7 for i in range(NUM_LEARNERS) for way in ("up", "down")} | {"syncer": 2e8}
    paths = [Route((f"up-{i}", "syncer"), (f"down-{i}", "syncer"), 0.02) for i in range(NUM_LEARNERS)]
    names = [f"learner-{index:02d}" for index in range(NUM_LEARNERS)]
    speeds = [1.0 + index / NUM_LEARNERS for index in range(NUM_LEARNERS)]
    run = VirtualRun(names, lambda index, _: speeds[index], [0.0] * NUM_LEARNERS, Network(links, paths))
    run_virtual(life, run)
    return max(times) - min(times)
