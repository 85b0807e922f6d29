"""A Decoupled run of real processes: learners never wait, and every token is accounted for.

    python -m benchmarks.decoupled [--step-s SECONDS] [--preset PRESET] [--directory DIR] [--json]

A syncer and four learners, of speeds 1 : 1 : 0.6 : 0.4, train together. The slowest is killed, a new one joins, the
syncer is killed and started again, all learners leave. Printed: how long `learner.step()` took and how long it was
blocked waiting for the network, by learner; what `diloco status` showed when all of this had happened; and where every
trained token went, by fragment.

It measures waiting and keeps books. The model is small and its steps are as long as they are told to be, so that seven
processes fit on a machine with two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import diloco
from benchmarks.processes import SyncerProcess, until
from diloco.errors import ExchangeError
from diloco.exchange.dialling import fetch_status
from diloco.learner.timing import BOUNDS_S, bound_of

RUN = "unequal"
H, FRAGMENTS, TOKENS = 8, 3, 5
SPEED = {"quick-1": 1.0, "quick-2": 1.0, "slow-1": 0.6, "slow-2": 0.4, "joiner": 1.0}
"""Inner steps of a learner for one of the quickest: a slow island, not a busy machine."""

FIRST_FOUR = ("quick-1", "quick-2", "slow-1", "slow-2")
IN_THE_END = ("quick-1", "quick-2", "slow-1", "joiner")
LIMIT_S = 120.0

PRESETS = ("DecoupledDiLoCo", "StreamingDiLoCo", "DiLoCo")

RUN_FILE = f"""
[run]
name = "{RUN}"
tokens = 1_000_000
[method]
preset = "{{preset}}"
sync_every = {H}
fragments = {{{{type = "Balanced", num_fragments = {FRAGMENTS}}}}}
[syncer]
lost_floor_s = 2.0
"""


@dataclass(frozen=True)
class Result:
    """What a run left behind.

    Attributes:
        learners: what those that were not killed say in the end: `Learner.metrics()`, and `step_histogram`, the time
            that `learner.step()` took as its caller saw it, with `longest_step_s`.
        shown: what `diloco status` printed while all learners were in the run.
        status: what it says once all have left.
        away_s: how long the syncer did not answer.
    """

    learners: dict[str, dict[str, Any]]
    shown: str
    status: dict[str, Any]
    away_s: float


def run(
    directory: Path, *, step_s: float, preset: str = PRESETS[0], say: Callable[[str], None] = lambda _: None
) -> Result:
    """The whole story.

    Arguments:
        directory: for the run file, logs, and the syncer's state and events.
        step_s: what an inner step of the quickest learners takes.
        preset: the method, with its defaults but for H and the fragments.
        say: hears what happens.
    """
    with ExitStack() as stack:
        syncer = SyncerProcess(directory, RUN_FILE.format(preset=preset))
        stack.callback(syncer.kill)
        learners = _Learners(directory, stack, step_s)
        watch = _Watch(syncer, learners)

        say("a syncer and four learners")
        for name in FIRST_FOUR:
            learners.start(syncer.address, name, *["initialise"] * (name == FIRST_FOUR[0]))
        watch.until(
            "not all four are healthy and in merges", lambda s: all(_takes_part(s, name) for name in FIRST_FOUR)
        )

        say("slow-2 is killed")
        learners.kill("slow-2")
        watch.until("slow-2 is not given up", lambda s: "slow-2" not in s["learners"])
        watch.until_it_goes_on()

        say("joiner joins")
        learners.start(syncer.address, "joiner")
        watch.until("joiner is not in merges", lambda s: _takes_part(s, "joiner"))

        say("the syncer is killed, and started again")
        killed_at = time.monotonic()
        syncer.kill()
        syncer.start()
        away_s = time.monotonic() - killed_at
        watch.until_it_goes_on()
        watch.until("not all learners are in merges", lambda s: all(_takes_part(s, name) for name in IN_THE_END))
        shown = _diloco_status(syncer.address)

        say("all learners leave")
        results = learners.finish()
        return Result(results, shown, watch.until("not all learners have left", lambda s: not s["learners"]), away_s)


def _takes_part(status: dict[str, Any], name: str) -> bool:
    it = status["learners"].get(name)
    return it is not None and it["live"] and it["healthy"] and it["merged"] > 0


class _Learners:
    """Learner processes by name."""

    def __init__(self, directory: Path, stack: ExitStack, step_s: float) -> None:
        self._directory = directory
        self._stack = stack
        self._step_s = step_s
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, address: str, name: str, *extra: str) -> None:
        step_s = self._step_s / SPEED[name]
        command = [sys.executable, "-m", "benchmarks.decoupled", "--learner", address, name, str(step_s), *extra]
        log = self._stack.enter_context(self._log(name).open("wb"))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=Path(__file__).parent.parent)
        self._processes[name] = self._stack.enter_context(process)
        self._stack.callback(process.kill)

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def check(self) -> None:
        """Check that no process has ended by itself."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} has ended:\n{self._log(name).read_text()}")

    def finish(self) -> dict[str, dict[str, Any]]:
        """Have all learners leave, one after the other; returns what they print."""
        results = {}
        for name, process in self._processes.items():
            process.terminate()
            out, _ = process.communicate(timeout=LIMIT_S)
            if process.returncode != 0:
                raise RuntimeError(f"{name} failed:\n{self._log(name).read_text()}")
            results[name] = json.loads(out)
        self._processes.clear()
        return results

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"


