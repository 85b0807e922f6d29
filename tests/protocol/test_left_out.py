"""Contributions that a merge leaves out: lost on purpose, or refused by a screen."""

from __future__ import annotations

from typing import Any

import pytest
from tests.protocol.driving import committed, kinds, ledger, publish, restarted, verdicts

from diloco.core.method import Method
from diloco.core.presets import DecoupledDiLoCo, DiLoCo
from diloco.core.quorum import AllLive, Called
from diloco.protocol.actions import Acknowledge, Action, MergeRound, Publish, Reject
from diloco.protocol.contribution import ABANDONED, DROPPED, MISSED, OUTLIER, UNMERGED, Contribution, Verdict
from diloco.protocol.learner import LearnerCore
from diloco.protocol.members import Report
from diloco.protocol.rounds.base import Rules
from diloco.protocol.syncer import SyncerCore

NEARLY_ALL = 1 - 2**-40


def contribution(learner: str, round_: int, *, base: int | None = None, step: int | None = None) -> Contribution:
    """10 tokens a step, 4 steps."""
    step = 4 * (round_ + 1) if step is None else step
    return Contribution(
        learner, 1, 0, round_ + 1, round_, round_ if base is None else base, 40, 4, 10 * step, step=step
    )


# --- dropped ----------------------------------------------------------------------------------------------------------


def dropping(*learners: str, at_least: int = 1) -> SyncerCore:
    method = DiLoCo(sync_every=4, quorum=AllLive(at_least=at_least, drop=NEARLY_ALL))
    core = SyncerCore(Rules.of(method, 1), [0])
    for learner in learners:
        core.joined(0.0, learner, ready=True)
    core.saved()
    return core


def test_dropped_contributions_are_left_out_when_their_round_closes() -> None:
    core = dropping("a", "b", "c")
    for learner in "ab":
        assert isinstance(core.contributed(0.0, contribution(learner, 0))[0], Acknowledge)
    accept, merge, _ = core.contributed(0.0, contribution("c", 0))
    assert isinstance(accept, Acknowledge)
    assert isinstance(merge, MergeRound)
    assert merge.contributions == (contribution("c", 0),)
    core.merged(0)
    written = core.saved(storing=[0])
    assert verdicts(core, "a") == ()
    *rejects, published, _, _ = committed(core, 1.0, 0, written)
    assert rejects == [Reject(contribution("a", 0), DROPPED), Reject(contribution("b", 0), DROPPED)]
    assert published == Publish(0, 1, ("c",))
    for each in (core, restarted(core, written, 1.0)):
        assert verdicts(each, "a") == (Verdict(0, 1, DROPPED, 1),)
        assert verdicts(each, "c") == (Verdict(0, 1, None, 1),)
        assert {learner: ledger(each, learner).pending for learner in "abc"} == {"a": 40, "b": 40, "c": 0}


def test_never_fewer_than_k_are_left() -> None:
    core = dropping("a", "b", "c", at_least=2)
    for learner in "ab":
        core.contributed(0.0, contribution(learner, 0))
    _, merge, _ = core.contributed(0.0, contribution("c", 0))
    assert isinstance(merge, MergeRound)
    assert [c.learner for c in merge.contributions] == ["b", "c"]
    assert publish(core)[0] == Reject(contribution("a", 0), DROPPED)


def test_after_a_crash_before_its_version_is_stored_a_dropped_contribution_is_sent_again() -> None:
    """Its learner has heard nothing of it: the round that is opened again waits for it."""
    core = dropping("a", "b", "c")
    written = core.saved()
    for learner in "abc":
        core.contributed(0.0, contribution(learner, 0))
    core.merged(0)
    assert verdicts(core, "a") == ()
    again = restarted(core, written, 1.0)
    actions = [again.contributed(1.0, contribution(learner, 0)) for learner in "abc"]
    assert [kinds(each)[:2] for each in actions] == [
        ["Acknowledge", "WakeAt"],
        ["Acknowledge", "WakeAt"],
        ["Acknowledge", "MergeRound"],
    ]


