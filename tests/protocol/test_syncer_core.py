"""SyncerCore by scripted events in virtual time: rounds, members, deadlines, incarnations, restarts, and the
accounting."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
from tests.protocol.driving import committed, kinds, ledger, only, publish, record, restarted, status_of, verdicts

from diloco.core.presets import DiLoCo, StreamingDiLoCo
from diloco.core.quorum import AllLive
from diloco.errors import ConfigError, PayloadError, StaleIncarnationError, VersionError
from diloco.protocol.actions import (
    Acknowledge,
    Action,
    Evict,
    MergeRound,
    Publish,
    Reject,
    Tell,
    WakeAt,
)
from diloco.protocol.contribution import UNMERGED, Contribution, Standing, Verdict
from diloco.protocol.members import Deadlines, Report
from diloco.protocol.records import Record
from diloco.protocol.rounds.base import Rules
from diloco.protocol.steering import Order
from diloco.protocol.syncer import SyncerCore

DEADLINES = Deadlines(
    lost_steps=20.0, lost_floor_s=6.0, lost_cap_s=120.0, stalled_steps=50.0, stalled_floor_s=60.0, stalled_cap_s=3600.0
)
H = 10


class Run:
    """A SyncerCore, and learners that take tokens=10 a step; who takes part is recorded."""

    def __init__(
        self, *learners: str, fragments: int = 1, overlap: int = 0, at_least: int = 1, ready: bool = True,
        weight: str = "uniform",
    ) -> None:  # fmt: skip
        method = DiLoCo(sync_every=H, overlap=overlap, quorum=AllLive(at_least=at_least), weight=weight)
        self.core = SyncerCore(Rules.of(method, fragments), [0] * fragments, deadlines=DEADLINES)
        for learner in learners:
            self.core.joined(0.0, learner)
            if ready:
                self.beat(0.0, learner, step=0, tokens=1)
        self.record(0.0)

    def incarnation(self, learner: str) -> int:
        return self.core.accounting.accounts[learner].incarnation

    def beat(
        self,
        now: float,
        learner: str,
        *,
        step: int,
        tokens: int = 1,
        step_s: float | None = None,
        waiting: bool = False,
        sending: bool = False,
        confirmed: tuple[int, ...] = (),
    ) -> list[Action]:
        versions = tuple(state.version for state in self.core.fragments)
        blocked_with = versions if waiting and not sending else ()
        report = Report(step, tokens, step_s, waiting, steps=step, blocked_with=blocked_with, confirmed=confirmed)
        return self.core.heartbeat(now, learner, self.incarnation(learner), report)

    def c(
        self, learner: str, round_: int, *, number: int | None = None, step: int = 0, fragment: int = 0,
        base: int | None = None, tokens: int = 100, trained: int | None = None, discarded: int = 0,
        incarnation: int | None = None,
    ) -> Contribution:  # fmt: skip
        step = step or (round_ + 1) * H
        return Contribution(
            learner, incarnation or self.incarnation(learner), fragment, number or round_ + 1, round_,
            round_ if base is None else base, tokens, tokens // 10, trained or tokens * (round_ + 1),
            (("overlap", discarded),) if discarded else (), step=step,
        )  # fmt: skip

    def send(self, now: float, learner: str, round_: int, **values: int) -> list[Action]:
        return self.core.contributed(now, self.c(learner, round_, **values))

    def publish(self, now: float, fragment: int = 0) -> list[Action]:
        return publish(self.core, now, fragment)

    def merged(self, fragment: int = 0) -> None:
        self.core.merged(fragment)

    def stored(self, now: float, fragment: int = 0) -> list[Action]:
        return committed(self.core, now, fragment)

    def record(self, now: float) -> Record:
        return record(self.core, now)[0]

    def restart(self, now: float, found: Record) -> None:
        self.core = restarted(self.core, found, now)

    def ledger(self, learner: str, fragment: int = 0) -> dict[str, object]:
        return dict(ledger(self.core, learner, fragment).as_dict())

    def ledgers(self) -> object:
        return deepcopy({learner: account.ledgers for learner, account in self.core.accounting.accounts.items()})

    def members(self, fragment: int = 0) -> set[str]:
        """Of the open round."""
        return set(self.core.rounds.roster(fragment)[1])

    def steps(self) -> list[int]:
        """Of the rounds that the versions came from."""
        return [state.step for state in self.core.fragments]

    def reason(self, now: float, fragment: int = 0) -> object:
        return status_of(self.core, now)["fragments"][fragment]["reason"]

    def phase(self, fragment: int = 0) -> str:
        return self.core.fragments[fragment].phase


# --- the life of a round ----------------------------------------------------------------------------------------------


def test_a_round_is_merged_stored_and_only_then_published() -> None:
    run = Run("a", "b")
    assert run.reason(0.0) == "no contribution yet"
    assert run.send(1.0, "b", 0)[0] == Acknowledge(run.c("b", 0), duplicate=False)
    assert run.reason(1.0) == "waiting for a; a is given up in 5.0 s"
    merge = only(MergeRound, run.send(2.0, "a", 0))
    why = "all 2 learners of the round have contributed"
    assert merge == MergeRound(0, 0, (run.c("a", 0), run.c("b", 0)), (1.0, 1.0), 1.0, frozenset("ab"), why)
    assert run.reason(2.0) == "merging"
    run.merged()
    assert run.reason(2.0) == "storing"
    assert run.core.fragments[0].version == 0
    assert run.ledger("a") == {"trained": 100, "pending": 100, "merged": 0, "lost": 0, "discarded": {}}
    assert run.stored(3.0)[0] == Publish(0, 1, ("a", "b"))
    assert run.core.fragments[0].version == 1
    assert run.reason(3.0) == "no contribution yet"
    assert run.ledger("a") == {"trained": 100, "pending": 0, "merged": 100, "lost": 0, "discarded": {}}


def test_contributions_count_by_tokens_where_the_method_says_so() -> None:
    run = Run("a", "b", weight="tokens")
    run.send(1.0, "b", 0, tokens=300)
    assert only(MergeRound, run.send(1.0, "a", 0, tokens=100)).weights == (100.0, 300.0)


def test_fragments_have_rounds_of_their_own() -> None:
    run = Run("a", "b", fragments=2, overlap=9)
    for learner in "ab":
        run.send(1.0, learner, 0, fragment=0, step=5)
    run.send(2.0, "a", 0, fragment=1, step=10)
    assert (run.phase(0), run.phase(1)) == ("merging", "open")
    run.publish(3.0, 0)
    assert [fragment.version for fragment in run.core.fragments] == [1, 0]
    assert run.steps() == [5, 0]


# --- who is in a round ------------------------------------------------------------------------------------------------


def test_a_joiner_never_delays_an_open_round_and_is_included_when_in_time() -> None:
    run = Run("a", "b")
    run.send(1.0, "a", 0)
    run.core.joined(1.5, "c")
    run.beat(1.6, "c", step=3, tokens=10)
    assert run.members() == {"a", "b"}
    assert only(MergeRound, run.send(2.0, "b", 0)).contributions == (run.c("a", 0), run.c("b", 0))
    late = run.c("c", 0, tokens=70, trained=80)
    assert run.core.contributed(2.1, late)[0] == Acknowledge(late, duplicate=False)
    assert run.publish(3.0)[:2] == [Reject(late, "missed"), Publish(0, 1, ("a", "b"))]
    run.send(4.0, "a", 1)  # the next round waits for it
    assert run.members() == {"a", "b", "c"}

    run = Run("a", "b")
    run.send(1.0, "a", 0)
    run.core.joined(1.5, "c")
    assert isinstance(run.send(1.9, "c", 0)[0], Acknowledge)
    assert [c.learner for c in only(MergeRound, run.send(2.0, "b", 0)).contributions] == ["a", "b", "c"]


def test_a_learner_that_never_stepped_delays_nobody() -> None:
    run = Run("a")
    run.core.joined(0.5, "b")
    run.core.heartbeat(0.9, "b", 1, Report(step=0, steps=0, tokens=0))
    assert kinds(run.send(1.0, "a", 0))[:2] == ["Acknowledge", "MergeRound"]


def test_fixed_membership_waits_for_everybody_from_the_start() -> None:
    run = Run()
    for learner in "ab":
        run.core.joined(0.0, learner, ready=True)
    run.send(0.0, "a", 0)
    assert run.members() == {"a", "b"}


def test_a_lost_connection_is_no_reason_to_leave_a_learners_work_out() -> None:
    run = Run("a", "b")
    run.core.disconnected(0.5, "b", 1)
    run.send(1.0, "a", 0)
    assert run.phase() == "open"
    assert [c.learner for c in only(MergeRound, run.send(3.0, "b", 0)).contributions] == ["a", "b"]
    assert run.core.members["b"].healthy


def test_at_least_keeps_a_survivor_from_becoming_a_solo_run() -> None:
    run = Run("a", "b", at_least=2)
    run.send(1.0, "a", 0)
    run.core.left(2.0, "b", 1, tokens=40)
    assert run.reason(2.0) == "1 of at least 2 learners have contributed"
    run.core.joined(3.0, "c")
    assert "MergeRound" in kinds(run.send(9.0, "c", 0))


def rounds_of_one(how: str) -> Run:
    """Of two learners, "b" has ended at step 20 so; the rounds of the other one come after that."""
    run = Run("a", "b", at_least=2)
    for learner in "ab":
        run.send(1.0, learner, 0)
    run.publish(1.0)
    run.beat(2.0, "b", step=20, tokens=200)
    if how == "finished":
        run.core.heartbeat(2.0, "b", 1, Report(step=20, steps=20, tokens=200, step_s=0.1, finished=True))
    elif how == "left":
        run.core.left(2.0, "b", 1, tokens=200)
    else:
        run.core.tick(8.5)
    return run


@pytest.mark.parametrize("how", ["finished", "left"])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_learner_that_has_ended_counts_for_the_rounds_of_steps_that_it_took(how: str, restarts: bool) -> None:
    """It counted steps ahead of the rounds, and the other one must come to its end too."""
    run = rounds_of_one(how)
    if restarts:
        run.restart(3.0, run.record(3.0))
    actions = run.send(4.0, "a", 1, step=20)
    assert [c.learner for c in only(MergeRound, actions).contributions] == ["a"]
    run.publish(4.0)
    run.send(5.0, "a", 2, step=30)  # a run that goes on beyond it waits for another learner
    assert run.reason(5.0) == "1 of at least 2 learners have contributed"


def test_a_learner_that_was_lost_or_is_back_does_not_count_for_a_round() -> None:
    run = rounds_of_one("lost")
    assert "b" not in run.core.members
    run.core.joined(9.0, "a")
    run.send(9.0, "a", 1, step=20, number=1)
    assert run.reason(9.0) == "1 of at least 2 learners have contributed"
    run = rounds_of_one("left")
    run.core.joined(3.0, "b")
    run.core.left(3.5, "b", 2, tokens=0)  # and has not trained again
    run.send(4.0, "a", 1, step=20)
    assert run.reason(4.0) == "1 of at least 2 learners have contributed"


def test_a_joiner_is_not_held_back_for_a_round_that_has_those_who_ended() -> None:
    run = rounds_of_one("finished")
    run.beat(3.0, "a", step=20, tokens=200)
    assert starts_at(run) == 20


def starts_at(run: Run, learner: str = "joiner") -> int:
    run.core.joined(50.0, learner)
    return run.core.start_step(learner)


def test_a_joiner_starts_at_the_runs_step() -> None:
    run = Run("a", "b", at_least=2)
    for learner in "ab":
        run.send(1.0, learner, 0)
    run.publish(1.0)
    run.send(2.0, "a", 1)  # b brings the second
    assert starts_at(run) == 20


def test_a_joiner_starts_before_the_round_that_lacks_learners() -> None:
    run = Run("a", "b", at_least=2)
    for learner in "ab":
        run.send(1.0, learner, 0)
    run.publish(1.0)
    run.send(2.0, "a", 1)
    run.core.left(3.0, "b", 1, tokens=100)
    assert starts_at(run) == 10
    assert starts_at(Run("a", at_least=1)) == 0


def test_the_first_steps_of_a_joiner_are_progress_wherever_the_run_is() -> None:
    """It started at the run's step and took long to compile. Meanwhile the run went on, and it connected anew."""
    run = Run("a")
    run.beat(0.0, "a", step=100)
    assert starts_at(run, "b") == 100
    for now, step in ((60.0, 200), (120.0, 300)):
        run.beat(now, "a", step=step)
        run.beat(now, "b", step=0, tokens=0, step_s=None)
        assert run.core.start_step("b") == step
    for number in range(1, 4):
        now = 200.0 + 50 * number
        run.beat(now, "a", step=300 + number, step_s=0.1)
        run.beat(now, "b", step=100 + number, tokens=10 * number, step_s=0.1)
        assert "Evict" not in kinds(run.core.tick(now))
    assert run.core.members["b"].step == 103
    assert run.core.members["b"].ready_step == 101


