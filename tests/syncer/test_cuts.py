"""A learner that is cut off for less than its deadline trains on as far as it can, and all of that is counted."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from benchmarks.processes import until
from tests.syncer.runs import RUN, method, start, status_of, train

import diloco
from diloco.chaos.proxy import Relay

TOKENS, STEPS = 5, 40
CUT_AT = 11
"""What is due after odd steps has been waited for, so that one more step is taken."""

METHODS = {
    "scheduled": method(at_least=1),
    "called": diloco.DecoupledDiLoCo(
        sync_every=4, overlap=1, codec="fp32", fragments=method().fragments, quorum=diloco.Called(at_least=1)
    ),
}


@pytest.mark.parametrize("kind", METHODS)
def test_what_is_trained_during_a_cut_is_counted(kind: str, tmp_path: Path) -> None:
    """Nothing arrives over its connections, open ones and new ones, and neither end is told."""
    has_begun, has_other, is_cut, has_gone_on, is_over = (threading.Event() for _ in range(5))
    others_steps = 0

    def at_step(step: int) -> None:
        if step == 1:  # at the run's first step, so that the steps at which it sends are known
            has_begun.set()
            has_other.wait(60)
        if step == CUT_AT:
            relay.stall()
            relay.refuse()
            is_cut.set()
        if step == CUT_AT + 1:
            has_gone_on.set()

    def others_step(step: int) -> None:
        nonlocal others_steps
        others_steps = step
        has_other.set()
        if is_over.is_set():
            raise StopIteration

    def other() -> None:
        with pytest.raises(StopIteration):
            train(
                1,
                diloco.connect(syncer.address, run=RUN, learner="other", join_timeout_s=30.0),
                None,
                10**6,
                others_step,
            )

    with start(tmp_path, METHODS[kind]) as syncer:
        with Relay(syncer.port) as relay, ThreadPoolExecutor(2) as pool:
            exchange = diloco.connect(relay.address, run=RUN, learner="cut", initialise=True)
            cut_off = pool.submit(train, 0, exchange, None, STEPS, at_step)
            until(lambda: has_begun.is_set() or cut_off.done(), "it does not join")
            living = pool.submit(other)
            try:
                until(lambda: is_cut.is_set() or cut_off.done(), "it does not begin")
                until(lambda: has_gone_on.is_set() or cut_off.done(), "it takes no step while it is cut off")
                relay.heal()
                _, metrics = cut_off.result(timeout=60)
            finally:
                is_over.set()
            living.result(timeout=60)
        syncer.driver.drain()
        status: dict[str, Any] = status_of(syncer)
    assert metrics["incarnation"] == 1
    assert status["tokens"] == TOKENS * (STEPS + others_steps)
    for fragment in status["fragments"]:
        ledger = fragment["ledger"]
        settled = ledger["merged"] + ledger["lost"] + sum(ledger["discarded"].values())
        assert ledger["trained"] == ledger["pending"] + settled == status["tokens"]
