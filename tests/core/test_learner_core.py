"""LearnerCore by scripted events: what is sent, waited for and adopted, and where every token goes."""

from __future__ import annotations

import json
import random
from copy import deepcopy

import pytest

from diloco.core.contribution import MISSED, OUT_OF_STEP, OUTLIER, TWICE
from diloco.core.in_flight import Send
from diloco.core.learner import LearnerCore
from diloco.core.schedule import Schedule
from diloco.errors import CheckpointError, VersionError


def core(
    schedule: Schedule, *, wait: bool = True, keeps_pending: bool = False, version: int = 0, step: int = 0
) -> LearnerCore:
    return LearnerCore(schedule, [version] * schedule.num_fragments, wait=wait, keeps_pending=keeps_pending, step=step)


def answer(learner: LearnerCore, *, listed: bool = True) -> None:
    """Whatever is waited for arrives at once, and what is due is adopted."""
    for fragment, version in learner.waiting():
        learner.received(fragment, version, version - 1 if listed else -1)
    for fragment, version in learner.adoptions():
        learner.adopted(fragment, version)


def books_balance(learner: LearnerCore) -> bool:
    for book in learner.books:
        in_flight = sum(flight.tokens for flight in book.flights if not flight.listed)
        if book.ledger.pending != book.pending_tokens + in_flight or book.ledger.trained != learner.tokens:
            return False
    return True