def test_one_whose_connection_broke_is_not_counted_on() -> None:
    run = Run("a", "b", at_least=2)
    run.send(2.0, "a", 0, step=10)
    run.core.disconnected(3.0, "b", 1)
    assert starts_at(run) == 0


def test_a_round_that_is_on_its_way_lacks_learners_too() -> None:
    """The survivor has told of its step, and its contribution has not arrived."""
    run = Run("a", "b", at_least=2)
    for learner in "ab":
        run.send(1.0, learner, 0)
    run.publish(1.0)
    run.core.left(3.0, "b", 1, tokens=100)
    run.beat(4.0, "a", step=19)
    assert starts_at(run, "early") == 19
    run.beat(4.0, "a", step=20)
    assert starts_at(run, "late") == 10


def test_with_several_fragments_the_first_send_is_the_earliest_round_that_lacks_learners() -> None:
    run = Run(
        "a", "b", fragments=2, at_least=2
    )  # DiLoCo cut in two: fragment 0 after 5, 15, …; fragment 1 after 10, 20, …
    for fragment, step in ((0, 5), (1, 10)):
        for learner in "ab":
            run.send(1.0, learner, 0, fragment=fragment, step=step)
        run.publish(1.0, fragment)
    run.send(2.0, "a", 1, fragment=0, step=15)
    run.core.left(3.0, "b", 1, tokens=100)
    assert starts_at(run) == 10


def test_one_that_had_passed_the_step_before_it_was_ready_is_not_waited_for() -> None:
    """The first contribution took so long to arrive that a joiner, who started behind it, is past that step already."""
    run = Run("a")
    run.core.joined(0.0, "b")
    run.beat(0.5, "b", step=10, tokens=10)
    assert "MergeRound" in kinds(run.send(1.0, "a", 0, step=10))
    run.publish(2.0)
    run.send(3.0, "a", 1, step=20)
    assert run.members() == {"a", "b"}


