"""What a Learner costs the training step, as a ratio to the bare step: with nothing due, and with an exchange in
flight.

One torch thread trains; a syncer in another process answers over a loopback connection. Both sides of a pair train the
same model, one after the other, first one first and then the other, so that neither where tensors lie nor a drift of
the machine tells in the ratio.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import diloco
from diloco import Learner, Method
from diloco.exchange.base import Exchange
from diloco.syncer.server import Options, Syncer

RUN = "benchmark"
TOKENS = 8 * 48
STEPS_IN_FLIGHT = 2

NOTHING_DUE = diloco.DiLoCo(sync_every=1_000_000)
# Sent after the first step of every three, adopted after the third: with the whole model in one fragment, all of it in
# two steps.
IN_FLIGHT = diloco.StreamingDiLoCo(
    sync_every=STEPS_IN_FLIGHT + 1, overlap=STEPS_IN_FLIGHT, offsets=(1,), fragments=diloco.Whole(), error_feedback=True
)

MakeExchange = Callable[[Method], AbstractContextManager[Exchange]]


def run(quick: bool, make_exchange: MakeExchange | None = None) -> list[dict[str, Any]]:
    """One row per case: name, ratio (median over pairs), its 95 % bootstrap interval, bare_step_s, target and met.

    `make_exchange` gives another exchange than the one with a syncer in another process.
    """
    pairs = 20 if quick else 100
    make_exchange = make_exchange or beside_a_syncer
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with make_exchange(NOTHING_DUE) as exchange:
            rows = [_nothing_due(exchange, pairs)]
        with make_exchange(IN_FLIGHT) as exchange:
            rows.append(_in_flight(exchange, pairs))
    finally:
        torch.set_num_threads(num_threads)
    return rows


def _nothing_due(exchange: Exchange, pairs: int) -> dict[str, Any]:
    training = _Training()
    with training.attach(exchange) as learner:

        def attached() -> None:
            training.step()
            learner.step(tokens=TOKENS)

        bare_s, attached_s = interleaved(training.step, attached, pairs)
    return row_of("a step with nothing due", bare_s, attached_s, target=1.01)


def _in_flight(exchange: Exchange, pairs: int) -> dict[str, Any]:
    """Sending, the steps until the answer is due, and adopting it, against as many bare steps."""
    training = _Training()
    with training.attach(exchange) as learner:

        def bare() -> None:
            for _ in range(STEPS_IN_FLIGHT):
                training.step()

        def attached() -> None:
            learner.step(tokens=TOKENS)
            for _ in range(STEPS_IN_FLIGHT):
                training.step()
                learner.step(tokens=TOKENS)

        bare_s, attached_s = interleaved(bare, attached, pairs)
        metrics = learner.metrics()
    row = row_of("a step with an exchange in flight", bare_s, attached_s, target=1.10, num_steps=STEPS_IN_FLIGHT)
    return row | {"exchanges": metrics["merges"], "blocked_s": metrics["blocked_s"]}


def interleaved(bare: Callable[[], None], attached: Callable[[], None], pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of each, pair by pair; whichever goes first takes turns."""
    for warm_up in (bare, attached, bare, attached):
        warm_up()
    seconds: dict[Callable[[], None], list[float]] = {bare: [], attached: []}
    for pair in range(pairs):
        for action in (bare, attached) if pair % 2 == 0 else (attached, bare):
            started = time.perf_counter()
            action()
            seconds[action].append(time.perf_counter() - started)
    return seconds[bare], seconds[attached]


def row_of(
    name: str, bare_s: Sequence[float], attached_s: Sequence[float], *, target: float, num_steps: int = 1
) -> dict[str, Any]:
    ratios = [attached / bare for attached, bare in zip(attached_s, bare_s, strict=True)]
    ratio = statistics.median(ratios)
    low, high = interval(ratios)
    return {
        "name": name,
        "ratio": ratio,
        "low": low,
        "high": high,
        "bare_step_s": statistics.median(bare_s) / num_steps,
        "pairs": len(ratios),
        "target": target,
        "met": ratio <= target,
    }


def interval(values: Sequence[float], resamples: int = 2000) -> tuple[float, float]:
    """Of the median, by bootstrap: 95 %."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(resamples))
    return medians[resamples // 40], medians[-resamples // 40 - 1]


# - what is trained --------------------------------------------------------------------------------------------------


class _Training:
    """A transformer of 4.8 million parameters on 384 tokens a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(256, 4, dim_feedforward=1024, dropout=0.0, batch_first=True, norm_first=True)
        self.model = nn.Sequential(
            nn.Embedding(256, 256), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(256, 256)
        )
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randint(0, 256, (8, TOKENS // 8 + 1))

    def attach(self, exchange: Exchange) -> Learner:
        return Learner(self.model, self.inner, exchange=exchange)

    def step(self) -> None:
        self.inner.zero_grad()
        logits = self.model(self.batch[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), self.batch[:, 1:].flatten()).backward()
        self.inner.step()


# - the syncer -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def beside_a_syncer(method: Method) -> Iterator[Exchange]:
    """A learner's exchange with a fresh syncer in another process."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.step", "--serve", json.dumps(method.to_dict()), folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address:
                raise RuntimeError(f"the syncer did not start (exit code {process.wait()})")
            yield diloco.connect(address, run=RUN, learner="only", initialise=True)
        finally:
            process.communicate()  # closes its input, which ends it


def _serve(method: Method, folder: Path) -> None:
    torch.set_num_threads(1)
    with Syncer(RUN, method, Options(address="127.0.0.1:0", state_dir=folder)) as syncer:
        print(syncer.address, flush=True)
        stop = threading.Event()

        def until_input_ends() -> None:
            sys.stdin.read()
            stop.set()

        threading.Thread(target=until_input_ends, daemon=True).start()
        syncer.wait(stop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer pairs")
    parser.add_argument("--serve", nargs=2, metavar=("METHOD", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        _serve(Method.from_dict(json.loads(arguments.serve[0])), Path(arguments.serve[1]))
        return
    for row in run(arguments.quick):
        print(
            f"{row['name']:36s}{row['ratio']:7.3f}x  [{row['low']:.3f}, {row['high']:.3f}]  of "
            f"{row['bare_step_s'] * 1e3:.0f} ms   target {row['target']:.2f} {'met' if row['met'] else 'MISSED'}"
        )


if __name__ == "__main__":
    main()
