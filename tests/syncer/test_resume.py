"""A run over a syncer that stops and goes on has the bits of one that went through, whatever is loaded first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.learner.test_learner import LAYERS, assert_same, make_model, run, tokens_of
from tests.syncer.runs import RUN, start
from torch import nn

import diloco
from diloco import Learner
from diloco.core.quorum import AllLive

pytestmark = pytest.mark.timeout(900)

T = 5  # in the middle of a round; with an overlap of 2 and more, answers are on their way
BOTH = AllLive(at_least=2)
METHODS = {
    "LocalSGD": diloco.LocalSGD(sync_every=3, quorum=BOTH),
    "DiLoCo": diloco.DiLoCo(sync_every=4, quorum=BOTH),
    "DiLoCo, tokens": diloco.DiLoCo(sync_every=4, weight="tokens", quorum=BOTH),
    "Streaming": diloco.StreamingDiLoCo(
        sync_every=4, overlap=2, fragments=LAYERS, error_feedback=True, quorum=BOTH
    ),
    "Streaming, two in flight": diloco.StreamingDiLoCo(
        sync_every=4, overlap=4, fragments=LAYERS, codec=("int4", "int8"), error_feedback=True, quorum=BOTH
    ),
    "MuLoCo": diloco.MuLoCo(sync_every=3, quorum=BOTH),
    "SparseLoCo": diloco.SparseLoCo(sync_every=3, quorum=BOTH),
    "Delayed": diloco.DelayedDiLoCo(sync_every=3, quorum=BOTH),
    "Eager": diloco.EagerDiLoCo(sync_every=3, fragments=LAYERS, quorum=BOTH),
}  # fmt: skip


def life(index: int, model: nn.Module, address: str, steps: range, saved: dict[str, Any] | None) -> dict[str, Any]:
    """One process's part. The first learner does as Lightning and Trainer do: the model and the optimizer are loaded,
    then the learner is attached; the second loads its own state after attaching, and then the optimizer's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    early = saved is not None and index == 0
    if saved is not None and early:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    exchange = diloco.connect(address, run=RUN, learner=f"learner-{index}", initialise=index == 0 and saved is None)
    learner = Learner(model, optimizer, exchange=exchange, resume=saved["learner"] if saved and early else None)
    with learner:
        if saved is not None and not early:
            assert learner.load_state_dict(saved["learner"])
            optimizer.load_state_dict(saved["optimizer"])
        assert learner.resumed is (None if saved is None else True)
        run(learner, index, steps)
        return {
            "learner": learner.state_dict(),
            "model": {name: value.clone() for name, value in model.state_dict().items()},
            "optimizer": optimizer.state_dict(),
            "global": learner.global_state_dict(),
            "steps": learner.steps,
            "versions": learner.versions,
        }


def both(address: str, steps: range, saved: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    models = [make_model(index) for index in range(2)]  # here, since threads share torch's random state
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(life, i, models[i], address, steps, None if saved is None else saved[i]) for i in range(2)
        ]
        return [future.result() for future in futures]


ALIKE = ["LocalSGD", "DiLoCo", "Streaming", "MuLoCo"]
"""Whose state is a part of another one's."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in METHODS]
)
def test_a_resumed_run_has_the_bits_of_one_that_went_through(name: str, tmp_path: Path) -> None:
    with start(tmp_path / "whole", METHODS[name]) as syncer:
        whole = both(syncer.address, range(1, 2 * T + 1))
    with start(tmp_path / "halves", METHODS[name]) as syncer:
        halves = both(syncer.address, range(1, T + 1))
        resumed = both(syncer.address, range(T + 1, 2 * T + 1), halves)
    for index, (mine, through) in enumerate(zip(resumed, whole, strict=True)):
        for what in ("model", "optimizer", "global", "steps", "versions"):
            assert_same(mine[what], through[what], f"{index}/{what}")
        for what in ("anchors", "origins", "residuals", "eager"):
            assert_same(mine["learner"][what], through["learner"][what], f"{index}/{what}")
    assert halves[0]["learner"]["core"]["tokens"] == T * tokens_of(0)