SCHEDULES = [
    Schedule(3, 1), Schedule(1, 1), Schedule(1, 1, 1), Schedule(6, 2, 1), Schedule(6, 3, 5), Schedule(6, 3, 6), Schedule(4, 1, 4),
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
        due = schedule.due(step)
        assert tuple(send.fragment for send in sends) == due.send
        for send in sends:
            assert send.round == rounds[send.fragment]
            assert send.base == max(0, send.round - (1 if schedule.overlap == schedule.sync_every else 0))
            rounds[send.fragment] += 1
        applied = tuple(f for f in due.apply if step > schedule.overlap)
        assert tuple(f for f, _ in learner.waiting()) == applied
        before = learner.versions
        answer(learner)
        assert [after - b for after, b in zip(learner.versions, before, strict=True)] == [
            int(f in applied) for f in range(schedule.num_fragments)
        ]
        assert learner.waiting() == ()
        assert books_balance(learner)
    assert all(not book.ledger.lost for book in learner.books)


def test_several_fragments_are_in_flight() -> None:
    learner = core(Schedule(6, 3, 5))
    for _ in range(6):
        learner.stepped(1)
    assert [len(book.flights) for book in learner.books] == [1, 1, 1]
    learner.stepped(1)
    assert learner.waiting() == ((0, 1),)
    learner.received(2, 1, 0)  # an answer that comes early is kept until it is due
    assert learner.adoptions() == ()
    learner.received(0, 1, 0)
    assert learner.adoptions() == ((0, 1),)


def test_replace_discards_what_was_trained_since_the_send_and_says_so_once() -> None:
    learner = core(Schedule(4, 1, 2))
    for tokens in (1, 2, 3):
        learner.stepped(tokens)
    assert learner.stepped(4) == (Send(0, 0, 0, tokens=10, steps=4),)
    learner.stepped(5)
    learner.stepped(6)
    answer(learner)
    ledger = learner.books[0].ledger
    assert (ledger.merged, ledger.discarded, ledger.pending) == (10, {"overlap": 11}, 0)
    learner.stepped(7)
    assert learner.stepped(8) == (Send(0, 1, 1, tokens=15, steps=2, discarded=(("overlap", 11),)),)
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
    assert learner.books[0].ledger.discarded == {}
    learner.stepped(1)
    assert learner.stepped(1) == (Send(0, 1, 1, tokens=4, steps=4),)


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
    assert learner.rejected(0, 0, reason)
    assert learner.books[0].ledger.discarded == {reason: 30}
    learner.stepped(10)
    assert learner.waiting() == ((0, 1),)
    learner.received(0, 1, 0)  # as of an earlier incarnation of itself
    answer(learner)
    assert learner.versions == (1,)
    assert learner.books[0].ledger.merged == 0
    assert learner.books[0].ledger.discarded == {reason: 30, "overlap": 10}
    assert books_balance(learner)


def test_a_contribution_that_was_out_of_step_stays_with_the_learner() -> None:
    learner = core(Schedule(3, 1, 1))
    for _ in range(3):
        learner.stepped(10)
    assert learner.rejected(0, 0, OUT_OF_STEP)
    learner.stepped(10)
    assert learner.waiting() == ()
    learner.stepped(10)
    assert learner.stepped(10) == (Send(0, 0, 0, tokens=60, steps=6),)
    assert learner.books[0].ledger.discarded == {}
    assert books_balance(learner)


@pytest.mark.parametrize("reason", ["version", "not finite"])
def test_a_contribution_that_is_refused_for_good_is_not_waited_for(reason: str) -> None:
    learner = core(Schedule(3, 1, 1))
    for _ in range(3):
        learner.stepped(10)
    assert learner.rejected(0, 0, reason)
    assert not learner.rejected(0, 0, reason)
    assert learner.books[0].ledger.discarded == {reason: 30}
    for _ in range(2):
        learner.stepped(10)
        assert learner.waiting() == ()
    assert learner.stepped(10)[0] == Send(0, 0, 0, tokens=30, steps=3)
    assert books_balance(learner)


def test_after_a_refusal_for_good_nothing_is_sent_on_top_of_it() -> None:
    """τ = H: a contribution that follows a refused one counts on a version that may never come; the next one waits for clarity."""
    learner = core(Schedule(2, 1, 2))
    for _ in range(4):
        sends = learner.stepped(10)
    assert [(send.round, send.base) for send in sends] == [(1, 0)]
    assert learner.rejected(0, 0, "not finite")
    for _ in range(2):
        assert learner.stepped(10) == ()
    assert learner.rejected(0, 1, "not finite")
    for _ in range(2):
        sends = learner.stepped(10)
    assert sends == (Send(0, 0, 0, tokens=40, steps=4),)
    assert books_balance(learner)


def test_a_refusal_after_the_merge_is_void() -> None:
    learner = core(Schedule(3, 1, 2))
    for _ in range(3):
        learner.stepped(10)
    learner.received(0, 1, 0)
    assert not learner.rejected(0, 0, MISSED)
    assert learner.books[0].ledger.merged == 30


def test_a_version_without_the_contribution_settles_it_as_missed() -> None:
    """The syncer went on without it and its refusal was lost with the connection."""
    learner = core(Schedule(3, 1))
    for _ in range(3):
        learner.stepped(10)
    learner.received(0, 1, -1)
    assert [flight.listed for flight in learner.adopted(0, 1)] == [False]
    assert learner.books[0].ledger.discarded == {MISSED: 30}
    assert not learner.rejected(0, 0, MISSED)


def test_a_learner_overtaken_takes_the_newest_version() -> None:
    learner = core(Schedule(3, 1, 1))
    for _ in range(3):
        learner.stepped(10)
    learner.received(0, 3, -1)
    assert learner.adoptions() == ()  # not due yet
    learner.stepped(10)
    assert learner.waiting() == ()
    assert learner.adoptions() == ((0, 3),)
    learner.adopted(0, 3)
    assert learner.versions == (3,)
    assert learner.books[0].flights == []
    learner.received(0, 1, 0)  # what comes after it is old
    assert learner.adoptions() == ()
    assert books_balance(learner)


def test_a_joiner_between_two_rounds_takes_the_newest_version_at_once() -> None:
    learner = core(Schedule(10, 2), version=7, step=13)
    learner.stepped(5)
    learner.received(0, 8, -1)
    learner.received(0, 9, -1)
    assert learner.adoptions() == ((0, 9),)
    learner.adopted(0, 9)
    assert learner.versions == (9, 7)
    assert learner.stepped(5) == (Send(0, 9, 9, tokens=5, steps=1, discarded=(("overlap", 5),)),)
    assert learner.step == 15


def test_never_waiting_means_taking_an_answer_when_it_comes() -> None:
    learner = core(Schedule(3, 1, 1), wait=False)
    for _ in range(3):
        learner.stepped(10)
    for _ in range(3):
        assert learner.stepped(10) == ()  # after step 6 the first one is still on its way: the work goes with the next
        assert learner.waiting() == ()
        assert learner.adoptions() == ()
    learner.received(0, 1, 0)
    assert learner.adoptions() == ((0, 1),)
    learner.adopted(0, 1)
    assert learner.books[0].ledger.discarded == {"overlap": 30}
    learner.stepped(10)
    learner.stepped(10)
    assert learner.stepped(10) == (Send(0, 1, 1, tokens=30, steps=3, discarded=(("overlap", 30),)),)


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
    assert learner.stepped(10) == (Send(0, 4, 4, tokens=10, steps=1),)
    learner.rejoined([4], step=2)  # a syncer may have forgotten some steps
    assert learner.step == 12
    learner.rejoined([4], step=3, awaited=True)  # a round waits for the send after it
    assert learner.step == 3
    assert [send.round for _ in range(3) for send in learner.stepped(10)] == [4]


def test_gradients_are_merged_before_their_step_is_taken() -> None:
    learner = core(Schedule(1, 2, 0, (1, 1)))
    for _ in range(3):
        assert len(learner.stepped(0)) == 2
        answer(learner)
        learner.credit(100)
    assert learner.step == 3
    assert [book.ledger.as_dict() for book in learner.books] == 2 * [
        {"trained": 300, "pending": 0, "merged": 300, "lost": 0, "discarded": {}}
    ]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("wait", [True, False])
def test_a_saved_learner_continues_identically(schedule: Schedule, wait: bool) -> None:
    """Saved through JSON at every boundary of a random life, the copy does the same as the original to the end."""
    events = random.Random(7)
    learner = core(schedule, wait=wait, keeps_pending=bool(schedule.overlap % 2))
    for _ in range(4 * schedule.sync_every):
        copy = core(schedule, wait=wait, keeps_pending=learner.keeps_pending)
        copy.load_state_dict(json.loads(json.dumps(learner.state_dict())))
        assert copy.state_dict() == learner.state_dict()
        tokens, listed, early = events.randint(1, 9), events.random() < 0.8, events.random() < 0.3
        sends = []
        for each in (learner, copy):
            sends.append(each.stepped(tokens))
            if early:
                for fragment, book in enumerate(each.books):
                    for flight in book.flights:
                        each.received(fragment, flight.round + 1, flight.round if listed else -1)
            if wait or early:
                answer(each, listed=listed)
        assert sends[0] == sends[1]
        assert copy.state_dict() == learner.state_dict()
        assert copy.books == learner.books
        assert books_balance(learner)


def test_saved_state_shares_nothing_with_the_learner() -> None:
    learner = core(Schedule(3, 1, 1))
    for _ in range(3):
        learner.stepped(10)
    state = learner.state_dict()
    before = deepcopy(state)
    answer(learner)
    learner.rejected(0, 0, MISSED)
    learner.stepped(1)
    answer(learner)
    assert state == before
    copy = core(Schedule(3, 1, 1))
    copy.load_state_dict(state)
    copy.rejected(0, 0, MISSED)
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
    assert copy.stepped(10) == (Send(0, 1, 1, tokens=20, steps=3),)
    assert books_balance(copy)


def test_a_state_of_another_cut_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has 2 fragments and this model 1"):
        core(Schedule(4, 1)).load_state_dict(core(Schedule(4, 2)).state_dict())


def test_a_call_that_is_quicker_than_its_version_is_answered_after_it() -> None:
    """The syncer publishes and calls at once; the call is a few bytes and the version is not."""
    core = LearnerCore(Schedule(4, 1), [0], wait=False, mode="called")
    core.stepped(5)
    assert core.called(0, 0) is not None
    core.stepped(5)
    assert core.called(0, 1) is None
    assert core.stepped(5) == ()
    core.received(0, 1, merged_round=0)
    core.adopted(0, 1)
    (send,) = core.stepped(5)
    assert (send.base, send.tokens) == (1, 5)


@pytest.mark.parametrize(("keeps_pending", "next_push"), [(False, 11), (True, 8)])
def test_a_push_holds_a_whole_interval_of_work_however_late_the_last_answer(
    keeps_pending: bool, next_push: int
) -> None:
    """H = 4; the answer to the push after step 4 is adopted after step 7. What it overwrites is not work any more."""
    core = LearnerCore(Schedule(4, 1), [0], wait=False, keeps_pending=keeps_pending, mode="pushed")
    for _ in range(7):
        core.stepped(5)
    core.received(0, 1, merged_round=0)
    core.adopted(0, 1)
    restored = LearnerCore(Schedule(4, 1), [0], wait=False, keeps_pending=keeps_pending, mode="pushed")
    restored.load_state_dict(core.state_dict())
    for each in (core, restored):
        sends = [(each.step, send.steps, send.base) for _ in range(4) for send in each.stepped(5)]
        assert sends == [(next_push, 4, 1)]


def test_who_is_still_waiting_pushes_a_whole_interval_after_the_answer() -> None:
    """It came after the next push was due."""
    core = LearnerCore(Schedule(4, 1), [0], wait=False, mode="pushed")
    for _ in range(10):
        core.stepped(5)
    core.received(0, 1, merged_round=0)
    core.adopted(0, 1)
    sends = [send for _ in range(4) for send in core.stepped(5)]
    assert [(send.steps, send.tokens, send.discarded) for send in sends] == [(4, 20, (("overlap", 30),))]
