"""Rounds that nobody blocks on, by scripted events in virtual time: calls, grace, late work, pacing, pushes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.core.contribution import Contribution
from diloco.core.fragments import Whole
from diloco.core.method import Method
from diloco.core.outer import DelayedNesterov
from diloco.core.presets import DecoupledDiLoCo
from diloco.core.rounds import (
    Accept,
    Action,
    Call,
    Called,
    Merge,
    Publish,
    Pushed,
    Reject,
    Store,
    WakeAt,
    quorum_from_dict,
)
from diloco.core.rounds.base import Quorum
from diloco.core.rounds.called import Pace
from diloco.core.rounds.late import decide_open
from diloco.core.syncer import SyncerCore
from diloco.errors import ConfigError

NO_GRACE = Called(at_least=1, grace=0.0)


def method(quorum: Quorum = NO_GRACE, **changes: object) -> Method:
    if isinstance(quorum, Pushed):
        changes = {"overlap": 0, **changes}
    return replace(
        DecoupledDiLoCo(sync_every=4, fragments=Whole(), weight="tokens"),
        quorum=quorum,
        **changes,  # type: ignore[arg-type]
    )


class Run:
    """A syncer whose merges and stores are done when the test says so; one token a step."""

    def __init__(self, how: Method, learners: str = "abc") -> None:
        self.core = SyncerCore(how, [0])
        self.now = 0.0
        self.steps = dict.fromkeys(learners, 0)
        self.bases = dict.fromkeys(learners, 0)
        self.sent = dict.fromkeys(learners, 0)
        for learner in learners:
            self.core.joined(0.0, learner, ready=True)

    def step(self, learners: str, times: int = 1, step_s: float = 1.0) -> list[Action]:
        """These learners take steps, one after the other; what the last reports caused."""
        actions: list[Action] = []
        for _ in range(times):
            for learner in learners:
                self.steps[learner] += 1
                step = self.steps[learner]
                actions = [
                    action
                    for action in self.core.heartbeat(
                        self.now, learner, 1, step=step, tokens=step, step_s=step_s, waiting=False
                    )
                    if not isinstance(action, WakeAt)
                ]
        return actions

    def send(self, learner: str, base: int | None = None) -> list[Action]:
        """Everything since the learner's last contribution."""
        step = self.steps[learner]
        base = self.bases[learner] if base is None else base
        c = Contribution(
            learner, 1, 0, base, base, step - self.sent[learner], step - self.sent[learner], step, step=step
        )
        self.sent[learner] = step
        return [a for a in self.core.contributed(self.now, c) if not isinstance(a, WakeAt)]

    def close(self, adopted_by: str = "") -> list[Action]:
        """The merge under way is done and published; these learners adopt it."""
        assert self.core.merged(0) == [Store(0, self.core.fragments[0].version + 1)]
        actions = self.core.stored(self.now, 0)
        for learner in adopted_by:
            self.bases[learner] += 1
        return [action for action in actions if not isinstance(action, WakeAt)]


def accepted(action: Action) -> bool:
    return isinstance(action, Accept) and not action.duplicate


# --- calls and their pace -----------------------------------------------------------------------------------------------


def test_a_fragment_is_called_when_the_run_clock_reaches_its_turn() -> None:
    run = Run(method())
    assert run.step("abc", 3) == []
    assert run.core.clock == pytest.approx(3.0)
    assert run.step("ab") == []
    assert run.step("c") == [Call(0, 0, ("a", "b", "c"))]
    assert run.core.clock == pytest.approx(4.0)


def test_a_fast_network_does_not_shorten_the_interval() -> None:
    run = Run(method())
    calls = []
    for step in range(1, 41):
        for learner in "abc":
            for action in run.step(learner):
                if isinstance(action, Call):
                    calls.append((step, action.version))
                    for each in "abc":
                        run.send(each)
                        if run.core.fragments[0].phase == "merging":
                            run.close("abc")
    assert [step for step, _ in calls] == list(range(4, 41, 4))


def test_the_clock_counts_steps_over_live_learners() -> None:
    run = Run(method(), "ab")
    run.step("a", 6)  # b is slow
    assert run.core.clock == pytest.approx(3.0)
    run.core.left(run.now, "b", 1, tokens=0)
    run.step("a")
    assert run.core.clock == pytest.approx(4.0)


def test_a_turn_that_comes_while_a_round_is_stored_is_called_afterwards() -> None:
    run = Run(method(), "ab")
    run.step("ab", 4)
    run.send("a")
    assert run.core.fragments[0].phase == "merging"
    assert run.step("ab", 5) == []  # the clock is at 9
    [publish, call] = run.close("ab")
    assert isinstance(publish, Publish)
    assert call == Call(0, 1, ("a", "b"))
    assert run.core.fragments[0].turn == 12


