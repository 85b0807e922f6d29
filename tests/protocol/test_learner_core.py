"""LearnerCore by scripted events, in scheduled rounds: what is sent, waited for and adopted, and where every token
goes."""

from __future__ import annotations

import json
import random
from copy import deepcopy

import pytest

from diloco.core.quorum import AllLive, Called
from diloco.core.schedule import Schedule
from diloco.errors import CheckpointError, VersionError
from diloco.protocol.contribution import DROPPED, MISSED, OUT_OF_STEP, OUTLIER, TWICE
from diloco.protocol.in_flight import Send
from diloco.protocol.learner import LearnerCore
from diloco.protocol.rounds.base import Rules


def core(
    schedule: Schedule, *, wait: bool = True, keeps_pending: bool = False, version: int = 0, step: int = 0
) -> LearnerCore:
    rules = Rules(AllLive(), schedule, wait=wait, keeps_pending=keeps_pending)
    return LearnerCore(rules, [version] * schedule.num_fragments, step=step)


def called() -> LearnerCore:
    """One fragment, H = 4."""
    return LearnerCore(Rules(Called(), Schedule(4, 1), wait=False), [0])


def newest(learner: LearnerCore, fragment: int, version: int) -> int:
    """The number of the newest contribution that this version can have merged."""
    return max((flight.number for flight in learner.fragments[fragment].in_flight if flight.round < version), default=0)


def answer(learner: LearnerCore, *, listed: bool = True) -> None:
    """What is waited for arrives at once, and what is due is adopted."""
    for fragment, version in learner.waiting():
        learner.received(fragment, version, newest(learner, fragment, version) if listed else 0)
    for fragment, version in learner.adoptions():
        learner.adopted(fragment, version)


def accounts_balance(learner: LearnerCore) -> bool:
    for work in learner.fragments:
        in_flight = sum(flight.tokens for flight in work.in_flight if not flight.listed)
        if work.ledger.pending != work.pending_tokens + in_flight or work.ledger.trained != learner.tokens:
            return False
    return True


SCHEDULES = [
    Schedule(3, 1), Schedule(1, 1), Schedule(1, 1, 1), Schedule(6, 2, 1), Schedule(6, 3, 5), Schedule(6, 3, 6),
    Schedule(4, 1, 4),
    Schedule(6, 2, 1, (2, 5)), Schedule(5, 3, 2), Schedule(6, 2, 0, (6, 6)),
]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("keeps_pending", [False, True])
def test_sends_and_adoptions_follow_the_schedule(schedule: Schedule, keeps_pending: bool) -> None:
    """Answered in time, a learner sends and adopts exactly after the steps of the table, round after round."""
    learner = core(schedule, keeps_pending=keeps_pending)
    rounds = [0] * schedule.num_fragments
    for step in range(1, 4 * schedule.sync_every + 1):
        sends = learner.stepped(10)
        assert tuple(send.fragment for send in sends) == schedule.sends(step)
        for send in sends:
            assert send.round == rounds[send.fragment]
            assert send.base == max(0, send.round - (1 if schedule.overlap == schedule.sync_every else 0))
            rounds[send.fragment] += 1
        applied = schedule.sends(step - schedule.overlap)
        assert tuple(f for f, _ in learner.waiting()) == applied
        before = learner.versions
        answer(learner)
        assert [after - b for after, b in zip(learner.versions, before, strict=True)] == [
            int(f in applied) for f in range(schedule.num_fragments)
        ]
        assert learner.waiting() == ()
        assert accounts_balance(learner)
    assert all(not work.ledger.lost for work in learner.fragments)


def test_several_fragments_are_in_flight() -> None:
    learner = core(Schedule(6, 3, 5))
    for _ in range(6):
        learner.stepped(1)
    assert [len(work.in_flight) for work in learner.fragments] == [1, 1, 1]
    learner.stepped(1)
    assert learner.waiting() == ((0, 1),)
    learner.received(2, 1, 1)  # an answer that comes early is kept until it is due
    assert learner.adoptions() == ()
    learner.received(0, 1, 1)
    assert learner.adoptions() == ((0, 1),)


