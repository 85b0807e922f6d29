"""One run on shaped links: start the processes, have the learners begin together, take what they measured, end
everything."""

from __future__ import annotations

import json
import math
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from diloco.event_log import read_events
from diloco.events import Merged, Published
from studies.shaped_links.cases import FRAGMENTS, RUN, STEP_S, Case
from studies.shaped_links.links import HUB_IP, LEARNERS, Sites

ROOT = Path(__file__).parents[2]
READY_S = 120.0
SLACK_S = 60.0
"""A run may take three times what is expected, and this."""

WARM_VERSIONS = 3
"""Versions of every fragment before the pace of called rounds is measured."""


class RunFailedError(Exception):
    """A process ended or did not answer; with the end of its log."""


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        num_steps: inner steps of each learner.
        utilization: of each learner, steps × step time ÷ wall clock from the common beginning to the end of the last
            boundary.
        step_s: what a padded step really took, in the mean.
        period_steps: of called rounds: inner steps between two versions of a fragment, in the mean.
        latency_s: one way, where it was asked for.
        merge_s: what the syncer took for a round: merging, and making it durable, in the mean; all but the first
            rounds.
        blocked_s: what a learner waited, in all.
    """

    num_steps: int
    utilization: tuple[float, ...]
    step_s: float
    period_steps: float | None = None
    latency_s: float | None = None
    merge_s: float = math.nan
    blocked_s: float = math.nan


def run_ours(sites: Sites, case: Case, num_steps: int, expected_s: float, *, pings: bool = False) -> Measured:
    """A syncer and two learners, over mutual TLS."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        work = Path(directory)
        names = [f"learner-{i}" for i in range(LEARNERS)]
        for keys in (["init", "--run", RUN, "--host", HUB_IP], ["add", "learner", *names]):
            subprocess.run([_diloco(), "keys", *keys], cwd=work, check=True, capture_output=True, timeout=60)
        (work / "run.toml").write_text(case.run_file(HUB_IP))
        syncer = [_diloco(), "syncer", "run.toml", "--state-dir", "state", "--port-file", "port"]
        process = stack.enter_context(_started(work, "syncer", Sites.inside(sites.hub, *syncer), work))
        _until_there(work / "port", process, work / "syncer.log")
        tasks = [
            {"address": f"{HUB_IP}:7700", "name": name, "index": i, "num_steps": num_steps, "pings": pings and i == 0,
             "keys": str(work / "keys" / name)}
            for i, name in enumerate(names)
        ]  # fmt: skip
        said = _together(work, sites, "diloco", tasks, expected_s)
        merge_s = _merge_s(work / "state" / "events.jsonl")
    period = fmean([_period_steps(each["adopted"]) for each in said]) if case.is_called else None
    return Measured(
        num_steps,
        *_shares(said, num_steps),
        period,
        said[0]["latency_s"],
        merge_s,
        fmean([each["blocked_s"] for each in said]),
    )


def run_collective(sites: Sites, num_steps: int, expected_s: float) -> Measured:
    """Two learners of a process group."""
    with tempfile.TemporaryDirectory() as directory:
        tasks = [{"name": f"learner_{i}", "index": i, "num_steps": num_steps} for i in range(LEARNERS)]
        said = _together(Path(directory), sites, "collective", tasks, expected_s)
    return Measured(num_steps, *_shares(said, num_steps))


def run_torchft(sites: Sites, num_steps: int, expected_s: float) -> Measured:
    """torchft's DiLoCo: a lighthouse where the syncer would be, and two learners."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        work = Path(directory)
        command = _python("lighthouse", {"bind": f"{HUB_IP}:29510"})
        server = stack.enter_context(_started(work, "lighthouse", Sites.inside(sites.hub, *command)))
        _line(server, READY_S, work / "lighthouse.log")
        tasks = [
            {"lighthouse": f"http://{HUB_IP}:29510", "name": f"learner_{i}", "index": i, "num_steps": num_steps}
            for i in range(LEARNERS)
        ]
        said = _together(work, sites, "torchft", tasks, expected_s)
    return Measured(num_steps, *_shares(said, num_steps))


def _shares(said: list[Mapping[str, Any]], num_steps: int) -> tuple[tuple[float, ...], float]:
    utilization = tuple(num_steps * STEP_S / each["seconds"] for each in said)
    return utilization, fmean([each["steps_s"] / num_steps for each in said])


def _period_steps(adopted: list[tuple[int, list[int]]]) -> float:
    """Inner steps from one version of a fragment to the next, over fragments and versions after the first few."""
    steps = versions = 0
    for fragment in range(FRAGMENTS):
        held = [(step, each[fragment]) for step, each in adopted if each[fragment] >= WARM_VERSIONS]
        if len(held) > 1:
            first = next(step for step, version in held if version == held[0][1])
            last = next(step for step, version in held if version == held[-1][1])
            steps, versions = steps + last - first, versions + held[-1][1] - held[0][1]
    return steps / versions if versions else float("inf")


def _merge_s(log: Path) -> float:
    """Seconds of a round on the syncer, by its own clock; the first round of each fragment is left out."""
    merge_s = [it.merge_s for it in read_events(log) if isinstance(it, Merged) and it.version > 1]
    persist_s = [it.persist_s for it in read_events(log) if isinstance(it, Published) and it.version > 1]
    return fmean(merge_s) + fmean(persist_s)


# - processes --------------------------------------------------------------------------------------------------------


def _together(
    work: Path, sites: Sites, kind: str, tasks: list[dict[str, Any]], expected_s: float
) -> list[Mapping[str, Any]]:
    """Learners that begin at one time; what they say in the end."""
    with ExitStack() as stack:
        learners = [
            stack.enter_context(_started(work, task["name"], Sites.inside(site, *_python(kind, task))))
            for site, task in zip(sites.learners, tasks, strict=True)
        ]
        logs = [work / f"{task['name']}.log" for task in tasks]
        for learner, log in zip(learners, logs, strict=True):
            _line(learner, READY_S, log)
        begins_s = time.monotonic() + 0.5
        for learner in learners:
            assert learner.stdin is not None
            learner.stdin.write(f"{begins_s!r}\n")
            learner.stdin.flush()
        limit_s = SLACK_S + 3 * expected_s
        return [json.loads(_line(learner, limit_s, log)) for learner, log in zip(learners, logs, strict=True)]


@contextmanager
def _started(work: Path, name: str, command: list[str], cwd: Path = ROOT) -> Iterator[subprocess.Popen[str]]:
    with open(work / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str], limit_s: float, log: Path) -> str:
    """The next line that it says."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], limit_s)
    line = process.stdout.readline() if ready else ""
    if not line:
        what = "ended" if ready else f"said nothing for {limit_s:.0f} s"
        raise RunFailedError(f"{log.stem} {what}:\n{log.read_text()[-2000:]}")
    return line


def _until_there(file: Path, process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while not file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RunFailedError(f"{log.stem} does not serve:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)


def _python(kind: str, task: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-m", "studies.shaped_links.learner", kind, json.dumps(task)]


def _diloco() -> str:
    return str(Path(sys.executable).with_name("diloco"))
