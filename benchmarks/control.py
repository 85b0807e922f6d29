"""Heartbeats over a link that bulk transfers fill: how long their answers take, against the lost deadline.

    python -m benchmarks.control [--rate 10mbit] [--learners N] [--seconds S] [--json]

A real syncer and real learners, with mutual TLS, are processes in two network namespaces with a link of this rate each
way between them (`tc … tbf`). First the learners have joined and say no more than heartbeats. Then they train a model
of 4 MB with pushes of their own after every two steps, so that contributions and updates fill the link in both
directions. The queues before the link hold 50 ms of bytes, as a router that is set up well has, and then 4 s, as one
with deep buffers has. Goal: no answer takes as long as the lost deadline, and no learner is given up.

Needs root, `ip` and `tc` (Linux), and leave to make network namespaces; without those it ends with exit code 2.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.__main__ import machine
from benchmarks.control_learner import Heartbeats
from benchmarks.processes import run_file, until
from benchmarks.two_sites import SITES, counted_bytes, two_sites
from diloco import events
from diloco.event_log import read_events
from diloco.protocol.members import Deadlines
from diloco.syncer.keys.keyring import Keyring

RUN, ADDRESS = "control", f"{SITES['site-a']}:7700"
QUEUES_MS = (50, 4000)
SETTLE_S = 5.0
"""Before each stretch that is measured."""

FRAGMENTS = {"type": "Named", "patterns": [["0.*"], ["1.*"], ["2.*"], ["3.*"]]}


@dataclass(frozen=True)
class Row:
    """One stretch.

    Attributes:
        queue_ms: that the buffers before the link hold.
        bulk: whether transfers fill the link.
        heartbeats, unanswered: sent in it, and of those without an answer in time.
        median_s, worst_s: from a heartbeat to its answer.
        lost_s: the shortest time after which a silent learner is given up.
        evictions: in it and while it settled, of any learner.
        up, down: the share of the link's rate that was used towards the syncer, and from it, all headers included.
    """

    queue_ms: int
    bulk: bool
    seconds: float
    heartbeats: int
    unanswered: int
    median_s: float
    worst_s: float
    lost_s: float
    evictions: int
    up: float
    down: float


@dataclass(frozen=True)
class Stretch:
    """When it was, since when it settled, and what crossed the link in it, towards the syncer and from it."""

    settles_at: float
    began_at: float
    ended_at: float
    num_bytes: tuple[int, int]


def run(rate: str, num_learners: int, seconds: float) -> list[Row]:
    """Two rows for each depth of the queues."""
    rows = []
    for queue_ms in QUEUES_MS:
        print(f"{num_learners} learners over {rate} with queues of {queue_ms} ms …", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="diloco-control-") as name, two_sites(rate, queue_ms=queue_ms):
            rows += _measure(Path(name), _bit_per_s(rate), queue_ms, num_learners, seconds)
    return rows


def _measure(
    directory: Path, bit_per_s: float, queue_ms: int, num_learners: int, seconds: float
) -> list[Row]:  # fmt: skip
    names = [f"learner-{number}" for number in range(num_learners)]
    method: dict[str, Any] = {"preset": "AsyncDiLoCo", "sync_every": 2, "dynamic_steps": False, "fragments": FRAGMENTS}
    go, stop, log = directory / "go", directory / "stop", directory / "state" / "events.jsonl"
    with ExitStack() as stack:
        stack.enter_context(syncer(directory, RUN, learners=names, **method))
        learners = {
            name: stack.enter_context(_learner(directory, name, go, stop, initialise=name == names[0]))
            for name in names
        }
        for name, process in learners.items():
            _lines(directory, name, process, 1)
        idle = _stretch(seconds)
        go.touch()
        busy = _stretch(seconds)
        stop.touch()
        heartbeats = [_told(directory, name, process) for name, process in learners.items()]
    evicted_at = [event.t for event in read_events(log) if isinstance(event, events.Evicted)]
    return [
        _row(queue_ms, is_bulk, bit_per_s, stretch, heartbeats, evicted_at)
        for is_bulk, stretch in ((False, idle), (True, busy))
    ]


def _row(
    queue_ms: int, is_bulk: bool, bit_per_s: float, stretch: Stretch, heartbeats: Sequence[Heartbeats],
    evicted_at: Sequence[float],
) -> Row:  # fmt: skip
    began_at, ended_at = stretch.began_at, stretch.ended_at
    within = [took_s for each in heartbeats for at, took_s in each if began_at <= at < ended_at]
    answered = [took_s for took_s in within if took_s is not None]
    most_bytes = bit_per_s / 8 * (ended_at - began_at)
    up, down = (num_bytes / most_bytes for num_bytes in stretch.num_bytes)
    return Row(
        queue_ms, is_bulk, ended_at - began_at, len(within), len(within) - len(answered),
        statistics.median(answered), max(answered), Deadlines().lost_floor_s,
        sum(stretch.settles_at <= at < ended_at for at in evicted_at), up, down,
    )  # fmt: skip


def _stretch(seconds: float) -> Stretch:
    """Let it settle, and then so many seconds."""
    settles_at = time.time()
    time.sleep(SETTLE_S)
    (up, down), began_at = counted_bytes(), time.time()
    time.sleep(seconds)
    (up_by_then, down_by_then), ended_at = counted_bytes(), time.time()
    return Stretch(settles_at, began_at, ended_at, (up_by_then - up, down_by_then - down))


# --- processes


@contextmanager
def syncer(
    directory: Path, run: str, *, learners: Sequence[str], viewers: Sequence[str] = (), **method: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A syncer at the first site, and keys of these names in `directory`."""
    callers: list[tuple[str, Any]] = [(name, "learner") for name in learners]
    callers += [(name, "viewer") for name in viewers]
    Keyring.new(directory / "keys", run, [SITES["site-a"]], callers, dt.timedelta(days=1))
    (directory / "run.toml").write_text(run_file(run, syncer={"address": ADDRESS, "keys": "keys/syncer"}, **method))
    port_file = directory / "port"
    command = ["diloco", "syncer", "run.toml", "--state-dir", "state", "--port-file", str(port_file)]
    with at_site(directory, "site-a", "syncer", *command) as process:
        until(lambda: port_file.exists() or process.poll() is not None, "the syncer does not start")
        if process.poll() is not None:
            raise RuntimeError((directory / "syncer.log").read_text())
        yield process


