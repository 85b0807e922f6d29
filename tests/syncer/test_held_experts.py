"""Learners that hold parts of a mixture, over a real syncer: the last holder of an expert is killed, so is the syncer;
a late learner takes the expert over, and the holder comes back.

python -m tests.syncer.test_held_experts ADDRESS KILL_AT      the holder that is killed
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.processes import until
from tests.learner.mixtures import mixture, train_step
from tests.processes import ForkedSyncer, start_module
from tests.syncer.runs import RUN, LearnerThreads

import diloco
from diloco import events
from diloco.cli import main
from diloco.event_log import read_events
from diloco.exchange.base import Exchange
from diloco.exchange.dialling import fetch_status
from diloco.following.follower import newest_model

RUN_FILE = """
[run]
name = "tiny"
tokens = 1_000_000
learners = 2

[method]
preset = "DiLoCo"
sync_every = 3
fragments = { type = "Experts", groups = 2, trunk = { type = "Whole" } }

[syncer]
lost_floor_s = 60.0
lost_cap_s = 60.0
reconnect_floor_s = 1.0
record_contributions = true
"""


def train(
    index: int, exchange: Exchange, text: str | None, steps: int, at_step: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """A learner's life of so many steps. Returns its metrics."""
    model = mixture(index, experts=4 if text is None else 2)
    whole = mixture() if index == 0 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with diloco.Learner(
        model, optimizer, exchange=exchange, buffers="average", holds_experts=text, whole=whole
    ) as learner:
        for step in range(1, steps + 1):
            train_step(model, optimizer, index, step)
            learner.step(tokens=5)
            if at_step is not None:
                at_step(step)
        learner.finish(ends_run=False)
        return learner.metrics()


def test_the_last_holder_of_an_expert_is_killed_and_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    syncer, stop = ForkedSyncer(tmp_path, RUN_FILE), threading.Event()

    def status() -> dict[str, Any]:
        found: dict[str, Any] = fetch_status(syncer.address, run=RUN)
        return found

    def versions() -> list[int]:
        return [each["version"] for each in status()["fragments"]]

    def goes_on(fragment: int) -> None:
        before = versions()[fragment]
        until(lambda: versions()[fragment] > before + 1, f"fragment {fragment} does not go on")

    def keep_going(step: int) -> None:
        if stop.is_set():
            raise StopIteration

    def survive(exchange: Exchange) -> None:
        try:
            train(0, exchange, "0-1 of 4", 1_000_000, keep_going)
        except StopIteration:
            return

    try:
        with LearnerThreads(2) as pool:
            survivor = pool.submit(survive, pool.connect(syncer.address, learner="survivor", initialise=True))
            victim = start_module("tests.syncer.test_held_experts", syncer.address, "7")
            victim.join(timeout=300)
            exitcode = victim.exitcode
            victim.kill()  # where it is late, nothing else ends it
            assert exitcode == -signal.SIGKILL
            until(lambda: "victim" not in status()["learners"], "the victim is not given up")
            assert status()["experts"] == {"number": 4, "untrained": [[2, 4]]}
            left = versions()[1]
            assert left > 0
            syncer.kill()
            syncer.start()
            goes_on(2)
            goes_on(0)
            assert versions()[1] == left
            train(2, pool.connect(syncer.address, learner="late"), None, 7)
            late = versions()[1]
            assert late > left
            goes_on(2)
            assert versions()[1] == late
            back = train(1, pool.connect(syncer.address, learner="victim"), "2-3 of 4", 12)
            assert back["incarnation"] == 2
            assert back["versions"][0] == -1
            assert versions()[1] > late
            stop.set()
            survivor.result(timeout=300)
        final = status()
        model = newest_model(syncer.address, run=RUN).state_dict()
    finally:
        syncer.kill()
    assert all(value.isfinite().all() for value in model.values())
    for fragment in final["fragments"]:
        ledger = fragment["ledger"]
        settled = ledger["merged"] + ledger["lost"] + sum(ledger["discarded"].values())
        assert ledger["trained"] == ledger["pending"] + settled
    of_group_1 = final["fragments"][1]["ledger"]["trained"]
    assert 5 * (7 + 12) + 5 * 1 <= of_group_1 <= 5 * (7 + 12) + 5 * 7  # of the victim, all that it had reported
    assert final["fragments"][2]["ledger"]["trained"] == final["tokens"]
    merged = [it for it in read_events(tmp_path / "state" / "events.jsonl") if isinstance(it, events.Merged)]
    assert {name for it in merged if it.fragment == 1 for name in it.contributors} == {"victim", "late"}
    assert {name for it in merged if it.fragment == 0 for name in it.contributors} == {"survivor", "late"}
    capsys.readouterr()
    with pytest.raises(SystemExit, match="^0$"):
        main(["replay", str(tmp_path / "state"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["difference"], found["gaps"], found["boots"]) == (None, [], 2)
    assert found["merges_equal"] == found["merges"] > 10


def _victim(address: str, kill_at: int) -> None:
    def at_step(step: int) -> None:
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    train(1, diloco.connect(address, run=RUN, learner="victim"), "2-3 of 4", kill_at, at_step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _victim(sys.argv[1], int(sys.argv[2]))