def test_one_that_is_a_send_behind_is_sent_back_with_its_work() -> None:
    """Others contributed to round 0 after step 10. A joiner at step 8 holds version 1 and reaches step 10 later."""
    run = Run("a", fragments=2)
    run.send(1.0, "a", 0, fragment=1, step=10)
    run.publish(1.0, 1)
    run.core.joined(1.0, "b")
    run.beat(1.5, "b", step=8, tokens=10)
    early = run.c("b", 1, fragment=1, step=10, tokens=30, trained=30)
    assert run.core.contributed(2.0, early)[0] == Reject(early, "out of step")
    assert run.ledger("b", 1)["pending"] == 30
    run.send(3.0, "a", 1, fragment=1, step=20)
    assert run.members(1) == {"a", "b"}
    assert "MergeRound" in kinds(run.send(4.0, "b", 1, number=3, fragment=1, step=20, tokens=130, trained=130))


def test_rounds_that_wait_for_each_other_in_a_circle_let_go() -> None:
    """b is blocked in a round of a later step than the one that a is blocked in, which waits for b."""
    run = Run("a", "b", fragments=2)
    run.send(1.0, "a", 0, fragment=0, step=5)
    run.send(1.0, "b", 0, fragment=1, step=10)
    assert (run.phase(0), run.phase(1)) == ("open", "open")
    run.beat(2.0, "a", step=5, tokens=100, waiting=True)
    assert "MergeRound" in kinds(run.beat(2.0, "b", step=10, tokens=100, waiting=True))
    assert (run.phase(0), run.phase(1)) == ("merging", "open")
    run.publish(3.0, 0)
    assert "MergeRound" in kinds(run.send(4.0, "a", 0, fragment=1, step=10))


def test_a_circle_with_a_learner_that_is_a_whole_interval_ahead_lets_go_too() -> None:
    """c waits for a, which has passed the step of that round and is blocked after a later one: nothing of it is on its
    way."""
    run = Run("a", "b", "c", fragments=2)
    run.send(1.0, "c", 0, fragment=1, step=20)
    run.send(1.0, "b", 0, fragment=0, step=15)
    run.beat(1.0, "a", step=20)
    run.beat(2.0, "b", step=15, tokens=100, waiting=True)
    run.beat(2.0, "c", step=20, tokens=100, waiting=True)
    run.send(3.0, "a", 0, fragment=0, step=25)
    assert (run.phase(0), run.phase(1)) == ("open", "open")
    assert only(MergeRound, run.beat(4.0, "a", step=25, tokens=100, waiting=True)).members == {"a", "b"}
    assert (run.phase(0), run.phase(1)) == ("merging", "open")


def test_a_connection_that_breaks_after_a_silence_does_not_make_it_longer() -> None:
    run = Run("a", "b")
    run.send(1.0, "a", 0)
    run.beat(1.0, "b", step=1)
    assert only(WakeAt, run.core.disconnected(5.0, "b", 1)).at == 1.0 + DEADLINES.lost_floor_s


def test_a_circle_of_learners_that_are_each_behind_in_another_fragment_lets_go() -> None:
    """What each sent to the fragment that it is behind in was merged in the round before, or was too late for it."""
    run = Run("a", "b", "c", fragments=2)
    for fragment in (0, 1):
        run.send(1.0, "a", 0, fragment=fragment, step=6)
    run.send(1.0, "b", 0, fragment=1, step=7)
    run.send(1.0, "c", 0, fragment=0, step=7)
    for learner, step in (("a", 6), ("b", 7)):
        run.beat(2.0, learner, step=step, tokens=100, waiting=True)
    assert (run.members(0), run.members(1)) == ({"a", "b", "c"}, {"a", "b", "c"})
    run.beat(2.0, "c", step=7, tokens=100, waiting=True, sending=True)
    assert (run.phase(0), run.phase(1)) == ("open", "open")
    assert "MergeRound" in kinds(run.beat(3.0, "c", step=7, tokens=100, waiting=True))
    assert (run.phase(0), run.phase(1)) == ("merging", "merging")


def test_a_learner_that_has_not_the_newest_versions_is_not_blocked() -> None:
    """It waits for one that is published, and goes on by itself."""
    run = Run("a", "b", fragments=2)
    run.send(1.0, "a", 0, fragment=0, step=5)
    run.send(1.0, "b", 0, fragment=1, step=10)
    run.beat(2.0, "a", step=5, tokens=100, waiting=True)
    run.core.heartbeat(2.0, "b", 1, Report(step=10, steps=10, tokens=100, waiting=True, blocked_with=(0, -1)))
    assert run.members(0) == {"a", "b"}
    assert "MergeRound" in kinds(run.beat(2.0, "b", step=10, tokens=100, waiting=True))


def test_a_heartbeat_that_a_contribution_has_overtaken_does_not_say_that_a_learner_is_blocked() -> None:
    run = Run("a", "b")
    run.send(2.0, "a", 0, step=10)
    run.beat(3.0, "a", step=9, tokens=100, waiting=True)
    assert run.core.members["a"].blocked_with == ()
    run.beat(3.0, "a", step=10, tokens=100, waiting=True)
    assert run.core.members["a"].blocked_with == (0,)


def test_a_heartbeat_from_before_the_first_step_of_an_incarnation_says_nothing_of_its_steps() -> None:
    """The learner had been further, in a run that has gone back; a contribution has overtaken the heartbeat."""
    run = Run("a", "b")
    run.send(2.0, "a", 0, step=3)
    run.core.heartbeat(3.0, "a", 1, Report(step=9, steps=0, tokens=0))
    assert run.core.members["a"].step == 3
    run.beat(3.0, "a", step=4, tokens=100)
    assert run.core.members["a"].step == 4


def test_learners_past_a_round_count_for_it_where_all_wait_for_each_other() -> None:
    """The third contribution to the earlier round was lost, and the learner that made it is past its step."""
    run = Run("a", "b", "c", fragments=2, at_least=3)
    run.send(1.0, "a", 0, fragment=1, step=6)
    run.send(1.0, "b", 0, fragment=1, step=6)
    run.send(1.0, "c", 0, fragment=0, step=9)
    run.beat(2.0, "a", step=7, tokens=100, waiting=True)
    run.beat(2.0, "b", step=7, tokens=100, waiting=True)
    assert (run.phase(0), run.phase(1)) == ("open", "open")
    assert len(only(MergeRound, run.beat(3.0, "c", step=10, tokens=100, waiting=True)).contributions) == 2
    assert (run.phase(0), run.phase(1)) == ("open", "merging")


def test_no_circle_while_anybody_trains_or_a_contribution_is_on_its_way() -> None:
    run = Run("a", "b", "c", fragments=2, overlap=9)
    run.send(1.0, "a", 0, fragment=0, step=5)
    run.send(1.0, "b", 0, fragment=1, step=10)
    run.beat(2.0, "a", step=14, tokens=100, waiting=True)
    run.beat(2.0, "b", step=14, tokens=100, waiting=True)
    assert run.members() == {"a", "b", "c"}  # c trains
    run.beat(2.0, "a", step=14, tokens=100, waiting=True, sending=True)
    run.beat(3.0, "c", step=14, tokens=100, waiting=True, sending=True)
    assert run.members() == {"a", "b", "c"}  # a and c have sent fragment 1: it is being uploaded


def test_a_learner_is_known_to_be_blocked_only_as_long_as_it_says_so() -> None:
    run = Run("a", "b")
    run.beat(1.0, "a", step=9, waiting=True)
    run.send(2.0, "a", 0)
    assert not run.core.members["a"].waiting  # it went on and sent
    run.beat(3.0, "a", step=10, waiting=True)
    run.send(4.0, "b", 0)
    run.beat(4.0, "b", step=10, waiting=True)
    assert run.core.members["b"].waiting
    run.publish(5.0)
    assert not any(member.waiting for member in run.core.members.values())


