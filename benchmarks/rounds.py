"""What a round costs over torchft's elastic process group, against `diloco.Collective` over a fixed one: the price of
elasticity.

Two processes hold a model of 4.2 million parameters in one fragment. They move it a little and make one round over one
exchange, then one over the other: encode, exchange, merge, outer step, digest, adopt. Both exchanges talk through gloo
on loopback; the lighthouse is a third process, with torchft's defaults.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import diloco
from benchmarks.step import interval
from diloco.exchange.base import Exchange

CODECS = ("fp32", "e3m0")
WIDTH, LAYERS = 1024, 4
LEARNERS = 2


def run(quick: bool) -> list[dict[str, Any]]:
    """One row per codec: milliseconds of a round over `Collective`, ratio (median over pairs) and its 95 % bootstrap
    interval.

    No row where torchft is not installed: it is published for Linux on x86-64 only.
    """
    if importlib.util.find_spec("torchft") is None:
        print(
            "torchft is not installed, so there is nothing to measure: pip install 'diloco[torchft]'", file=sys.stderr
        )
        return []
    return [row_of(codec, measure(codec, 10 if quick else 50)) for codec in CODECS]


def row_of(codec: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """What the table shows of `measure`."""
    ratios = [torchft_s / collective_s for collective_s, torchft_s in pairs]
    low, high = interval(ratios)
    return {
        "name": f"a round of 4.2 M parameters, {codec}",
        "value": 1e3 * _median([collective_s for collective_s, _ in pairs]),
        "unit": "ms",
        "ratio": _median(ratios),
        "low": low,
        "high": high,
        "target": None,
        "met": None,
    }


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def measure(codec: str, rounds: int) -> list[tuple[float, float]]:
    """Seconds over `Collective` and over torchft, pair by pair of rounds, as the first learner saw them."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        log = stack.enter_context(open(f"{folder}/log", "w+"))

        def start(*arguments: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.rounds", *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=Path(__file__).parent.parent,
            )  # fmt: skip
            stack.callback(process.communicate)  # closes its input, which ends a lighthouse
            return process

        lighthouse = start("--lighthouse")
        assert lighthouse.stdout is not None
        address = lighthouse.stdout.readline().strip()
        learners = [start("--learner", str(rank), address, folder, codec, str(rounds)) for rank in range(LEARNERS)]
        out = [learner.communicate()[0] for learner in learners]
        if any(learner.returncode for learner in learners):
            raise RuntimeError(f"a learner failed:\n{Path(log.name).read_text()}")
    pairs: list[tuple[float, float]] = [tuple(pair) for pair in json.loads(out[0])]
    return pairs


def learn(rank: int, lighthouse: str, folder: str, codec: str, rounds: int) -> None:
    """One of the two processes."""
    from diloco.exchange.torchft import TorchFT

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=LEARNERS)
    method = diloco.DiLoCo(sync_every=1, codec=codec)
    exchanges: list[Exchange] = [
        diloco.Collective(),
        TorchFT(f"learner-{rank}", lighthouse=lighthouse, host="127.0.0.1"),
    ]
    sides = [_Side(exchange, method) for exchange in exchanges]
    for side in sides:
        side.round_s()  # connections and buffers
    pairs = []
    for number in range(rounds):
        order = sides if number % 2 == 0 else sides[::-1]
        taken = {id(side): side.round_s() for side in order}
        pairs.append([taken[id(side)] for side in sides])
    for side in sides:
        side.learner.close()
    dist.destroy_process_group()
    print(json.dumps(pairs), flush=True)


class _Side:
    """A model that is trained over one of the exchanges."""

    def __init__(self, exchange: Exchange, method: diloco.Method) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self._moves: list[Tensor] = [1e-3 * torch.randn_like(parameter) for parameter in self._model.parameters()]
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        self.learner = diloco.Learner(self._model, optimizer, method=method, exchange=exchange, ranks="self")

    def round_s(self) -> float:
        """Seconds of one round, which both processes begin at once."""
        with torch.no_grad():
            for parameter, move in zip(self._model.parameters(), self._moves, strict=True):
                parameter.add_(move)
        dist.barrier()
        started = time.perf_counter()
        self.learner.step(tokens=1)
        return time.perf_counter() - started


def _serve_lighthouse() -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=LEARNERS)
    print(f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}", flush=True)
    sys.stdin.read()
    server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lighthouse", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--learner", nargs=5, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.lighthouse:
        _serve_lighthouse()
    else:
        rank, lighthouse, folder, codec, rounds = chosen.learner
        learn(int(rank), lighthouse, folder, codec, int(rounds))


if __name__ == "__main__":
    main()