def test_a_turn_is_not_called_again_after_a_restart() -> None:
    """Three learners that take eight steps each turn the clock by less than eight."""
    run = Run(method())
    run.step("abc", 8)
    assert run.core.clock < 8
    restarted, resumed = SyncerCore(method(), [1], clock=run.core.clock), SyncerCore(method(), [1])
    resumed.wind(run.core.clock)
    assert restarted.fragments[0].turn == resumed.fragments[0].turn == 12


# --- who is in ------------------------------------------------------------------------------------------------------------


def test_without_grace_k_answers_are_enough() -> None:
    run = Run(method(Called(at_least=2, grace=0.0)))
    run.step("abc", 4)
    assert len(run.send("b")) == 1
    [first, merge] = run.send("a")
    assert accepted(first)
    assert isinstance(merge, Merge)
    assert [c.learner for c in merge.contributions] == ["a", "b"]


def test_the_grace_window_stays_open_for_its_measured_length() -> None:
    run = Run(method(Called(at_least=1, grace=0.5, grace_cap_s=100.0), overlap=3))
    run.core.pace = Pace(step_s=2.0, quorum_s=1.0, sync_s=1.0)
    run.step("abc", 4, step_s=2.0)
    run.now = 10.0
    run.send("a")  # the quorum: formed in 10 s, which lengthens the average
    assert run.core.pace.quorum_s == pytest.approx(0.8 * 1.0 + 0.2 * 10.0)
    grace_s = 0.5 * (3 * 2.0 - (2.8 + 1.0))
    decision = run.core.decision(run.now, 0)
    assert decision is not None
    assert decision.wait_until == pytest.approx(10.0 + grace_s)
    assert "grace window is open for b, c for 1.10 s" in decision.reason
    wake = [action for action in run.core.tick(10.5) if isinstance(action, WakeAt)]
    assert wake == [WakeAt(10.0 + grace_s)]
    run.send("b")
    [merge] = [action for action in run.core.tick(10.0 + grace_s) if isinstance(action, Merge)]
    assert [c.learner for c in merge.contributions] == ["a", "b"]


def test_it_closes_at_once_when_everybody_has_answered() -> None:
    run = Run(method(Called(at_least=1, grace=1.0)))
    run.step("abc", 4)
    assert len(run.send("a")) == len(run.send("b")) == 1
    assert isinstance(run.send("c")[1], Merge)


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
    assert Called(grace=0.8, grace_cap_s=9.0).grace_s(4, pace) == pytest.approx(seconds)
    assert Called(grace=0.0).grace_s(4, pace) == 0.0


def test_a_dead_learner_is_not_needed_for_k() -> None:
    run = Run(method(Called(at_least=3, grace=0.0)))
    run.step("abc", 4)
    run.send("a")
    assert len(run.send("b")) == 1
    [merge] = [a for a in run.core.left(run.now, "c", 1, tokens=4) if isinstance(a, Merge)]
    assert [c.learner for c in merge.contributions] == ["a", "b"]


# --- late work -------------------------------------------------------------------------------------------------------------


def test_late_work_goes_into_the_next_merge_and_adds_up_with_fresh() -> None:
    run = Run(method(Called(at_least=1, grace=0.0)), "ab")
    run.step("ab", 4)
    run.send("a")
    [late] = run.send("b")  # while a's is merged
    assert accepted(late)
    run.close("ab")
    decision = run.core.decision(run.now, 0)
    assert decision is not None
    assert decision.merge is None
    assert "late work of 1 waits for the fragment's next turn" in decision.reason
    assert run.core.books.merged_round("b", 1, 0) == -1
    run.step("ab", 4)  # called again
    [_, merge] = run.send("b")
    assert isinstance(merge, Merge)
    assert [(c.learner, c.base, c.tokens) for c in merge.contributions] == [("b", 0, 4), ("b", 1, 4)]
    assert merge.weights == (8.0,)
    run.close()
    assert run.core.books.merged_round("b", 1, 0) == 1
    assert run.core.books.ledgers["b"][0].merged == 8


def test_late_work_alone_is_no_quorum() -> None:
    run = Run(method(Called(at_least=1, grace=0.0)), "abc")
    run.step("abc", 4)
    run.send("a")
    run.send("b")
    run.close("abc")
    run.step("abc", 4)
    decision = run.core.decision(run.now, 0)
    assert decision is not None
    assert decision.merge is None
    assert decision.reason == "0 of 1 have contributed; a, b, c may still"


def test_late_work_can_be_dropped_and_is_counted() -> None:
    run = Run(method(Called(at_least=1, grace=0.0, late="drop")), "ab")
    run.step("ab", 4)
    run.send("a")
    run.close("a")
    [reject] = run.send("b")
    assert isinstance(reject, Reject)
    assert reject.reason == "late"
    assert run.core.books.ledgers["b"][0].discarded == {"late": 4}