def test_a_round_counts_as_of_its_earliest_step() -> None:
    """Two learners may count steps a whole interval apart; the one that is behind is not out of step."""
    run = Run("a", "b")
    for round_ in (0, 1):
        run.send(1.0, "a", round_, step=20 + H * round_)
        assert "MergeRound" in kinds(run.send(1.0, "b", round_, step=10 + H * round_))
        run.publish(2.0)
        assert run.steps() == [10 + H * round_]


# --- who is given up --------------------------------------------------------------------------------------------------


def test_a_silent_learner_is_waited_for_until_its_deadline() -> None:
    run = Run("a", "b", "c")
    run.send(1.0, "a", 0)
    run.beat(2.0, "c", step=9)
    assert only(WakeAt, run.send(3.0, "b", 0)).at == 7.0  # a was heard of at 1
    run.beat(6.5, "a", step=10, waiting=True)
    assert only(WakeAt, run.beat(6.5, "b", step=10, waiting=True)).at == 8.0
    assert run.reason(7.0) == "waiting for c; c is given up in 1.0 s"
    assert "MergeRound" not in kinds(run.core.tick(7.9))
    actions = run.core.tick(8.0)
    assert only(Evict, actions) == Evict("c", 1, "nothing heard for 6.0 s", replaced=False)
    assert [c.learner for c in only(MergeRound, actions).contributions] == ["a", "b"]
    assert only(WakeAt, actions).at == 12.5


def test_a_broken_connection_leaves_less_time_than_silence() -> None:
    run = Run("a", "b")
    run.send(1.0, "a", 0)
    run.core.disconnected(2.0, "b", 1)
    assert run.reason(3.0) == "waiting for b; b is given up in 2.0 s"
    run.beat(4.0, "a", step=10, waiting=True)
    actions = run.core.tick(5.0)
    reason = "its connection broke 3.0 s ago and was not restored"
    assert only(Evict, actions) == Evict("b", 1, reason, replaced=False)
    assert [c.learner for c in only(MergeRound, actions).contributions] == ["a"]


def test_one_that_comes_back_is_as_before() -> None:
    run = Run("a", "b")
    run.send(1.0, "a", 0)
    run.core.disconnected(2.0, "b", 1)
    run.beat(4.9, "b", step=9)
    run.beat(4.9, "a", step=10, waiting=True)
    assert run.reason(5.0) == "waiting for b; b is given up in 5.9 s"
    assert "Evict" not in kinds(run.core.tick(9.0))


def test_the_time_to_reconnect_follows_a_learners_own_pace() -> None:
    assert [DEADLINES.reconnect_after_s(step_s) for step_s in (None, 0.1, 2.0, 100.0)] == [3.0, 3.0, 10.0, 120.0]
    short = Deadlines(lost_floor_s=2.0)
    assert short.reconnect_after_s(0.01) == short.lost_after_s(0.01) == 2.0


def test_a_finished_learner_is_neither_waited_for_nor_stalled() -> None:
    """Its training is over and it evaluates: it says so, and the others go on without it; a stalled one they would wait
    for."""
    run = Run("a", "b")
    run.send(1.0, "a", 0)
    run.send(1.0, "b", 0)
    run.publish(1.5)
    assert run.reason(2.0) == "no contribution yet"
    run.send(2.0, "a", 1)
    assert run.reason(2.0).startswith("waiting for b")  # type: ignore[attr-defined]
    actions = run.core.heartbeat(3.0, "b", 1, Report(step=10, steps=10, tokens=100, step_s=0.1, finished=True))
    assert [c.learner for c in only(MergeRound, actions).contributions] == ["a"]
    run.publish(3.5)
    for now in range(4, 400):
        run.core.heartbeat(float(now), "b", 1, Report(step=10, steps=10, tokens=100, step_s=0.1, finished=True))
        run.beat(float(now), "a", step=now, step_s=0.1)
        assert "Evict" not in kinds(run.core.tick(float(now)))
    assert not run.core.members["b"].healthy
    assert "Evict" in kinds(run.core.tick(406.0))  # silent


@pytest.mark.parametrize(
    ("step_s", "lost_s", "stalled_s"),
    [
        (None, 6.0, 3600.0),
        (0.01, 6.0, 60.0),
        (1.0, 20.0, 60.0),
        (2.0, 40.0, 100.0),
        (30.0, 120.0, 1500.0),
        (100.0, 120.0, 3600.0),
    ],
)
def test_deadlines_are_measured_in_steps_within_a_floor_and_a_cap(
    step_s: float | None, lost_s: float, stalled_s: float
) -> None:
    assert DEADLINES.lost_after_s(step_s) == lost_s
    assert DEADLINES.stalled_after_s(step_s) == stalled_s
    run = Run("a")
    assert only(WakeAt, run.beat(100.0, "a", step=1, step_s=step_s)).at == 100.0 + min(lost_s, stalled_s)


def test_heartbeats_without_steps_are_a_stall() -> None:
    run = Run("a", "b")
    run.beat(0.0, "a", step=1, step_s=0.5)
    for now in range(1, 60):
        actions = run.beat(float(now), "a", step=1, step_s=0.5)
        run.beat(float(now), "b", step=now, step_s=0.5)
        assert kinds(run.core.tick(float(now))) == ["WakeAt"]
    assert only(WakeAt, actions).at == 60.0
    run.beat(59.9, "b", step=60)
    assert only(Evict, run.core.tick(60.0)) == Evict("a", 1, "no step for 60.0 s", replaced=False)


def test_a_waiting_learner_is_not_stalled() -> None:
    run = Run("a", "b")
    run.send(0.0, "a", 0)
    for now in range(1, 4000, 2):
        run.beat(float(now), "a", step=10, step_s=0.5, waiting=True)
        run.beat(float(now), "b", step=now, step_s=0.5)
        assert kinds(run.core.tick(float(now))) == ["WakeAt"]
    run.beat(4000.0, "a", step=10, step_s=0.5)  # from here on it has work to do
    run.beat(4055.0, "a", step=10, step_s=0.5)
    assert run.core.deadlines.ends_at(run.core.members["a"]) == pytest.approx(3999.0 + 60.0)


@pytest.mark.parametrize(
    "wrong", [{"lost_floor_s": 0.0}, {"stalled_cap_s": 1.0}, {"lost_steps": 0.0}, {"stalled_steps": -1.0}]
)
def test_deadlines_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))[:4]):
        Deadlines(**wrong)


def test_a_step_time_once_measured_stays() -> None:
    run = Run("a")
    run.beat(0.0, "a", step=1, step_s=2.0)
    assert only(WakeAt, run.beat(10.0, "a", step=2, step_s=None)).at == 50.0


def test_every_event_that_leaves_somebody_here_says_when_to_wake() -> None:
    run = Run("a", "b")
    incarnation, joined = run.core.joined(1.0, "c")
    steps = [
        joined, run.beat(1.0, "a", step=1), run.send(2.0, "a", 0), run.core.disconnected(2.0, "b", 1),
        run.core.tick(2.5),
        run.core.left(3.0, "c", incarnation, tokens=0),
        run.publish(4.0) if run.phase() == "merging" else run.core.tick(4.0),
    ]  # fmt: skip
    for actions in steps:
        assert only(WakeAt, actions).at <= 8.0
    run.core.left(5.0, "a", 1, tokens=100)
    assert "WakeAt" not in kinds(run.core.left(5.0, "b", 1, tokens=1))


# --- incarnations -----------------------------------------------------------------------------------------------------


