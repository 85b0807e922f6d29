"""Storms of runs whose learners train groups of reinforcement learning, with rollout and reward workers."""

from __future__ import annotations

import pytest
from tests.storms.defects import Defect
from tests.storms.group_defects import DEFECTS
from tests.storms.plans import WORKER_FAULTS, plan_of
from tests.storms.runs import failures, firsts, quiet, run

PER_TEST = 1


@pytest.mark.parametrize("first", firsts(20_000, 8, PER_TEST, 1))
def test_storms_of_groups(first: int) -> None:
    found = failures(range(first, first + PER_TEST), groups=True)
    assert [str(each) for each in found if each is not None] == []


@pytest.mark.parametrize("first", firsts(20_002, 4, PER_TEST, 0))
def test_storms_of_groups_with_two_syncers(first: int) -> None:
    found = failures(range(first, first + PER_TEST), groups=True, standby=True)
    assert [str(each) for each in found if each is not None] == []


def test_seeds_differ_in_their_workers() -> None:
    plans = [plan_of(seed, groups=True) for seed in range(100)]
    assert {plan.rules.max_staleness for plan in plans if plan.rules is not None} == {0, 1, 2, 3, 4}
    assert {each.is_inline for plan in plans for each in plan.workers} == {True, False}
    assert {each.role for plan in plans for each in plan.workers} == {"rollout", "reward"}
    assert {each.kind for plan in plans for each in plan.faults} >= {*WORKER_FAULTS}


@pytest.mark.parametrize(("break_it", "first"), DEFECTS.items())
def test_a_defect_of_groups_is_found(break_it: Defect, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with quiet():
        for plan in (plan_of(seed, groups=True) for seed in range(first, first + 20)):
            if run(plan, plan.faults) is not None:
                return
    pytest.fail("no storm has found it")
