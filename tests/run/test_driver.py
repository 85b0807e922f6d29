"""The driver, one effect after the other: what is visible when, what a kill between any two effects leaves, and a store
that refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from tests.run.memory import LimitedSpool
from tests.run.toy import (
    LAYOUT,
    NUM_BYTES,
    RUN_ID,
    Line,
    Number,
    Player,
    Scene,
    Sums,
    contribution,
    scheduled,
    started,
)  # fmt: skip

import diloco
from diloco.core.layout import Layout, TensorSpec, place
from diloco.errors import (
    AlreadyInitialisedError,
    CorruptPayloadError,
    LayoutError,
    NonFiniteError,
    NoRoomError,
    NotInitialisedError,
    PayloadError,
    RestartedError,
    StaleIncarnationError,
    StoreError,
    UnknownRunError,
)
from diloco.protocol.contribution import MISSED, NOT_FINITE, OUT_OF_STEP, UNMERGED
from diloco.protocol.leases import Ask, DataSet
from diloco.protocol.manifest import epoch_of
from diloco.protocol.members import Claim, Deadlines, Report
from diloco.protocol.publishing import RETRY_S
from diloco.run.ports import InitialModel, NullObserver
from diloco.run.validation import MAX_TOKENS

# --- effects, one at a time -------------------------------------------------------------------------------------------


def test_a_version_is_visible_once_it_is_durable() -> None:
    scene = started("a", "b")
    line = scene.listen("a")
    assert scene.push(contribution("a")) is None
    assert scene.push(contribution("b"), payload=5) is None
    for effect in ("close", "put", "answer", "put", "answer", "swap", "answer"):
        assert scene.driver.state.versions == (0, 0)
        assert [standing.versions for standing in line.heard] == [(0, 0)]
        scene.next(effect)
    assert scene.driver.state.versions == (1, 0)
    assert line.heard[-1].versions == (1, 0)
    assert [(it.number, it.reason, it.version) for it in line.heard[-1].verdicts] == [(1, None, 1)]
    assert scene.driver.fetch(0, base=0).held == Number(1, 6)
    assert scene.spool.held_bytes == 0
    scene.settle()
    assert not scene.driver.is_busy


def test_a_join_and_a_goodbye_are_answered_once_they_are_durable() -> None:
    scene, answers = started(), list[Any]()
    scene.driver.join(Claim("a"), LAYOUT, answers.append)
    for effect in ("put", "answer", "swap", "answer"):
        assert answers == []
        scene.next(effect)
    assert answers == [1]
    scene.driver.leave(Claim("a", 1), Report(tokens=0), lambda: answers.append("gone"))
    for effect in ("put", "answer", "swap", "answer"):
        assert answers == [1]
        scene.next(effect)
    assert answers == [1, "gone"]
    with pytest.raises(StaleIncarnationError):
        scene.beat("a", 1)


def test_a_rejection_is_told_once_it_is_durable() -> None:
    scene = started("a", "b")
    for learner in ("a", "b"):
        scene.push(contribution(learner))
    scene.settle()
    scene.join("c")
    scene.beat("c", 1)
    line = scene.listen("c")
    behind = contribution("c", 1, round_=1, step=2)  # after the same step as the round before: sent back
    assert scene.push(behind) is None
    assert scene.spool.held_bytes == 0
    for effect in ("put", "answer", "swap", "answer"):
        assert scene.driver.core.standing("c").verdicts == ()
        scene.next(effect)
    assert [(it.number, it.reason) for it in line.heard[-1].verdicts] == [(1, OUT_OF_STEP)]
    scene.restart()
    assert [(it.number, it.reason) for it in scene.driver.core.standing("c").verdicts] == [(1, OUT_OF_STEP)]


def test_what_a_broken_connection_loses_is_said_on_the_next_one() -> None:
    scene = started("a", "b")
    broken = scene.listen("a")
    for learner in ("a", "b"):
        scene.push(contribution(learner))
    scene.settle()  # all of it went to a connection that was broken by then
    scene.driver.disconnected(Claim("a", 1), broken)
    line = scene.listen("a")
    assert (line.heard[0].versions, [it.number for it in line.heard[0].verdicts]) == ((1, 0), [1])
    standing = scene.beat("a", 4, confirmed=(1, 0))
    assert (standing.versions, standing.verdicts) == ((1, 0), ())


def test_a_new_connection_ends_the_one_before_and_survives_its_end() -> None:
    scene = started("a")
    old, new = scene.listen("a"), scene.listen("a")
    assert (old.has_ended, new.has_ended) == (True, False)
    scene.driver.disconnected(Claim("a", 1), old)
    assert scene.driver.status()["learners"]["a"]["live"]
    scene.driver.disconnected(Claim("a", 1), new)
    assert not scene.driver.status()["learners"]["a"]["live"]


def test_a_version_is_named_once_it_and_its_update_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = started("a", "b")
    monkeypatch.setattr(Sums, "lossless", False)
    for learner in ("a", "b"):
        scene.push(contribution(learner))
    for effect in ("close", "put", "put", "answer", "answer"):  # the record is put once both are there
        assert scene.place.manifest is not None
        assert scene.place.manifest.versions == (0, 0)
        scene.next(effect)
    assert [each[0] for each in scene.todo] == ["put"]
    scene.settle()
    assert scene.place.manifest is not None
    newest = scene.place.manifest.fragments[0][0]
    assert (newest.version, newest.update is not None) == (1, True)
    assert scene.place.manifest.names <= scene.place.objects.keys()


def test_one_commit_at_a_time_has_all_that_waits() -> None:
    scene = started("a", "b")
    answers: list[int] = []
    scene.driver.join(Claim("c"), LAYOUT, answers.append)  # its commit is under way
    for fragment in (0, 1):
        for learner in ("a", "b"):
            scene.push(contribution(learner, fragment=fragment))
    for learner in ("d", "e"):
        scene.driver.join(Claim(learner), LAYOUT, answers.append)
    for effect in ("put", "close", "close", "answer", "put", "put", "swap", "answer", "answer"):
        scene.next(effect)
    assert [each[0] for each in scene.todo] == ["answer"]
    assert scene.alarm.at_s > scene.now  # for what waits, the end of the commit is the event
    assert (scene.driver.state.versions, answers) == ((0, 0), [])
    scene.next()
    assert answers == [1]
    num_swaps = len(scene.place.history)
    scene.settle()
    assert (scene.driver.state.versions, answers) == ((1, 1), [1, 1, 1])
    assert len(scene.place.history) == num_swaps + 1
    saved = scene.saved()
    assert saved is not None
    assert saved.record is not None
    assert set(saved.record["members"]) == {"a", "b", "c", "d", "e"}


def test_a_round_without_a_usable_result_costs_its_own_contributions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sums, "most", 10)
    scene = started("a", "b")
    line = scene.listen("a")
    for learner in ("a", "b"):
        scene.push(contribution(learner), payload=6)
    scene.settle()
    assert scene.driver.state.versions == (0, 0)
    assert [it.reason for it in line.heard[-1].verdicts] == [NOT_FINITE]
    assert scene.spool.held_bytes == 0
    for learner in ("a", "b"):
        scene.push(contribution(learner, 2, round_=0, step=6))
    scene.settle()
    assert scene.driver.state.versions == (1, 0)


def test_an_update_is_kept_until_every_learner_has_sent_work_on_its_version() -> None:
    scene = started("a", "b")
    for learner in ("a", "b"):
        scene.push(contribution(learner))
    scene.settle()
    scene.push(contribution("a", 2))
    assert scene.driver.fetch(0, 0).payload is not None
    scene.push(contribution("b", 2))  # the round is closed, and the next version not yet durable
    assert scene.driver.state.versions == (1, 0)
    assert scene.driver.fetch(0, 0).payload is None
    scene.settle()
    assert scene.driver.fetch(0, 1).payload is not None


def test_an_update_is_kept_for_a_learner_that_is_not_in_the_round() -> None:
    scene = started("a", "b")
    for learner in ("a", "b"):
        scene.push(contribution(learner))
    scene.settle()
    scene.join("c")
    for learner in ("a", "b"):
        scene.push(contribution(learner, 2))
    assert scene.driver.state.versions == (1, 0)
    assert scene.driver.fetch(0, 0).payload is not None


def test_a_stopped_driver_ends_what_is_under_way_and_begins_nothing() -> None:
    scene = started("a", "b")
    for learner in ("a", "b"):
        scene.push(contribution(learner))
    scene.driver.stop()
    for learner in ("a", "b"):
        scene.push(contribution(learner, fragment=1))
    assert scene.driver.is_busy
    scene.settle()
    assert not scene.driver.is_busy
    assert scene.driver.state.versions == (1, 0)
    line = scene.listen("a")
    scene.driver.end()
    assert line.has_ended


# --- pushes -----------------------------------------------------------------------------------------------------------


def test_a_push_is_admitted_before_room_is_made_for_it() -> None:
    scene = started("a", "b")
    good = contribution("a")
    for error, c, num_bytes, boot in (
        (StaleIncarnationError, replace(good, incarnation=2), NUM_BYTES, 1),
        (RestartedError, good, NUM_BYTES, 7),
        (PayloadError, replace(good, number=0), NUM_BYTES, 1),
        (PayloadError, replace(good, tokens=10**6), NUM_BYTES, 1),
        (LayoutError, replace(good, fragment=2), NUM_BYTES, 1),
        (LayoutError, replace(good, tensors=(0, 1)), NUM_BYTES, 1),
        (CorruptPayloadError, good, NUM_BYTES + 1, 1),
        (CorruptPayloadError, good, 0, 1),
        (CorruptPayloadError, replace(good, tensors=()), NUM_BYTES, 1),
        (LayoutError, replace(good, routed=(40, 0)), NUM_BYTES, 1),
        (LayoutError, replace(good, routed=()), NUM_BYTES, 1),
        (PayloadError, replace(good, routed=(MAX_TOKENS + 1,)), NUM_BYTES, 1),
    ):
        with pytest.raises(error):
            scene.driver.begin_push(c, num_bytes, boot=boot)
    assert scene.spool.held_bytes == 0
    assert scene.todo == []


def test_a_push_that_is_cut_or_not_finite_leaves_the_round_as_it_was() -> None:
    scene = started("a", "b")
    scene.driver.cut_push(scene.begin(contribution("a")))
    assert isinstance(scene.push(contribution("a"), payload=-1), NonFiniteError)
    assert scene.spool.held_bytes == 0
    assert scene.push(contribution("a")) is None
    assert scene.spool.held_bytes == NUM_BYTES


@pytest.mark.parametrize("idle", ["a", "ab"])
def test_a_learner_that_trains_nothing_of_a_fragment_contributes_without_bytes(idle: str) -> None:
    scene = started("a", "b")
    sent = {learner: contribution(learner) for learner in "ab"}
    sent |= {learner: replace(sent[learner], tensors=(), routed=(0,)) for learner in idle}
    for learner in "ab":
        for _ in range(2):  # the acknowledgement of the first one is lost
            assert scene.push(sent[learner], payload=learner not in idle) is None
    assert scene.spool.held_bytes == NUM_BYTES * (2 - len(idle))
    scene.settle()
    assert scene.driver.state.versions == (1, 0)
    assert scene.spool.held_bytes == 0
    for learner in "ab":
        ledger = scene.driver.core.accounting.accounts[learner].ledgers[0]
        assert ledger.merged == sent[learner].tokens


def test_a_push_that_comes_twice_counts_once() -> None:
    scene = started("a", "b")
    for _ in range(2):
        assert scene.push(contribution("a")) is None
    assert scene.spool.held_bytes == NUM_BYTES
    scene.push(contribution("b"))
    scene.settle()
    assert scene.push(contribution("a")) is None  # once more, after its version
    scene.settle()
    assert scene.spool.held_bytes == 0
    assert scene.driver.fetch(0, base=0).held == Number(1, 2)
    assert scene.driver.status()["fragments"][0]["ledger"]["merged"] == 40


def test_a_contribution_that_comes_while_its_round_is_closed_is_rejected_with_the_version() -> None:
    scene = started("a", "b")
    scene.join("c")
    for learner in ("a", "b"):
        scene.push(contribution(learner))
    scene.beat("c", 1)
    line = scene.listen("c")
    assert scene.push(contribution("c")) is None
    scene.settle()
    assert [(it.number, it.reason) for it in line.heard[-1].verdicts] == [(1, MISSED)]
    assert scene.spool.held_bytes == 0


def test_a_push_whose_incarnation_ends_while_it_is_checked_is_refused() -> None:
    scene, answers = started("a", "b"), list[Any]()
    scene.driver.complete_push(scene.begin(contribution("a")), answers.append)
    scene.driver.join(Claim("a"), LAYOUT, answers.append)
    scene.settle()
    assert isinstance(answers[0], StaleIncarnationError)
    assert answers[1] == 2
    assert scene.spool.held_bytes == 0


def test_a_contribution_that_finds_no_room_is_taken_later() -> None:
    scene = started("a", "b")
    scene.spool.budget_bytes = NUM_BYTES
    scene.push(contribution("a"))
    with pytest.raises(NoRoomError):
        scene.begin(contribution("b", fragment=1))
    assert "no room" in str(scene.driver.status()["waits_for"])
    scene.wait(6.0)
    assert scene.driver.status()["waits_for"] is None


def test_a_learner_that_had_finished_before_a_restart_may_still_send_what_the_driver_lacks() -> None:
    """Its first heartbeat names the driver it knows; a round closed without it would reject its last contribution."""
    scene = started("a", "b", method=scheduled(at_least=1))
    scene.push(contribution("a"))
    scene.beat("a", 4, finished=True)
    scene.settle()
    scene.restart()
    scene.beat("a", 4, finished=True, seen=replace(scene.driver.lineage, epoch=1))
    assert scene.push(contribution("b")) is None
    scene.settle()
    assert scene.driver.state.versions == (0, 0)
    assert scene.push(contribution("a")) is None
    scene.settle()
    assert scene.driver.state.versions == (1, 0)
    assert [(it.number, it.reason) for it in scene.driver.core.standing("a").verdicts] == [(1, None)]


# --- a store that refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["put", "swap"])
def test_a_version_waits_for_a_store_that_refuses_and_nothing_is_lost(what: str) -> None:
    scene = started("a", "b")
    scene.refuse = lambda at: at == what
    for learner in ("a", "b"):
        scene.push(contribution(learner))
    scene.settle()
    for learner in ("a", "b"):  # meanwhile work on the next fragment is taken, and signs of life are heard
        scene.push(contribution(learner, fragment=1))
        assert scene.beat(learner, 4).versions == (0, 0)
    scene.settle()
    assert not scene.driver.is_busy
    scene.wait(3 * RETRY_S)
    assert scene.driver.state.versions == (0, 0)
    scene.refuse = lambda _: False
    scene.wait(RETRY_S)
    assert scene.driver.state.versions == (1, 1)
    assert scene.said == (
        ["the manifest"] if what == "swap" else ["version 1 of fragment 0", "version 1 of fragment 1"]
    )
    assert [ledger["merged"] for ledger in _ledgers(scene)] == [40, 80]


def test_a_join_waits_for_a_store_that_refuses() -> None:
    scene, answers = started("a"), list[int]()
    scene.refuse = lambda _: True
    scene.driver.join(Claim("b"), LAYOUT, answers.append)
    scene.settle()
    scene.wait(2 * RETRY_S)
    assert answers == []
    scene.refuse = lambda _: False
    scene.wait(RETRY_S)
    assert answers == [1]


def test_a_full_disk_that_takes_a_record_lets_a_learner_join() -> None:
    """A version does not fit; what is small is not held up by it."""
    scene, answers = started("a", "b"), list[int]()
    for learner in ("a", "b"):
        scene.push(contribution(learner))
    scene.next("close")
    scene.refuse = lambda at: at == "put"
    scene.next("put")
    scene.refuse = lambda _: False
    scene.next("answer")
    scene.driver.join(Claim("c"), LAYOUT, answers.append)
    scene.settle()
    assert (answers, scene.driver.state.versions) == ([1], (0, 0))
    scene.wait(RETRY_S)
    assert scene.driver.state.versions == (1, 0)
    scene.restart()
    assert "c" in scene.driver.core.members


def test_a_run_that_could_not_begin_begins_later() -> None:
    scene = Scene()
    scene.refuse = lambda _: True
    assert isinstance(scene.initialise(), StoreError)
    assert not scene.driver.state.is_initialised
    scene.refuse = lambda _: False
    assert scene.initialise() is None
    with pytest.raises(AlreadyInitialisedError):
        scene.initialise()


def test_a_stop_does_not_wait_for_a_model_that_the_store_refuses() -> None:
    scene, answers = Scene(), list[Any]()
    scene.refuse = lambda what: what == "swap"
    model = InitialModel(LAYOUT, (Number(0, 0), Number(0, 0)), b"", "a", "test", RUN_ID)
    scene.driver.initialise(model, answers.append)
    for effect in ("put", "answer", "swap"):
        assert scene.driver.is_busy
        scene.next(effect)
    scene.next("answer")
    assert (scene.driver.is_busy, answers) == (False, [])
    scene.refuse = lambda _: False
    scene.now += RETRY_S
    scene.store.tick()
    scene.settle()
    assert (scene.driver.is_busy, answers) == (False, [None])


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_fenced_syncer_puts_objects_in_its_own_epoch_only(is_gone: bool) -> None:
    """A round is closed after its fence."""
    scene = started("a", "b")
    [epoch] = {epoch_of(name) for name in scene.place.objects}
    found, manifest = scene.place.found, scene.place.manifest
    assert found is not None
    assert manifest is not None
    scene.place.swap(replace(manifest, epoch=epoch + 1, boot=7, serial=manifest.serial + 1).to_bytes(), found.token)
    if is_gone:
        scene.place.found = None
    answers = list[int]()
    scene.driver.join(Claim("c"), LAYOUT, answers.append)
    scene.settle()
    assert (scene.store.publisher.standing, answers) == ("fenced", [])
    for learner in ("a", "b"):
        scene.push(contribution(learner))
    before = len(scene.place.objects)
    scene.settle()
    assert len(scene.place.objects) > before
    assert {epoch_of(name) for name in scene.place.objects} == {epoch}


def test_of_two_that_initialise_at_once_one_does() -> None:
    for is_refused in (False, True):
        scene, answers = Scene(), list[Any]()
        tries = iter([is_refused])
        scene.refuse = lambda what, tries=tries: what == "put" and next(tries, False)  # type: ignore[misc]
        for value in (1, 2):
            model = InitialModel(LAYOUT, (Number(0, value), Number(0, value)), b"", "a", "test", RUN_ID)
            scene.driver.initialise(model, answers.append)
        scene.settle()
        assert [type(answer) for answer in answers] == (
            [StoreError, type(None)] if is_refused else [type(None), AlreadyInitialisedError]
        )
        assert scene.driver.state.model.held(0).value == (2 if is_refused else 1)


# --- killed between two effects ---------------------------------------------------------------------------------------

NUM_ROUNDS = 3


def _play(kills: set[int]) -> tuple[Scene, list[Player]]:
    """Two learners make their contributions; the driver is killed after these effects, counted from 1."""
    scene = Scene()
    assert scene.initialise() is None
    scene.done.clear()
    players = [Player(scene, name, NUM_ROUNDS) for name in ("a", "b")]
    seen: dict[tuple[int, int], str] = {}
    for _ in range(1000):
        for player in players:
            player.act()
        for index, version in enumerate(
            scene.driver.state.versions
        ):  # a version that was seen never changes, and never goes
            assert seen.setdefault((index, version), scene.driver.state.model.held(index).digest) == (
                scene.driver.state.model.held(index).digest
            )
            assert version == max(each[1] for each in seen if each[0] == index)
        if all(player.has_finished for player in players) and not scene.todo:
            return scene, players
        scene.next()
        if len(scene.done) in kills:
            scene.restart()
    raise AssertionError(f"they do not finish: {scene.driver.status()}")


def _ledgers(scene: Scene) -> list[dict[str, Any]]:
    return [fragment["ledger"] for fragment in scene.driver.status()["fragments"]]


NUM_EFFECTS = len(_play(set())[0].done)


@pytest.mark.parametrize("second", [None, 1, 2, 5])
def test_killed_between_any_two_effects_it_goes_on(second: int | None) -> None:
    """And killed a second time, a few effects later. Each contribution is merged once, whatever was under way."""
    assert NUM_EFFECTS > 20
    for first in range(1, NUM_EFFECTS + 1):
        scene, players = _play({first} if second is None else {first, first + second})
        assert scene.boot == (2 if second is None else 3) or first + (second or 0) > NUM_EFFECTS
        assert scene.driver.state.versions == (NUM_ROUNDS, NUM_ROUNDS)
        assert [scene.driver.state.model.held(index) for index in (0, 1)] == [Number(NUM_ROUNDS, 2 * NUM_ROUNDS)] * 2
        for player in players:
            assert sorted(player.merged) == [(f, n) for f in (0, 1) for n in range(1, NUM_ROUNDS + 1)]
        last = contribution("a", NUM_ROUNDS, 0).tokens
        assert [ledger["merged"] for ledger in _ledgers(scene)] == [
            2 * (contribution("a", 1, fragment).tokens + (NUM_ROUNDS - 1) * last) for fragment in (0, 1)
        ]


def test_a_join_that_was_answered_survives_a_kill() -> None:
    scene = started("a")
    scene.restart()
    assert scene.beat("a", 2).versions == (0, 0)
    scene.driver.join(Claim("b"), LAYOUT, lambda _: None)
    for effect in ("put", "answer", "swap"):  # durable, and killed before it could be said
        scene.next(effect)
    scene.restart()
    assert scene.driver.core.members.keys() == {"a", "b"}
    assert scene.join("b") == 2  # its number is never given again
    scene.driver.leave(Claim("a", 1), Report(tokens=20), lambda: None)
    scene.settle()
    scene.restart()
    assert scene.driver.core.members.keys() == {"b"}


def test_what_is_merged_and_not_stored_is_sent_again_after_a_kill() -> None:
    scene = started("a", "b")
    for learner in ("a", "b"):
        scene.push(contribution(learner))
    scene.next("close")
    scene.restart()
    assert scene.driver.state.versions == (0, 0)
    assert scene.beat("a", 2).verdicts == ()
    for learner in ("a", "b"):
        scene.push(contribution(learner))
    scene.settle()
    assert scene.driver.state.versions == (1, 0)
    assert _ledgers(scene)[0]["merged"] == 40


def test_what_is_stored_and_not_published_is_said_after_a_kill() -> None:
    scene = started("a", "b")
    for learner in ("a", "b"):
        scene.push(contribution(learner))
    for effect in ("close", "put", "answer", "put", "answer", "swap"):
        scene.next(effect)
    scene.restart()
    line = scene.listen("a")
    assert line.heard[0].versions == (1, 0)
    assert [(it.number, it.reason) for it in line.heard[0].verdicts] == [(1, None)]
    assert scene.push(contribution("a")) is None  # its answer was lost, so it comes again
    scene.settle()
    assert _ledgers(scene)[0]["merged"] == 40


def test_another_run_or_method_is_not_continued() -> None:
    scene = started("a")
    scene.method = scheduled(at_least=1)
    with pytest.raises(AlreadyInitialisedError, match="another method"):
        scene.restart()
    scene.method = scheduled()
    assert scene.place.found is not None
    assert scene.place.manifest is not None
    other = replace(scene.place.manifest, run="other")
    scene.place.found = replace(scene.place.found, data=other.to_bytes())
    with pytest.raises(UnknownRunError, match="'other'"):
        scene.restart()


# --- members ----------------------------------------------------------------------------------------------------------


def test_only_a_run_with_a_model_can_be_joined_and_only_with_its_model() -> None:
    scene = Scene()
    with pytest.raises(NotInitialisedError):
        scene.join("a")
    with pytest.raises(StaleIncarnationError, match="no model yet; join again"):  # of another syncer
        scene.beat("a", 1, seen=None)
    scene.initialise()
    other = Layout((place(0, [TensorSpec("w0", (3,), "float32")]),), ())
    with pytest.raises(LayoutError, match="does not hold the run's model"):
        scene.driver.join(Claim("a"), other, lambda _: None)
    unfit = Scene(diloco.StreamingDiLoCo(sync_every=4, overlap=1, offsets=[1, 2, 3]))
    with pytest.raises(LayoutError, match="cannot train"):
        unfit.initialise()


def test_a_name_is_not_taken_back_from_a_newer_process() -> None:
    scene, answers = started(), list[int]()
    for process in (1, 2):
        scene.driver.join(Claim("a", process=process), LAYOUT, answers.append)
        scene.settle()
    with pytest.raises(StaleIncarnationError, match="another process"):
        scene.driver.join(Claim("a", incarnation=1, process=1), LAYOUT, answers.append)
    assert answers == [1, 2]


def test_a_process_that_a_run_which_has_gone_back_does_not_know_joins_again() -> None:
    """It was incarnation 3, and the record that was repaired, or restored, knows an earlier process and 1."""
    scene, answers = started(), list[int]()
    scene.driver.join(Claim("a", process=1), LAYOUT, answers.append)
    scene.driver.join(Claim("a", incarnation=3, process=3), LAYOUT, answers.append)
    scene.driver.join(
        Claim("b", incarnation=5, process=4), LAYOUT, answers.append
    )  # by a name that is not in the record
    scene.settle()
    scene.beat("a", 2, incarnation=4, earlier_tokens=70, process=3)
    assert answers == [1, 4, 6]
    account = scene.driver.core.accounting.accounts["a"]
    assert (account.ledgers[0].trained, account.ledgers[0].lost) == (90, 70)
    for process, after in ((1, 1), (2, 2), (2, 3)):
        with pytest.raises(StaleIncarnationError, match="another process"):
            scene.driver.join(Claim("a", incarnation=after, process=process), LAYOUT, answers.append)


ASK = Ask(1, 5, DataSet(40, 0, "d"))
OF_A_PROCESS: dict[str, Callable[[Scene, int], object]] = {
    "beats": lambda scene, process: scene.beat("a", 2, incarnation=2, process=process),
    "listens": lambda scene, process: scene.driver.connected(Claim("a", 2, process=process), Line()),
    "leases": lambda scene, process: scene.driver.lease(Claim("a", 2, process=process), ASK, lambda _: None),
    "pushes": lambda scene, process: scene.begin(contribution("a", incarnation=2), process=process),
    "fetches": lambda scene, process: scene.driver.fetch(0, -1, Claim("a", 2, process=process)),
    "fetches what is static": lambda scene, process: scene.driver.core.check("a", 2, process),
    "leaves": lambda scene, process: scene.driver.leave(Claim("a", 2, process=process), Report(tokens=0), lambda: None),
}


@pytest.mark.parametrize("does", OF_A_PROCESS)
def test_a_number_of_an_incarnation_is_of_one_process(does: str) -> None:
    """A run that has gone back gives 2 to process 3, and does not know that it was another one's."""
    scene = started("a")
    scene.driver.join(Claim("a", process=3), LAYOUT, lambda _: None)
    scene.settle()
    for process in (1, 0):
        with pytest.raises(StaleIncarnationError, match="incarnation 2 of learner 'a' is not part of the run"):
            OF_A_PROCESS[does](scene, process)
    with nullcontext() if not does.startswith("shares") else pytest.raises(PayloadError, match="was not asked"):
        OF_A_PROCESS[does](scene, 3)


