"""Called rounds by scripted events in virtual time: calls, grace, late work, pacing."""

from __future__ import annotations

import pytest
from tests.protocol.driving import ledger, restarted, verdicts
from tests.protocol.rounds.asynchronous import Run, contributors, is_accepted, method

from diloco.core.quorum import QUORUMS, Called
from diloco.errors import ConfigError
from diloco.protocol.actions import Acknowledge, MergeRound, Publish, Reject, Tell, WakeAt
from diloco.protocol.contribution import Contribution, Verdict
from diloco.protocol.members import Report
from diloco.protocol.rounds.called import CalledSyncer, Pace

NO_GRACE = Called(at_least=1, grace=0.0)


def rounds(run: Run) -> CalledSyncer:
    assert isinstance(run.core.rounds, CalledSyncer)
    return run.core.rounds


# --- calls and their pace ---------------------------------------------------------------------------------------------


def test_a_fragment_is_called_when_the_run_clock_reaches_its_turn() -> None:
    run = Run(method(NO_GRACE))
    assert run.step("abc", 3) == []
    assert rounds(run).clock == pytest.approx(3.0)
    assert run.step("ab") == []
    assert run.calls("a") == ()
    assert run.step("c") == [Tell(("a", "b", "c"))]
    assert [run.calls(learner) for learner in "abc"] == [((0, 0),)] * 3
    assert rounds(run).clock == pytest.approx(4.0)


def test_a_call_stands_until_it_is_answered() -> None:
    run = Run(method(Called(at_least=3, grace=0.0)))
    run.step("abc", 4)
    run.step("abc")
    assert run.step("abc") == []  # told once; the standing repeats it
    run.send("a")
    assert [run.calls(learner) for learner in "abc"] == [(), ((0, 0),), ((0, 0),)]
    run.core.joined(run.now, "d")
    assert run.calls("d") == ((0, 0),)
    run.send("b")
    assert contributors(run.send("c")[1]) == ["a", "b", "c"]
    assert [run.calls(learner) for learner in "abcd"] == [()] * 4


def test_a_fast_network_does_not_shorten_the_interval() -> None:
    run = Run(method(NO_GRACE))
    calls = []
    for step in range(1, 41):
        for learner in "abc":
            for action in run.step(learner):
                if isinstance(action, Tell):
                    calls.append((step, run.core.fragments[0].version))
                    for each in "abc":
                        run.send(each)
                        if run.phase == "merging":
                            run.close("abc")
    assert calls == [(4 * (version + 1), version) for version in range(10)]


def test_the_clock_counts_steps_over_live_learners() -> None:
    run = Run(method(NO_GRACE), "ab")
    run.step("a", 6)  # b is slow
    assert rounds(run).clock == pytest.approx(3.0)
    run.core.left(run.now, "b", 1, tokens=0)
    run.step("a")
    assert rounds(run).clock == pytest.approx(4.0)


def test_a_turn_that_comes_while_a_round_is_stored_is_called_afterwards() -> None:
    run = Run(method(NO_GRACE), "ab")
    run.step("ab", 4)
    run.send("a")
    assert run.phase == "merging"
    assert run.step("ab", 5) == []  # the clock is at 9
    [publish, tell] = run.close("ab")
    assert isinstance(publish, Publish)
    assert tell == Tell(("a", "b"))
    assert run.calls("a") == run.calls("b") == ((0, 1),)
    run.send("a")
    run.close("ab")
    assert run.step("ab", 2) == []
    assert run.step("ab") == [Tell(("a", "b"))]  # the next turn is at 12


def test_a_turn_is_not_called_again_after_a_restart() -> None:
    """Three learners that take eight steps each turn the clock by less than eight."""
    run = Run(method(NO_GRACE))
    run.step("abc", 8)
    assert rounds(run).clock < 8
    for _ in range(2):  # the turns at 4 and 8
        run.send("a")
        run.close("a")
    run.core = restarted(run.core, run.core.saved(), 0.0)
    assert rounds(run).clock == pytest.approx(8)
    assert run.step("abc", 3) == []
    assert run.step("abc") == [Tell(("a", "b", "c"))]  # at 12


@pytest.mark.parametrize("phase", ["called", "merging"])
def test_a_round_that_was_under_way_is_called_again_after_a_restart(phase: str) -> None:
    """Its turn counts until its version is durable: the fragment would wait for twice H."""
    run = Run(method(NO_GRACE))
    run.step("abc", 5)
    assert run.calls("b") == ((0, 0),)
    if phase == "merging":
        run.send("a")
    assert run.phase == {"called": "open", "merging": "merging"}[phase]
    run.core = restarted(run.core, run.core.saved(), 0.0)
    assert run.step("a") == [Tell(("a", "b", "c"))]
    assert run.calls("b") == ((0, 0),)


