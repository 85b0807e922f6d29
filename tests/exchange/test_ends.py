"""The end of a run: after `finish`, every learner has the run's final model, to the bit, over every exchange."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exchange.ending_life import LEARNERS, METHODS, TOKENS, live
from tests.exchange.scenarios import Result
from tests.exchange.worlds import TIMEOUT_S, read
from tests.processes import start_module
from tests.syncer.runs import PATIENT

import diloco
from diloco.errors import ConfigError
from diloco.exchange.base import Exchange
from diloco.exchange.local import Lost, run_virtual
from diloco.exchange.virtual.delivery import Fault
from diloco.exchange.virtual.run import VirtualRun
from diloco.following.follower import newest_model
from diloco.protocol.contribution import Budget
from diloco.syncer.server import Options, Syncer

OVER_A_SYNCER = [name for name in METHODS if name != "data parallel"]


def require_one_model(results: list[Result]) -> None:
    first, *others = results
    assert len(others) == LEARNERS - 1
    assert first.facts["is_final"]
    assert any(first.facts["versions"])
    for other in others:
        assert other.facts == first.facts
        assert other.tensors.keys() == first.tensors.keys()
        assert all(torch.equal(value, other.tensors[key]) for key, value in first.tensors.items())


@pytest.mark.parametrize("name", METHODS)
def test_learners_of_one_speed(name: str) -> None:
    require_one_model(diloco.run_local(partial(live, METHODS[name]), learners=LEARNERS, tokens=TOKENS))


@pytest.mark.parametrize(
    "kills",
    [
        (), pytest.param((Fault(1, 20.5, 24.0),), marks=pytest.mark.slow),
        (Fault(0, 3.2, 4.0), Fault(2, 29.9, 40.0)), (Fault(1, 20.5, 9e3),),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", OVER_A_SYNCER)
def test_learners_of_different_speeds_of_which_some_are_killed_and_come_back(
    name: str, kills: tuple[Fault, ...]
) -> None:
    speeds = (1.0, 1.7, 0.6)
    names = [f"learner-{index}" for index in range(LEARNERS)]
    run = VirtualRun(names, lambda index, _: speeds[index], [0.0] * LEARNERS, faults=kills, budget=Budget(TOKENS))
    results = run_virtual(partial(live, METHODS[name]), run)
    require_one_model([result for result in results if not isinstance(result, Lost)])


def start(
    directory: Path, name: str, *more: str, ranks: range = range(LEARNERS), stdin: int | None = None
) -> list:  # type: ignore[type-arg]  # fmt: skip
    module = "tests.exchange.ending_life"
    return [start_module(module, str(directory), name, str(rank), str(LEARNERS), *more, stdin=stdin) for rank in ranks]


def ends(processes: list, expected: int = 0) -> None:  # type: ignore[type-arg]
    for process in processes:
        process.join(TIMEOUT_S)
        assert process.exitcode == expected


@pytest.mark.parametrize("name", ["streaming", "eager", "data parallel"])
def test_ranks_of_a_process_group(name: str, tmp_path: Path) -> None:
    ends(start(tmp_path, name))
    require_one_model([read(tmp_path, "end", rank) for rank in range(LEARNERS)])


@pytest.mark.parametrize("name", OVER_A_SYNCER)
def test_processes_that_race_to_begin_the_run_and_of_which_one_is_killed(name: str, tmp_path: Path) -> None:
    """Nobody is evicted in time: the others wait at the end for the one that was killed, which the same command brings
    back. The run does not end before."""
    options = Options("127.0.0.1:0", tmp_path / "syncer", deadlines=PATIENT, budget=Budget(TOKENS))
    with Syncer("ends", METHODS[name], options) as syncer, ExitStack() as stack:
        theirs, ours = os.pipe()
        others = start(tmp_path, name, syncer.address, ranks=range(1, LEARNERS), stdin=theirs)
        os.close(theirs)
        [dying] = start(tmp_path, name, syncer.address, "--dies", ranks=range(1))
        for process in (*others, dying):
            stack.callback(process.kill)
        ends([dying], -signal.SIGKILL)
        os.close(ours)
        back = start(tmp_path, name, syncer.address, ranks=range(1))
        stack.callback(back[0].kill)
        ends([*back, *others])
        results = [read(tmp_path, "end", rank) for rank in range(LEARNERS)]
        require_one_model(results)
        at_syncer = newest_model(syncer.address, run="ends").state_dict()
    assert all(torch.equal(value, at_syncer[key]) for key, value in results[0].tensors.items())


def test_a_learner_that_stops_early_is_told_that_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """It has the merges of its own contributions."""

    def life(index: int, exchange: Exchange) -> tuple[bool, int, int]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco.Learner(model, optimizer, method=diloco.DiLoCo(sync_every=2), exchange=exchange) as learner:
            while not learner.done and not (index == 1 and learner.steps == 4):
                learner.step(tokens=1)
            return learner.finish(), learner.steps, learner.versions[0]

    with caplog.at_level(logging.WARNING, "diloco"):
        first, second = diloco.run_local(life, learners=2, tokens=20)
    assert first == (True, 16, 8)
    assert second == (False, 4, 2)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("learner learner-001 ends at step 4 with versions [2] of the global model, which may not be")
    assert "since the run goes on" in said


def test_a_learner_that_joins_after_the_end_has_the_final_model_at_once() -> None:
    """It trains nothing."""

    def life(index: int, exchange: Exchange) -> tuple[bool, int, int]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco.Learner(model, optimizer, method=diloco.DiLoCo(sync_every=2), exchange=exchange) as learner:
            while not learner.done:
                learner.step(tokens=1)
            return learner.finish(), learner.run_tokens, learner.versions[0]

    assert diloco.run_local(life, learners=2, tokens=6, starts_s=[0.0, 50.0]) == [(True, 6, 3)] * 2


def test_finish_while_the_syncer_is_away_ends_in_time_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    with Syncer("ends", diloco.DiLoCo(sync_every=2), Options("127.0.0.1:0", tmp_path, budget=Budget(4))) as syncer:
        exchange = diloco.connect(syncer.address, run="ends", learner="a", initialise="if-empty")
        learner = diloco.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=exchange)
        learner.step(tokens=3)
    with caplog.at_level(logging.WARNING, "diloco"), learner:
        assert not learner.finish(timeout_s=0.5, ends_run=True)
        assert not learner.finish(timeout_s=0)
        learner.interrupt(0.0)
    said = [each.getMessage() for each in caplog.records if "ends at step" in each.getMessage()]
    assert len(said) == 1
    assert "`diloco export` gets the last ones" in said[0]


def test_the_last_contributions_may_spend_the_budget(tmp_path: Path) -> None:
    """A loop that counts its steps is at their end before the syncer has told it so."""
    method, options = diloco.StreamingDiLoCo(sync_every=2), Options("127.0.0.1:0", tmp_path, budget=Budget(6))
    with Syncer("ends", method, options) as syncer:
        model = torch.nn.Linear(2, 2)
        exchange = diloco.connect(syncer.address, run="ends", learner="a", initialise="if-empty")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco.Learner(model, optimizer, exchange=exchange) as learner:
            for _ in range(2):
                learner.step(tokens=3)
            assert learner.finish()
            assert learner.versions == (1, 1)


def test_a_learner_that_waits_again_after_another_has_joined_waits_for_its_end(tmp_path: Path) -> None:
    with Syncer("ends", diloco.DiLoCo(sync_every=2), Options("127.0.0.1:0", tmp_path)) as syncer, ExitStack() as stack:

        def join(name: str) -> diloco.Learner:
            model = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            exchange = diloco.connect(syncer.address, run="ends", learner=name, initialise="if-empty")
            return stack.enter_context(diloco.Learner(model, optimizer, exchange=exchange))

        first = join("a")
        assert first.finish(TIMEOUT_S)
        second = join("b")
        for _ in range(4):
            second.step(tokens=1)
        give_up_at = time.monotonic() + TIMEOUT_S
        while first.finish(timeout_s=0):  # until it is told
            assert time.monotonic() < give_up_at
        assert not first.finish(timeout_s=0.5)
        assert second.finish(TIMEOUT_S)
        assert first.finish(TIMEOUT_S)
        assert first.versions == second.versions == (2,)


@pytest.mark.parametrize("name", OVER_A_SYNCER)
def test_a_learner_that_waits_for_the_others_keeps_no_version_but_the_last(name: str) -> None:
    def life(index: int, exchange: Exchange) -> tuple[bool, int]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco.Learner(model, optimizer, method=METHODS[name], exchange=exchange) as learner:
            for _ in range(8 if index == 0 else 80):
                learner.step(tokens=1)
            is_final = learner.finish(1e6)
            state = learner.state_dict()
            return is_final, len(state["received"]) - 2 * len(state["anchors"])

    results = diloco.run_local(life, learners=LEARNERS)
    assert all(is_final and too_many <= 0 for is_final, too_many in results)


def test_done_needs_a_budget() -> None:
    def life(index: int, exchange: Exchange) -> str:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            diloco.Learner(model, optimizer, method=diloco.DiLoCo(), exchange=exchange) as learner,
            pytest.raises(ConfigError) as error,
        ):
            learner.done  # noqa: B018
        return str(error.value)

    [said] = diloco.run_local(life, learners=1)
    assert said.startswith("learner.done needs a run with a budget: [run] tokens of its run file")


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf"), True, "5", None])
def test_a_wait_that_is_no_number_of_seconds_is_refused(timeout_s: Any) -> None:
    def life(_: int, exchange: Exchange) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco.Learner(model, optimizer, method=diloco.DiLoCo(), exchange=exchange) as learner:
            learner.finish(timeout_s)

    with pytest.raises(ConfigError, match=r"timeout_s of learner\.finish, unless it is 0, must be a finite number"):
        diloco.run_local(life, learners=1)


@pytest.mark.parametrize(
    ("tokens", "step", "is_spent"), [(99, 9, False), (100, 0, True), (0, 10, True), (None, 9, False)]
)
def test_either_limit_ends_a_run(tokens: int | None, step: int, is_spent: bool) -> None:
    assert Budget(100, 10).is_spent(tokens, step) is is_spent
    assert not Budget().is_spent(tokens, step)


@pytest.mark.parametrize("limit", [0, 1.5, True, "9"])
def test_a_limit_that_cannot_be_counted_is_refused(limit: Any) -> None:
    for budget in ({"tokens": limit}, {"steps": limit}):
        with pytest.raises(ConfigError, match=r"^(tokens|steps) of a run must be .*, not"):
            Budget(**budget)
