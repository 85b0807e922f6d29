"""An operator's orders to SyncerCore, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from tests.protocol.driving import kinds, only, publish, record, restarted, status_of
from tests.protocol.test_syncer_core import H, Run

from diloco.core.method import Method
from diloco.core.outer import DelayedNesterov
from diloco.core.presets import AsyncDiLoCo, DecoupledDiLoCo, DiLoCo
from diloco.core.quorum import AllLive, Called, Pushed
from diloco.errors import ConfigError, DrainedError
from diloco.protocol.actions import Action, Evict, MergeRound, Tell, WakeAt
from diloco.protocol.contribution import Contribution
from diloco.protocol.members import Deadlines, Report
from diloco.protocol.rounds.base import Rules
from diloco.protocol.steering import Order, Pool, Steering
from diloco.protocol.syncer import SyncerCore


def steer(core: SyncerCore, what: Any, learner: str = "", *, now: float = 1.0, **fields: Any) -> list[Action]:
    """An order, which is durable at once."""
    _, actions = core.steer(now, Order(what, learner, **fields), "alice")
    return [*actions, *record(core, now)[1]]


def drained(core: SyncerCore) -> set[str]:
    return {learner for learner in core.members if core.standing(learner).drained}


# --- durable first ----------------------------------------------------------------------------------------------------


def test_an_order_is_in_force_with_the_first_durable_record_that_has_it() -> None:
    run = Run("a", "b")
    written = run.core.saved()  # under way when the orders come
    for order in (Order("pause"), Order("evict", "b", bans=True), Order("quorum", at_least=1)):
        _, actions = run.core.steer(1.0, order, "alice")
        assert kinds(actions) == ["PersistRecord", "WakeAt"]
    assert run.core.recorded(2.0, written.serial) == []
    assert (run.core.standing("a").paused, "b" in run.core.members) == (False, True)
    assert restarted(run.core, written, 3.0).steering == Steering()
    run.core.saved()  # which is not stored
    written, actions = record(run.core, 4.0)
    assert kinds(actions) == ["Evict", "Tell", "PersistRecord", "WakeAt"]
    assert (run.core.standing("a").paused, "b" in run.core.members) == (True, False)
    with pytest.raises(DrainedError, match="may not join again before it is admitted|before an admin admits it"):
        run.core.joined(5.0, "b")
    assert restarted(run.core, written, 5.0).steering == run.core.steering


def test_a_pause_that_is_resumed_before_it_is_durable_never_was() -> None:
    run = Run("a", "b")
    for what in ("pause", "resume"):
        run.core.steer(1.0, Order(what), "alice")
    assert record(run.core, 2.0)[1] == []
    assert not run.core.standing("a").paused


def test_learners_that_still_stand_while_a_resume_becomes_durable_do_not_wait_for_each_other() -> None:
    core = SyncerCore(Rules.of(DiLoCo(sync_every=H, quorum=Pushed(at_least=2)), 2), [0, 0])
    for learner in "ab":
        core.joined(0.0, learner)
        called(core, 0.0, learner, 1)
    for fragment, learner in enumerate("ab"):
        core.contributed(1.0, Contribution(learner, 1, fragment, 1, 0, 0, H, H, H, step=H))
    steer(core, "pause", now=2.0)
    actions = core.steer(3.0, Order("resume"), "alice")[1]
    for learner in "ab":
        actions += called(core, 4.0, learner, H, waiting=True)
    actions += record(core, 5.0)[1] + called(core, 6.0, "a", H)
    assert MergeRound not in map(type, actions)


# --- evict, drain, admit, end -----------------------------------------------------------------------------------------


def test_an_evicted_learner_is_told_by_whom_and_may_join_again() -> None:
    run = Run("a", "b")
    run.send(1.0, "a", 0)
    actions = steer(run.core, "evict", "b", now=2.0, reason="its disk is swapped")
    assert only(Evict, actions) == Evict("b", 1, "evicted by alice: its disk is swapped", False)
    assert [c.learner for c in only(MergeRound, actions).contributions] == ["a"]  # which waited for it
    assert run.core.joined(3.0, "b")[0] == 2


def test_a_banned_learner_joins_after_it_is_admitted() -> None:
    run = Run("a", "b")
    said, _ = run.core.steer(1.0, Order("evict", "b", bans=True), "alice")
    assert said == "b was evicted by alice; it may not join again before it is admitted"
    assert only(Evict, record(run.core)[1]).learner == "b"
    with pytest.raises(DrainedError, match=r"b was evicted by alice; .* \(diloco admin admit b\)"):
        run.core.joined(2.0, "b")
    run.restart(3.0, run.record(3.0))
    with pytest.raises(DrainedError):
        run.core.joined(4.0, "b")
    steer(run.core, "admit", "b")
    assert run.core.joined(5.0, "b")[0] == 2
    with pytest.raises(ConfigError, match="'b' was neither drained nor banned; no learner was"):
        steer(run.core, "admit", "b")


def test_a_learner_that_is_not_there_can_only_be_banned() -> None:
    run = Run("a")
    for what in ("evict", "drain"):
        with pytest.raises(ConfigError, match="no learner 'x' takes part; those that do are a"):
            steer(run.core, what, "x")
    assert Evict not in map(type, steer(run.core, "evict", "x", bans=True))
    with pytest.raises(DrainedError):
        run.core.joined(2.0, "x")


def test_a_drained_learner_contributes_once_more_and_does_not_come_back() -> None:
    run = Run("a", "b")
    assert only(Tell, steer(run.core, "drain", "b")) == Tell(("a", "b"))
    assert drained(run.core) == {"b"}
    run.restart(2.0, run.record(2.0))
    assert drained(run.core) == {"b"}
    run.send(2.0, "a", 0)
    assert only(MergeRound, run.send(2.0, "b", 0)).members == {"a", "b"}
    publish(run.core, 3.0)
    run.core.left(3.0, "b", 1, tokens=100, step=H)
    with pytest.raises(DrainedError, match="b was drained by alice"):
        run.core.joined(4.0, "b")


def test_a_run_that_is_ended_drains_all_merges_what_they_send_and_admits_none() -> None:
    run = Run("a", "b")
    steer(run.core, "pause")
    steer(run.core, "end", reason="the paper is out")
    assert drained(run.core) == {"a", "b"}
    run.send(2.0, "a", 0)
    only(MergeRound, run.send(2.0, "b", 0))
    publish(run.core, 3.0)
    run.restart(4.0, run.record(4.0))
    with pytest.raises(DrainedError, match="the run was ended by alice: the paper is out; no learner may join until"):
        run.core.joined(5.0, "c")
    steer(run.core, "resume")
    assert drained(run.core) == set()
    assert run.core.joined(5.0, "c")[0] == 1


def test_the_pool_and_an_operator_take_out_each_their_own() -> None:
    core = SyncerCore(Rules.of(DiLoCo(sync_every=H), 1), [0], pool=Pool("halving", 4, 8))
    for learner in "abcd":
        core.joined(0.0, learner)
    steer(core, "drain", "a")
    assert drained(core) == {"a"}
    core.heartbeat(1.0, "b", 1, Report(step=4, steps=4, tokens=4, step_s=1.0))
    assert drained(core) == {"a", "c", "d"}


# --- pause ------------------------------------------------------------------------------------------------------------


def test_no_round_is_merged_while_the_run_is_paused() -> None:
    run = Run("a", "b")
    run.send(1.0, "a", 0)
    assert kinds(steer(run.core, "pause", reason="power cut at noon")) == ["PersistRecord", "WakeAt", "Tell", "WakeAt"]
    assert run.core.standing("a").paused
    assert MergeRound not in map(type, run.send(2.0, "b", 0))
    assert run.reason(2.0) == "paused by alice: power cut at noon"
    actions = steer(run.core, "resume", now=9.0)
    assert [c.learner for c in only(MergeRound, actions).contributions] == ["a", "b"]
    assert not run.core.standing("a").paused


def test_a_merge_under_way_is_published_while_the_run_is_paused() -> None:
    run = Run("a")
    run.send(1.0, "a", 0)
    steer(run.core, "pause")
    publish(run.core, 2.0)
    assert run.core.fragments[0].version == 1


def test_a_restart_keeps_a_pause() -> None:
    run = Run("a", "b")
    steer(run.core, "pause")
    run.restart(2.0, run.record(2.0))
    for learner in "ab":
        actions = run.send(3.0, learner, 0)
    assert MergeRound not in map(type, actions)
    only(MergeRound, steer(run.core, "resume", now=4.0))


def test_no_learner_stalls_while_the_run_is_paused_and_each_has_its_deadline_after_it() -> None:
    deadlines = Deadlines(lost_floor_s=1e6, lost_cap_s=1e6, stalled_steps=1, stalled_floor_s=5.0, stalled_cap_s=5.0)
    core = SyncerCore(Rules.of(DiLoCo(sync_every=H), 1), [0], deadlines=deadlines)
    core.joined(0.0, "a")
    core.heartbeat(0.0, "a", 1, Report(step=1, steps=1, tokens=1, step_s=1.0))
    steer(core, "pause", now=1.0)
    for at in (5.0, 10.0, 500.0):
        (wake,) = [each for each in core.tick(at) if isinstance(each, WakeAt)]
        assert wake.at > at
    steer(core, "resume", now=501.0)
    assert only(WakeAt, core.tick(505.0)).at == 506.0
    assert only(Evict, core.tick(506.0)).reason == "no step for 5.0 s"


def test_a_lost_learner_is_evicted_while_the_run_is_paused() -> None:
    run = Run("a", "b")
    steer(run.core, "pause")
    assert {each.learner for each in run.core.tick(100.0) if isinstance(each, Evict)} == {"a", "b"}


def called(core: SyncerCore, now: float, learner: str, step: int, waiting: bool = False) -> list[Action]:
    return core.heartbeat(now, learner, 1, Report(step=step, steps=step, tokens=step, step_s=1.0, waiting=waiting))


def asynchronous(method: Method) -> tuple[Run, SyncerCore]:
    run = Run()
    run.core = core = SyncerCore(Rules.of(method, 1), [0])
    for learner in "ab":
        core.joined(0.0, learner)
        called(core, 0.0, learner, 1)
    return run, core


def test_no_call_is_made_while_the_run_is_paused() -> None:
    _, core = asynchronous(DecoupledDiLoCo(sync_every=4, fragments=None))
    steer(core, "pause")
    for learner in "ab":
        called(core, 2.0, learner, 9)
    assert core.standing("a").calls == ()
    steer(core, "resume", now=3.0)
    assert core.standing("a").calls == ((0, 0),)


def test_a_grace_window_goes_on_after_a_pause_where_it_stood() -> None:
    run, core = asynchronous(DecoupledDiLoCo(sync_every=4, fragments=None, quorum=Called(at_least=1, grace_cap_s=8.0)))
    for learner in "ab":
        called(core, 1.0, learner, 9)
    run.send(2.0, "a", 0, step=9, trained=100)
    assert "the grace window is open for b for 8.00 s" in str(run.reason(2.0))
    steer(core, "pause", now=4.0)
    assert MergeRound not in map(type, core.tick(12.0))
    steer(core, "resume", now=100.0)
    assert "the grace window is open for b for 6.00 s" in str(run.reason(100.0))
    only(MergeRound, core.tick(106.0))


def test_learners_that_stood_still_are_not_taken_to_wait_for_answers() -> None:
    """All that push blocked, each for another, would close a round that lacks learners."""
    method = AsyncDiLoCo(sync_every=4, quorum=Pushed(at_least=2), outer=DiLoCo(sync_every=1).outer)
    run, core = asynchronous(method)
    run.send(1.0, "a", 0, step=4, trained=100)
    steer(core, "pause", now=2.0)
    for learner in "ab":
        called(core, 3.0, learner, 5, waiting=True)
    assert not [each for each in steer(core, "resume", now=4.0) if isinstance(each, MergeRound)]
    assert not any(member.waiting for member in core.members.values())


# --- quorum -----------------------------------------------------------------------------------------------------------


def test_a_lower_quorum_lets_a_round_go_that_lacks_learners() -> None:
    run = Run("a", "b", at_least=2)
    run.core.left(1.0, "b", 1, tokens=1)
    run.send(2.0, "a", 0)
    assert run.reason(2.0) == "1 of at least 2 learners have contributed"
    only(MergeRound, steer(run.core, "quorum", at_least=1))
    assert run.core.standing("a").at_least == 1


def test_a_higher_quorum_holds_after_a_restart() -> None:
    run = Run("a", "b")
    steer(run.core, "quorum", at_least=2)
    run.restart(2.0, run.record(2.0))
    run.core.left(3.0, "b", 1, tokens=1)
    assert MergeRound not in map(type, run.send(4.0, "a", 0))
    assert run.reason(4.0) == "1 of at least 2 learners have contributed"


@pytest.mark.parametrize("quorum", [Called(at_least=1, grace=0.0), Pushed(at_least=1)])
def test_a_higher_quorum_holds_where_learners_do_not_wait(quorum: Any) -> None:
    kind = DecoupledDiLoCo if isinstance(quorum, Called) else AsyncDiLoCo
    fields: dict[str, Any] = {} if kind is DecoupledDiLoCo else {"outer": DiLoCo(sync_every=1).outer}
    run, core = asynchronous(kind(sync_every=4, quorum=quorum, **fields))
    steer(core, "quorum", at_least=2)
    for learner in "ab":
        called(core, 1.0, learner, 9)
    assert MergeRound not in map(type, run.send(2.0, "a", 0, step=9, trained=100))
    assert [c.learner for c in only(MergeRound, run.send(3.0, "b", 0, step=9, trained=100)).contributions] == ["a", "b"]


def test_a_quorum_that_cannot_be_had_is_refused() -> None:
    run = Run("a", "b", "c")
    steer(run.core, "drain", "c")
    for wrong in (0, 3):
        with pytest.raises(ConfigError, match=rf"a quorum of {wrong} is out of reach: 2 learners take part \(a, b\)"):
            steer(run.core, "quorum", at_least=wrong)
    alone = SyncerCore(Rules.of(AsyncDiLoCo(sync_every=4, outer=DelayedNesterov(0.7, 0.9, 2)), 1), [0])
    with pytest.raises(ConfigError, match="one at a time, and a quorum of 2 would wait for several; use 1"):
        steer(alone, "quorum", at_least=2)
    small = SyncerCore(Rules.of(DiLoCo(sync_every=4), 1), [0], pool=Pool("doubling", 2, 8, begin_step=0), step=4)
    for learner in "ab":
        small.joined(0.0, learner)
    with pytest.raises(ConfigError, match="the pool has 1 of 2 learners at times"):
        steer(small, "quorum", at_least=2)


# --- what is no order -------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_cannot_be_resumed() -> None:
    with pytest.raises(ConfigError, match="neither paused nor ended"):
        steer(Run("a").core, "resume")


def test_what_stands_is_in_the_record() -> None:
    run = Run("a", "b")
    assert record(run.core)[0].values["steering"] == {"paused": None, "ended": None, "at_least": None, "out": {}}
    steer(run.core, "quorum", at_least=2)
    steer(run.core, "drain", "b", reason="it moves")
    steer(run.core, "pause")
    written, _ = record(run.core)
    again = restarted(run.core, written, 5.0)
    assert again.steering == run.core.steering
    assert again.saved().values["steering"] == {
        "paused": "paused by alice", "ended": None, "at_least": 2, "out": {"b": "b was drained by alice: it moves"},
    }  # fmt: skip
    assert status_of(again, 5.0)["learners"]["b"]["drained"]


def test_the_quorum_of_the_method_holds_until_an_order() -> None:
    assert Run("a", at_least=3).core.at_least == 3
    assert SyncerCore(Rules.of(DiLoCo(sync_every=2, quorum=AllLive(at_least=4)), 1), [0]).at_least == 4


def test_what_is_sent_last_to_a_run_that_is_ended_waits_for_no_others() -> None:
    run = Run("a", "b", at_least=2)
    run.core.left(1.0, "b", 1, tokens=1)
    assert MergeRound not in map(type, run.send(2.0, "a", 0))
    only(MergeRound, steer(run.core, "end"))
