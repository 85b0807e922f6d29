"""A scheduled round that needs two learners has lost one: the learner that joins later makes it whole, and both reach
the end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.processes import until
from tests.chaos.relay import Link, Relay
from tests.syncer.runs import (
    RUN,
    Raw,
    is_initialised,
    layout,
    num_live,
    position,
    start,
    status_of,
    train,
    versions_of,
)
from tests.syncer.runs import method as tiny_method

import diloco
from diloco.exchange.base import Exchange

STEPS, LEAVES_AFTER, BLOCKED_AT = 60, 20, 30


def method(**changes: Any) -> diloco.Method:
    return diloco.DiLoCo(sync_every=10, quorum=diloco.AllLive(at_least=2), **changes)


@dataclass
class End:
    """How a learner ended: the run's step, its own steps by number, its books."""

    steps: list[int]
    metrics: dict[str, Any]
    weight: torch.Tensor


def live(exchange: Exchange, until_step: int, given: diloco.Method | None) -> End:
    """Constant gradients until the run's step `until_step`."""
    model = torch.nn.Linear(8, 4, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), []
    with diloco.Learner(model, optimizer, method=given, exchange=exchange) as learner:
        while learner.steps < until_step:
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            learner.step(tokens=10)
            steps.append(learner.steps)
        return End(steps, learner.metrics(), learner.global_state_dict()["weight"])


def check(survivor: End, joiner: End) -> None:
    assert survivor.steps == list(range(1, STEPS + 1))
    assert joiner.steps == list(range(LEAVES_AFTER + 1, STEPS + 1))  # its first send is the round's that waits
    assert survivor.metrics["versions"] == joiner.metrics["versions"] == [STEPS // 10]
    assert (survivor.metrics["merges"], joiner.metrics["merges"]) == (6, 4)
    assert torch.equal(survivor.weight, joiner.weight)
    assert [each.metrics["ledger"][0]["merged"] for each in (survivor, joiner)] == [600, 400]


def test_in_one_process() -> None:
    """The second learner leaves after 20 steps, the first waits after 30, the third joins much later."""

    def life(index: int, exchange: Exchange) -> End:
        return live(exchange, LEAVES_AFTER if index == 1 else STEPS, method())

    survivor, _, joiner = diloco.run_local(life, learners=3, starts_s=[0.0, 0.0, 100.0])
    check(survivor, joiner)


def test_over_a_syncer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with start(tmp_path, method()) as syncer, ThreadPoolExecutor(3) as pool:

        def join(name: str, until_step: int) -> Any:
            exchange = diloco.connect(syncer.address, run=RUN, learner=name, initialise=name == "survivor")
            return pool.submit(live, exchange, until_step, None)

        def is_blocked() -> bool:
            it = status_of(syncer)
            return it["step"] == BLOCKED_AT and it["learners"]["survivor"]["waiting"]

        survivor = join("survivor", STEPS)
        until(lambda: is_initialised(syncer), "the run has no model")
        join("leaver", LEAVES_AFTER).result(timeout=300)
        until(is_blocked, "the survivor does not come to the round that lacks a learner")
        until(lambda: "has the contributions of 1 of at least 2 learners" in caplog.text, "no word is said of it")
        joiner = join("joiner", STEPS)
        check(survivor.result(timeout=300), joiner.result(timeout=300))


def test_a_joiner_is_a_joiner_after_the_syncer_was_started_again(tmp_path: Path) -> None:
    """It has joined, and the syncer is started again before its first step, while the survivor waits after step 6 for a
    second learner."""
    numels = [fragment.numel for fragment in layout().fragments]

    def push(raw: Raw, fragment: int, version: int, step: int, tokens: int) -> None:
        payload = diloco.FP32().encode(torch.zeros(numels[fragment]))
        given = {
            "fragment": fragment,
            "round": version,
            "base": version,
            "tokens": tokens,
            "trained": tokens * step // 2,
        }
        assert raw.push(payload, step=step, steps=2, **given)

    with start(tmp_path, tiny_method(at_least=2)) as syncer:
        survivor, joiner = Raw(syncer.address, "survivor"), Raw(syncer.address, "joiner")
        survivor.initialise()
        for raw in (survivor, joiner):
            raw.join()
        for fragment, step in ((0, 2), (1, 4)):
            for raw in (survivor, joiner):
                push(raw, fragment, 0, step, 10)
        until(lambda: versions_of(syncer) == [1, 1], "the first rounds are not merged")
        joiner.join()
    for raw in (survivor, joiner):
        raw.connection.close()
    with start(tmp_path, tiny_method(at_least=2)) as syncer:
        for raw in (survivor, joiner):
            raw.connection = Raw(syncer.address).connection
        survivor.beat(step=4, tokens=20)  # its answer names the new process, which the push is meant for
        push(survivor, 0, 1, 6, 10)
        survivor.beat(step=7, tokens=35, waiting=True)
        assert joiner.beat(step=0, tokens=0).standing.start_step == 4  # the send before the one that is missing
        for raw in (survivor, joiner):
            raw.connection.close()


def test_one_that_hears_late_of_the_quorum_begins_with_the_others(tmp_path: Path) -> None:
    """The other learner has trained by the time that this one hears that both are there: it does not skip the steps in
    between."""
    begun = threading.Event()

    def hold_up(_: Link) -> None:
        if num_live(syncer) == 2:
            until(lambda: position(syncer)[0] > 0, "the other one does not begin")

    with (
        start(tmp_path, tiny_method(at_least=2)) as syncer,
        Relay(syncer.port, hold_up) as relay,
        ThreadPoolExecutor(2) as pool,
    ):
        first = diloco.connect(syncer.address, run=RUN, learner="a", initialise=True)
        lives = [pool.submit(train, 0, first, None, 12, lambda step: step > 1 or begun.wait(300))]
        lives.append(
            pool.submit(train, 1, diloco.connect(relay.address, run=RUN, learner="b"), None, 12, lambda _: begun.set())
        )
        ends = [life.result(timeout=300) for life in lives]
    given = diloco.Method.from_dict(tiny_method().to_dict())
    together = diloco.run_local(lambda index, exchange: train(index, exchange, given, 12), learners=2)
    for (mine, metrics), (theirs, _) in zip(ends, together, strict=True):
        assert metrics["steps"] == 12
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