def test_a_grace_window_does_not_pass_while_the_syncer_stands_still() -> None:
    run = Run(method(Called(at_least=1, grace_cap_s=5.0)))
    run.step("abc", 5)
    run.send("a")
    [wake] = [action for action in run.core.tick(run.now) if isinstance(action, WakeAt)]
    run.core.was_suspended(100.0)
    assert run.core.tick(run.now + 100.0) == [WakeAt(pytest.approx(wake.at + 100.0))]


def test_standing_still_is_no_part_of_the_time_that_a_synchronisation_takes() -> None:
    run = Run(method(NO_GRACE))
    run.step("abc", 5)
    run.send("a")
    run.core.was_suspended(100.0)
    run.now += 100.0
    run.close("a")
    assert rounds(run).pace.sync_s == pytest.approx(0.0)


def test_the_pace_survives_a_restart() -> None:
    run = Run(method(NO_GRACE))
    rounds(run).pace = Pace(step_s=2.0, quorum_s=1.0, sync_s=None)
    run.core = restarted(run.core, run.core.saved(), 0.0)
    assert rounds(run).pace == Pace(step_s=2.0, quorum_s=1.0, sync_s=None)


# --- which answers are in ---------------------------------------------------------------------------------------------


def test_without_grace_k_answers_are_enough() -> None:
    run = Run(method(Called(at_least=2, grace=0.0)))
    run.step("abc", 4)
    assert len(run.send("b")) == 1
    [first, merge] = run.send("a")
    assert is_accepted(first)
    assert contributors(merge) == ["a", "b"]


def test_the_grace_window_stays_open_for_its_measured_length() -> None:
    run = Run(method(Called(at_least=1, grace=0.5, grace_cap_s=100.0), overlap=3))
    rounds(run).pace = Pace(step_s=2.0, quorum_s=1.0, sync_s=1.0)
    run.step("abc", 4, step_s=2.0)
    run.now = 10.0
    run.send("a")  # the quorum: formed in 10 s, which lengthens the average
    assert rounds(run).pace.quorum_s == pytest.approx(0.8 * 1.0 + 0.2 * 10.0)
    grace_s = 0.5 * (3 * 2.0 - (2.8 + 1.0))
    decision = run.core.decision(run.now, 0)
    assert decision is not None
    assert decision.wait_until == pytest.approx(10.0 + grace_s)
    assert "grace window is open for b, c for 1.10 s" in decision.reason
    wake = [action for action in run.core.tick(10.5) if isinstance(action, WakeAt)]
    assert wake == [WakeAt(10.0 + grace_s)]
    run.send("b")
    [merge] = [action for action in run.core.tick(10.0 + grace_s) if isinstance(action, MergeRound)]
    assert contributors(merge) == ["a", "b"]


@pytest.mark.parametrize(("at", "step_s"), [(10.5, 0.1), (11.2, 2.0)])
def test_a_heartbeat_closes_a_grace_window_that_it_shortens_or_finds_over(at: float, step_s: float) -> None:
    """The next wake-up is no more that of the window, which is over."""
    run = Run(method(Called(at_least=1, grace=0.5, grace_cap_s=100.0), overlap=3))
    rounds(run).pace = Pace(step_s=2.0, quorum_s=1.0, sync_s=1.0)
    run.step("abc", 4, step_s=2.0)
    run.now = 10.0
    run.send("a")
    assert run.core.decision(at, 0) != run.core.decision(10.0, 0)
    run.now = at
    found = [action for each in 3 * "bc" for action in run.step(each, step_s=step_s)]
    assert [contributors(action) for action in found] == [["a"]]


def test_a_round_closes_at_once_when_all_live_learners_have_answered() -> None:
    run = Run(method(Called(at_least=1, grace=1.0)))
    run.step("abc", 4)
    assert len(run.send("a")) == len(run.send("b")) == 1
    assert isinstance(run.send("c")[1], MergeRound)


@pytest.mark.parametrize(
    ("pace", "seconds"),
    [
        (Pace(), 9.0),  # nothing measured: the cap
        (Pace(1.0, 0.5, None), 9.0),
        (Pace(1.0, 0.5, 0.5), 0.8 * (4.0 - 1.0)),
        (Pace(1.0, 3.0, 2.0), 0.0),  # a synchronisation takes longer than the overlap
        (Pace(100.0, 0.0, 0.0), 9.0),
    ],
)
def test_the_grace_window_is_what_an_overlap_leaves_over(pace: Pace, seconds: float) -> None:
    assert Called(grace=0.8, grace_cap_s=9.0).grace_s(pace.slack_s(4)) == pytest.approx(seconds)
    assert Called(grace=0.0).grace_s(pace.slack_s(4)) == 0.0