def test_an_evicted_learner_is_refused_and_nothing_changes() -> None:
    run = Run("a", "b")
    run.core.disconnected(0.0, "b", 1)
    run.beat(5.0, "a", step=1)
    run.core.tick(6.0)
    before = deepcopy((run.core.saved().values, run.core.members, run.core.fragments, status_of(run.core, 7.0)))
    stale = [
        lambda: run.send(7.0, "b", 0), lambda: run.beat(7.0, "b", step=5),
        lambda: run.core.left(7.0, "b", 1, tokens=500),
        lambda: run.core.check("b", 1),
    ]  # fmt: skip
    for event in stale:
        with pytest.raises(StaleIncarnationError, match="incarnation 1 of learner 'b' is not part of the run any more"):
            event()
    assert run.core.disconnected(7.0, "b", 1) == []
    assert (run.core.saved().values, run.core.members, run.core.fragments, status_of(run.core, 7.0)) == before
    assert run.core.joined(8.0, "b")[0] == 2
    with pytest.raises(StaleIncarnationError):
        run.send(9.0, "b", 0, incarnation=1)


def test_a_newer_incarnation_replaces_a_live_one() -> None:
    run = Run("a", "b")
    run.beat(1.0, "b", step=4, tokens=40)
    incarnation, actions = run.core.joined(2.0, "b")
    assert incarnation == 2
    assert only(Evict, actions) == Evict("b", 1, "replaced by a newer incarnation", replaced=True)
    assert run.ledger("b") == {"trained": 40, "pending": 0, "merged": 0, "lost": 40, "discarded": {}}
    assert run.core.members["b"].step == run.core.step == 4
    run.beat(3.0, "b", step=6, tokens=20)
    assert run.ledger("b")["trained"] == 60
    assert run.core.accounting.run_tokens == 61


def test_what_an_evicted_learner_has_trained_unheard_is_lost_and_counted_once() -> None:
    """The next incarnation says it of all before, as often as it speaks. Another process says it of its own."""
    run = Run()

    def join(process: int) -> int:
        return run.core.joined(1.0, "b", process=process)[0]

    def beat(tokens: int, earlier: int, step: int = 20) -> None:
        report = Report(step, tokens, steps=tokens // 10, earlier_tokens=earlier)
        run.core.heartbeat(2.0, "b", run.incarnation("b"), report)

    join(process=7)
    beat(100, earlier=0)
    run.send(2.5, "b", 0)
    run.record(2.5)
    join(process=7)
    for _ in range(2):
        beat(0, earlier=120)  # it may not know yet at which step it will hear of it
    beat(30, earlier=130)
    expected = {"trained": 160, "pending": 130, "merged": 0, "lost": 30, "discarded": {}}
    assert run.ledger("b") == expected
    found = run.record(3.0)
    run.restart(3.0, found)
    beat(30, earlier=130)
    assert run.ledger("b") == {**expected, "pending": 30, "lost": 130}  # what is open is not sent again
    join(process=7)
    beat(10, earlier=165)
    assert run.ledger("b") == {"trained": 175, "pending": 10, "merged": 0, "lost": 165, "discarded": {}}
    join(process=8)
    beat(20, earlier=0)
    assert run.ledger("b") == {"trained": 195, "pending": 20, "merged": 0, "lost": 175, "discarded": {}}
    join(process=8)
    beat(0, earlier=25)
    assert run.ledger("b") == {"trained": 200, "pending": 0, "merged": 0, "lost": 200, "discarded": {}}
    assert run.core.accounting.run_tokens == 200


@pytest.mark.parametrize("is_member", [False, True], ids=["gone", "joined again"])
def test_a_goodbye_of_an_incarnation_that_is_out_says_what_it_has_trained(is_member: bool) -> None:
    run = Run()
    run.core.joined(0.0, "b", process=7)
    run.beat(1.0, "b", step=10, tokens=100)
    run.core.tick(1000.0)
    if is_member:
        run.core.joined(1000.0, "b", process=7)
    for _ in range(2):
        run.core.left_late(1001.0, "b", process=7, tokens=120)
        assert "b" not in run.core.members
        assert run.ledger("b") == {"trained": 120, "pending": 0, "merged": 0, "lost": 120, "discarded": {}}
    for learner, process in (("b", 8), ("c", 7)):
        with pytest.raises(StaleIncarnationError, match="not known as learner"):
            run.core.left_late(1002.0, learner, process=process, tokens=500)


def test_what_an_evicted_learner_was_acknowledged_for_is_merged() -> None:
    run = Run("a", "b")
    run.send(1.0, "b", 0, tokens=100, trained=100)
    run.beat(2.0, "b", step=13, tokens=130)
    run.beat(6.0, "a", step=9)
    run.core.tick(8.0)
    assert run.ledger("b") == {"trained": 130, "pending": 100, "merged": 0, "lost": 30, "discarded": {}}
    merge = only(MergeRound, run.send(9.0, "a", 0))
    assert [c.learner for c in merge.contributions] == ["a", "b"]
    run.publish(10.0)
    assert run.ledger("b") == {"trained": 130, "pending": 0, "merged": 100, "lost": 30, "discarded": {}}


@pytest.mark.parametrize("phase", ["open", "merging", "storing"])
def test_tokens_that_a_contribution_gave_up_are_not_lost_as_well(phase: str) -> None:
    """Evicted in any phase of the round, a learner's tokens are counted once."""
    run = Run("a", "b")
    run.send(1.0, "b", 0, tokens=80, discarded=20, trained=100)
    if phase != "open":
        run.send(1.0, "a", 0)
    if phase == "storing":
        run.merged()
    run.beat(2.0, "b", step=11, tokens=110)
    run.core.joined(3.0, "b")
    assert run.ledger("b")["lost"] == 10
    if phase == "open":
        run.send(4.0, "a", 0)
    if phase != "storing":
        run.merged()
    run.stored(5.0)
    assert run.ledger("b") == {"trained": 110, "pending": 0, "merged": 80, "lost": 10, "discarded": {"overlap": 20}}


def test_an_early_contribution_of_an_evicted_learner_is_merged_in_its_round() -> None:
    run = Run("a", "b", overlap=H)
    for learner in "ab":
        run.send(1.0, learner, 0, step=10)
    run.send(2.0, "b", 1, base=0, step=20)
    run.core.joined(3.0, "b")
    run.publish(4.0)
    assert run.ledger("b") == {"trained": 200, "pending": 100, "merged": 100, "lost": 0, "discarded": {}}
    assert "MergeRound" in kinds(run.send(5.0, "a", 1, base=0, step=20))
    run.publish(6.0)
    assert run.ledger("b")["merged"] == 200


def test_two_incarnations_contribute_once_to_a_round() -> None:
    run = Run("a", "b")
    run.send(1.0, "b", 0)
    run.core.joined(2.0, "b")
    second = run.c("b", 0, tokens=50, trained=60)
    assert run.core.contributed(3.0, second)[0] == Acknowledge(second, duplicate=False)
    assert run.core.contributed(3.5, second)[0] == Acknowledge(second, duplicate=True)  # sent again
    written = run.record(3.5)
    merge = only(MergeRound, run.send(4.0, "a", 0))
    assert [c.incarnation for c in merge.contributions] == [1, 1]
    crashed = restarted(
        run.core, written, 4.5
    )  # forgets the first, which is not sent again: the round waits for the second
    for c in (run.c("a", 0), second):
        actions = crashed.contributed(5.0, c)
    assert [c.incarnation for c in only(MergeRound, actions).contributions] == [1, 2]
    assert run.publish(5.0)[:2] == [Reject(second, "twice in one round"), Publish(0, 1, ("a", "b"))]
    assert verdicts(run.core, "b") == (Verdict(0, 1, "twice in one round", 1),)
    assert run.ledger("b") == {
        "trained": 160, "pending": 10, "merged": 100, "lost": 0, "discarded": {"twice in one round": 50}
    }  # fmt: skip


def test_a_goodbye_leaves_acknowledged_work_behind() -> None:
    run = Run("a", "b")
    run.send(1.0, "b", 0)
    run.core.left(2.0, "b", 1, tokens=120)
    assert "b" not in run.core.members
    assert run.ledger("b") == {"trained": 120, "pending": 100, "merged": 0, "lost": 0, "discarded": {UNMERGED: 20}}
    assert len(only(MergeRound, run.send(3.0, "a", 0)).contributions) == 2
    with pytest.raises(StaleIncarnationError):
        run.core.left(4.0, "b", 1, tokens=120)


@pytest.mark.parametrize("ends", ["leaves", "finishes", "is silent"])
def test_only_a_learner_that_did_not_end_loses_its_work(ends: str) -> None:
    """That of one that finished or left is not merged at the end; also what the syncer had of it when it restarted."""
    run = Run("a", "b")
    run.send(1.0, "b", 0)
    run.core.heartbeat(2.0, "b", 1, Report(12, 120, steps=12, finished=ends == "finishes"))
    if ends == "leaves":
        run.core.left(2.0, "b", 1, tokens=120)
    else:
        run.core.tick(1e6)
        assert "b" not in run.core.members
    for pending, given_up in ((100, 20), (0, 120)):
        fate = (
            {"lost": given_up, "discarded": {}}
            if ends == "is silent"
            else {"lost": 0, "discarded": {UNMERGED: given_up}}
        )
        assert run.ledger("b") == {"trained": 120, "pending": pending, "merged": 0, **fate}
        run.restart(2e6, run.record(2e6))


# --- contributions that do not fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phase", ["open", "merging", "storing", "published", "restarted", "two later", "confirmed", "confirmed, restarted"]
)
def test_a_contribution_sent_again_after_a_reconnect_counts_once(phase: str) -> None:
    run = Run("a", "b")
    run.send(1.0, "a", 0, discarded=7, trained=107)
    if phase != "open":
        run.send(1.0, "b", 0)
    if phase == "storing":
        run.merged()
    if phase not in ("open", "merging", "storing"):
        run.publish(1.0)
    if phase == "two later":
        for learner in "ab":
            run.send(2.0, learner, 1, trained=300)
        run.publish(2.0)
    if phase.startswith("confirmed"):
        run.beat(2.0, "a", step=10, tokens=107, confirmed=(1,))
        assert verdicts(run.core, "a") == ()
    if phase.endswith("restarted"):
        run.restart(2.0, run.record(2.0))
    before = run.ledgers()
    again = run.c("a", 0, discarded=7, trained=107)
    for _ in range(2):
        assert run.core.contributed(3.0, again)[0] == Acknowledge(again, duplicate=True)
    assert run.ledgers() == before