@pytest.mark.parametrize("after", [-1, 2**20 + 1])
def test_an_incarnation_that_cannot_be_is_refused(after: int) -> None:
    with pytest.raises(PayloadError, match="'a' was never incarnation"):
        started().driver.join(Claim("a", incarnation=after, process=1), LAYOUT, lambda _: None)


@pytest.mark.parametrize("is_gone", [False, True], ids=["present", "gone"])
def test_a_restarted_syncer_knows_the_newest_process_of_a_name(is_gone: bool) -> None:
    scene = started()
    for process in (1, 2**64 - 1):
        scene.driver.join(Claim("a", process=process), LAYOUT, lambda _: None)
    scene.settle()
    if is_gone:
        scene.driver.leave(Claim("a", 2, process=2**64 - 1), Report(tokens=0), lambda: None)
        scene.settle()
    scene.restart()
    with pytest.raises(StaleIncarnationError, match="another process"):
        scene.driver.join(Claim("a", incarnation=1, process=1), LAYOUT, lambda _: None)
    scene.driver.join(Claim("a", incarnation=2, process=2**64 - 1), LAYOUT, lambda _: None)
    scene.settle()
    assert scene.driver.core.accounting.accounts["a"].incarnation == 3


def test_a_late_goodbye_is_answered_once_its_tokens_are_durable() -> None:
    scene, answers = started(), list[str]()
    for process in (7, 7):
        scene.driver.join(Claim("a", process=process), LAYOUT, lambda _: None)
        scene.settle()
    scene.beat("a", 1, incarnation=2, tokens=10, earlier_tokens=40, process=7)
    with pytest.raises(StaleIncarnationError):
        scene.driver.leave(Claim("a", 1, process=7), Report(tokens=30), lambda: None)
    scene.driver.leave(
        Claim("a", 0, process=7), Report(tokens=0, earlier_tokens=50, step=12), lambda: answers.append("gone")
    )
    assert scene.driver.core.accounting.accounts["a"].ended_at == 12
    assert answers == []
    scene.settle()
    assert answers == ["gone"]
    scene.restart()
    [ledger, _] = scene.driver.core.accounting.accounts["a"].ledgers
    assert ledger.as_dict() == {"trained": 50, "pending": 0, "merged": 0, "lost": 40, "discarded": {UNMERGED: 10}}
    with pytest.raises(StaleIncarnationError, match="not known as learner"):
        scene.driver.leave(Claim("a", 0, process=8), Report(tokens=30), lambda: None)


