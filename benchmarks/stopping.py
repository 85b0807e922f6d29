"""How long a learner that is blocked takes from SIGTERM until its process is gone, with a checkpoint of its last step.

    python -m benchmarks.stopping [--times N] [--json]

Each try is a `diloco train` of a tiny model against a syncer of its own, with a relay between them. It is blocked once
its log has been still for a second:

    round    its contribution is with the syncer, and the round waits for another learner, which is suspended
    lease    the network takes nothing any more, and its leased data is used up
    join     it has warmed up alone, and the syncer does not answer
    push     the network takes nothing any more, and it has something to push

Then it gets SIGTERM. It must end with exit code 0 and a checkpoint of the last step that it has taken. Goal: 1 s.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.chaos.relay import Relay

import diloco
from benchmarks.processes import until
from diloco.config import RunConfig, dump_config, parse_config
from diloco.core.presets import method_from_table
from diloco.event_log import EventTail
from diloco.events import Stepped
from diloco.protocol.members import Deadlines
from diloco.syncer.server import Options, Syncer
from diloco.training.checkpoint import latest_checkpoint, load_checkpoint

NAME, OTHER = "learner", "other"
STILL_S = 1.0
"""A learner whose log does not grow for so long is blocked: its steps take milliseconds."""

CUT_AT_STEP = 20
LIMIT_S = 60.0
GOAL_S = 1.0

RUN_FILE = """
[run]
name = "stopping"
tokens = 1_000_000_000
[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
[data]
kind = "text"
sequence_length = 32
[train]
global_batch = 8
log_every_steps = 1
threads = 1
[schedule]
kind = "constant"
steps = 1000
[evaluate]
sequences = 4
sample_bytes = 0
[method]
preset = "DiLoCo"
sync_every = 100
"""

PATIENT = Deadlines(lost_floor_s=120.0, reconnect_floor_s=120.0)
"""No learner is evicted meanwhile: without an end to its waiting one waits for good."""

PLACES = {
    "round": (),
    "lease": ("method.sync_every=1_000_000", "data.deal='leases'", "data.lease_steps=50"),
    "join": ("warm_start.steps=20",),
    "push": (),
}
"""Where a learner is blocked, and what its run has for that."""


@dataclass(frozen=True)
class Row:
    """One place.

    Attributes:
        saved_s, saved_worst_s: from the signal until the checkpoint has its final name, median and worst.
        gone_s, gone_worst_s: until the process has ended, Python's and torch's own end included.
    """

    place: str
    times: int
    saved_s: float
    saved_worst_s: float
    gone_s: float
    gone_worst_s: float


def run(times: int) -> list[Row]:
    """A row for each place.

    Raises:
        RuntimeError: a learner has not ended as it should.
    """
    rows = []
    for place in PLACES:
        print(f"stopping a learner that is blocked: {place} …", file=sys.stderr)
        saved, gone = zip(*(_stopped_after_s(place) for _ in range(times)), strict=True)
        rows.append(Row(place, times, statistics.median(saved), max(saved), statistics.median(gone), max(gone)))
    return rows


def _stopped_after_s(place: str) -> tuple[float, float]:
    """Seconds from the signal until the checkpoint is there, and until the process is gone."""
    with tempfile.TemporaryDirectory(prefix="diloco-stopping-") as name:
        directory = Path(name)
        text = Path(diloco.__file__).parent / "core" / "method.py"
        given = (f"data.paths=['{text}']", f"run.dir='{directory / 'run'}'", *PLACES[place])
        config = parse_config(RUN_FILE, overrides=given)
        syncer = Syncer(
            config.run.name,
            method_from_table(config.method),
            Options("127.0.0.1:0", directory / "state", deadlines=PATIENT),
        )
        with syncer, Relay(syncer.port) as relay:
            if place == "join":
                relay.up.flows.clear()
            address = f"syncer.address={relay.address}"
            run_file = directory / "run.toml"
            run_file.write_text(dump_config(parse_config(RUN_FILE, overrides=(*given, address))), encoding="utf-8")
            return _measure(place, run_file, config, relay)


def _measure(place: str, run_file: Path, config: RunConfig, relay: Relay) -> tuple[float, float]:
    with ExitStack() as stack:
        if place == "round":
            other = stack.enter_context(_learner(run_file, OTHER, "--initialise", "if-empty"))
            _until_it_trains(other, config, OTHER)
            other.send_signal(signal.SIGSTOP)
        process = stack.enter_context(_learner(run_file, NAME, "--initialise", "if-empty"))
        steps = _until_it_trains(process, config, NAME)
        if place in ("lease", "push"):
            relay.up.flows.clear()
        step = steps.when_still()
        began = time.time()
        process.send_signal(signal.SIGTERM)
        code = process.wait(LIMIT_S)
        gone_s = time.time() - began
    said = _log(run_file, NAME).read_text(encoding="utf-8")
    checkpoint = latest_checkpoint(config.dir / NAME / "checkpoints")
    saved = load_checkpoint(checkpoint)["step"]
    # The last step's event is written when `step` returns, and a learner may be blocked in that.
    if code != 0 or "was told to stop" not in said or saved - step not in (0, 1):
        raise RuntimeError(f"{place}: exit code {code}, a checkpoint of step {saved} after step {step}:\n{said}")
    return checkpoint.stat().st_ctime - began, gone_s


@contextmanager
def _learner(run_file: Path, name: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "diloco", "train", str(run_file), "--name", name, *more]
    with open(_log(run_file, name), "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _log(run_file: Path, name: str) -> Path:
    return run_file.with_name(f"{name}.log")


def _until_it_trains(process: subprocess.Popen[bytes], config: RunConfig, name: str) -> _Steps:
    steps = _Steps(config.dir / name / "events.jsonl")
    until(lambda: steps.newest() >= CUT_AT_STEP or process.poll() is not None, "it does not train", LIMIT_S)
    return steps


class _Steps:
    """Follows the steps in a learner's event log."""

    def __init__(self, path: Path) -> None:
        self._tail, self._newest = EventTail(path), 0

    def newest(self) -> int:
        for event in self._tail.read():
            if isinstance(event, Stepped):
                self._newest = event.step
        return self._newest

    def when_still(self) -> int:
        """The newest step, once there has been none for `STILL_S`."""
        step = -1
        while step != self.newest():
            step = self.newest()
            threading.Event().wait(STILL_S)
        return step


def show(rows: Sequence[Row], console: Console) -> None:
    """One line a place."""
    table = Table(box=None, pad_edge=False)
    for title in ("blocked in", "times", "saved after (median)", "worst", "gone after (median)", "worst"):
        table.add_column(title, justify="right")
    for row in rows:
        times = (row.saved_s, row.saved_worst_s, row.gone_s, row.gone_worst_s)
        shown = (f"[{'green' if each <= GOAL_S else 'red'}]{each:.2f} s[/]" for each in times)
        table.add_row(row.place, str(row.times), *shown)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="tries of each place; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args()
    rows = run(chosen.times)
    if chosen.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        show(rows, Console())


if __name__ == "__main__":
    main()