def test_replace_discards_what_was_trained_since_the_send_and_says_so_once() -> None:
    learner = core(Schedule(4, 1, 2))
    for tokens in (1, 2, 3):
        learner.stepped(tokens)
    assert learner.stepped(4) == (Send(0, 1, 0, 0, tokens=10, steps=4),)
    learner.stepped(5)
    learner.stepped(6)
    answer(learner)
    ledger = learner.fragments[0].ledger
    assert (ledger.merged, ledger.discarded, ledger.pending) == (10, {"overlap": 11}, 0)
    learner.stepped(7)
    assert learner.stepped(8) == (Send(0, 2, 1, 1, tokens=15, steps=2, discarded=(("overlap", 11),)),)
    for _ in range(2):
        learner.stepped(1)
    answer(learner)
    learner.stepped(1)
    assert learner.stepped(1)[0].discarded == (("overlap", 2),)


def test_mixing_keeps_what_was_trained_since_the_send() -> None:
    learner = core(Schedule(4, 1, 2), keeps_pending=True)
    for _ in range(6):
        learner.stepped(1)
    answer(learner)
    assert learner.fragments[0].ledger.discarded == {}
    learner.stepped(1)
    assert learner.stepped(1) == (Send(0, 2, 1, 1, tokens=4, steps=4),)


def test_an_overlap_of_a_whole_interval_sends_before_it_adopts() -> None:
    """τ = H: from the second send on the base is one version behind the round."""
    learner = core(Schedule(2, 1, 2))
    sends = []
    for _ in range(6):
        sends += learner.stepped(1)
        answer(learner)
    assert [(send.round, send.base) for send in sends] == [(0, 0), (1, 0), (2, 1)]


@pytest.mark.parametrize("reason", [MISSED, TWICE, OUTLIER])
def test_a_contribution_that_a_round_goes_on_without_waits_for_the_answer_like_the_others(reason: str) -> None:
    learner = core(Schedule(3, 1, 1))
    for _ in range(3):
        learner.stepped(10)
    assert learner.rejected(0, 1, reason)
    assert learner.fragments[0].ledger.discarded == {reason: 30}
    learner.stepped(10)
    assert learner.waiting() == ((0, 1),)
    learner.received(0, 1, 1)  # what was rejected is in no version, whatever is merged after it
    answer(learner)
    assert learner.versions == (1,)
    assert learner.fragments[0].ledger.merged == 0
    assert learner.fragments[0].ledger.discarded == {reason: 30, "overlap": 10}
    assert accounts_balance(learner)


def test_a_contribution_that_was_out_of_step_stays_with_the_learner() -> None:
    learner = core(Schedule(3, 1, 1))
    for _ in range(3):
        learner.stepped(10)
    assert learner.rejected(0, 1, OUT_OF_STEP)
    learner.stepped(10)
    assert learner.waiting() == ()
    learner.stepped(10)
    assert learner.stepped(10) == (Send(0, 2, 0, 0, tokens=60, steps=6),)
    assert learner.fragments[0].ledger.discarded == {}
    assert accounts_balance(learner)


@pytest.mark.parametrize("reason", ["version", "not finite"])
def test_a_contribution_that_is_refused_for_good_is_not_waited_for(reason: str) -> None:
    learner = core(Schedule(3, 1, 1))
    for _ in range(3):
        learner.stepped(10)
    assert learner.rejected(0, 1, reason)
    assert not learner.rejected(0, 1, reason)
    assert learner.fragments[0].ledger.discarded == {reason: 30}
    for _ in range(2):
        learner.stepped(10)
        assert learner.waiting() == ()
    assert learner.stepped(10)[0] == Send(0, 2, 0, 0, tokens=30, steps=3)
    assert accounts_balance(learner)


def test_after_a_refusal_for_good_nothing_is_sent_on_top_of_it() -> None:
    """τ = H: a contribution that follows a refused one counts on a version that may never come; the next one waits for
    clarity."""
    learner = core(Schedule(2, 1, 2))
    for _ in range(4):
        sends = learner.stepped(10)
    assert [(send.round, send.base) for send in sends] == [(1, 0)]
    assert learner.rejected(0, 1, "not finite")
    for _ in range(2):
        assert learner.stepped(10) == ()
    assert learner.rejected(0, 2, "not finite")
    for _ in range(2):
        sends = learner.stepped(10)
    assert sends == (Send(0, 3, 0, 0, tokens=40, steps=4),)
    assert accounts_balance(learner)


