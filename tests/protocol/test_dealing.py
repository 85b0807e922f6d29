"""Sets of experts that the syncer deals: the pure functions, and their state."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.driving import only, record, restarted

from diloco import DiLoCo, Experts
from diloco.errors import DrainedError
from diloco.protocol.actions import Evict, Tell
from diloco.protocol.dealing import PROMISED_FOR_S, Dealing, Sets, balanced
from diloco.protocol.members import Member, Report
from diloco.protocol.rounds.base import Rules
from diloco.protocol.syncer import SyncerCore


@st.composite
def situations(draw: st.DrawFn) -> tuple[Sets, list[frozenset[int]], int, int]:
    """Sets, fixed sets, the number of groups, and copies."""
    num_groups = draw(st.integers(1, 6))
    own = st.frozensets(st.integers(0, num_groups - 1), min_size=1)
    sets = draw(st.dictionaries(st.sampled_from("abcdef"), own, max_size=5))
    return sets, draw(st.lists(own, max_size=2)), num_groups, draw(st.integers(1, 3))


def holders(sets: Sets, others: list[frozenset[int]]) -> Counter[int]:
    return Counter(group for each in (*sets.values(), *others) for group in each)


@given(situations())
def test_balanced_sets_keep_their_sizes_and_leave_no_group_alone_that_they_can_hold(
    situation: tuple[Sets, list[frozenset[int]], int, int],
) -> None:
    sets, others, num_groups, copies = situation
    dealt = balanced(sets, others, num_groups, copies)
    assert {name: len(own) for name, own in dealt.items()} == {name: len(own) for name, own in sets.items()}
    assert all(own <= frozenset(range(num_groups)) for own in dealt.values())
    count, before = holders(dealt, others), holders(sets, others)
    lacking = frozenset(range(num_groups)).difference(*others)
    if sum(map(len, sets.values())) >= len(lacking):
        assert all(count[group] > 0 for group in range(num_groups))
    for to in range(num_groups):  # nothing is left to improve, and no group has lost a holder that it needs
        assert count[to] >= copies or not any(
            count[group] >= count[to] + 2 for own in dealt.values() if to not in own for group in own
        )
        assert count[to] >= min(before[to], 1)


@given(situations())
def test_balanced_sets_are_kept(situation: tuple[Sets, list[frozenset[int]], int, int]) -> None:
    sets, others, num_groups, copies = situation
    dealt = balanced(sets, others, num_groups, copies)
    assert balanced(dealt, others, num_groups, copies) == dealt
    assert balanced(dict(reversed(sets.items())), others[::-1], num_groups, copies) == dealt
    before = holders(sets, others)
    if all(before[group] >= copies for group in range(num_groups)):
        assert dealt == sets
    num_moves = sum(len(dealt[name] - own) for name, own in sets.items())
    assert num_moves <= sum(max(0, copies - before[group]) for group in range(num_groups))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 3))
def test_learners_that_start_together_hold_each_group_often_enough(
    num_learners: int, num_groups: int, copies: int
) -> None:
    size = -(-copies * num_groups // num_learners)
    if size > num_groups:
        return
    dealing = Dealing(num_groups, copies)
    dealt = {f"learner-{i}": dealing.ask(0.0, f"learner-{i}", size, {}) for i in range(num_learners)}
    assert dealt == {name: dealing.of(name) for name in dealt}  # the later ones have moved none of the others
    assert all(len(own) == size for own in dealt.values())
    count = Counter(group for own in dealt.values() for group in own)
    assert min(count[group] for group in range(num_groups)) >= copies
    assert dealing.ask(1.0, "learner-0", size, {}) == dealt["learner-0"]


def member(learner: str, held: tuple[int, ...] | None) -> Member:
    return Member(learner, 1, 0, 0.0, 0.0, held=None if held is None else frozenset(held))


def run_of_four() -> tuple[Dealing, dict[str, Member]]:
    """Three groups, and the trunk in fragment 3; a and d hold the first group, b and c another one each."""
    dealing, members = Dealing(3), dict[str, Member]()
    for learner in "abcd":
        groups = dealing.ask(0.0, learner, 1, members)
        members[learner] = member(learner, (*groups, 3))
        dealing.joined(learner, members, is_dealt=True)
    assert {learner: dealing.of(learner) for learner in "abcd"} == {"a": (0,), "b": (1,), "c": (2,), "d": (0,)}
    return dealing, members


def test_the_first_learner_with_a_group_to_spare_takes_over_from_a_lost_one() -> None:
    dealing, members = run_of_four()
    del members["b"]
    dealing.lost("b", members)
    assert {learner: dealing.of(learner) for learner in "abcd"} == {"a": (1,), "b": (), "c": (2,), "d": (0,)}
    members["b"] = member("b", (1, 3))  # it is back, and joins with what it holds
    dealing.joined("b", members, is_dealt=True)
    assert dealing.of("b") == (1,)
    assert dealing.of("a") == (1,)


def test_a_question_in_the_name_of_a_member_changes_nothing() -> None:
    dealing, members = run_of_four()
    assert dealing.ask(1.0, "b", 3, members) == (1,)
    assert {learner: dealing.of(learner) for learner in "abcd"} == {"a": (0,), "b": (1,), "c": (2,), "d": (0,)}


def test_a_learner_that_leaves_for_another_set_is_expected_back() -> None:
    dealing, members = run_of_four()
    del members["b"]
    dealing.lost("b", members)
    dealing.left(2.0, members.pop("a"), members)  # it holds group 0, and was dealt group 1
    assert dealing.ask(3.0, "a", 1, members) == (1,)
    dealing.left(4.0, members.pop("c"), members)  # for good
    assert dealing.of("c") == ()
    assert dealing.ask(5.0, "new", 1, members) == (2,)
    assert dealing.ask(5.1 + PROMISED_FOR_S, "newer", 1, members) == (1,)  # neither a nor the new one has joined


def test_others_take_over_from_one_that_was_expected_back_and_from_one_that_leaves_for_good() -> None:
    dealing, members = run_of_four()
    del members["b"]
    dealing.lost("b", members)  # a is dealt group 1
    dealing.left(2.0, members.pop("a"), members)
    members["e"] = member("e", (0, 3))
    dealing.joined("e", members, is_dealt=True)
    assert dealing.ends_at == 2.0 + PROMISED_FOR_S
    dealing.tick(dealing.ends_at - 1.0, members)
    assert {learner: dealing.of(learner) for learner in "acde"} == {"a": (1,), "c": (2,), "d": (0,), "e": (0,)}
    dealing.tick(dealing.ends_at, members)
    assert {learner: dealing.of(learner) for learner in "acde"} == {"a": (), "c": (2,), "d": (1,), "e": (0,)}
    assert dealing.ends_at == math.inf
    members["d"] = member("d", (1, 3))
    members["f"] = member("f", (0, 3))
    dealing.joined("f", members, is_dealt=True)
    dealing.left(700.0, members.pop("c"), members)
    assert {learner: dealing.of(learner) for learner in "def"} == {"d": (1,), "e": (2,), "f": (0,)}


def test_a_whole_learner_and_one_with_a_fixed_set_hold_groups_too() -> None:
    members = {"fixed": member("fixed", (0, 1, 4))}
    dealing = Dealing(4)
    assert dealing.ask(0.0, "a", 2, members) == (2, 3)
    assert Dealing(4).ask(0.0, "a", 2, {"whole": member("whole", None)}) == (0, 1)


def test_sets_turn_with_the_rounds_of_the_trunk_and_are_restored() -> None:
    dealing, members = run_of_four()
    dealing.every = 2
    dealing.turned([9, 9, 9, 1], members)
    assert dealing.of("a") == (0,)
    dealing.turned([0, 0, 0, 2], members)
    assert {learner: dealing.of(learner) for learner in "abcd"} == {"a": (1,), "b": (2,), "c": (0,), "d": (1,)}
    again = Dealing(3, every=2)
    again.restore(0.0, dealing.saved(), members)
    again.turned([0, 0, 0, 3], members)
    assert again.sets == dealing.sets
    again.turned([0, 0, 0, 7], members)
    assert again.of("a") == (0,)


def test_what_a_member_held_that_is_none_after_going_back_is_dealt() -> None:
    dealing, members = Dealing(2), {"fixed": member("fixed", (1,))}
    for learner in "ab":
        assert dealing.ask(0.0, learner, 1, members) == (0,)
    dealing.restore(0.0, dealing.saved(), {})
    assert dealing.sets == {"a": {1}, "b": {0}}


def test_a_syncer_tells_its_learners_and_one_that_is_restarted_goes_on() -> None:
    core = SyncerCore(Rules.of(DiLoCo(fragments=Experts(groups=3)), 4), [0] * 4, dealing=Dealing(3))
    for learner in "abcd":
        groups, _ = core.deal(0.0, learner, 1)
        core.joined(0.0, learner, held=(*groups, 3), dealt=True)
    core.joined(0.0, "whole")
    assert [core.standing(it).dealt for it in ("a", "b", "c", "d", "whole")] == [(0,), (1,), (2,), (0,), ()]
    core.left(0.0, "whole", 1, tokens=0)
    core.joined(1.0, "b", held=(1, 3), dealt=True)  # its process was killed, and started again
    assert [core.standing(learner).dealt for learner in "abcd"] == [(0,), (1,), (2,), (0,)]
    again = restarted(core, record(core)[0], 2.0)
    again.dealing.num_groups = 3
    for learner in "acd":
        again.heartbeat(149.5, learner, 1, Report())
    actions = again.tick(150.0)  # nothing was heard of b
    assert only(Evict, actions).learner == "b"
    assert only(Tell, actions).learners == ("a",)
    assert [again.standing(learner).dealt for learner in "acd"] == [(1,), (2,), (0,)]
    again.left(151.0, "a", 1, tokens=0)
    again.tick(152.0)
    assert again.deal(153.0, "a", 1)[0] == (1,)
    assert again.joined(154.0, "a", held=(1, 3), dealt=True)[0] == 2
    assert [again.standing(learner).dealt for learner in "acd"] == [(1,), (2,), (0,)]
    _, actions = again.joined(155.0, "b", held=(1, 3), dealt=True)  # it is back, with what it was dealt
    assert not any(isinstance(each, Tell) for each in actions)
    actions = again.left(156.0, "c", 1, tokens=0)  # for good
    assert only(Tell, actions).learners == ("a",)
    assert [again.standing(learner).dealt for learner in "abd"] == [(2,), (1,), (0,)]
    again.steering.out["new"] = "drained by an admin"
    with pytest.raises(DrainedError):
        again.deal(157.0, "new", 1)