@contextmanager
def _learner(
    directory: Path, name: str, go: Path, stop: Path, *, initialise: bool
) -> Iterator[subprocess.Popen[bytes]]:  # fmt: skip
    command = [
        "benchmarks.control_learner", ADDRESS, RUN, name, "--keys", f"keys/{name}",
        "--go", str(go), "--stop", str(stop), *["--initialise"] * initialise,
    ]  # fmt: skip
    with at_site(directory, "site-b", name, *command) as process:
        yield process


@contextmanager
def at_site(directory: Path, site: str, name: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A module of Python at a site; killed at the end, if it still runs."""
    root = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    with open(directory / f"{name}.out", "wb") as out, open(directory / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            ["ip", "netns", "exec", site, sys.executable, "-m", *command], cwd=directory, env=env, stdout=out,
            stderr=log
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _told(directory: Path, name: str, process: subprocess.Popen[bytes]) -> Heartbeats:
    heartbeats: Heartbeats = json.loads(_lines(directory, name, process, 2)[-1])
    return heartbeats


def _lines(directory: Path, name: str, process: subprocess.Popen[bytes], number: int) -> list[str]:
    """The first lines that a learner has printed, once there are so many."""
    out = directory / f"{name}.out"
    until(lambda: out.read_text().count("\n") >= number or process.poll() is not None, f"{name} says nothing", 120.0)
    if len(lines := out.read_text().splitlines()) < number:
        raise RuntimeError((directory / f"{name}.log").read_text()[-2000:])
    return lines


def _bit_per_s(rate: str) -> float:
    """As tc writes it: "10mbit"."""
    number, unit = rate.removesuffix("bit"), 1.0
    if number and number[-1] in "kmg":
        number, unit = number[:-1], {"k": 1e3, "m": 1e6, "g": 1e9}[number[-1]]
    return float(number) * unit


def require_namespaces(program: str) -> None:
    """End with exit code 2 where there can be no network namespaces."""
    if (why := _obstacle()) is not None:
        print(f"{program}: {why}", file=sys.stderr)
        raise SystemExit(2)


def _obstacle() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root; run it as root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool!r}; install iproute2"
    made = subprocess.run(["ip", "netns", "add", "diloco-try"], check=False, capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespace can be made ({made.stderr.strip()}); run it on a machine that permits them"
    subprocess.run(["ip", "netns", "del", "diloco-try"], check=True)
    return None


def show(rows: Sequence[Row], console: Console) -> None:
    """One line a stretch."""
    table = Table(box=None, pad_edge=False)
    for title in ("queues", "bulk", "heartbeats", "median", "worst", "unanswered", "evictions", "link up", "down"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            f"{row.queue_ms} ms", "yes" if row.bulk else "no", str(row.heartbeats), f"{1e3 * row.median_s:.0f} ms",
            f"{1e3 * row.worst_s:.0f} ms", str(row.unanswered), str(row.evictions), f"{row.up:.0%}", f"{row.down:.0%}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="10mbit", help="of the link each way, as tc writes it; default: %(default)s")
    parser.add_argument("--learners", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each stretch; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args()
    require_namespaces("benchmarks.control")
    before = machine()
    rows = run(chosen.rate, chosen.learners, chosen.seconds)
    if chosen.json:
        its = {"rate": chosen.rate, "learners": chosen.learners, "machine": before}
        print(json.dumps({**its, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        show(rows, Console())


if __name__ == "__main__":
    main()
