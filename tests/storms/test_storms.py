"""Whole runs in virtual time, in which all goes wrong that can: seeds of each kind, and those that once found a
defect. `make storm` runs as many as wanted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from tests.chaos.versions import BrokenInvariantError
from tests.run.simulated import Place
from tests.storms.defects import (
    DEALT,
    DEFECTS,
    HELD,
    Defect,
    forgets_that_it_was_merged,
    merges_what_is_not_trained,
    never_sends_again,
    saves_nothing_of_learners,
    trains_what_its_last_process_trained,
)
from tests.storms.plans import OLDER_COPY, STORE_FAULTS, Kind, plan_of
from tests.storms.runs import failures, firsts, quiet, run, run_seed, shortest
from tests.storms.store_defects import ONE
from tests.storms.world import Storm

from diloco.core.adopt import ADOPTIONS
from diloco.core.merges import MERGES, SCREENS
from diloco.core.quorum import QUORUMS, Called, Quorum
from diloco.protocol.contribution import Contribution
from diloco.protocol.leases import Leases
from diloco.run.driver import Driver

FOUND = {
    43: "a session that leaves was woken endlessly at the time when its syncer becomes silent, to the bit",
    81: "the same",
    59: "learners that push several fragments at paces of their own, and wait, waited for each other for good",
    377: "the same, after a restart under the same name",
    3322: "learners in a circle of scheduled rounds were not seen to be in one where another learner was behind them",
    2027: "the last rounds of learners that count steps behind the others lacked those that had ended",
    2529: "the same, after a torn write",
    1581: "a contribution that was dropped after its learner had left stayed pending for good",
    2636: "a joiner started behind the second of two open rounds, which then lacked a learner",
    10080: "work was given back as dropped that its learner had discarded with the adoption of the round's version",
    30492: "a learner that a round waited for waited itself at its start for learners that had finished",
    30659: "the same; and a learner whose heartbeat was late left without its last contribution",
    50701: "a fragment that rose faster than it was fetched kept all other fetches waiting",
    110376: "learners of which each was behind in another fragment waited for each other for good",
    116758: "the storm did not count a message that arrived once more among those heard of a learner",
    120368: "learners waited for each other in rounds that lacked learners, after a restart that lost a contribution",
    122683: "a connection that broke after a silence gave its learner more time than the silence would have",
    10874: "with late='drop' a learner pushed again before it adopted, so that all its pushes were late",
    2646: "a goodbye of an incarnation whose eviction was not durable counted its tokens twice",
    261: "an older copy of the state evicted a learner that does not follow it, and took its goodbye",
}
"""Seeds that found a defect."""

FOUND_WITH_HELD_PARTS = {
    46: "tokens that a process reported late were lost in what another one of its name had held",
    316: "learners that hold parts were not seen to wait in a circle, since they say 0 of what they do not hold",
}
"""Likewise."""

FOUND_WITH_DEALT_PARTS = {
    161: "a learner that does not wait kept other experts than it was dealt, since not all was ever sent at once",
    625: "the same of pushes that wait and are rejected",
    2321: "a group whose only holder was not yet back after going back was dealt to nobody until the next event",
    12021: "a syncer that began again without its record took the next turn for the first",
    30629: "a learner whose heartbeat was late said goodbye to a syncer that waits",
    32851: "the same",
}
"""Likewise."""


@pytest.mark.parametrize("first", firsts(1000, 100, 10, 10))
def test_storms(first: int) -> None:
    assert [str(each) for each in failures(range(first, first + 10)) if each is not None] == []


@pytest.mark.parametrize("first", firsts(5000, 25, 5, 5))
def test_storms_with_leased_data(first: int) -> None:
    found = failures(range(first, first + 5), leased=True)
    assert [str(each) for each in found if each is not None] == []


@pytest.mark.parametrize("first", firsts(7000, 25, 5, 5))
def test_storms_with_orders(first: int) -> None:
    found = failures(range(first, first + 5), steered=True)
    assert [str(each) for each in found if each is not None] == []


@pytest.mark.parametrize("seed", FOUND)
def test_seeds_that_found_a_defect(seed: int) -> None:
    with quiet():
        assert run_seed(seed) is None


def test_a_seed_with_leased_data_that_found_a_defect() -> None:
    """A learner that came back from a checkpoint answered a call before it knew which of its units are its own."""
    with quiet():
        assert run_seed(62, leased=True) is None


def test_a_storm_is_the_same_each_time() -> None:
    def once() -> tuple[float, int, dict[Any, Any]]:
        storm = Storm(plan_of(7))
        storm.run()
        return storm.now_s, storm.num_events, dict(storm.ledger.versions.digests)

    with quiet():
        assert once() == once()


def test_seeds_differ_in_all_that_is_drawn() -> None:
    plans = [plan_of(seed) for seed in range(300)]
    assert {type(plan.method.quorum) for plan in plans} == set(QUORUMS)
    assert {type(plan.method.merge) for plan in plans} == set(MERGES)
    assert {type(plan.method.adopt) for plan in plans} == set(ADOPTIONS)
    assert {type(plan.method.screen) for plan in plans} == {*SCREENS, type(None)}
    for name in ("up", "down", "outer", "outer_at", "partial", "weight", "wait", "error_feedback"):
        assert len({str(getattr(plan.method, name)) for plan in plans}) > 1
    assert sum(len(set(plan.overlaps)) > 1 for plan in plans) > 20
    assert sum(len(set(plan.trains)) > 1 for plan in plans) > 20
    assert {fault.kind for plan in plans for fault in plan.faults} == {*get_args(Kind), *STORE_FAULTS, OLDER_COPY}
    assert {plan.lease_s < math.inf for plan in plans} == {True, False}
    assert {plan.spool_fits for plan in plans} == {None, 1, 2, 3}
    assert len({plan.repeats for plan in plans}) == 2


@pytest.mark.timeout(900)  # processor time, where a change of the storms has moved the seed that finds it
@pytest.mark.parametrize(("break_it", "first"), DEFECTS.items())
def test_a_defect_is_found(break_it: Defect, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with quiet():
        if not any(run(each, each.faults) for each in map(plan_of, range(first, first + 400))):
            pytest.fail("no storm has found it")


@pytest.mark.parametrize(("break_it", "first"), ONE.items())
def test_a_defect_between_a_syncer_and_its_store_is_found(
    break_it: Defect, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with quiet():
        if not any(run(each, each.faults) for each in map(plan_of, range(first, first + 50))):
            pytest.fail("no storm has found it")


@pytest.mark.parametrize(
    "break_it",
    [
        pytest.param(forgets_that_it_was_merged, marks=pytest.mark.slow),
        pytest.param(never_sends_again, marks=pytest.mark.slow),
        pytest.param(saves_nothing_of_learners, marks=pytest.mark.slow),
    ],
)
def test_the_faults_that_a_defect_needs_are_few(break_it: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with quiet():
        for seed in range(200):
            plan = plan_of(seed)
            failure = run(plan, plan.faults)
            if failure is not None and len(plan.faults) > 2 and len(shortest(failure).faults) < len(plan.faults):
                break
        else:
            pytest.fail("no storm needs fewer")
        few = shortest(failure)
        again = run(plan, few.faults)
    assert again is not None
    assert str(again) == str(few)
    assert f"python -m tests.storms {seed} --faults" in str(few)


def test_what_storms_require_can_fail() -> None:
    storm = Storm(plan_of(7))
    with quiet():
        storm.run()
        held = storm.learners[0].processes[-1].client.held[0]
        assert held is not None
        held.theta.add_(torch.ones_like(held.theta))
    with pytest.raises(BrokenInvariantError, match="other bits"):
        storm.ledger.held("learner-0", held)
    assert storm.driver is not None
    shown = storm.driver.state.model.held(0)
    with pytest.raises(BrokenInvariantError, match="is shown and not durable with these bits"):
        storm.ledger.shown(replace(shown, version=10**6), storm.nodes[0].epoch, 0)
    with pytest.raises(BrokenInvariantError, match=r"is shown in epoch 10\d*, and was published in epoch"):
        storm.ledger.shown(shown, 10**6, 0)
    manifest = storm.place.manifest
    assert manifest is not None
    named = sorted(manifest.names)
    with pytest.raises(BrokenInvariantError, match="are deleted, and named by the manifest"):
        Place.delete(storm.place, named)
    with pytest.raises(BrokenInvariantError, match="is deleted before it is named"):
        storm.place.delete([f"{manifest.epoch}/99-{'0' * 64}"])
    storm.place._unnamed_s[named[0]] = storm.now_s
    with pytest.raises(BrokenInvariantError, match="is deleted, and was named 0.0 s ago"):
        storm.place.delete(named[:1])
    assert storm.place.found is not None
    for changes, says in (
        ({"serial": manifest.serial + 2}, "follows"),
        ({"epoch": manifest.epoch + 2, "boot": 99}, "is claimed after"),
        ({"epoch": manifest.epoch + 1}, "without a claim"),
        ({"fragments": tuple(each[:1] for each in manifest.fragments)}, "without a record"),
        ({"record": f"{manifest.epoch}/99-{'0' * 64}"}, "which are not there"),
    ):
        other = replace(manifest, **{"serial": manifest.serial + 1, **changes})
        with pytest.raises(BrokenInvariantError, match=says):
            storm.place.swap(other.to_bytes(), storm.place.found.token)
        storm.place.history.append(manifest)


@pytest.mark.parametrize("first", firsts(9000, 25, 5, 5))
def test_storms_with_parts(first: int) -> None:
    found = failures(range(first, first + 5), parts=True)
    assert [str(each) for each in found if each is not None] == []


def test_seeds_differ_in_the_parts_that_learners_train() -> None:
    plans = [plan_of(seed, parts=True) for seed in range(200)]
    trained = [own for plan in plans for learner in plan.trains for own in learner]
    assert {own is None for own in trained} == {own == () for own in trained} == {True, False}
    assert any(own and own is not None for own in trained)
    assert {plan.method.fragments.multiples(1)[0] for plan in plans} == {1, 2, 3}
    assert {type(plan.method.quorum) for plan in plans} == set(QUORUMS)
    for name in ("up", "down", "outer"):
        assert any(getattr(plan.method.for_fragment(0), name) != getattr(plan.method, name) for plan in plans)


@pytest.mark.parametrize("break_it", [merges_what_is_not_trained, trains_what_its_last_process_trained])
def test_a_defect_of_parts_is_found(break_it: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with quiet():
        for plan in (plan_of(seed, parts=True) for seed in range(100)):
            if run(plan, plan.faults) is not None:
                return
    pytest.fail("no storm has found it")


@pytest.mark.parametrize("first", firsts(11000, 20, 5, 5))
def test_storms_with_held_parts(first: int) -> None:
    found = failures(range(first, first + 5), held=True)
    assert [str(each) for each in found if each is not None] == []


@pytest.mark.parametrize("seed", FOUND_WITH_DEALT_PARTS)
def test_seeds_with_dealt_parts_that_found_a_defect(seed: int) -> None:
    with quiet():
        assert run_seed(seed, dealt=True) is None


@pytest.mark.parametrize("seed", FOUND_WITH_HELD_PARTS)
def test_seeds_with_held_parts_that_found_a_defect(seed: int) -> None:
    with quiet():
        assert run_seed(seed, held=True) is None


def test_seeds_differ_in_the_parts_that_learners_hold() -> None:
    plans = [plan_of(seed, held=True) for seed in range(200)]
    trunks = [{f for f, own in enumerate(plan.method.experts_of(plan.layout)) if not own} for plan in plans]
    assert all(trunk <= held for plan, trunk in zip(plans, trunks, strict=True) for held in plan.holds)
    firsts = [[plan.held_by(learner, 1) for learner in range(len(plan.step_s))] for plan in plans]
    at_first = [frozenset[int]().union(*(held or () for held in each)) for each in firsts]
    assert sum(len(held) < len(plan.sizes) for plan, held in zip(plans, at_first, strict=True)) > 50  # none holds one
    assert sum(plan.held_by(0, 1) != plan.held_by(0, 2) for plan in plans) > 50
    assert {type(plan.method.quorum) for plan in plans} == set(QUORUMS)
    for name in ("num_units", "standby", "goes_back", "steered"):
        assert {bool(getattr(plan, name)) for plan in plans} == {True, False}


@pytest.mark.parametrize(
    "quorum", [pytest.param(each, marks=[] if each is Called else [pytest.mark.slow]) for each in QUORUMS]
)
def test_a_fragment_without_a_holder_stays_as_it_was_until_a_late_one_takes_it_over(quorum: type[Quorum]) -> None:
    """Version 0 is the only one that there ever was of it; with the late holder it goes on from there."""
    plans = (replace(plan_of(seed, parts=True), faults=(), steps=100) for seed in range(100))
    plan = next(it for it in plans if len(it.step_s) == 2 and len(it.sizes) > 2 and type(it.method.quorum) is quorum)
    everything = frozenset(range(len(plan.sizes)))
    part = everything - {0}
    plan = replace(plan, holds=(part,), method=replace(plan.method, quorum=replace(plan.method.quorum, at_least=1)))
    for holds, starts_s, expected in (((part,), plan.starts_s, part), ((part, everything), (0.0, 10.0), everything)):
        storm = Storm(replace(plan, holds=holds, starts_s=starts_s))
        with quiet():
            storm.run()
        assert {fragment for fragment, version in storm.ledger.versions.digests if version > 0} == expected


@pytest.mark.parametrize(("break_it", "first"), HELD.items())
def test_a_defect_of_held_parts_is_found(break_it: Defect, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with quiet():
        if not any(run(each, each.faults) for each in (plan_of(seed, held=True) for seed in range(first, first + 60))):
            pytest.fail("no storm has found it")


@pytest.mark.parametrize("first", firsts(12000, 21, 3, 3))
def test_storms_with_dealt_parts(first: int) -> None:
    found = failures(range(first, first + 3), dealt=True)
    assert [str(each) for each in found if each is not None] == []


def test_seeds_differ_in_the_parts_that_are_dealt() -> None:
    plans = [plan_of(seed, dealt=True) for seed in range(200)]
    assert {plan.method.dealing[1] for plan in plans} == {1, 2}
    assert {plan.method.dealing[2] > 0 for plan in plans} == {True, False}
    assert {0 in plan.dealt for plan in plans} == {True, False}  # fixed sets beside them
    assert {type(plan.method.quorum) for plan in plans} == set(QUORUMS)


@pytest.mark.parametrize(("break_it", "first"), DEALT.items())
def test_a_defect_of_dealt_parts_is_found(break_it: Defect, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with quiet():
        if not any(run(each, each.faults) for each in (plan_of(seed, dealt=True) for seed in range(first, first + 60))):
            pytest.fail("no storm has found it")


def test_what_storms_with_held_parts_require_can_fail() -> None:
    storm = Storm(plan_of(1, parts=True))
    with quiet():
        storm.run()
    assert storm.driver is not None
    core, ledger = storm.driver.core, storm.ledger
    learner, account = next(iter(core.accounting.accounts.items()))
    c = Contribution(learner, account.incarnation, 0, 99, 0, 0, 1, 1, step=1)
    ledger.held_as[learner, account.incarnation] = frozenset({1})
    storm.accounts.sent(c, torch.empty(0))
    storm.accounts.contributed(c, 0)
    with pytest.raises(BrokenInvariantError, match=r"is acknowledged, and its learner holds \[1\]"):
        storm.accounts.take_events(0.0)
    ledger.held_by[account.process or 0] = frozenset({1})
    account.train(5)
    with pytest.raises(BrokenInvariantError, match=r"which holds \[1\], has trained"):
        storm.accounts.check(core)


def leases_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    lease = Driver.lease

    def at_once(self: Driver[Any, Any, Any], learner: str, incarnation: int, ask: Any, done: Any, **seen: Any) -> None:
        lease(self, learner, incarnation, ask, lambda grant: None, **seen)
        done(self.core.leases.leases[learner, incarnation].grant)

    patch.setattr(Driver, "lease", at_once)


def forgets_whom_it_leased_to(patch: pytest.MonkeyPatch) -> None:
    saved = Leases.saved

    def lost(self: Leases, *decided: Any) -> Any:
        record = saved(self, *decided)
        return record and {**record, "frontier": self.frontier - 1 if self.frontier else 0}

    patch.setattr(Leases, "saved", lost)


def returns_what_is_acknowledged(patch: pytest.MonkeyPatch) -> None:
    ended = Leases.ended
    patch.setattr(Leases, "ended", lambda self, learner, incarnation, _: ended(self, learner, incarnation, ()))


@pytest.mark.parametrize(
    "break_it", [leases_before_it_is_durable, forgets_whom_it_leased_to, returns_what_is_acknowledged]
)
def test_a_defect_of_leases_is_found(break_it: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with quiet():
        for plan in (plan_of(seed, leased=True) for seed in range(300)):
            if run(plan, plan.faults) is not None:
                return
    pytest.fail("no storm has found it")
