"""A seed is a schedule."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from tests.chaos.faults import INJECTIONS
from tests.chaos.plan import SYNCER, kinds, schedule

LEARNERS = ("learner-0", "learner-1", "learner-2")


def test_the_same_seed_has_the_same_faults() -> None:
    once, again = (schedule(7, 300.0, LEARNERS, kinds(2.0), 1.0) for _ in range(2))
    assert once == again
    assert len(once) > 50
    assert schedule(8, 300.0, LEARNERS, kinds(2.0), 1.0) != once


def test_every_kind_is_drawn_and_can_be_injected() -> None:
    drawn = {fault.kind for fault in schedule(1, 3000.0, LEARNERS, kinds(2.0), 1.0)}
    assert drawn == {kind.name for kind in kinds(2.0)} == set(INJECTIONS)


def test_a_target_is_left_alone_until_its_fault_is_over() -> None:
    by_target = defaultdict(list)
    for fault in schedule(3, 1000.0, LEARNERS, kinds(2.0), 0.2):
        by_target[fault.target].append(fault)
    assert set(by_target) == {*LEARNERS, SYNCER}
    for faults in by_target.values():
        assert all(before.ends_s < after.at_s for before, after in pairwise(faults))


def test_faults_fall_in_their_time_on_their_targets() -> None:
    known = {kind.name: kind for kind in kinds(2.0)}
    for fault in schedule(5, 200.0, LEARNERS, kinds(2.0), 0.5):
        low, high = known[fault.kind].seconds
        assert 0 <= fault.at_s < 200.0
        assert low - 0.001 <= fault.seconds <= high + 0.001
        aim = known[fault.kind].target
        assert fault.target in (LEARNERS if aim in ("learner", "way") else (aim,))