def test_a_goodbye_says_where_it_ends_since_heartbeats_may_be_from_before_a_restart() -> None:
    """Learners that end at a round's step count for it; otherwise the others would wait for ever."""
    scene = started("a", "b", "c", method=scheduled(at_least=3), deadlines=Deadlines())
    for learner in "abc":
        scene.beat(learner, 1)
    scene.restart()
    for learner in "ab":
        scene.push(contribution(learner))
    scene.driver.leave(Claim("c", 1), Report(tokens=110, step=11), lambda: None)
    scene.settle()
    assert scene.driver.state.versions == (1, 0)


def test_an_evicted_learner_is_told_and_its_round_goes_on() -> None:
    scene = started("a", "b", method=scheduled(at_least=1), deadlines=Deadlines())
    lines: dict[str, Line] = {learner: scene.listen(learner) for learner in ("a", "b")}
    scene.push(contribution("a"))
    scene.settle()
    for second in range(2, 30):
        scene.wait(1.0)
        scene.beat("a", 2, waiting=True)
        if second == 10:
            assert scene.driver.state.versions == (0, 0)
    scene.settle()
    assert lines["b"].evicted_for is not None
    assert (lines["a"].has_ended, lines["b"].has_ended) == (False, True)
    assert scene.driver.state.versions == (1, 0)
    assert lines["a"].heard[-1].versions == (1, 0)