def test_a_refusal_after_the_merge_is_void() -> None:
    learner = core(Schedule(3, 1, 2))
    for _ in range(3):
        learner.stepped(10)
    learner.received(0, 1, 1)
    assert not learner.rejected(0, 1, MISSED)
    assert learner.fragments[0].ledger.merged == 30


def test_a_version_without_the_contribution_settles_it_as_missed() -> None:
    """The syncer went on without it and its refusal was lost with the connection."""
    learner = core(Schedule(3, 1))
    for _ in range(3):
        learner.stepped(10)
    learner.received(0, 1, 0)
    assert [flight.listed for flight in learner.adopted(0, 1)] == [False]
    assert learner.fragments[0].ledger.discarded == {MISSED: 30}
    assert not learner.rejected(0, 1, MISSED)


def test_a_learner_overtaken_takes_the_newest_version() -> None:
    learner = core(Schedule(3, 1, 1))
    for _ in range(3):
        learner.stepped(10)
    learner.received(0, 3, 0)
    assert learner.adoptions() == ()  # not due yet
    learner.stepped(10)
    assert learner.waiting() == ()
    assert learner.adoptions() == ((0, 3),)
    learner.adopted(0, 3)
    assert learner.versions == (3,)
    assert learner.fragments[0].in_flight == []
    learner.received(0, 1, 1)  # what comes after it is old
    assert learner.adoptions() == ()
    assert accounts_balance(learner)


def test_a_joiner_between_two_rounds_takes_the_newest_version_at_once() -> None:
    learner = core(Schedule(10, 2), version=7, step=13)
    learner.stepped(5)
    learner.received(0, 8, 0)
    learner.received(0, 9, 0)
    assert learner.adoptions() == ((0, 9),)
    learner.adopted(0, 9)
    assert learner.versions == (9, 7)
    assert learner.stepped(5) == (Send(0, 1, 9, 9, tokens=5, steps=1, discarded=(("overlap", 5),)),)
    assert learner.step == 15


def test_never_waiting_means_taking_an_answer_when_it_comes() -> None:
    learner = core(Schedule(3, 1, 1), wait=False)
    for _ in range(3):
        learner.stepped(10)
    for _ in range(3):
        assert learner.stepped(10) == ()  # after step 6 the first one is still on its way: the work goes with the next
        assert learner.waiting() == ()
        assert learner.adoptions() == ()
    learner.received(0, 1, 1)
    assert learner.adoptions() == ((0, 1),)
    learner.adopted(0, 1)
    assert learner.fragments[0].ledger.discarded == {"overlap": 30}
    learner.stepped(10)
    learner.stepped(10)
    assert learner.stepped(10) == (Send(0, 2, 1, 1, tokens=30, steps=3, discarded=(("overlap", 30),)),)


def test_a_version_that_is_not_here_cannot_be_adopted() -> None:
    with pytest.raises(VersionError, match="fragment 0 cannot adopt version 1: it was not received"):
        core(Schedule(3, 1)).adopted(0, 1)


def test_a_new_incarnation_starts_from_the_run() -> None:
    learner = core(Schedule(3, 1, 2))
    for _ in range(5):
        learner.stepped(10)
    learner.rejoined([4], step=11)
    assert (learner.versions, learner.step, learner.tokens) == ((4,), 11, 0)
    assert learner.waiting() == learner.adoptions() == ()
    assert learner.stepped(10) == (Send(0, 1, 4, 4, tokens=10, steps=1),)
    learner.rejoined([4], step=2)  # a syncer may have forgotten some steps
    assert learner.step == 12
    learner.rejoined([4], step=3, awaited=True)  # a round waits for the send after it
    assert learner.step == 3
    assert [send.round for _ in range(3) for send in learner.stepped(10)] == [4]