def test_a_rejected_contribution_sent_again_is_discarded_once() -> None:
    run = Run("a", "b")
    run.send(1.0, "a", 0)
    run.core.joined(1.0, "c")
    run.send(1.5, "b", 0)
    late = run.c("c", 0, tokens=60, discarded=5, trained=65)
    for duplicate in (False, True):
        assert run.core.contributed(2.0, late)[0] == Acknowledge(late, duplicate=duplicate)
    assert only(Reject, run.publish(3.0)) == Reject(late, "missed")
    counted = {"trained": 65, "pending": 0, "merged": 0, "lost": 0, "discarded": {"overlap": 5, "missed": 60}}
    assert run.ledger("c") == counted
    assert run.core.contributed(4.0, late)[0] == Acknowledge(late, duplicate=True)
    assert run.ledger("c") == counted


def test_a_contribution_that_came_too_late_is_judged_when_the_version_is_durable() -> None:
    """Were its learner told at once, it would not send it again, and after a crash the round would wait for it until
    its deadline."""
    run = Run("a", "b", "c")
    for learner in "ab":
        run.send(1.0, learner, 0)
    run.core.left(1.0, "c", 1, tokens=0)
    run.core.joined(1.0, "c")
    written = run.record(1.0)
    late = run.c("c", 0)
    assert run.phase() == "merging"
    assert kinds(run.core.contributed(2.0, late)) == ["Acknowledge", "WakeAt"]
    run.record(2.5)
    assert verdicts(run.core, "c") == ()
    run.restart(3.0, written)
    for c in (run.c("a", 0), run.c("b", 0)):
        run.core.contributed(3.0, c)
    assert only(MergeRound, run.core.contributed(3.0, late)).contributions == (run.c("a", 0), run.c("b", 0), late)


@pytest.mark.parametrize(
    ("overlap", "round_", "base"),
    [(0, 2, 2), (0, 1, 1), (0, 1, 0), (0, 0, -1), (0, -1, -1), (10, 1, 1), (10, 2, 0), (10, 0, 1)],
)
def test_version_nonsense_is_rejected(overlap: int, round_: int, base: int) -> None:
    run = Run("a", "b", overlap=overlap)
    c = run.c("a", round_, number=1, base=base, step=30, trained=100)
    assert run.core.contributed(1.0, c)[0] == Reject(c, "version")
    assert run.core.rounds.roster(0) == ((), ())
    assert run.ledger("a")["discarded"] == {"version": 100}


@pytest.mark.parametrize("fragment", [-1, 1])
def test_a_fragment_that_is_not_there_is_an_error(fragment: int) -> None:
    run = Run("a")
    with pytest.raises(VersionError, match="there is no fragment -?1; the run has fragments 0 to 0"):
        run.send(1.0, "a", 0, fragment=fragment)


def test_other_content_for_the_same_round_is_rejected() -> None:
    run = Run("a", "b")
    run.send(1.0, "a", 0)
    other = run.c("a", 0, number=2, tokens=120, trained=220)
    assert run.core.contributed(2.0, other)[0] == Acknowledge(other, duplicate=False)
    assert only(MergeRound, run.send(3.0, "b", 0)).contributions == (run.c("a", 0), run.c("b", 0))
    assert only(Reject, run.publish(4.0)) == Reject(other, "twice in one round")


# --- overlap of a whole interval --------------------------------------------------------------------------------------


def test_contributions_to_the_next_round_are_kept_while_one_is_merged_and_stored() -> None:
    run = Run("a", "b", overlap=H)
    for learner in "ab":
        run.send(1.0, learner, 0, step=10)
    assert kinds(run.send(2.0, "a", 1, base=0, step=20)) == ["Acknowledge", "WakeAt"]
    run.merged()
    assert kinds(run.send(3.0, "b", 1, base=0, step=20)) == ["Acknowledge", "WakeAt"]
    actions = run.stored(4.0)
    assert kinds(actions) == ["Publish", "MergeRound", "WakeAt"]
    assert only(MergeRound, actions).round == 1
    assert run.steps() == [10]
    run.merged()
    assert run.core.saved(storing=[0]).values["fragment_steps"] == [20]
    assert run.core.saved().values["fragment_steps"] == [10]


def test_an_early_contribution_needs_the_round_before_it() -> None:
    run = Run("a", "b", overlap=H)
    early = run.c("a", 1, base=0, step=20)
    assert run.core.contributed(1.0, early)[0] == Reject(early, "out of step")


def test_an_abandoned_round_takes_what_counts_on_it_along() -> None:
    run = Run("a", "b", overlap=H)
    for learner in "ab":
        run.send(1.0, learner, 0, step=10)
    run.send(2.0, "a", 1, base=0, step=20)
    actions = run.core.abandoned(3.0, 0, "not finite")
    assert kinds(actions) == ["Reject", "Reject", "Reject", "PersistRecord", "WakeAt"]
    assert run.phase() == "open"
    assert run.core.fragments[0].version == 0
    assert run.core.rounds.roster(0) == ((), ())
    assert run.ledger("a") == {"trained": 200, "pending": 0, "merged": 0, "lost": 0, "discarded": {"not finite": 200}}
    again = run.c("b", 0, number=2, step=20, trained=200)
    assert run.core.contributed(4.0, again)[0] == Acknowledge(again, duplicate=False)


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_after_a_restart_the_first_to_come_back_does_not_merge_alone() -> None:
    run = Run("a", "b", "c")
    run.restart(100.0, run.record(99.0))
    assert only(WakeAt, run.core.tick(100.0)).at == 106.0
    assert "MergeRound" not in kinds(run.send(101.0, "a", 0))
    assert run.reason(101.0) == "waiting for b, c; b is given up in 5.0 s"
    run.send(105.0, "b", 0)
    actions = run.core.tick(106.0)
    assert only(Evict, actions).learner == "c"
    assert [c.learner for c in only(MergeRound, actions).contributions] == ["a", "b"]


