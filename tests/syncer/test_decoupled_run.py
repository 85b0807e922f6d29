"""Decoupled DiLoCo over a real syncer: four processes of unequal speed, one killed, one joining late, the syncer killed too.

Nobody ever blocks in `learner.step()`, every token is accounted for, and the status says who takes part.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.syncer.runs import RUN
from tests.syncer.test_faults import SyncerProcess, until

from diloco import events
from diloco.errors import ExchangeError
from diloco.exchange.remote import fetch_status

pytestmark = pytest.mark.timeout(300)  # seven processes that import torch, on whatever cores there are

H, FRAGMENTS = 8, 3
STEP_S = {"quick-1": 0.02, "quick-2": 0.02, "slow-1": 0.033, "slow-2": 0.05, "late": 0.02}

RUN_FILE = f"""
[run]
name = "{RUN}"
tokens = 1_000_000
[method]
preset = "DecoupledDiLoCo"
sync_every = {H}
fragments = {{type = "Balanced", num_fragments = {FRAGMENTS}}}
codec = "bf16"
[syncer]
lost_floor_s = 2.0
"""


class Learners:
    """Learner processes by name."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self._stack = stack
        self._directory = directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, address: str, name: str, *extra: str) -> None:
        command = [sys.executable, "-m", "tests.syncer.unequal", address, name, str(STEP_S[name]), *extra]
        log = self._stack.enter_context((self._directory / f"{name}.log").open("wb"))
        process = self._stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log))
        self._stack.callback(process.kill)
        self.processes[name] = process

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def finish(self) -> dict[str, Any]:
        """Everybody leaves, one after the other; returns their metrics."""
        results = {}
        for name, process in self.processes.items():
            process.terminate()
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0, (self._directory / f"{name}.log").read_text()
            results[name] = json.loads(out)
        return results


@contextmanager
def decoupled(directory: Path) -> Iterator[tuple[SyncerProcess, Learners]]:
    with ExitStack() as stack:
        syncer = SyncerProcess(directory, RUN_FILE)
        stack.callback(lambda: (syncer.process.kill(), syncer.process.wait()))
        yield syncer, Learners(stack, directory)


class Watcher:
    """Asks for the status until it is as wanted."""

    def __init__(self, syncer: SyncerProcess) -> None:
        self._syncer = syncer
        self.status: dict[str, Any] = {}

    def until(self, wanted: str, holds: Any) -> dict[str, Any]:
        def look() -> bool:
            try:
                self.status = fetch_status(self._syncer.address, run=RUN)
            except ExchangeError:
                return False
            return bool(self.status["initialised"] and holds(self.status))

        until(look, wanted, limit_s=120.0)
        return self.status


def versions(status: dict[str, Any]) -> list[int]:
    return [fragment["version"] for fragment in status["fragments"]]


def in_merges(status: dict[str, Any], names: list[str]) -> bool:
    return all(name in status["learners"] and status["learners"][name]["merged"] > 0 for name in names)


def test_a_decoupled_run_never_blocks_and_loses_nothing(tmp_path: Path) -> None:
    four = ["quick-1", "quick-2", "slow-1", "slow-2"]
    with decoupled(tmp_path) as (syncer, learners):
        watcher = Watcher(syncer)
        learners.start(syncer.address, "quick-1", "initialise")
        for name in four[1:]:
            learners.start(syncer.address, name)
        watcher.until("all four are in merges", lambda status: in_merges(status, four))
        assert all(it["live"] and it["healthy"] for it in watcher.status["learners"].values())

        learners.kill("slow-2")
        before = versions(
            watcher.until("the killed one is given up", lambda status: "slow-2" not in status["learners"])
        )
        watcher.until("the others go on", lambda status: min(versions(status)) > max(before) + 2)

        learners.start(syncer.address, "late")
        watcher.until("the late one is in merges", lambda status: in_merges(status, ["late"]))

        before = versions(watcher.status)
        syncer.kill()
        syncer.start()
        watcher.until("the run goes on", lambda status: min(versions(status)) > max(before) + 2)
        everybody = ["quick-1", "quick-2", "slow-1", "late"]
        status = watcher.until("everybody is in merges", lambda status: in_merges(status, everybody))
        shown = diloco_status(syncer.address)

        results = learners.finish()
        status = watcher.until("everybody has left", lambda status: not status["learners"])

    for name, metrics in results.items():
        assert metrics["num_blocked"] == 0, name
        assert metrics["blocked_s"] == 0.0, name
        histogram = metrics["blocked_histogram"]
        assert histogram["0"] == sum(histogram.values()) > 50, name
        assert metrics["incarnation"] == 1, name
    check_books(status, results)
    check_merges(tmp_path)
    for name in everybody:
        assert name in shown
    assert max(len(line) for line in shown.splitlines()) <= 100


def check_books(status: dict[str, Any], results: dict[str, Any]) -> None:
    """Per fragment, pending + merged + discarded + lost = trained, and trained is what the learners say."""
    tokens = sum(metrics["tokens"] for metrics in results.values())
    for fragment in status["fragments"]:
        ledger = fragment["ledger"]
        settled = ledger["merged"] + ledger["lost"] + sum(ledger["discarded"].values())
        assert ledger["trained"] == ledger["pending"] + settled == status["tokens"]
        assert ledger["trained"] > tokens  # and what the killed one had trained
        assert ledger["merged"] > 0.5 * ledger["trained"]
    for metrics in results.values():
        for ledger in metrics["ledger"]:
            settled = ledger["merged"] + ledger["lost"] + sum(ledger["discarded"].values())
            assert ledger["trained"] == ledger["pending"] + settled == metrics["tokens"]


def check_merges(directory: Path) -> None:
    """The syncer called each fragment about every H mean steps: a fast network does not make it more often."""
    merges = [it for it in events.read_events(directory / "state" / "events.jsonl") if isinstance(it, events.Merged)]
    contributed = [sum(it.steps) / max(1, len(it.contributors)) for it in merges if it.fragment == 0 and it.version > 1]
    assert sum(contributed) / len(contributed) > 0.6 * H
    assert any(it.scale < 1 for it in merges)
    assert all(it.scale <= 1 for it in merges)
    assert {name for it in merges for name in it.contributors} == set(STEP_S)


def diloco_status(address: str) -> str:
    command = [sys.executable, "-m", "diloco", "status", "--address", address, "--run", RUN]
    env = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