def test_a_dropped_contribution_of_a_round_without_a_result_is_not_waiting_for_it() -> None:
    """A learner whose contribution was dropped waits for the round's version; this one would have none."""
    core = dropping("a", "b", "c")
    for learner in "abc":
        core.contributed(0.0, contribution(learner, 0))
    rejects = [action for action in core.abandoned(1.0, 0, "not finite") if isinstance(action, Reject)]
    reasons = {each.contribution.learner: each.reason for each in rejects}
    assert reasons == {"a": ABANDONED, "b": ABANDONED, "c": "not finite"}
    assert {learner: ledger(core, learner).pending for learner in "abc"} == {"a": 40, "b": 40, "c": 0}


@pytest.mark.parametrize("leaves_out", ["drops", "is closed"])
def test_a_learner_left_out_of_a_round_without_a_result_goes_on_with_its_work(leaves_out: str) -> None:
    """The round is open again after the next send, and has the work of both learners."""
    is_dropped = leaves_out == "drops"
    core = dropping("a", "b") if is_dropped else SyncerCore(Rules.of(DiLoCo(sync_every=4), 1), [0])
    learners = {name: LearnerCore(core.rules, [0]) for name in "ab"}

    def send(name: str) -> list[Action]:
        """4 steps of 10 tokens, then a contribution."""
        it = learners[name]
        [send] = [send for _ in range(4) for send in it.stepped(10)]
        c = Contribution(
            name, 1, 0, send.number, send.round, send.base, send.tokens, send.steps, it.tokens, step=it.step
        )
        return core.contributed(0.0, c)

    if not is_dropped:
        core.joined(0.0, "b", ready=True)
        core.joined(0.0, "a")
    for name in "ba":  # "a" is late, or dropped
        send(name)
    for action in core.abandoned(1.0, 0, "not finite"):
        if isinstance(action, Reject):
            learners[action.contribution.learner].rejected(0, action.contribution.number, action.reason)
    assert all(it.waiting() == () for it in learners.values())
    send("b")
    merge = send("a")[1]
    assert isinstance(merge, MergeRound)
    publish(core)
    assert ledger(core, "b").discarded == {"not finite": 40}
    assert ledger(core, "a").discarded == {}
    assert ledger(core, "a").pending + ledger(core, "a").merged == 80


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.parametrize("is_merged", [False, True])
def test_work_that_was_left_out_is_given_up_if_its_learner_has_left_by_then(comes_back: bool, is_merged: bool) -> None:
    """It cannot be given back. The round was closed while the learner was there."""
    given_up = given_up_of(comes_back)
    core = dropping("a", "b")
    for learner in "ab":
        core.contributed(0.0, contribution(learner, 0))
    core.left(0.5, "a", 1, tokens=40)
    if comes_back:
        core.joined(0.6, "a")
    if is_merged:
        core.merged(0)
        written = core.saved(storing=[0])
        committed(core, 1.0, 0, written)
        assert ledger(restarted(core, written, 2.0), "a").as_dict() == given_up
    else:
        core.abandoned(1.0, 0, "not finite")
    assert ledger(core, "a").as_dict() == given_up


def given_up_of(comes_back: bool) -> dict[str, Any]:
    """The ledger of a learner that has trained 40 tokens and left; a new incarnation has not ended."""
    fate = {"lost": 40, "discarded": {}} if comes_back else {"lost": 0, "discarded": {UNMERGED: 40}}
    return {"trained": 40, "pending": 0, "merged": 0, **fate}


def test_a_contribution_that_would_be_dropped_is_merged_when_the_others_leave() -> None:
    """Had it been sent back at once, the round would be empty, and its learner would wait for it without end."""
    core = dropping("a", "b")
    core.contributed(0.0, contribution("a", 0))
    merge, *_ = core.left(0.0, "b", 1, tokens=0)
    assert isinstance(merge, MergeRound)
    assert merge.contributions == (contribution("a", 0),)


