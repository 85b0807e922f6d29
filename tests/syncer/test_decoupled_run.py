"""Decoupled DiLoCo over a real syncer: four processes of unequal speed, one killed, one joining late, the syncer killed
too.

No learner ever blocks in `learner.step()`, every token is accounted for, and the status says who takes part. `python -m
benchmarks.decoupled` shows the same run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest
import torch
from benchmarks import decoupled
from benchmarks.decoupled import IN_THE_END, SPEED, H
from rich.console import Console
from tests.syncer.runs import RUN, Net, start, status_of
from torch import Tensor

import diloco
from diloco import events
from diloco.event_log import read_events
from diloco.syncer.server import Syncer


@pytest.mark.slow
@pytest.mark.timeout(900)  # seven processes that import torch, on whatever cores there are
def test_a_decoupled_run_never_blocks_and_loses_nothing(tmp_path: Path) -> None:
    result = decoupled.run(tmp_path, step_s=0.05)
    assert set(result.learners) == set(IN_THE_END)
    for name, metrics in result.learners.items():
        assert metrics["num_blocked"] == 0, name
        assert metrics["blocked_s"] == 0.0, name
        histogram = metrics["blocked_histogram"]
        assert histogram["0"] == sum(histogram.values()) == sum(metrics["step_histogram"].values()) > 3 * H, name
        assert metrics["longest_step_s"] < result.away_s / 2, (
            name
        )  # whatever it does, it does not sit the syncer's absence out
        assert metrics["incarnation"] == 1, name
    check_books(result.status, result.learners)
    check_merges(tmp_path, result.status)
    for name in IN_THE_END:
        assert name in result.shown
    console = Console(record=True, width=100)
    decoupled.show(result, console)
    assert "blocked 0 s" in console.export_text()


@pytest.mark.parametrize("restored", ["before it is attached", "after it is attached", "never"])
def test_a_resumed_learner_has_the_work_that_it_had_not_sent(restored: str, tmp_path: Path) -> None:
    """The syncer has called no learner, so the run is where it was, and what the learner has trained is in its own
    parameters alone."""
    method = diloco.DecoupledDiLoCo(sync_every=1000, fragments=diloco.Whole())
    with start(tmp_path, method) as syncer, Life(syncer) as whole:
        whole.train(7)
        straight = whole.parameters()
    with start(tmp_path / "again", method) as syncer:
        with Life(syncer) as first:
            first.train(4)
            saved = first.state()
        with Life(syncer, saved["model"] if restored == "before it is attached" else None) as second:
            if restored == "after it is attached":
                second.model.load_state_dict(saved["model"])
            second.optimizer.load_state_dict(saved["optimizer"])
            assert second.learner.load_state_dict(saved["learner"])
            assert second.learner.steps == 4
            second.train(3)
            assert torch.equal(second.parameters(), straight)


class Life:
    """A learner over a syncer, alone; `model`: what its model is before it is attached."""

    def __init__(self, syncer: Syncer, model: dict[str, Tensor] | None = None) -> None:
        torch.manual_seed(0)
        self.model = Net()
        if model is not None:
            self.model.load_state_dict(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        initialise = not status_of(syncer)["initialised"]
        exchange = diloco.connect(syncer.address, run=RUN, learner="a", initialise=initialise)
        self.learner = diloco.Learner(self.model, self.optimizer, exchange=exchange)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.learner.close()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.learner.steps)
            x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)
            (self.model(x) - y).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.learner.step(tokens=5)

    def parameters(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def state(self) -> dict[str, Any]:
        model = {name: value.clone() for name, value in self.model.state_dict().items()}
        return {"model": model, "optimizer": self.optimizer.state_dict(), "learner": self.learner.state_dict()}


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
    merges = [it for it in read_events(directory / "state" / "events.jsonl") if isinstance(it, events.Merged)]
    assert any(it.scale < 1 for it in merges)
    assert all(it.scale <= 1 for it in merges)
    assert {name for it in merges for name in it.contributors} == set(SPEED)