def test_steps_count_from_the_start_of_an_incarnation() -> None:
    learner, other = core(Schedule(3, 1, 1), step=7), core(Schedule(3, 1, 1))
    for _ in range(2):
        learner.stepped(10)
    assert (learner.step, learner.steps) == (9, 2)
    other.load_state_dict(learner.state_dict())
    assert (other.step, other.steps) == (9, 0)
    other.stepped(10)
    assert (other.step, other.steps) == (10, 1)
    learner.rejoined([0], step=20)
    assert (learner.step, learner.steps) == (20, 0)


def test_gradients_are_merged_before_their_step_is_taken() -> None:
    learner = core(Schedule(1, 2, 0, (1, 1)))
    for _ in range(3):
        assert len(learner.stepped(0)) == 2
        answer(learner)
        learner.credit(100)
    assert learner.step == 3
    assert [work.ledger.as_dict() for work in learner.fragments] == 2 * [
        {"trained": 300, "pending": 0, "merged": 300, "lost": 0, "discarded": {}}
    ]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("wait", [True, False])
def test_a_saved_learner_continues_identically(schedule: Schedule, wait: bool) -> None:
    """Saved through JSON at every boundary of a random life, the copy does the same as the original to the end."""
    events = random.Random(7)
    learner = core(schedule, wait=wait, keeps_pending=bool(schedule.overlap % 2))
    for _ in range(4 * schedule.sync_every):
        copy = core(schedule, wait=wait, keeps_pending=learner.rules.keeps_pending)
        copy.load_state_dict(json.loads(json.dumps(learner.state_dict())))
        assert copy.state_dict() == learner.state_dict()
        tokens, listed, early = events.randint(1, 9), events.random() < 0.8, events.random() < 0.3
        sends = []
        for each in (learner, copy):
            sends.append(each.stepped(tokens))
            if early:
                for fragment, work in enumerate(each.fragments):
                    for flight in work.in_flight:
                        each.received(fragment, flight.round + 1, flight.number if listed else 0)
            if wait or early:
                answer(each, listed=listed)
        assert sends[0] == sends[1]
        assert copy.state_dict() == learner.state_dict()
        assert copy.fragments == learner.fragments
        assert accounts_balance(learner)


def test_saved_state_shares_nothing_with_the_learner() -> None:
    learner = core(Schedule(3, 1, 1))
    for _ in range(3):
        learner.stepped(10)
    state = learner.state_dict()
    before = deepcopy(state)
    answer(learner)
    learner.rejected(0, 1, MISSED)
    learner.stepped(1)
    answer(learner)
    assert state == before
    copy = core(Schedule(3, 1, 1))
    copy.load_state_dict(state)
    copy.rejected(0, 1, MISSED)
    assert state == before


def test_a_resumed_learner_under_a_new_incarnation_counts_from_nothing() -> None:
    """What was pending was counted as lost with the old incarnation; the work itself goes on."""
    learner = core(Schedule(3, 1, 2), keeps_pending=True)
    for _ in range(4):
        learner.stepped(10)
    copy = core(Schedule(3, 1, 2), keeps_pending=True)
    copy.load_state_dict(learner.state_dict())
    copy.reincarnated()
    assert copy.tokens == 0
    copy.stepped(10)
    assert copy.waiting() == ((0, 1),)
    answer(copy)
    assert copy.stepped(10) == (Send(0, 1, 1, 1, tokens=20, steps=3),)
    assert accounts_balance(copy)


def test_a_state_of_another_cut_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has 2 fragments and this model 1"):
        core(Schedule(4, 1)).load_state_dict(core(Schedule(4, 2)).state_dict())


# --- what is heard again, or late, or never ---------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [OUT_OF_STEP, DROPPED])
def test_work_that_comes_back_is_pending_once_however_often_that_is_said(reason: str) -> None:
    learner = core(Schedule(3, 1, 1))
    for _ in range(3):
        learner.stepped(10)
    flight = learner.rejected(0, 1, reason)
    assert flight is not None
    assert flight.number == 1
    for _ in range(2):
        assert learner.rejected(0, 1, reason) is None
        assert (learner.fragments[0].pending_tokens, learner.fragments[0].pending_steps) == (30, 3)
    assert accounts_balance(learner)


