"""A learner that is blocked for long says on what, in the time of its exchange."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tests.learner.test_learner_events import Script, step
from tests.syncer.runs import RUN, Net, method
from tests.syncer.runs import start as start_syncer
from torch import nn

import diloco
from diloco import Learner


class Slow(Script):
    """Time passes only while the learner waits. The update comes at `comes_at_s`, and news about nothing every 3 s."""

    comes_at_s = 75.0
    news_s = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.time_s = 1000.0
        self.waits_s: list[float] = []

    @property
    def now_s(self) -> float:
        return self.time_s

    def wait(self, timeout_s: float) -> None:
        self.waits_s.append(timeout_s)
        self.time_s += min(timeout_s, self.news_s, 1000.0 + self.comes_at_s - self.time_s)
        if self.time_s == 1000.0 + self.comes_at_s:
            self.publish(1, "me", "you")


class OtherRank(Slow):
    @property
    def rank(self) -> tuple[int, int]:
        return 1, 2


def blocked(exchange: Slow, caplog: pytest.LogCaptureFixture) -> list[str]:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = Learner(model, optimizer, method=diloco.DiLoCo(sync_every=2), exchange=exchange)
    with caplog.at_level(logging.INFO, "diloco"):
        step(learner, 2)
    assert learner.versions == (1,)
    assert learner.metrics()["blocked_s"] == exchange.comes_at_s
    return [record.getMessage() for record in caplog.records]


def test_a_blocked_learner_says_on_what_after_10_s_and_again_at_doubled_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange = Slow()
    assert blocked(exchange, caplog) == [
        f"learner me has been blocked after step 2 for {seconds} s: it waits for version 1 of fragment 0; "
        "1 learner(s) take part."
        for seconds in (10, 20, 40)
    ]
    assert min(exchange.waits_s) > 0


def test_a_step_that_is_blocked_for_less_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    exchange = Slow()
    exchange.comes_at_s = 9.0
    assert blocked(exchange, caplog) == []


def test_only_rank_0_of_a_learner_says_it(caplog: pytest.LogCaptureFixture) -> None:
    assert blocked(OtherRank(), caplog) == []


def test_waiting_for_a_checkpoint_says_it_too(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 3)
    exchange = Slow()
    method = diloco.DiLoCo(sync_every=2, overlap=1)
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), method=method, exchange=exchange)
    step(learner, 2)
    with caplog.at_level(logging.INFO, "diloco"):
        learner.state_dict()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"learner me has been blocked after step 2 for {seconds} s" for seconds in (10, 20, 40)
    ]


def test_over_a_syncer_it_says_where_to_look_and_whether_the_syncer_is_reached(tmp_path: Path) -> None:
    with start_syncer(tmp_path, method()) as syncer:
        exchange = diloco.connect(syncer.address, run=RUN, learner="me", initialise=True)
        model = Net()
        learner = Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=exchange)
        assert exchange.obstacles == "1 learner(s) take part, and `diloco status` shows which are missing"
    while exchange.obstacles != "the syncer cannot be reached":
        exchange.wait(0.02)
    learner.close()