def test_a_dead_learner_is_not_needed_for_k() -> None:
    run = Run(method(Called(at_least=3, grace=0.0)))
    run.step("abc", 4)
    run.send("a")
    assert len(run.send("b")) == 1
    [merge] = [a for a in run.core.left(run.now, "c", 1, tokens=4) if isinstance(a, MergeRound)]
    assert contributors(merge) == ["a", "b"]


def test_a_quorum_that_a_departure_makes_opens_the_grace_window_then() -> None:
    """K is judged at every event, not only when an answer comes."""
    run = Run(method(Called(at_least=3, grace=1.0, grace_cap_s=4.0)), "abcd")
    run.step("abcd", 4)
    run.send("a")
    run.send("b")
    run.now = 5.0
    run.core.left(run.now, "d", 1, tokens=4)
    first = run.core.decision(5.0, 0)
    assert first is not None
    assert first.reason == "2 of 3 have contributed; c may still"
    run.core.joined(5.0, "e")  # not ready: it is not needed for K
    actions = run.core.heartbeat(6.0, "c", 1, Report(step=4, steps=4, tokens=4, step_s=1.0, finished=True))
    [merge] = [action for action in actions if isinstance(action, MergeRound)]
    assert contributors(merge) == ["a", "b"]


# --- late work --------------------------------------------------------------------------------------------------------


def test_late_work_goes_into_the_next_merge_and_adds_up_with_fresh() -> None:
    run = Run(method(NO_GRACE), "ab")
    run.step("ab", 4)
    run.send("a")
    [late] = run.send("b")  # while a's is merged
    assert is_accepted(late)
    run.close("ab")
    decision = run.core.decision(run.now, 0)
    assert decision is not None
    assert decision.merge is None
    assert "late work of 1 waits for the fragment's next turn" in decision.reason
    assert verdicts(run.core, "b") == ()
    run.step("ab", 4)  # called again
    [_, merge] = run.send("b")
    assert isinstance(merge, MergeRound)
    assert [(c.learner, c.base, c.tokens) for c in merge.contributions] == [("b", 0, 4), ("b", 1, 4)]
    assert merge.weights == (8.0,)
    run.close()
    assert verdicts(run.core, "b") == (Verdict(0, 1, None, 2), Verdict(0, 2, None, 2))
    assert ledger(run.core, "b").merged == 8


def test_late_work_alone_is_no_quorum() -> None:
    run = Run(method(NO_GRACE), "abc")
    run.step("abc", 4)
    run.send("a")
    run.send("b")
    run.close("abc")
    run.step("abc", 4)
    decision = run.core.decision(run.now, 0)
    assert decision is not None
    assert decision.merge is None
    assert decision.reason == "0 of 1 have contributed; a, b, c may still"
    assert run.calls("b") == ((0, 1),)  # late work is no answer


def test_late_work_can_be_dropped_and_is_counted() -> None:
    run = Run(method(Called(at_least=1, grace=0.0, late="drop")), "ab")
    run.step("ab", 4)
    run.send("a")
    run.close("a")
    [reject] = run.send("b")
    assert isinstance(reject, Reject)
    assert reject.reason == "late"
    assert verdicts(run.core, "b") == (Verdict(0, 1, "late", 1),)
    assert ledger(run.core, "b").discarded == {"late": 4}


def test_the_late_work_of_all_learners_that_are_left_waits_for_their_answers() -> None:
    """Or every merge would have the work of the turn before in it, from then on."""
    run = Run(method(NO_GRACE), "ab")
    run.step("ab", 4)
    run.send("a")
    run.send("b")
    run.close("ab")
    run.core.left(run.now, "a", 1, tokens=4)
    assert run.step("b", 4) == [Tell(("b",))]
    [_, merge] = run.send("b")
    assert isinstance(merge, MergeRound)
    assert [(c.base, c.tokens) for c in merge.contributions] == [(0, 4), (1, 4)]


