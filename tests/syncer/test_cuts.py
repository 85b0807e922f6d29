"""A learner that is cut off trains on as far as it can. All of that is counted: pending work, where the cut is shorter
than the learner's deadline, and work that was lost, where the learner was evicted and has joined again."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest
from benchmarks.processes import until
from tests.chaos.relay import Relay
from tests.syncer.runs import RUN, LearnerThreads, Raw, fall_silent, method, start, status_of, train

import diloco
from diloco.errors import StaleIncarnationError

TOKENS, STEPS = 5, 40
CUT_AT = 11
"""What is due after odd steps has been waited for, so that one more step is taken."""

METHODS = {
    "scheduled": method(at_least=1),
    "called": diloco.DecoupledDiLoCo(
        sync_every=4, overlap=1, codec="fp32", fragments=method().fragments, quorum=diloco.Called(at_least=1)
    ),
}


Cut = Literal["short", "long", "long, until it leaves"]


def trained_under_a_cut(kind: str, tmp_path: Path, cut: Cut) -> tuple[dict[str, Any], dict[str, Any]]:
    """Nothing arrives over a learner's connections, open ones and new ones, and neither end is told. Returns the
    learner's metrics and the syncer's status. The syncer has counted all tokens that were trained."""
    has_begun, has_other, is_cut, has_gone_on, may_go_on, is_over = (threading.Event() for _ in range(6))
    num_steps = Counter[str]()

    def at_step(step: int) -> None:
        num_steps["cut"] += 1
        if step == 1:  # at the run's first step, so that the steps at which it sends are known
            has_begun.set()
            has_other.wait(300)
        if step == CUT_AT:
            relay.stall()
            relay.refuse()
            is_cut.set()
        if step == CUT_AT + 1:
            has_gone_on.set()
            may_go_on.wait(300)

    def others_step(step: int) -> None:
        num_steps["other"] += 1
        has_other.set()
        if is_over.is_set():
            raise StopIteration

    def other() -> None:
        exchange = diloco.connect(syncer.address, run=RUN, learner="other", join_timeout_s=300.0)
        with pytest.raises(StopIteration):
            train(1, exchange, None, 10**6, others_step)

    def num_counted() -> int:
        accounts = syncer.driver.ask(lambda driver: driver.core.accounting.accounts)
        return accounts["cut"].ledgers[0].trained

    steps = CUT_AT + 1 if cut == "long, until it leaves" else STEPS
    with start(tmp_path, METHODS[kind]) as syncer:
        with Relay(syncer.port) as relay, LearnerThreads(2) as pool:
            exchange = pool.connect(relay.address, learner="cut", initialise=True)
            cut_off = pool.submit(train, 0, exchange, None, steps, at_step)
            until(lambda: has_begun.is_set() or cut_off.done(), "it does not join")
            living = pool.submit(other)
            try:
                until(lambda: is_cut.is_set() or cut_off.done(), "it does not begin")
                until(lambda: has_gone_on.is_set() or cut_off.done(), "it takes no step while it is cut off")
                if cut != "short":
                    fall_silent(syncer, "cut")
                relay.heal()
                until(lambda: num_counted() == TOKENS * (CUT_AT + 1), "the syncer does not hear what it has trained")
                may_go_on.set()
                _, metrics = cut_off.result(timeout=300)
            finally:
                may_go_on.set()
                is_over.set()
            living.result(timeout=300)
        syncer.driver.drain()
        status: dict[str, Any] = status_of(syncer)
    assert status["tokens"] == TOKENS * num_steps.total()
    for fragment in status["fragments"]:
        ledger = fragment["ledger"]
        settled = ledger["merged"] + ledger["lost"] + sum(ledger["discarded"].values())
        assert ledger["trained"] == ledger["pending"] + settled == status["tokens"]
    return metrics, status


@pytest.mark.parametrize("kind", METHODS)
def test_what_is_trained_during_a_cut_is_counted(kind: str, tmp_path: Path) -> None:
    metrics, _ = trained_under_a_cut(kind, tmp_path, "short")
    assert metrics["incarnation"] == 1


@pytest.mark.parametrize("kind", METHODS)
def test_what_is_trained_during_a_cut_beyond_the_deadline_is_counted(kind: str, tmp_path: Path) -> None:
    """It is the evicted incarnation's until the boundary at which the learner hears of that."""
    _, status = trained_under_a_cut(kind, tmp_path, "long")
    assert all(fragment["ledger"]["lost"] > 0 for fragment in status["fragments"])


def test_what_is_trained_during_a_cut_is_counted_where_the_learner_leaves_before_it_begins_again(
    tmp_path: Path,
) -> None:
    trained_under_a_cut("called", tmp_path, "long, until it leaves")


def test_a_goodbye_of_a_learner_that_is_out_says_what_it_has_trained(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer:
        raw = Raw(syncer.address)
        with closing(raw.connection):
            raw.initialise()
            raw.join(process=7)
            raw.beat(8, 40)
            raw.join(process=7, after=1)
            raw.leave(incarnation=0, earlier_tokens=50, process=7)
            with pytest.raises(StaleIncarnationError, match="not known as learner 'raw'"):
                raw.leave(incarnation=0, earlier_tokens=60, process=8)
        syncer.driver.drain()
        status = status_of(syncer)
    assert status["learners"] == {}
    assert status["tokens"] == 50
    assert all(fragment["ledger"]["lost"] == 50 for fragment in status["fragments"])
