"""A pool of learners over a real syncer: who waits for a place, and who gives one up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.syncer.runs import RUN, start, status_of, train
from tests.syncer.test_faults import until

import diloco
from diloco.errors import ConfigError
from diloco.protocol.in_flight import Ledger
from diloco.protocol.steering import Pool
from diloco.syncer.server import Syncer

METHOD = diloco.DiLoCo(sync_every=4)
STEPS = 40


class Pair:
    """Two learners, of which the first initialises the run. Rounds wait for both once the syncer knows that both train.

    Arguments:
        hold_at: the first goes no further than this step before that.
    """

    def __init__(self, syncer: Syncer, hold_at: int) -> None:
        self._syncer, self._has_begun = syncer, threading.Event()
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(self._life, 0, hold_at, learner="first", initialise=True)
            assert self._has_begun.wait(timeout=300)
            second = pool.submit(self._life, 1, 1, learner="second", initialise=False)
        self.first, self.second = first.result(), second.result()

    def _life(self, index: int, hold_at: int, *, learner: str, initialise: bool) -> dict[str, Any]:
        def at_step(step: int) -> None:
            self._has_begun.set()
            if step == hold_at:
                until(lambda: self._num_healthy == 2, "one of the learners does not train")

        exchange = diloco.connect(self._syncer.address, run=RUN, learner=learner, initialise=initialise)
        metrics: dict[str, Any] = train(index, exchange, METHOD, STEPS, at_step)[1]
        return metrics

    @property
    def _num_healthy(self) -> int:
        return sum(each["healthy"] for each in status_of(self._syncer)["learners"].values())


def ledger(syncer: Syncer, learner: str) -> Ledger:
    return syncer.driver.ask(lambda driver: driver.core.accounting.accounts[learner].ledgers[0])


def test_the_newest_learner_gives_up_its_place_and_all_its_work_is_merged(tmp_path: Path) -> None:
    with start(tmp_path, METHOD, pool=Pool("halving", 2, STEPS)) as syncer:
        pair = Pair(syncer, hold_at=1)
        assert pair.first["steps"] == STEPS
        assert STEPS // 2 <= pair.second["steps"] <= STEPS // 2 + 8
        work = ledger(syncer, "second")
    assert (work.trained, work.merged, work.lost) == (pair.second["tokens"], pair.second["tokens"], 0)


def test_a_learner_waits_until_the_pool_has_grown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with start(tmp_path, METHOD, pool=Pool("doubling", 2, STEPS)) as syncer:
        pair = Pair(syncer, hold_at=STEPS // 2 + 1)
    assert pair.first["steps"] == STEPS
    assert pair.second["steps"] - pair.second["tokens"] // 5 >= STEPS // 2
    waits = [record.getMessage() for record in caplog.records if "no room" in record.getMessage()]
    assert len(waits) == 1
    assert "the run's pool has places for 1 of 2 learners" in waits[0]


def test_a_pool_that_is_too_small_for_a_round_is_refused(tmp_path: Path) -> None:
    method = diloco.DiLoCo(sync_every=4, quorum=diloco.AllLive(at_least=2))
    with pytest.raises(ConfigError, match=r"1 of 2 learners at times, and a round needs 2; set quorum\.at_least to 1"):
        start(tmp_path, method, pool=Pool("doubling", 2, STEPS))