def test_a_process_that_stood_still_evicts_no_learner_for_it() -> None:
    scene = started("a", deadlines=Deadlines())
    scene.now += 500.0
    scene.driver.tick(late_s=500.0)
    assert scene.driver.core.members.keys() == {"a"}
    scene.now += 500.0
    scene.driver.tick()
    assert not scene.driver.core.members


def test_learners_that_listen_or_train_are_live_until_they_have_finished() -> None:
    scene = started("a", "b")
    assert scene.join("c") == 1
    assert scene.beat("a", 2).num_live == 2
    scene.listen("c")
    assert scene.beat("a", 2).num_live == 3
    assert scene.beat("b", 2, finished=True).num_live == 2


class Broken(NullObserver):
    def published(self, *_: Any) -> None:
        raise ArithmeticError("a defect")

    def merged(self, *_: Any) -> None:
        raise ArithmeticError("a defect")


def test_a_defect_in_what_observes_stops_nothing() -> None:
    scene = started("a", "b", observer=Broken())
    for learner in ("a", "b"):
        scene.push(contribution(learner))
    scene.settle()
    assert scene.driver.state.versions == (1, 0)


def test_a_spool_counts_what_it_holds() -> None:
    spool = LimitedSpool(10)
    slot = spool.allocate(8)
    with pytest.raises(NoRoomError):
        spool.allocate(8)
    spool.release(slot)
    assert spool.held_bytes == 0