def test_a_dropped_contribution_goes_with_the_next_one_and_its_round_is_adopted_around_it() -> None:
    learner = core(Schedule(3, 1))
    for _ in range(3):
        learner.stepped(10)
    learner.rejected(0, 1, DROPPED)
    assert learner.waiting() == ((0, 1),)
    learner.received(0, 1, 0)
    assert learner.keeps_own(0, 1)
    assert learner.adoptions() == ((0, 1),)
    learner.adopted(0, 1)
    learner.rejected(0, 1, DROPPED)
    for _ in range(3):
        sends = learner.stepped(10)
    assert sends == (Send(0, 2, 1, 1, tokens=60, steps=6),)
    assert learner.fragments[0].ledger.discarded == {}
    assert accounts_balance(learner)


def test_a_rejection_heard_before_the_version_is_not_booked_as_merged() -> None:
    """Two contributions are in flight; the first was refused by the screen, the second is in the version that comes."""
    learner = core(Schedule(2, 1, 2))
    for _ in range(4):
        learner.stepped(10)
    learner.rejected(0, 1, OUTLIER)
    listed = learner.received(0, 1, 0)
    assert listed == ()
    learner.adopted(0, 1)
    listed = learner.received(0, 2, 2)
    assert [flight.number for flight in listed] == [2]
    assert learner.received(0, 2, 2) == ()
    assert (learner.fragments[0].ledger.merged, learner.fragments[0].ledger.discarded) == (20, {OUTLIER: 20})
    assert accounts_balance(learner)


def test_a_resumed_learners_contributions_of_the_earlier_incarnation_are_not_taken_for_its_own() -> None:
    """Numbers begin anew with an incarnation: a verdict on the new number 1 is not one on the old."""
    learner = core(Schedule(2, 1, 2))
    for _ in range(2):
        learner.stepped(10)
    copy = core(Schedule(2, 1, 2))
    copy.load_state_dict(learner.state_dict())
    copy.reincarnated()
    copy.stepped(10)
    assert copy.stepped(10) == (Send(0, 1, 1, 0, tokens=20, steps=2),)
    flight = copy.rejected(0, 1, "not finite")
    assert flight is not None
    assert (flight.round, flight.tokens) == (1, 20)
    assert [each.round for each in copy.fragments[0].in_flight] == [0]
    assert copy.received(0, 1, 0) == ()
    assert accounts_balance(copy)


# --- called rounds ----------------------------------------------------------------------------------------------------


def test_a_call_that_is_quicker_than_its_version_is_answered_after_it() -> None:
    """The syncer publishes and calls at once; the call is a few bytes and the version is not."""
    learner = called()
    learner.stepped(5)
    assert learner.called(0, 0) is not None
    learner.stepped(5)
    assert learner.called(0, 1) is None
    assert learner.stepped(5) == ()
    learner.received(0, 1, 1)
    learner.adopted(0, 1)
    (send,) = learner.stepped(5)
    assert (send.number, send.base, send.tokens) == (2, 1, 5)


def test_a_resumed_learner_answers_a_call_once_it_knows_which_units_are_its_own() -> None:
    learner, copy = called(), called()
    learner.stepped(5, units=((0, 2),))
    learner.stepped(5, units=((2, 4),))
    copy.load_state_dict(learner.state_dict())
    copy.reincarnated()
    assert copy.called(0, 0) is None
    [send] = copy.keep_units(((1, 3),))
    assert (send.fragment, send.base, send.units, send.steps) == (0, 0, ((1, 3),), 2)
    assert copy.keep_units(((1, 3),)) == ()
    other = called()
    other.load_state_dict(called().state_dict())
    other.stepped(5, units=((0, 2),))
    assert other.called(0, 0) is not None, "units of its own"


def test_a_call_heard_again_is_answered_once() -> None:
    learner = called()
    learner.stepped(5)
    assert learner.called(0, 0) == Send(0, 1, 0, 0, tokens=5, steps=1)
    for _ in range(3):
        assert learner.called(0, 0) is None
        assert learner.stepped(5) == ()
    learner.received(0, 1, 1)
    learner.adopted(0, 1)
    assert learner.stepped(5) == ()


def test_a_call_before_the_first_step_is_answered_after_it() -> None:
    learner = called()
    for _ in range(2):
        assert learner.called(0, 0) is None
    assert learner.stepped(5) == (Send(0, 1, 0, 0, tokens=5, steps=1),)
    assert learner.stepped(5) == ()