def test_a_dropped_contribution_that_is_sent_again_is_not_taken_into_the_next_round() -> None:
    core = dropping("a", "b")
    for learner in "ab":
        core.contributed(0.0, contribution(learner, 0))
    for _ in range(2):
        assert core.contributed(0.0, contribution("a", 0))[0] == Acknowledge(contribution("a", 0), duplicate=True)
    assert ledger(core, "a").as_dict() == {"trained": 40, "pending": 40, "merged": 0, "lost": 0, "discarded": {}}


def test_a_contribution_that_comes_too_late_is_missed_and_not_dropped() -> None:
    """Its learner adopts the round's version before it hears of the contribution, and discards the work."""
    core = dropping("a", "b")
    for learner in "ab":
        core.contributed(0.0, contribution(learner, 0))
    core.joined(0.0, "c")
    late = contribution("c", 0)
    assert core.contributed(0.0, late)[0] == Acknowledge(late, duplicate=False)
    assert Reject(late, MISSED) in publish(core)
    assert ledger(core, "c").discarded == {MISSED: late.tokens}


@pytest.mark.parametrize("comes_back", [False, True])
def test_dropped_work_of_a_learner_that_is_gone_is_given_up(comes_back: bool) -> None:
    """It left after its round was closed, and before it was told."""
    core = dropping("a", "b")
    core.contributed(0.0, contribution("a", 0))
    core.contributed(0.0, contribution("b", 0))
    core.left(0.0, "a", 1, tokens=40)
    if comes_back:
        core.joined(0.0, "a")
    core.merged(0)
    written = core.saved(storing=[0])
    committed(core, 0.0, 0, written)
    for each in (core, restarted(core, written, 1.0)):
        assert ledger(each, "a").as_dict() == given_up_of(comes_back)


# --- refused ----------------------------------------------------------------------------------------------------------

CALLED = DecoupledDiLoCo(sync_every=4, quorum=Called(at_least=2, grace=0.0))


def refusing(method: Method) -> SyncerCore:
    """The contribution of "b" is refused; the version is not stored yet."""
    core = SyncerCore(Rules.of(method, 1), [0])
    for learner in "ab":
        core.joined(0.0, learner, ready=True)
    for learner in "ab":
        core.heartbeat(0.0, learner, 1, Report(step=4, steps=4, tokens=40, step_s=1.0))
    for learner in "ab":
        core.contributed(0.0, contribution(learner, 0))
    core.merged(0, ["b"])
    return core


@pytest.mark.parametrize("method", [DiLoCo(sync_every=4), CALLED], ids=["scheduled", "called"])
def test_a_refusal_is_told_when_the_version_is_durable(method: Method) -> None:
    core = refusing(method)
    written = core.saved(storing=[0])
    assert (ledger(core, "b").pending, ledger(core, "b").discarded) == (40, {})
    assert verdicts(core, "b") == ()
    again = SyncerCore(core.rules, [1])
    again.restore(1.0, written.values)
    actions = committed(core, 1.0, 0, written)
    assert actions[:2] == [Reject(contribution("b", 0), OUTLIER), Publish(0, 1, ("a",))]
    assert "PersistRecord" not in kinds(actions)
    for each in (core, again):
        assert (ledger(each, "b").pending, ledger(each, "b").discarded) == (0, {OUTLIER: 40})
        assert verdicts(each, "b") == (Verdict(0, 1, OUTLIER, 1),)
        assert verdicts(each, "a") == (Verdict(0, 1, None, 1),)


@pytest.mark.parametrize("method", [DiLoCo(sync_every=4), CALLED], ids=["scheduled", "called"])
def test_what_was_refused_is_not_taken_for_late_work_when_it_is_sent_again(method: Method) -> None:
    """Its learner has not heard that it is refused."""
    core = refusing(method)
    committed(core, 1.0, 0)
    assert core.contributed(2.0, contribution("b", 0))[0] == Acknowledge(contribution("b", 0), duplicate=True)
    assert core.rounds.roster(0) == ((), ())
    assert ledger(core, "b").discarded == {OUTLIER: 40}