def test_after_a_restart_those_who_stay_away_are_given_up() -> None:
    run = Run("a", "b")
    run.beat(1.0, "a", step=3, tokens=30)
    run.restart(100.0, run.record(99.0))
    actions = run.core.tick(106.0)
    assert kinds(actions) == ["Evict", "Evict", "PersistRecord"]
    assert run.ledger("a")["lost"] == 30
    assert run.core.joined(107.0, "a")[0] == 2
    assert run.core.step == 3


def test_after_a_restart_a_merged_contribution_sent_again_is_known() -> None:
    run = Run("a", "b")
    for learner in "ab":
        run.send(1.0, learner, 0)
    run.publish(2.0)
    run.restart(100.0, run.record(99.0))
    assert run.send(101.0, "a", 0)[0] == Acknowledge(run.c("a", 0), duplicate=True)
    assert run.ledger("a")["pending"] == 0


def test_what_is_being_stored_does_not_count_as_merged_on_disk() -> None:
    """A syncer that dies while it stores has the version before; the contributions are offered again."""
    run = Run("a", "b")
    for learner in "ab":
        run.send(1.0, learner, 0, discarded=9, trained=109)
    run.merged()
    pending = {"trained": 109, "pending": 109, "merged": 0, "lost": 0, "discarded": {}}
    merged = {"trained": 109, "pending": 0, "merged": 100, "lost": 0, "discarded": {"overlap": 9}}
    without, with_version = run.core.saved(), run.core.saved(storing=[0])
    assert run.ledger("a") == pending
    stored = restarted(run.core, with_version, 100.0, versions=[1])
    assert ledger(stored, "a").as_dict() == merged
    assert verdicts(stored, "a") == (Verdict(0, 1, None, 1),)
    run.restart(100.0, without)
    assert run.ledger("a") == pending
    assert verdicts(run.core, "a") == ()
    for learner in "ab":
        actions = run.send(101.0, learner, 0, discarded=9, trained=109)
        assert actions[0] == Acknowledge(run.c(learner, 0, discarded=9, trained=109), duplicate=False)
    assert "MergeRound" in kinds(actions)
    run.publish(102.0)
    assert run.ledger("a") == merged


def test_tokens_are_reported_per_incarnation_and_never_shrink() -> None:
    run = Run("a")
    run.beat(1.0, "a", step=5, tokens=50)
    run.beat(1.1, "a", step=4, tokens=40)  # overtaken on the way
    assert run.core.accounting.run_tokens == 50
    run.restart(100.0, run.record(99.0))
    run.beat(101.0, "a", step=6, tokens=60)
    assert run.core.accounting.run_tokens == 60
    run.core.joined(102.0, "a")
    run.beat(103.0, "a", step=7, tokens=10)
    assert run.core.accounting.run_tokens == 70


def test_a_finished_learner_stays_finished_over_a_restart() -> None:
    """Rounds wait for members that may come back, and it would not contribute any more."""
    run = Run("a", "b")
    run.core.heartbeat(1.0, "b", 1, Report(step=10, steps=10, tokens=100, step_s=0.1, finished=True))
    run.restart(100.0, run.record(2.0))
    assert "MergeRound" in kinds(run.send(101.0, "a", 0))
    run.beat(102.0, "b", step=10, tokens=100)
    assert not run.core.members["b"].healthy


def test_after_a_restart_a_round_waits_for_what_a_finished_learner_sends_again() -> None:
    run = Run("a", "b")
    run.send(1.0, "b", 0)
    run.core.heartbeat(1.0, "b", 1, Report(step=10, steps=10, tokens=100, step_s=0.1, finished=True))
    run.restart(100.0, run.record(2.0))
    assert "MergeRound" not in kinds(run.send(101.0, "a", 0))
    merge = only(MergeRound, run.send(102.0, "b", 0))
    assert [c.learner for c in merge.contributions] == ["a", "b"]
    run.core.heartbeat(102.0, "b", 1, Report(step=10, steps=10, tokens=100, step_s=0.1, finished=True))
    run.merged()
    run.restart(200.0, run.core.saved(storing=[0]))
    assert not run.core.members["b"].ready


def test_after_a_restart_no_round_waits_for_a_joiner_that_has_not_trained() -> None:
    """It may fetch a large model for long, and says so; until it is heard it may have begun since the record."""
    run = Run("a")
    run.core.joined(1.0, "b")
    run.restart(100.0, run.record(2.0))
    assert "MergeRound" not in kinds(run.send(101.0, "a", 0))
    merge = only(MergeRound, run.core.heartbeat(102.0, "b", 1, Report(step=0, steps=0, tokens=0)))
    assert [c.learner for c in merge.contributions] == ["a"]
    run.publish(102.0)
    run.beat(103.0, "b", step=6, tokens=10)
    assert "MergeRound" not in kinds(run.send(104.0, "a", 1))


def test_after_a_standstill_of_the_syncer_learners_have_their_whole_deadline() -> None:
    run = Run("a", "b", "c")
    run.core.disconnected(2.0, "c", 1)
    ends = {learner: run.core.deadlines.ends_at(member) for learner, member in run.core.members.items()}
    run.core.was_suspended(1000.0)
    assert "Evict" not in kinds(run.core.tick(1004.9))
    assert {learner: run.core.deadlines.ends_at(member) for learner, member in run.core.members.items()} == {
        learner: end + 1000.0 for learner, end in ends.items()
    }
    assert [evict.learner for evict in run.core.tick(1005.0) if isinstance(evict, Evict)] == ["c"]


def test_more_tokens_than_can_be_counted_are_refused_and_change_nothing() -> None:
    run = Run("a")
    run.beat(1.0, "a", step=1, tokens=2**52)
    run.core.joined(2.0, "a")
    before = run.ledger("a")
    with pytest.raises(PayloadError, match="'a' would have trained .* tokens; at most 9007199254740992 can be counted"):
        run.beat(3.0, "a", step=2, tokens=2**52 + 1)
    assert run.ledger("a") == before
    assert run.core.step == 1


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_rejection_is_told_when_a_record_with_it_is_durable() -> None:
    run = Run("a", "b")
    before = run.core.saved()
    assert kinds(run.send(1.0, "a", 2)) == ["Reject", "PersistRecord", "WakeAt"]
    assert kinds(run.core.tick(1.5)) == ["PersistRecord", "WakeAt"]  # until there is one
    assert run.core.recorded(2.0, before.serial) == []
    assert verdicts(run.core, "a") == ()
    written = run.core.saved()
    assert kinds(run.core.tick(2.5)) == ["WakeAt"]
    assert verdicts(run.core, "a") == ()
    assert run.core.recorded(3.0, written.serial) == [Tell(("a",))]
    assert verdicts(run.core, "a") == (Verdict(0, 3, "version", 0),)
    assert verdicts(run.core, "b") == ()
    assert run.core.recorded(3.0, written.serial) == []
    run.restart(4.0, written)
    assert verdicts(run.core, "a") == (Verdict(0, 3, "version", 0),)


