"""Storms in which the run goes back to an older state, on purpose, under live learners."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.chaos.versions import BrokenInvariantError
from tests.storms.going_back import GoingBackStorm
from tests.storms.plans import GOINGS, plan_of
from tests.storms.runs import failures, firsts, quiet, run, run_seed

from diloco.protocol.accounting import Accounting
from diloco.protocol.leases import Leases

PER_TEST = 5

FOUND = {
    246: "a heartbeat of before a learner's first step, that came after a later one, had it ahead of itself",
}
"""Seeds that found a defect."""


@pytest.mark.parametrize("first", firsts(1000, 50, PER_TEST, PER_TEST))
@pytest.mark.parametrize("leased", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "leased"])
def test_storms_in_which_the_run_goes_back(first: int, leased: bool) -> None:
    found = failures(range(first, first + PER_TEST), leased=leased, goes_back=True)
    assert [str(each) for each in found if each is not None] == []


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_of_runs_that_go_back_that_found_a_defect(seed: int) -> None:
    with quiet():
        assert run_seed(seed, goes_back=True) is None


@pytest.mark.slow
def test_runs_go_back_in_all_ways_and_learners_join_again() -> None:
    struck, num_lost, num_again = Counter[str](), 0, 0
    with quiet():
        for seed in range(16):
            storm = GoingBackStorm(plan_of(seed, goes_back=True))
            storm.run()
            struck += storm.struck
            versions = storm.ledger.versions
            num_lost += sum(len(digests) - 1 for digests in versions.ever.values())
            assert storm.driver is not None
            num_again += sum(each.incarnation > 1 for each in storm.driver.core.accounting.accounts.values())
    assert struck.keys() >= set(GOINGS)
    assert num_lost > 2  # versions of which the number was reached again with other bits
    assert num_again > 10


def lets_in_only_the_process_that_it_knows(patch: pytest.MonkeyPatch) -> None:
    def knows(self: Accounting, learner: str, process: int, incarnation: int) -> bool:
        account = self.accounts.get(learner)
        return account is None or account.process == process

    patch.setattr(Accounting, "is_newest", knows)


@pytest.mark.slow
def test_a_process_that_is_not_let_in_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lets_in_only_the_process_that_it_knows(monkeypatch)
    _require_found(range(50, 70), leased=False)


def test_units_of_versions_that_are_gone_have_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps(self: Leases, fragment: int, version: int) -> None:
        """They stay done."""

    monkeypatch.setattr(Leases, "lose", keeps)
    _require_found(range(100), leased=True)


def _require_found(seeds: range, *, leased: bool) -> None:
    with quiet():
        for plan in (plan_of(seed, leased=leased, goes_back=True) for seed in seeds):
            failure = run(plan, plan.faults)
            if failure is not None:
                assert isinstance(failure.error, BrokenInvariantError)
                return
    pytest.fail("no storm has found it")
