"""Decoupled DiLoCo over a real syncer: four processes of unequal speed, one killed, one joining late, the syncer killed too.

Nobody ever blocks in `learner.step()`, every token is accounted for, and the status says who takes part. `python -m
benchmarks.decoupled` shows the same run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks import decoupled
from benchmarks.decoupled import IN_THE_END, SPEED, H
from rich.console import Console

from diloco import events

pytestmark = pytest.mark.timeout(300)  # seven processes that import torch, on whatever cores there are


def test_a_decoupled_run_never_blocks_and_loses_nothing(tmp_path: Path) -> None:
    result = decoupled.run(tmp_path, step_s=0.02)
    assert set(result.learners) == set(IN_THE_END)
    for name, metrics in result.learners.items():
        assert metrics["num_blocked"] == 0, name
        assert metrics["blocked_s"] == 0.0, name
        histogram = metrics["blocked_histogram"]
        assert histogram["0"] == sum(histogram.values()) == sum(metrics["step_histogram"].values()) > 50, name
        assert metrics["longest_step_s"] < result.away_s / 2, (
            name
        )  # whatever it does, it does not sit the syncer's absence out
        assert metrics["incarnation"] == 1, name
    check_books(result.status, result.learners)
    check_merges(tmp_path, result.status)
    for name in IN_THE_END:
        assert name in result.shown
    assert max(len(line) for line in result.shown.splitlines()) <= 100
    console = Console(record=True, width=100)
    decoupled.show(result, console)
    assert "blocked 0 s" in console.export_text()


def check_books(status: dict[str, Any], results: dict[str, Any]) -> None:
    """Per fragment, pending + merged + discarded + lost = trained, and trained is what the learners say."""
    tokens = sum(metrics["tokens"] for metrics in results.values())
    for fragment in status["fragments"]:
        ledger = fragment["ledger"]
        settled = ledger["merged"] + ledger["lost"] + sum(ledger["discarded"].values())
        assert ledger["trained"] == ledger["pending"] + settled == status["tokens"]
        assert ledger["trained"] > tokens  # and what the killed one had trained
        assert ledger["merged"] > 0
    for metrics in results.values():
        for ledger in metrics["ledger"]:
            settled = ledger["merged"] + ledger["lost"] + sum(ledger["discarded"].values())
            assert ledger["trained"] == ledger["pending"] + settled == metrics["tokens"]


def check_merges(directory: Path, status: dict[str, Any]) -> None:
    """The syncer called each fragment every H mean steps at most: a fast network does not make it more often."""
    assert max(fragment["version"] for fragment in status["fragments"]) <= status["step"] / H + 1
    merges = [it for it in events.read_events(directory / "state" / "events.jsonl") if isinstance(it, events.Merged)]
    assert any(it.scale < 1 for it in merges)
    assert all(it.scale <= 1 for it in merges)
    assert {name for it in merges for name in it.contributors} == set(SPEED)
