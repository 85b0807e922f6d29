"""Pushed rounds by scripted events in virtual time: pushes and their pace, late work, one at a time; and the method
that uses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.protocol.driving import committed, ledger, restarted, verdicts
from tests.protocol.rounds.asynchronous import Run, contributors, is_accepted
from tests.protocol.rounds.asynchronous import method as asynchronous

from diloco.core.method import Method
from diloco.core.outer import DelayedNesterov
from diloco.core.presets import AsyncDiLoCo, DelayedDiLoCo, method_from_table
from diloco.core.quorum import QUORUMS, AllLive, Late, Pushed
from diloco.core.schedule import Schedule
from diloco.errors import ConfigError
from diloco.protocol.actions import Acknowledge, MergeRound, Reject
from diloco.protocol.contribution import Verdict
from diloco.protocol.learner import LearnerCore
from diloco.protocol.rounds.base import Rules


def method(quorum: Pushed, **changes: object) -> Method:
    return asynchronous(quorum, overlap=0, **changes)


ONE_AT_A_TIME = method(Pushed(at_least=1), outer=DelayedNesterov(buffer=3), partial="full")


# --- the syncer's half ------------------------------------------------------------------------------------------------


def test_a_push_is_merged_at_once() -> None:
    run = Run(method(Pushed(at_least=1)), "ab")
    run.step("a", 4)
    [_, merge] = run.send("a")
    assert isinstance(merge, MergeRound)
    run.close("a")
    run.step("b", 4)
    [_, merge] = run.send("b", base=0)
    assert isinstance(merge, MergeRound)
    assert merge.round == 1


def test_delayed_nesterov_takes_pushes_one_at_a_time() -> None:
    """Those that come while a version is merged and stored wait for a round of their own, in the order in which they
    came."""
    run = Run(ONE_AT_A_TIME, "abc")
    run.step("abc", 4)
    [_, merge] = run.send("c")
    merged = [contributors(merge)]
    assert [is_accepted(action) for action in run.send("a")] == [True]
    run.core.merged(0)
    assert [is_accepted(action) for action in run.send("b")] == [True]
    actions = committed(run.core, run.now, 0)
    while merges := [action for action in actions if isinstance(action, MergeRound)]:
        merged += [contributors(each) for each in merges]
        actions = run.close()
    assert merged == [["c"], ["a"], ["b"]]
    assert run.core.fragments[0].version == 3
    assert [verdicts(run.core, learner) for learner in "cab"] == [
        (Verdict(0, 1, None, version),) for version in (1, 2, 3)
    ]


def test_pushes_behind_one_that_cannot_be_merged_are_merged_in_its_place() -> None:
    run = Run(ONE_AT_A_TIME, "abc")
    run.step("abc", 4)
    for learner in "cab":
        run.send(learner)
    reject, *others = run.core.abandoned(run.now, 0, "not finite")
    assert isinstance(reject, Reject)
    assert reject.contribution.learner == "c"
    [merge] = [action for action in others if isinstance(action, MergeRound)]
    assert (merge.round, contributors(merge)) == (0, ["a"])
    [merge] = [action for action in run.close() if isinstance(action, MergeRound)]
    assert (merge.round, contributors(merge)) == (1, ["b"])


def test_two_pushes_make_a_quorum_of_two() -> None:
    run = Run(method(Pushed(at_least=2)), "abc")
    run.step("abc", 4)
    assert len(run.send("a")) == 1
    assert isinstance(run.send("c")[1], MergeRound)


def test_a_push_is_enough_when_all_other_learners_have_gone() -> None:
    """K is judged at every event, not only when a push comes."""
    run = Run(method(Pushed(at_least=2)), "abc")
    run.step("abc", 4)
    run.send("a")
    run.core.left(run.now, "b", 1, tokens=4)
    assert run.phase == "open"
    [merge] = [a for a in run.core.left(run.now, "c", 1, tokens=4) if isinstance(a, MergeRound)]
    assert contributors(merge) == ["a"]


def test_a_push_is_scaled_by_what_the_others_push() -> None:
    run = Run(method(Pushed(at_least=1), partial="scale"), "ab")
    run.step("a", 4)
    run.step("b", 2)
    [_, merge] = run.send("a")
    assert isinstance(merge, MergeRound)
    assert merge.scale == pytest.approx(4 / (4 + 2))  # b has not pushed yet
    run.close("a")
    run.core = restarted(run.core, run.core.saved(), 0.0)
    run.step("b", 2)
    [_, merge] = run.send("b", base=0)
    assert isinstance(merge, MergeRound)
    assert merge.scale == pytest.approx(4 / (4 + 4))  # a has nothing pending, and will bring 4 again


def test_late_work_can_be_dropped_and_is_counted() -> None:
    run = Run(method(Pushed(late="drop")), "ab")
    run.step("ab", 4)
    run.send("a")
    [reject] = run.send("b")  # its round is being merged
    assert isinstance(reject, Reject)
    assert (reject.reason, verdicts(run.core, "b")) == ("late", (Verdict(0, 1, "late", 0),))
    run.close("a")
    run.step("b", 4)
    assert [action.reason for action in run.send("b", base=0) if isinstance(action, Reject)] == ["late"]
    assert ledger(run.core, "b").discarded == {"late": 8}


def test_what_is_sent_again_is_merged_once() -> None:
    run = Run(ONE_AT_A_TIME, "ab")
    run.step("ab", 4)
    c = run.contribution("a")
    assert is_accepted(run.core.contributed(0.0, c)[0])
    assert run.core.contributed(0.0, c)[0] == Acknowledge(c, duplicate=True)
    run.close("a")
    assert run.phase == "open"
    run.core = restarted(run.core, run.core.saved(), 0.0)
    assert run.core.contributed(0.0, c)[0] == Acknowledge(c, duplicate=True)
    assert run.phase == "open"
    assert ledger(run.core, "a").merged == 4


def test_dynamic_steps_follow_the_measured_speed() -> None:
    run = Run(method(Pushed(dynamic_steps=True)), "ab")
    assert run.core.standing("a").sync_every == 4
    run.step("a", step_s=1.0)
    run.step("b", step_s=3.0)
    assert [run.core.standing(learner).sync_every for learner in "ab"] == [4, 1]  # ⌊4/3⌋
    static = Run(method(Pushed()), "ab")
    static.step("b", step_s=3.0)
    static.step("a", step_s=1.0)
    assert static.core.standing("b").sync_every is None  # the schedule's H


# --- the learner's half -----------------------------------------------------------------------------------------------


def learner_of(*, wait: bool = False, keeps_pending: bool = False, late: Late = "merge") -> LearnerCore:
    rules = replace(Rules.of(method(Pushed(late=late)), 1), wait=wait, keeps_pending=keeps_pending)
    return LearnerCore(rules, [0])


@pytest.mark.parametrize(("keeps_pending", "next_push"), [(False, 11), (True, 8)])
def test_a_push_holds_a_whole_interval_of_work_however_late_the_last_answer(
    keeps_pending: bool, next_push: int
) -> None:
    """H = 4; the answer to the push after step 4 is adopted after step 7. What it overwrites is not work any more."""
    core = learner_of(keeps_pending=keeps_pending)
    for _ in range(7):
        core.stepped(5)
    core.received(0, 1, 1)
    core.adopted(0, 1)
    restored = learner_of(keeps_pending=keeps_pending)
    restored.load_state_dict(core.state_dict())
    for each in (core, restored):
        sends = [(each.step, send.steps, send.base) for _ in range(4) for send in each.stepped(5)]
        assert sends == [(next_push, 4, 1)]


def test_a_learner_that_still_waits_pushes_a_whole_interval_after_the_answer() -> None:
    """It came after the next push was due."""
    core = learner_of()
    for _ in range(10):
        core.stepped(5)
    core.received(0, 1, 1)
    core.adopted(0, 1)
    sends = [send for _ in range(4) for send in core.stepped(5)]
    assert [(send.number, send.steps, send.tokens, send.discarded) for send in sends] == [
        (2, 4, 20, (("overlap", 30),))
    ]


def test_versions_of_other_learners_are_not_adopted_before_a_learners_own_work_is_in_one() -> None:
    core = learner_of(wait=True)
    for _ in range(4):
        core.stepped(5)
    core.received(0, 1, 0)
    assert core.adoptions() == ()
    assert core.newest == (1,)
    assert core.waiting() == ((0, 1),)
    core.received(0, 2, 1)
    assert core.waiting() == ()
    assert core.adoptions() == ((0, 2),)


def test_a_learner_whose_push_was_rejected_adopts_the_newest_version() -> None:
    """With `wait`, it would otherwise wait for an answer that does not come."""
    core = learner_of(wait=True)
    for _ in range(4):
        core.stepped(5)
    core.received(0, 1, 0)
    assert core.rejected(0, 1, "outlier") is not None
    assert core.waiting() == ()
    assert core.adoptions() == ((0, 1),)
    core.adopted(0, 1)
    assert core.fragments[0].ledger.discarded == {"outlier": 20}


@pytest.mark.parametrize(("late", "bases"), [("merge", [0]), ("drop", [])])
def test_where_late_pushes_are_dropped_a_newer_version_is_adopted_before_the_next_push(
    late: Late, bases: list[int]
) -> None:
    """The verdict and the version have come when the next push is due. Sent before it is adopted, that push would be
    late too, and so on: the learner's work would never be merged."""
    core = learner_of(late=late)
    for _ in range(7):
        core.stepped(5)
    core.received(0, 1, 0)
    core.rejected(0, 1, "late")
    assert [send.base for send in core.stepped(5)] == bases
    assert core.adoptions() == (() if bases else ((0, 1),))