def test_late_work_is_merged_in_the_order_in_which_it_was_sent_whatever_order_it_came_in() -> None:
    """After a restart of the syncer a learner's retransmissions may come newer before older."""
    run = Run(method(Called(at_least=2, grace=0.0)), "ab")
    run.step("ab", 4)
    older = run.contribution("a")
    run.step("ab", 4)
    newer = run.contribution("a", base=0)
    for c in (newer, older):
        assert is_accepted(run.core.contributed(run.now, c)[0])
    [_, merge] = run.send("b")
    assert isinstance(merge, MergeRound)
    assert [(c.learner, c.number, c.tokens) for c in merge.contributions] == [("a", 1, 4), ("a", 2, 4), ("b", 1, 8)]
    assert merge.weights == (8.0, 8.0)
    run.close()
    assert ledger(run.core, "a").merged == 8


def test_work_on_the_newest_version_that_came_before_the_call_answers_it() -> None:
    """After a restart of the syncer learners offer again what they had answered; they will not answer twice."""
    run = Run(method(Called(at_least=2, grace=0.0)), "ab")
    run.step("ab", 3)
    assert len(run.send("a")) == len(run.send("b")) == 1  # not called yet
    [tell, merge] = run.step("a") + run.step("b")
    assert tell == Tell(("a", "b"))
    assert contributors(merge) == ["a", "b"]


def test_late_work_can_be_dropped_while_its_round_is_merged() -> None:
    run = Run(method(Called(at_least=1, grace=0.0, late="drop")), "ab")
    run.step("ab", 4)
    run.send("a")
    assert run.phase == "merging"
    assert [action.reason for action in run.send("b") if isinstance(action, Reject)] == ["late"]


@pytest.mark.parametrize("weight", ["tokens^2/steps", "tokens"])
def test_tokens_without_steps_are_refused_before_anything_is_closed_with_them(weight: str) -> None:
    run = Run(method(NO_GRACE, weight=weight), "ab")
    run.step("ab", 4)
    contribution = Contribution("a", 1, 0, 1, 0, 0, 4, 0, 4, step=4)
    if weight == "tokens":
        assert is_accepted(run.core.contributed(0.0, contribution)[0])
    else:
        with pytest.raises(ConfigError, match="4 tokens in 0 steps have no rate"):
            run.core.contributed(0.0, contribution)
        assert run.phase == "open"


def test_what_is_sent_again_is_merged_once() -> None:
    run = Run(method(Called(at_least=2, grace=0.0)), "ab")
    run.step("ab", 4)
    c = run.contribution("a")
    assert is_accepted(run.core.contributed(0.0, c)[0])
    assert run.core.contributed(0.0, c)[0] == Acknowledge(c, duplicate=True)
    run.send("b")
    run.close("ab")
    assert run.core.contributed(0.0, c)[0] == Acknowledge(c, duplicate=True)
    assert ledger(run.core, "a").merged == 4
    run.core = restarted(run.core, run.core.saved(), 0.0)
    assert run.core.contributed(0.0, c)[0] == Acknowledge(c, duplicate=True)
    assert run.core.rounds.roster(0) == ((), ())
    assert ledger(run.core, "a").merged == 4


@pytest.mark.parametrize("newer_first", [False, True])
def test_acknowledged_work_that_a_restart_forgot_is_new_again(newer_first: bool) -> None:
    """It is neither taken for a duplicate nor rejected, in whatever order it comes."""
    run = Run(method(Called(at_least=2, grace=0.0)), "ab")
    run.step("ab", 4)
    older = run.contribution("a")
    run.core.contributed(0.0, older)
    run.step("ab", 2)
    newer = run.contribution("a", base=0)
    run.core.contributed(0.0, newer)
    run.core = restarted(run.core, run.core.saved(), 0.0)
    assert ledger(run.core, "a").pending == 6
    again = (newer, older) if newer_first else (older, newer)
    for c in again:
        assert is_accepted(run.core.contributed(0.0, c)[0])
    for c in again:
        assert run.core.contributed(0.0, c)[0] == Acknowledge(c, duplicate=True)
    run.step("ab", 4)
    [_, merge] = run.send("b")
    assert isinstance(merge, MergeRound)
    assert [(c.learner, c.number) for c in merge.contributions] == [("a", 1), ("a", 2), ("b", 1)]
    run.close()
    assert ledger(run.core, "a").as_dict() == {"trained": 10, "pending": 4, "merged": 6, "lost": 0, "discarded": {}}


def test_late_work_behind_a_round_that_cannot_be_merged_waits_for_the_next_turn() -> None:
    run = Run(method(NO_GRACE), "ab")
    run.step("ab", 4)
    run.send("a")
    run.send("b")
    rejected = [action for action in run.core.abandoned(run.now, 0, "not finite") if isinstance(action, Reject)]
    assert [(each.contribution.learner, each.reason) for each in rejected] == [("a", "not finite")]
    assert ledger(run.core, "a").discarded == {"not finite": 4}
    [tell, merge] = run.step("ab", 4)  # measured from the version that still stands, it answers the call
    assert tell == Tell(("a", "b"))
    assert contributors(merge) == ["b"]