def test_a_call_after_a_rejection_is_answered_again() -> None:
    learner = called()
    learner.stepped(5)
    learner.called(0, 0)
    learner.rejected(0, 1, "not finite")
    learner.stepped(7)
    assert learner.called(0, 0) == Send(0, 2, 0, 0, tokens=7, steps=1)
    assert accounts_balance(learner)


# --- tokens routed to the experts of a mixture ------------------------------------------------------------------------


def sent_with(learner: LearnerCore, *routed: int) -> tuple[int, ...]:
    """Four steps, a send, and the tokens that its contribution then has, of these that were read at the send."""
    for _ in range(3):
        assert not learner.stepped(10)
    (send,) = learner.stepped(10)
    return learner.fragments[0].add_routed(routed, send.number)


def restarted(learner: LearnerCore) -> LearnerCore:
    """A new process with its state."""
    again = core(Schedule(4, 1))
    again.load_state_dict(json.loads(json.dumps(learner.state_dict())))
    return again


def test_routed_tokens_go_with_one_contribution() -> None:
    learner = core(Schedule(4, 1))
    assert sent_with(learner, 3, 0) == (3, 0)
    answer(learner)
    assert learner.fragments[0].add_routed((1, 2)) == (1, 2)  # read for a checkpoint
    again = restarted(learner)
    assert sent_with(again, 5, 5) == (6, 7)
    answer(again)
    assert not again.fragments[0].pending_routed


@pytest.mark.parametrize("reason", [DROPPED, OUT_OF_STEP])
def test_routed_tokens_of_a_contribution_that_comes_back_go_with_the_next_one(reason: str) -> None:
    learner = core(Schedule(4, 1), wait=False, keeps_pending=True)
    sent_with(learner, 3, 1)
    for _ in range(2):
        learner.rejected(0, 1, reason)
    assert learner.fragments[0].pending_routed == (3, 1)
    assert learner.fragments[0].pending_tokens == 40
    learner.received(0, 1, 0)
    answer(learner)
    assert sent_with(learner, 1, 1) == (4, 2)


def test_routed_tokens_of_a_refused_contribution_do_not_come_back() -> None:
    learner = core(Schedule(4, 1), wait=False, keeps_pending=True)
    sent_with(learner, 3, 1)
    learner.rejected(0, 1, OUTLIER)
    assert not learner.fragments[0].pending_routed
    learner.received(0, 1, 0)
    answer(learner)
    assert sent_with(learner, 1, 1) == (1, 1)


def test_a_learner_that_is_stopped_takes_its_routed_tokens_back_and_adoption_overwrites_them() -> None:
    learner = core(Schedule(4, 1))
    sent_with(learner, 3, 1)
    assert learner.take_back() == ((0, 1),)
    assert learner.fragments[0].pending_routed == (3, 1)
    learner.fragments[0].overwrite()
    assert not learner.fragments[0].pending_routed


def test_work_of_an_earlier_incarnation_has_no_tokens_and_no_routed_ones() -> None:
    learner = core(Schedule(4, 1))
    sent_with(learner, 3, 1)
    again = restarted(learner)
    assert again.forget_in_flight(keep_work=True) == ()  # its answer is known
    again.take_back()
    assert again.fragments[0].pending_routed == (3, 1)
    again.reincarnated()
    assert not again.fragments[0].pending_routed
    learner.rejoined([1], 8)
    assert not learner.fragments[0].pending_routed


def test_routed_tokens_that_are_no_numbers_are_refused() -> None:
    learner = core(Schedule(4, 1))
    sent_with(learner, 3, 1)
    for key, broken in (("pending_routed", [-1]), ("pending_routed", ["1"]), ("pending_routed", 1)):
        state = deepcopy(learner.state_dict())
        state["fragments"][0][key] = broken
        with pytest.raises((ValueError, TypeError)):
            learner.check_state_dict(state)
    state["fragments"][0] = {**learner.state_dict()["fragments"][0], "pending_routed": []}
    state["fragments"][0]["in_flight"][0]["routed"] = [0.5]
    with pytest.raises(ValueError, match="not a whole number"):
        learner.check_state_dict(state)