def test_the_late_work_of_all_who_are_left_waits_for_what_they_answer() -> None:
    """Or every merge would have the work of the turn before in it, for ever."""
    run = Run(method(Called(at_least=1, grace=0.0)), "ab")
    run.step("ab", 4)
    run.send("a")
    run.send("b")
    run.close("ab")
    run.core.left(run.now, "a", 1, tokens=4)
    assert run.step("b", 4) == [Call(0, 1, ("b",))]
    [_, merge] = run.send("b")
    assert isinstance(merge, Merge)
    assert [(c.base, c.tokens) for c in merge.contributions] == [(0, 4), (1, 4)]


def test_work_on_the_newest_version_that_came_before_the_call_answers_it() -> None:
    """After a restart of the syncer learners offer again what they had answered; they will not answer twice."""
    run = Run(method(Called(at_least=2, grace=0.0)), "ab")
    run.step("ab", 3)
    assert len(run.send("a")) == len(run.send("b")) == 1  # nobody has called yet
    [call, merge] = run.step("a") + run.step("b")
    assert call == Call(0, 0, ("a", "b"))
    assert isinstance(merge, Merge)


def test_late_work_can_be_dropped_while_its_round_is_merged() -> None:
    run = Run(method(Called(at_least=1, grace=0.0, late="drop")), "ab")
    run.step("ab", 4)
    run.send("a")
    assert run.core.fragments[0].phase == "merging"
    assert [action.reason for action in run.send("b") if isinstance(action, Reject)] == ["late"]


@pytest.mark.parametrize("weight", ["tokens^2/steps", "tokens"])
def test_tokens_without_steps_are_refused_before_anything_is_closed_with_them(weight: str) -> None:
    run = Run(method(weight=weight), "ab")
    run.step("ab", 4)
    contribution = Contribution("a", 1, 0, 0, 0, 4, 0, 4, step=4)
    if weight == "tokens":
        assert accepted(run.core.contributed(0.0, contribution)[0])
    else:
        with pytest.raises(ConfigError, match="4 tokens in 0 steps have no rate"):
            run.core.contributed(0.0, contribution)
        assert run.core.fragments[0].phase == "open"


def test_sent_again_it_is_merged_once() -> None:
    run = Run(method(Called(at_least=2, grace=0.0)), "ab")
    run.step("ab", 4)
    c = Contribution("a", 1, 0, 0, 0, 4, 4, 4, step=4)
    assert accepted(run.core.contributed(0.0, c)[0])
    assert run.core.contributed(0.0, c)[0] == Accept(c, duplicate=True)
    run.send("b")
    run.close("ab")
    assert run.core.contributed(0.0, c)[0] == Accept(c, duplicate=True)
    assert run.core.books.ledgers["a"][0].merged == 4
    after_restart = SyncerCore(
        run.core.method, [1], roster=list(run.core.members.values()), incarnations=run.core.incarnations,
        ledgers=run.core.books.ledgers, clock=run.core.clock, merged_rounds=run.core.books.merged_rounds,
    )  # fmt: skip
    assert after_restart.contributed(0.0, c)[0] == Accept(c, duplicate=True)
    assert after_restart.fragments[0].turn == 8


# --- part of a house moves a part -----------------------------------------------------------------------------------------


def test_a_merge_of_part_of_the_live_weight_is_scaled_to_that_part() -> None:
    run = Run(method(Called(at_least=1, grace=0.0)), "abc")
    run.step("ab", 6)
    run.step("c", 2)
    [_, merge] = run.send("a")
    assert isinstance(merge, Merge)
    assert merge.weights == (6.0,)
    assert merge.scale == pytest.approx(6 / (6 + 6 + 2))  # the others with what they had last reported


def test_who_has_just_joined_counts_with_the_steps_since() -> None:
    """Not with those that the run had behind it: tokens · tokens / steps would be next to nothing."""
    run = Run(method(weight="tokens^2/steps"), "ab")
    run.step("ab", 4)
    run.send("a")
    run.close("a")
    run.core.joined(run.now, "c")
    run.steps["c"], run.sent["c"] = 4, 4
    run.core.heartbeat(run.now, "c", 1, step=6, tokens=2, step_s=1.0, waiting=False)
    run.step("ab", 5)
    [_, merge] = run.send("a")
    assert isinstance(merge, Merge)
    assert merge.scale == pytest.approx(5 / (5 + 9 + 2))