def test_a_record_that_was_not_written_tells_nothing_and_a_later_one_does() -> None:
    run = Run("a", "b")
    run.send(1.0, "a", 2)
    run.core.saved()  # its write fails
    run.send(2.0, "b", 2)
    written = run.core.saved()
    assert run.core.recorded(3.0, written.serial) == [Tell(("a", "b"))]


def test_the_record_of_a_version_tells_rejections_too() -> None:
    run = Run("a", "b")
    run.send(1.0, "b", 2)
    run.send(2.0, "a", 0)
    assert "MergeRound" in kinds(run.send(2.0, "b", 0))
    run.publish(3.0)
    assert verdicts(run.core, "b") == (Verdict(0, 1, None, 1), Verdict(0, 3, "version", 0))


def test_a_merged_contribution_has_its_verdict_when_the_version_is_published() -> None:
    run = Run("a", "b", fragments=2)
    for fragment, step in ((0, 5), (1, 10)):
        for learner in "ab":
            run.send(1.0, learner, 0, fragment=fragment, step=step)
        run.merged(fragment)
    assert verdicts(run.core, "a") == ()
    run.stored(2.0, 1)
    assert verdicts(run.core, "a") == (Verdict(1, 1, None, 1),)
    run.stored(3.0, 0)
    for learner in "ab":
        run.send(4.0, learner, 1, fragment=0, step=15)
    run.publish(5.0)
    assert verdicts(run.core, "a") == (Verdict(0, 1, None, 1), Verdict(0, 2, None, 2), Verdict(1, 1, None, 1))
    assert run.core.verdicts("a", 0, 1) == (Verdict(0, 1, None, 1),)
    assert run.core.verdicts("a", 1, 1) == (Verdict(1, 1, None, 1),)


def test_verdicts_that_a_learner_has_confirmed_are_forgotten() -> None:
    run = Run("a", "b")
    for round_ in range(3):
        for learner in "ab":
            run.send(1.0, learner, round_)
        run.publish(2.0)
    run.beat(3.0, "a", step=30, confirmed=(2,))
    assert [verdict.number for verdict in verdicts(run.core, "a")] == [3]
    run.beat(3.5, "a", step=30, confirmed=(1,))  # overtaken on the way
    run.beat(3.5, "a", step=30)
    assert [verdict.number for verdict in verdicts(run.core, "a")] == [3]
    run.restart(4.0, run.record(4.0))
    assert [verdict.number for verdict in verdicts(run.core, "a")] == [3]
    assert [verdict.number for verdict in verdicts(run.core, "b")] == [1, 2, 3]
    for round_ in range(3):
        assert run.send(5.0, "a", round_)[0] == Acknowledge(run.c("a", round_), duplicate=True)


def test_a_new_incarnation_hears_nothing_of_the_one_before() -> None:
    run = Run("a", "b")
    run.send(1.0, "b", 2)
    run.send(1.0, "b", 0)
    run.core.joined(2.0, "b")
    run.record(2.0)
    assert verdicts(run.core, "b") == ()
    assert "MergeRound" in kinds(run.send(3.0, "a", 0))
    run.publish(3.0)
    assert verdicts(run.core, "b") == ()
    first = run.c("b", 1)
    assert first.number == 2
    assert run.core.contributed(4.0, replace(first, number=1))[0] == Acknowledge(
        replace(first, number=1), duplicate=False
    )


def test_what_stands_is_the_whole_truth_for_one_learner() -> None:
    run = Run("a", "b", fragments=2)
    run.beat(1.0, "a", step=12, tokens=120)
    run.send(1.0, "b", 2, tokens=30, trained=30)
    run.record(1.0)
    assert run.core.standing("b") == Standing(
        step=30, start_step=30, run_tokens=150, num_live=2, sync_every=None, versions=(0, 0), calls=(),
        verdicts=(Verdict(0, 3, "version", 0),),
    )  # fmt: skip
    assert run.core.standing("b") == run.core.standing("b")


def test_the_status_is_for_people_and_programs() -> None:
    run = Run("b", "a", fragments=2)
    run.beat(1.0, "a", step=7, tokens=70, step_s=0.5)
    run.send(2.0, "b", 0, step=5, tokens=50, trained=50)
    status = status_of(run.core, 3.0)
    assert list(status["learners"]) == ["a", "b"]
    assert status["learners"]["a"] == {
        "incarnation": 1, "step": 7, "tokens": 70, "live": True, "healthy": True, "heard": True, "waiting": False,
        "drained": False, "finished": False, "step_s": 0.5, "tokens_per_step": None, "silent_s": 2.0,
        "given_up_in_s": 8.0, "merged": 0, "share": None, "versions_behind": None, "staleness": None, "versions": [],
        "experts": None, "holds_part": False,
    }  # fmt: skip
    assert status["fragments"][0]["contributed"] == ["b"]
    assert status["fragments"][0]["members"] == ["a", "b"]
    assert status["fragments"][0]["reason"] == "waiting for a; a is given up in 8.0 s"
    assert status["fragments"][1]["ledger"]["trained"] == 120


def test_streaming_methods_make_the_same_machine() -> None:
    core = SyncerCore(StreamingDiLoCo(sync_every=12, overlap=5), [3, 4, 5])
    assert [fragment.version for fragment in core.fragments] == [3, 4, 5]
    assert core.tick(0.0) == []


# --- the end of a run -------------------------------------------------------------------------------------------------


def finish(run: Run, now: float, learner: str, step: int) -> list[Action]:
    report = Report(step, 1, steps=step, finished=True)
    return run.core.heartbeat(now, learner, run.incarnation(learner), report)


def test_a_run_settles_once_all_have_finished_and_the_last_round_is_published() -> None:
    run = Run("a", "b")
    finish(run, 1.0, "b", step=3)
    run.send(2.0, "a", 0)  # the round waits for b no longer
    assert not run.core.is_settled
    finish(run, 3.0, "a", step=10)
    assert not run.core.is_settled, "the version is being made"
    actions = run.publish(4.0)
    assert run.core.is_settled
    assert run.core.standing("b").settled
    assert kinds(actions).index("Publish") < kinds(actions).index("Tell")
    run.core.joined(5.0, "c")
    assert not run.core.is_settled


def test_a_learner_that_finishes_without_a_step_of_its_own_ends_the_run_at_once() -> None:
    run = Run("a")
    finish(run, 1.0, "a", step=3)
    run.core.joined(2.0, "b")
    assert not run.core.is_settled
    actions = run.core.heartbeat(3.0, "b", 1, Report(step=3, finished=True))
    assert run.core.is_settled
    assert kinds(actions)[0] == "Tell"


def test_a_learner_that_stays_away_holds_the_end_until_it_is_evicted() -> None:
    run = Run("a", "b")
    run.beat(1.0, "a", step=5)
    run.beat(1.0, "b", step=5)
    finish(run, 1.0, "a", step=5)
    assert not run.core.is_settled
    ends_at = run.core.deadlines.ends_at(run.core.members["b"])
    finish(run, ends_at - 1.0, "a", step=5)
    assert kinds(run.core.tick(ends_at))[:2] == ["Evict", "Tell"]
    assert run.core.is_settled


def test_a_run_settles_with_a_round_that_lacks_learners_but_not_while_it_is_paused() -> None:
    run = Run("a", "b", at_least=2)
    run.send(1.0, "a", 0)
    run.core.steer(2.0, Order("pause"), "x")
    run.record(2.0)
    finish(run, 3.0, "a", step=10)
    finish(run, 3.0, "b", step=3)
    assert not run.core.is_settled
    run.core.steer(4.0, Order("resume"), "x")
    run.record(4.0)
    assert run.core.is_settled