def test_a_pace_of_its_own_sets_the_next_push() -> None:
    core = learner_of()
    sends = []
    for _ in range(12):
        for send in core.stepped(1, sync_every=2):
            sends.append(core.step)
            core.received(0, core.versions[0] + 1, send.number)
        for fragment, version in core.adoptions():
            core.adopted(fragment, version)
    assert sends == [4, 6, 8, 10, 12]  # the first after the schedule's H


# --- values, and the method -------------------------------------------------------------------------------------------


def test_a_quorum_can_be_written_and_read() -> None:
    quorum = Pushed(3, late="drop", dynamic_steps=True)
    assert QUORUMS.read(quorum.to_dict()) == quorum


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Pushed(late="keep"), "use 'merge' or 'drop'"),  # type: ignore[arg-type]
        (lambda: Pushed(dynamic_steps="yes"), r"dynamic_steps='yes'\) is not a truth value"),  # type: ignore[arg-type]
        (lambda: AsyncDiLoCo(dynamic_steps="yes"), "is not a truth value"),  # type: ignore[arg-type]
        (lambda: AsyncDiLoCo(dynamic_steps=True, quorum=AllLive()), r"dynamic_steps belongs to Pushed\(\)"),
        (lambda: replace(DelayedDiLoCo(), quorum=Pushed()), "needs a schedule that all learners follow, not Pushed"),
        (lambda: replace(AsyncDiLoCo(), partial="scale"), "divides once more"),
        (lambda: replace(AsyncDiLoCo(), overlap=2), "overlap=2 has no effect where learners push"),
        (lambda: AsyncDiLoCo(quorum=Pushed(at_least=2)),
         r"DelayedNesterov\(\) takes outer gradients one at a time, .*use at_least=1"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    ("given", "quorum"),
    [
        ({}, Pushed(dynamic_steps=True)),
        ({"dynamic_steps": False}, Pushed()),
        ({"quorum": {"type": "Pushed"}}, Pushed()),
        ({"quorum": {"type": "Pushed", "late": "drop"}, "dynamic_steps": True},
         Pushed(late="drop", dynamic_steps=True)),
        ({"quorum": {"type": "Pushed", "dynamic_steps": True}, "dynamic_steps": False}, Pushed()),
    ],
)  # fmt: skip
def test_dynamic_steps_are_set_by_the_preset_or_with_the_quorum(given: dict[str, Any], quorum: Pushed) -> None:
    assert method_from_table({"preset": "AsyncDiLoCo", **given}).quorum == quorum


def test_fragments_are_not_pushed_together() -> None:
    """Answers arrive 1 and 3 steps after a push, and a fragment is pushed an interval after its own: after the first
    push there is always work of one of them that is not sent."""
    rules = Rules(Pushed(at_least=1), Schedule(4, 2, 0, (4, 4)), wait=False)
    learner = LearnerCore(rules, [0, 0])
    assert rules.schedule.sends_together
    assert not learner.sends_together
    arrivals, together = dict[int, int](), list[int]()
    for step in range(1, 33):
        arrivals |= {each.fragment: step + (3 if each.fragment else 1) for each in learner.stepped(10)}
        if all(work.pending_steps == 0 for work in learner.fragments):
            together.append(step)
        for fragment, at in list(arrivals.items()):
            if at == step:
                learner.received(fragment, learner.fragments[fragment].version + 1, 99)
                del arrivals[fragment]
        for fragment, version in learner.adoptions():
            learner.adopted(fragment, version)
    assert together == [4]