# --- part of the live weight moves the model by its part --------------------------------------------------------------


def test_a_merge_of_part_of_the_live_weight_is_scaled_to_that_part() -> None:
    run = Run(method(NO_GRACE), "abc")
    run.step("ab", 6)
    run.step("c", 2)
    [_, merge] = run.send("a")
    assert isinstance(merge, MergeRound)
    assert merge.weights == (6.0,)
    assert merge.scale == pytest.approx(6 / (6 + 6 + 2))  # the others with what they had last reported


def test_a_learner_that_has_just_joined_counts_with_its_steps_since() -> None:
    """Not with those that the run had behind it: tokens · tokens / steps would be next to nothing."""
    run = Run(method(NO_GRACE, weight="tokens^2/steps"), "ab")
    run.step("ab", 4)
    run.send("a")
    run.close("a")
    run.core.joined(run.now, "c")
    run.steps["c"], run.sent["c"] = 4, 4
    run.core.heartbeat(run.now, "c", 1, Report(step=6, steps=2, tokens=2, step_s=1.0))
    run.step("ab", 5)
    [_, merge] = run.send("a")
    assert isinstance(merge, MergeRound)
    assert merge.scale == pytest.approx(5 / (5 + 9 + 2))


def test_what_absent_learners_would_bring_is_measured_from_their_last_contribution_over_a_restart() -> None:
    run = Run(method(NO_GRACE, weight="tokens^2/steps"), "ab")
    run.step("ab", 4)
    run.send("b")
    run.close("b")
    run.step("ab", 3)
    run.core = restarted(run.core, run.core.saved(), 0.0)
    run.step("a", 2)
    [_, merge] = run.send("a")
    assert isinstance(merge, MergeRound)
    assert merge.scale == pytest.approx(9 / (9 + 3))


def test_the_run_clock_counts_no_steps_from_before_a_learner_joined() -> None:
    """One joins while the others train on, one has trained elsewhere and one finds nothing left to do."""
    run = Run(method(NO_GRACE), "ab")
    clock = run.core.rounds
    assert isinstance(clock, CalledSyncer)
    run.core.joined(run.now, "c")
    run.step("ab", 3)
    for learner in "de":
        run.core.joined(run.now, learner)
    assert clock.clock == 3.0
    run.core.heartbeat(run.now, "e", 1, Report(step=900, finished=True))
    run.core.heartbeat(run.now, "c", 1, Report(step=4, steps=1, tokens=1, step_s=1.0))
    assert clock.clock == pytest.approx(3 + 1 / 3)
    run.core.heartbeat(run.now, "d", 1, Report(step=502, steps=2, tokens=2, step_s=1.0))
    assert clock.clock == pytest.approx(3 + 1 / 3 + 2 / 4)
    run.core.heartbeat(run.now, "d", 1, Report(step=503, steps=3, tokens=3, step_s=1.0))
    assert clock.clock == pytest.approx(3 + 1 / 3 + 2 / 4 + 1 / 4)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_restarted_syncer_counts_the_steps_of_a_learner_that_its_record_knows_as_a_joiner(is_ahead: bool) -> None:
    run = Run(method(NO_GRACE), "a")
    run.core = restarted(run.core, run.core.saved(), 0.0)
    rounds = run.core.rounds
    assert isinstance(rounds, CalledSyncer)
    run.core.heartbeat(0.0, "a", 1, Report(step=103 if is_ahead else 3, steps=3, tokens=3, step_s=1.0))
    assert rounds.clock == 3.0


def test_with_partial_full_a_merge_is_not_scaled() -> None:
    run = Run(method(NO_GRACE, partial="full"), "abc")
    run.step("abc", 4)
    [_, merge] = run.send("a")
    assert isinstance(merge, MergeRound)
    assert merge.scale == 1.0


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_quorum_can_be_written_and_read() -> None:
    quorum = Called(2, grace=0.3, grace_cap_s=4.0, late="drop")
    assert QUORUMS.read(quorum.to_dict()) == quorum


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Called(at_least=0), "at_least"),
        (lambda: Called(grace=1.5), "grace"),
        (lambda: Called(grace_cap_s=0.0), "grace_cap_s"),
        (lambda: Called(late="keep"), "use 'merge' or 'drop'"),  # type: ignore[arg-type]
    ],
)
def test_impossible_quorums_are_refused(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]
