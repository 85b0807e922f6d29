"""Storms with two syncers: the same runs and methods, with takeovers, and what is between the two breaks too."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
from tests.chaos.versions import BrokenInvariantError
from tests.storms.defects import Defect
from tests.storms.pair_defects import DEFECTS
from tests.storms.pair_world import PairStorm
from tests.storms.plans import PairKind, Plan, plan_of
from tests.storms.runs import failures, firsts, quiet, run, run_seed

from diloco.protocol.contribution import OUTLIER

PER_TEST = 4

FOUND = {
    9: "a syncer that was started again after most learners had followed its epoch, before it was alone, got no vote",
    12: "a learner that was to join again had no vote, so that the run had no syncer",
    28: "the same at a syncer that needs votes before it lets any join; one that had promised the epoch to the other",
}
"""Seeds that found a defect."""


def plan(seed: int) -> Plan:
    """Every third one with leased data."""
    return plan_of(seed, leased=seed % 3 == 0, standby=True)


@pytest.mark.parametrize("first", firsts(1000, 40, PER_TEST, 12))
def test_storms_with_a_standby(first: int) -> None:
    seeds = range(first, first + PER_TEST)
    for leased in (False, True):
        found = failures([seed for seed in seeds if (seed % 3 == 0) == leased], leased=leased, standby=True)
        assert [str(each) for each in found if each is not None] == []


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_of_two_syncers_that_found_a_defect(seed: int) -> None:
    with quiet():
        assert run_seed(seed, leased=seed % 3 == 0, standby=True) is None


def test_seeds_without_leased_data_that_found_a_defect() -> None:
    """Two promises that were in the way: to a syncer which then was fenced, and of an epoch that an agreement had
    overtaken; and a first that published alone while its standby had a later epoch as its base."""
    with quiet():
        for seed in (141084, 172998, 171677):
            assert run_seed(seed, standby=True) is None


def test_storms_have_takeovers_and_all_faults() -> None:
    assert {fault.kind for seed in range(100) for fault in plan(seed).faults} >= set(get_args(PairKind))
    stood, num_takeovers = Counter[str](), 0
    with quiet():
        for seed in FOUND:
            storm = PairStorm(plan(seed))
            storm.run()
            stood += storm.stood
            num_takeovers += storm.num_takeovers
    assert stood.keys() == {"waiting", "paired", "following", "proposing", "installing", "alone", "fenced"}
    assert num_takeovers >= len(FOUND)


def test_a_storm_with_a_standby_is_the_same_each_time() -> None:
    def once() -> tuple[float, int, dict[tuple[int, int], str]]:
        storm = PairStorm(plan(28))
        storm.run()
        return storm.now_s, storm.num_events, dict(storm.ledger.versions.digests)

    with quiet():
        assert once() == once()


def test_a_standby_changes_no_other_storm() -> None:
    for seed in range(20):
        one, two = plan_of(seed), plan_of(seed, standby=True)
        assert (one.method, one.sizes, one.step_s, one.starts_s) == (two.method, two.sizes, two.step_s, two.starts_s)
        assert one.silence_s == 0.0


@pytest.mark.parametrize(("break_it", "first"), DEFECTS.items())
def test_a_defect_of_two_syncers_is_found(break_it: Defect, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with quiet():
        if not any(run(each, each.faults) for each in map(plan, range(first, first + 30))):
            pytest.fail("no storm has found it")


def test_what_two_syncers_require_can_fail() -> None:
    storm = PairStorm(plan(9))
    with quiet():
        storm.run()
    first = storm.nodes[0] if storm.leading is None else storm.leading
    state, published = first.store.state, storm.published
    assert state is not None
    newest = max(published.by_epoch)
    with pytest.raises(BrokenInvariantError, match="both publish in epoch"):
        published.confirmed(newest, 0, None, state)
    with pytest.raises(BrokenInvariantError, match=f"publishes in epoch 0, after epoch {newest}"):
        published.confirmed(0, 0, None, state)
    published.ledger.verdicts["a", 1, 0, 1] = OUTLIER
    with pytest.raises(BrokenInvariantError, match="verdicts that were published are lost"):
        published.begins(state)
    published.ledger.versions.digests[0, 10**6] = "of none"
    with pytest.raises(BrokenInvariantError, match="is lost"):
        published.begins(state)