def test_a_push_is_scaled_by_what_the_others_push() -> None:
    run = Run(method(Pushed(at_least=1), partial="scale"), "ab")
    run.step("a", 4)
    run.step("b", 2)
    [_, merge] = run.send("a")
    assert isinstance(merge, Merge)
    assert merge.scale == pytest.approx(4 / (4 + 2))  # b has not pushed yet
    run.close("a")
    run.step("b", 2)
    [_, merge] = run.send("b", base=0)
    assert isinstance(merge, Merge)
    assert merge.scale == pytest.approx(4 / (4 + 4))  # a has nothing pending, and will bring 4 again


def test_unscaled_it_is_not() -> None:
    run = Run(method(Called(at_least=1, grace=0.0), partial="full"), "abc")
    run.step("abc", 4)
    [_, merge] = run.send("a")
    assert isinstance(merge, Merge)
    assert merge.scale == 1.0


# --- pushes -----------------------------------------------------------------------------------------------------------------


def test_a_push_is_merged_at_once() -> None:
    run = Run(method(Pushed(at_least=1)), "ab")
    run.step("a", 4)
    [_, merge] = run.send("a")
    assert isinstance(merge, Merge)
    run.close("a")
    run.step("b", 4)
    [_, merge] = run.send("b", base=0)
    assert isinstance(merge, Merge)
    assert merge.round == 1


def test_delayed_nesterov_takes_pushes_one_at_a_time() -> None:
    """Those that come while a version is merged and stored wait for a round of their own, in the order in which they came."""
    delayed = method(Pushed(at_least=1), outer=DelayedNesterov(buffer=3), partial="full")
    run = Run(delayed, "abc")
    run.step("abc", 4)
    [_, merge] = run.send("c")
    assert isinstance(merge, Merge)
    merged = [[c.learner for c in merge.contributions]]
    assert [accepted(action) for action in run.send("a")] == [True]
    assert run.core.merged(0) == [Store(0, 1)]
    assert [accepted(action) for action in run.send("b")] == [True]
    actions = run.core.stored(run.now, 0)
    while merges := [action for action in actions if isinstance(action, Merge)]:
        merged += [[c.learner for c in each.contributions] for each in merges]
        actions = run.close()
    assert merged == [["c"], ["a"], ["b"]]
    assert run.core.fragments[0].version == 3


def test_pushes_behind_one_that_cannot_be_merged_are_merged_in_its_place() -> None:
    delayed = method(Pushed(at_least=1), outer=DelayedNesterov(buffer=3), partial="full")
    run = Run(delayed, "abc")
    run.step("abc", 4)
    for learner in "cab":
        run.send(learner)
    reject, *others = run.core.abandoned(run.now, 0, "not finite")
    assert isinstance(reject, Reject)
    assert reject.contribution.learner == "c"
    [merge] = [action for action in others if isinstance(action, Merge)]
    assert (merge.round, [c.learner for c in merge.contributions]) == (0, ["a"])
    [merge] = [action for action in run.close() if isinstance(action, Merge)]
    assert (merge.round, [c.learner for c in merge.contributions]) == (1, ["b"])


def test_two_pushes_make_a_quorum_of_two() -> None:
    run = Run(method(Pushed(at_least=2)), "abc")
    run.step("abc", 4)
    assert len(run.send("a")) == 1
    assert isinstance(run.send("c")[1], Merge)


def test_dynamic_steps_follow_the_measured_speed() -> None:
    run = Run(method(Pushed(), dynamic_steps=True), "ab")
    assert run.core.sync_every_of("a") == 4
    run.step("a", step_s=1.0)
    run.step("b", step_s=3.0)
    assert (run.core.sync_every_of("a"), run.core.sync_every_of("b")) == (4, 1)  # ⌊4/3⌋
    static = Run(method(Pushed()), "ab")
    static.step("b", step_s=3.0)
    static.step("a", step_s=1.0)
    assert static.core.sync_every_of("b") == 4


# --- values ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quorum", [Called(2, grace=0.3, grace_cap_s=4.0, late="drop"), Pushed(3, late="drop")])
def test_a_quorum_can_be_written_and_read(quorum: Quorum) -> None:
    assert quorum_from_dict(quorum.to_dict()) == quorum


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Called(at_least=0), "at_least"),
        (lambda: Called(grace=1.5), "grace"),
        (lambda: Called(grace_cap_s=0.0), "grace_cap_s"),
        (lambda: Called(late="keep"), "use 'merge' or 'drop'"),  # type: ignore[arg-type]
        (lambda: Pushed(late="keep"), "use 'merge' or 'drop'"),  # type: ignore[arg-type]
    ],
)
def test_impossible_quorums_are_refused(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]


def test_nobody_is_not_merged() -> None:
    decision = decide_open(0.0, (), (), {"a"}, Called(), quorum_at=None, grace_s=0.0)
    assert decision.merge is None
    assert decision.reason == "nobody has contributed; 1 of 1 are needed"
