"""python -m tests.soak --hours 1 --learners 3 --out runs/soak --json FILE        (make soak HOURS=1)

A real run over TLS (`diloco chaos`): learners are killed, stopped, paused and come back, links break, backups are
taken; the syncer itself goes on, and viewers poll and scrape it (`tests.soak.viewers`). Memory, handles, threads and
files are sampled. Fails on a leak, on what `diloco chaos` finds broken (tokens that do not add up, lost versions,
learners that do not come back), on a fragment that gets no new version, and where a viewer is never answered.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.reliability import commit
from tests.soak.leaks import Growth, growth
from tests.soak.processes import descendants, held, size_of
from tests.soak.viewers import EVERY_S, SAID

from diloco.chaos.plan import ChaosPlan, _tables
from diloco.demo.plan import free_port
from diloco.event_log import read_events
from diloco.events import Contributed, Event, Published
from diloco.tables import write_toml

FAULTS = ("kill learner", "stop learner", "pause learner", "cut", "half open", "slow link")
"""The syncer is not among them: a process that ends has no leak."""

WARM_UP = 0.25
"""Share of the time in which caches fill."""

ALLOWED = {  # per hour, and in all
    "memory_bytes": (8e6, 16e6),
    "handles": (2.0, 8.0),
    "threads": (2.0, 8.0),
    "spool_bytes": (1e6, 1e6),
    "tensors_bytes": (1e6, 4e6),
    "backups_bytes": (1e6, 8e6),
}
"""What each may grow by."""

ALLOWED_A_VERSION = {"journal_bytes": 20e3, "events_bytes": 2e3}
"""What holds the history of the run, for each version: in the journal the contributions of three learners, 4.8 kB each,
with some 50 entries."""

STUCK_S = 120.0
"""No fragment is without a new version for so long."""

SAMPLED = "sampled.json"

LEAST_LIFE = 0.5
"""Share of the time that a process must have lived to be judged; a learner that was killed began anew."""

Curve = list[tuple[float, float]]


def sample(out: Path, at_s: float, curves: dict[str, Curve]) -> None:
    """Add what is held now."""
    for pid in descendants(os.getpid()):
        if (it := held(pid)) is not None:
            for what in ("memory_bytes", "handles", "threads"):
                curves[f"{it.name} ({it.pid}) {what}"].append((at_s, float(getattr(it, what))))
    state = out / "syncer"
    for what, path in (
        ("spool_bytes", state / "spool"), ("tensors_bytes", state / "tensors"), ("journal_bytes", state / "journal"),
        ("backups_bytes", out / "backups"),
    ):  # fmt: skip
        curves[f"disk {what}"].append((at_s, float(size_of(path))))
    log = state / "events.jsonl"
    curves["disk events_bytes"].append((at_s, float(log.stat().st_size if log.exists() else 0)))


def judge(curves: Mapping[str, Curve], seconds: float, num_versions: int) -> tuple[dict[str, Growth], list[str]]:
    """The growth of every curve that is long enough, and those that leak."""
    found, leaks = {}, []
    for name, curve in sorted(curves.items()):
        if curve[-1][0] - curve[0][0] < LEAST_LIFE * seconds:
            continue
        found[name] = each = growth(curve, WARM_UP * seconds)
        what = name.rpartition(" ")[2]
        if (most := ALLOWED_A_VERSION.get(what)) is not None:
            if (num_bytes := curve[-1][1]) > most * num_versions:
                leaks.append(f"{name} are {num_bytes:.3g} of {num_versions} versions")
        elif each.is_leak(*ALLOWED[what]):
            leaks.append(f"{name} grows by {each.per_hour:.3g} an hour, {each.total:.3g} so far")
    return found, leaks


def stuck(events: Iterable[Event]) -> list[str]:
    """Fragments that had work and no new version for too long; one that has none yet, since its first contribution."""
    newest, longest = dict[int, float](), dict[int, float]()
    for event in events:
        match event:
            case Published(fragment=fragment, t=at) | Contributed(fragment=fragment, t=at):
                since = newest.setdefault(fragment, at)
                longest[fragment] = max(longest.get(fragment, 0.0), at - since)
                if isinstance(event, Published):
                    newest[fragment] = at
    return [f"fragment {f} had no new version for {for_s:.0f} s" for f, for_s in longest.items() if for_s > STUCK_S]


def look_after(process: subprocess.Popen[bytes], out: Path, every_s: float) -> tuple[dict[str, Curve], float]:
    """Sample until the run ends; also the seconds that it took."""
    curves: dict[str, Curve] = defaultdict(list)
    began_s = time.monotonic()
    viewing: subprocess.Popen[bytes] | None = None
    while process.poll() is None:
        if viewing is None and (out / "syncer" / "events.jsonl").exists():
            viewing = subprocess.Popen([sys.executable, "-m", "tests.soak.viewers", str(out)])
        sample(out, time.monotonic() - began_s, curves)
        time.sleep(every_s)
    if viewing is not None:
        viewing.terminate()
        viewing.wait()
    return curves, time.monotonic() - began_s


def unanswered(out: Path) -> tuple[dict[str, Any], list[str]]:
    """What the viewers were answered, and those that were never."""
    counts = json.loads((out / SAID).read_text()) if (out / SAID).exists() else {}
    never = [name for name in EVERY_S if not counts.get(name, {}).get("answered")]
    return counts, [f"the viewer {name!r} was never answered" for name in never]


def write_run_file(path: Path, learners: int, seed: int) -> None:
    """The run of `diloco chaos`, with metrics."""
    tables = _tables(ChaosPlan(path.parent, seed, 1.0, learners, 0.5, 1.0))
    path.write_text(write_toml({**tables, "syncer": {**tables["syncer"], "metrics_port": free_port()}}))


def draw(curves: dict[str, Curve], seconds: float, path: Path) -> None:
    """The curves on one page."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    kinds = sorted({name.rpartition(" ")[2] for name in curves})
    figure, axes = plt.subplots(len(kinds), 1, figsize=(9, 2.2 * len(kinds)), sharex=True)
    for kind, plot in zip(kinds, axes, strict=True):
        for name, curve in curves.items():
            if name.endswith(kind):
                is_long = curve[-1][0] - curve[0][0] >= LEAST_LIFE * seconds
                plot.plot(*zip(*curve, strict=True), label=name.rpartition(" ")[0] if is_long else None, linewidth=1)
        plot.set_ylabel(kind)
        plot.legend(fontsize=6, loc="upper left")
    axes[-1].set_xlabel("seconds")
    figure.savefig(path)


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run it; returns what was sampled."""
    seconds, measured = 3600 * options.hours, commit()
    command = [
        sys.executable, "-m", "diloco", "chaos", str(options.out / "soak.toml"),
        "--seconds", str(seconds), "--learners", str(options.learners),
        "--every", str(options.every), "--seed", str(options.seed), "--out", str(options.out / "run"), "--json",
        *(argument for fault in FAULTS for argument in ("--only", fault)),
    ]  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    write_run_file(options.out / "soak.toml", options.learners, options.seed)
    with (options.out / "chaos.log").open("wb") as log, (options.out / "said.json").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=log)
        try:
            curves, took_s = look_after(process, options.out / "run", min(10.0, seconds / 100))
        finally:
            process.terminate()
            code = process.wait()
    return {"commit": measured, "seconds": took_s, "exit_code": code, "curves": curves}


def judged(sampled: dict[str, Any], out: Path) -> dict[str, Any]:
    """The result."""
    events = read_events(out / "run" / "syncer" / "events.jsonl")
    num_versions = sum(isinstance(event, Published) for event in events)
    growths, leaks = judge(sampled["curves"], sampled["seconds"], num_versions)
    code = sampled["exit_code"]
    viewers, never = unanswered(out / "run")
    broken = [*([f"diloco chaos ended with exit code {code}; see {out}"] if code else []), *never]
    late = stuck(events)
    return {
        "commit": sampled["commit"], "hours": round(sampled["seconds"] / 3600, 3), "versions": num_versions,
        "holds": not (leaks or late or broken), "leaks": leaks, "stuck": late, "broken": broken, "viewers": viewers,
        "growth": {name: vars(each) for name, each in growths.items()},
    }  # fmt: skip


def main() -> int:
    """Soak; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--learners", type=int, default=3)
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between two faults (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), help="an empty directory (default: runs/soak)")
    parser.add_argument("--again", action="store_true", help="run nothing; judge what a run has left in --out")
    parser.add_argument("--json", type=Path, help="write the result there too")
    options = parser.parse_args()
    if not options.again:
        sampled = soak(options)
        (options.out / SAMPLED).write_text(json.dumps(sampled))
    sampled = json.loads((options.out / SAMPLED).read_text())
    result = judged(sampled, options.out)
    if options.json is not None:
        options.json.write_text(json.dumps(result))
    draw(sampled["curves"], sampled["seconds"], options.out / "soak.svg")
    for name, each in result["growth"].items():
        print(f"{name:40} {each['per_hour']:>12.4g} an hour, {each['standard_errors']:5.1f} standard errors")
    for text in (*result["leaks"], *result["stuck"], *result["broken"]):
        print(f"BROKEN {text}")
    print(f"{result['hours']:.2f} hours, {result['versions']:,} versions; see {options.out / 'soak.svg'}")
    return not result["holds"]


if __name__ == "__main__":
    sys.exit(main())
