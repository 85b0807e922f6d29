"""Storms with two syncers over one store: the same runs and methods, with takeovers, and what is between the two and
their store breaks too."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
from tests.storms.defects import Defect
from tests.storms.plans import PairKind, Plan, plan_of
from tests.storms.runs import failures, firsts, quiet, run, run_seed
from tests.storms.standby import StandbyStorm
from tests.storms.store_defects import TWO

PER_TEST = 4

FOUND = {
    (157, False): "a learner gave up where a syncer without a model was asked for it, which another one had let in",
    (390, False): "the storm took the run to have ended, which an evicted learner came back to",
    (430235, True): "a syncer that was told to stop went on as long as learners asked for data",
}
"""Seeds, and whether the data was leased, that found a defect."""


def plan(seed: int) -> Plan:
    """Every third one with leased data."""
    return plan_of(seed, leased=seed % 3 == 0, standby=True)


@pytest.mark.parametrize("first", firsts(1000, 28, PER_TEST, 4))
def test_storms_with_a_standby(first: int) -> None:
    seeds = range(first, first + PER_TEST)
    for leased in (False, True):
        found = failures([seed for seed in seeds if (seed % 3 == 0) == leased], leased=leased, standby=True)
        assert [str(each) for each in found if each is not None] == []


@pytest.mark.parametrize(("seed", "leased"), FOUND)
def test_seeds_of_two_syncers_that_found_a_defect(seed: int, leased: bool) -> None:
    with quiet():
        assert run_seed(seed, leased=leased, standby=True) is None


@pytest.mark.slow
def test_storms_have_takeovers_and_all_faults() -> None:
    assert {fault.kind for seed in range(100) for fault in plan(seed).faults} >= set(get_args(PairKind))
    stood, num_takeovers = Counter[str](), 0
    with quiet():
        for seed in (*range(10), 25, 50):
            storm = StandbyStorm(plan(seed))
            storm.run()
            stood += storm.stood
            num_takeovers += storm.num_takeovers
    assert stood.keys() == {"waiting", "claiming", "serving", "suspended", "fenced", "released"}
    assert num_takeovers >= 8


def test_a_storm_with_a_standby_is_the_same_each_time() -> None:
    def once() -> tuple[float, int, dict[tuple[int, int], str]]:
        storm = StandbyStorm(plan(28))
        storm.run()
        return storm.now_s, storm.num_events, dict(storm.ledger.versions.digests)

    with quiet():
        assert once() == once()


def test_a_standby_changes_no_other_storm() -> None:
    for seed in range(20):
        one, two = plan_of(seed), plan_of(seed, standby=True)
        assert (one.method, one.sizes, one.step_s, one.starts_s) == (two.method, two.sizes, two.step_s, two.starts_s)
        assert not one.standby


@pytest.mark.parametrize(("break_it", "first"), TWO.items())
def test_a_defect_of_two_syncers_is_found(break_it: Defect, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with quiet():
        if not any(run(each, each.faults) for each in map(plan, range(first, first + 50))):
            pytest.fail("no storm has found it")