class _Watch:
    """Asks for the status until it is as wanted."""

    def __init__(self, syncer: SyncerProcess, learners: _Learners) -> None:
        self._syncer = syncer
        self._learners = learners
        self._status: dict[str, Any] = {}

    def until(self, what: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        def look() -> bool:
            self._learners.check()
            try:
                self._status = fetch_status(self._syncer.address, run=RUN)
            except ExchangeError:
                return False
            return bool(self._status["initialised"] and holds(self._status))

        until(look, what, LIMIT_S)
        return self._status

    def until_it_goes_on(self) -> None:
        """Every fragment is merged three times more."""
        before = _versions(self._status)
        self.until("the others do not go on", lambda status: min(_versions(status)) > max(before) + 2)


def _versions(status: dict[str, Any]) -> list[int]:
    return [fragment["version"] for fragment in status["fragments"]]


def _diloco_status(address: str) -> str:
    command = [sys.executable, "-m", "diloco", "status", "--address", address, "--run", RUN]
    env = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


# - a learner --------------------------------------------------------------------------------------------------------


def learn(address: str, name: str, step_s: float, initialise: bool) -> None:
    """Train until told to stop (SIGTERM), leave, and print metrics as one line of JSON."""
    torch.set_num_threads(1)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    generator = torch.Generator().manual_seed(sum(name.encode()))
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exchange = diloco.connect(address, run=RUN, learner=name, initialise=initialise)
    histogram, longest_s = dict.fromkeys(map(bound_of, BOUNDS_S), 0), 0.0
    with diloco.Learner(model, optimizer, exchange=exchange) as learner:
        while not stop.is_set():
            ends_at = time.monotonic() + step_s
            x, y = torch.randn(TOKENS, 16, generator=generator), torch.randn(TOKENS, 16, generator=generator)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            stop.wait(max(0.0, ends_at - time.monotonic()))
            started = time.monotonic()
            learner.step(tokens=TOKENS)
            taken_s = time.monotonic() - started
            histogram[bound_of(taken_s)] += 1
            longest_s = max(longest_s, taken_s)
        metrics = learner.metrics()
    print(json.dumps({**metrics, "step_histogram": histogram, "longest_step_s": longest_s}), flush=True)


# - what is printed --------------------------------------------------------------------------------------------------


def show(result: Result, console: Console) -> None:
    """The histograms, the status, the books."""
    console.print("Calls of learner.step(): how long they were blocked, and how long they took\n")
    console.print(_histograms(result))
    console.print(f"\nThe syncer was away for {result.away_s:.1f} s of this.\n\n$ diloco status")
    console.out(result.shown, highlight=False)
    console.print("Tokens by fragment, when all learners had left\n")
    console.print(_books(result))


def _histograms(result: Result) -> Table:
    table = Table("", box=None, pad_edge=False)
    first = next(iter(result.learners.values()))
    for name in result.learners:
        table.add_column(name, justify="right")
    for title, key in (("blocked", "blocked_histogram"), ("took", "step_histogram")):
        lower = "0"
        for bound in first[key]:
            counts = [metrics[key][bound] for metrics in result.learners.values()]
            table.add_row(f"{title} {_range(lower, bound)}", *map(str, counts))
            lower = bound
        table.add_section()
    table.add_row(
        "longest call", *(f"{metrics['longest_step_s'] * 1e3:.0f} ms" for metrics in result.learners.values())
    )
    return table


def _range(lower: str, upper: str) -> str:
    if upper == "0":
        return "0 s"
    return f"more than {lower} s" if upper == "inf" else f"up to {upper} s"


def _books(result: Result) -> Table:
    table = Table("fragment", box=None, pad_edge=False)
    for title in ("trained", "= merged", "+ pending", "+ discarded", "+ lost", "discarded because"):
        table.add_column(title, justify="right")
    for fragment in result.status["fragments"]:
        ledger = fragment["ledger"]
        discarded: dict[str, int] = ledger["discarded"]
        counts = (ledger["trained"], ledger["merged"], ledger["pending"], sum(discarded.values()), ledger["lost"])
        why = ", ".join(f"{reason} {count}" for reason, count in sorted(discarded.items()))
        table.add_row(str(fragment["fragment"]), *map(str, counts), why)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--step-s", type=float, default=0.1, help="what an inner step of the quickest takes; default 0.1"
    )
    parser.add_argument("--preset", choices=PRESETS, default=PRESETS[0], help="to compare with; default %(default)s")
    parser.add_argument("--directory", type=Path, help="keep the run file, the logs and the syncer's state here")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--learner", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.learner:
        address, name, step_s, *initialise = chosen.learner
        learn(address, name, float(step_s), initialise == ["initialise"])
        return
    with ExitStack() as stack:
        directory = chosen.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.mkdir(parents=True, exist_ok=True)
        result = run(
            directory, step_s=chosen.step_s, preset=chosen.preset, say=lambda what: print(f"{what} …", file=sys.stderr)
        )
    if chosen.json:
        print(json.dumps(asdict(result), indent=1))
    else:
        show(result, Console())


if __name__ == "__main__":
    main()
