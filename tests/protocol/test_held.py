"""Learners that hold parts of the fragments, by scripted events in virtual time: K, scale, deadlines, a fragment that
none holds, leases and the accounting. Fragments 0 and 1 are groups of experts, 2 is the trunk."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tests.protocol.driving import kinds, ledger, only, publish, record, restarted, status_of

from diloco.core.fragments import Whole
from diloco.core.presets import DecoupledDiLoCo, DiLoCo
from diloco.core.quorum import AllLive, Called, Pushed, Quorum
from diloco.errors import PayloadError
from diloco.exchange.remote.messages import heartbeat_request
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.protocol.actions import Action, MergeRound
from diloco.protocol.contribution import LATE, NOTHING, OUT_OF_STEP, Contribution
from diloco.protocol.learner import LearnerCore
from diloco.protocol.leases import UNHELD, Ask, DataSet, Leases
from diloco.protocol.members import Claim, Report
from diloco.protocol.rounds.base import Rules
from diloco.protocol.session.requests import Beat
from diloco.protocol.syncer import SyncerCore
from diloco.protocol.unit_queue import UnitQueue
from diloco.protocol.units import MERGED, Ranges

FIRST, SECOND, BOTH = (0, 2), (1, 2), None
H = 4
DATA = DataSet(num_units=40, passes=0, digest="d")


class Run:
    """A SyncerCore of three fragments, and learners that train a token a step."""

    def __init__(self, quorum: Quorum, **changes: object) -> None:
        called = DecoupledDiLoCo(sync_every=H, fragments=Whole())
        preset = DiLoCo(sync_every=H) if isinstance(quorum, AllLive) else called
        method = replace(preset, quorum=quorum, weight="uniform", **{"overlap": 0, **changes})  # type: ignore[arg-type]
        self.core = SyncerCore(Rules.of(method, 3), [0, 0, 0])
        self.now = 0.0
        self.numbers = Counter[tuple[str, int, int]]()

    def join(self, learner: str, held: tuple[int, ...] | None, *, process: int = 1, step: int = 0) -> None:
        """It joins, and has trained a token by `step`; 0: it has not trained."""
        self.core.joined(self.now, learner, held=held, process=process)
        if step:
            self.beat(learner, step, steps=1)

    def beat(self, learner: str, step: int, *, steps: int | None = None, **values: object) -> list[Action]:
        steps = step if steps is None else steps
        report = Report(step, tokens=steps, step_s=1.0, steps=steps, **values)  # type: ignore[arg-type]
        return self.core.heartbeat(self.now, learner, self.incarnation(learner), report)

    def incarnation(self, learner: str) -> int:
        return self.core.accounting.incarnation_of(learner)

    def c(self, learner: str, fragment: int, step: int, *, steps: int = H, units: Ranges = ()) -> Contribution:
        """Its work of the last `steps`, measured from the newest version."""
        incarnation, version = self.incarnation(learner), self.core.fragments[fragment].version
        self.numbers[learner, incarnation, fragment] += 1
        number = self.numbers[learner, incarnation, fragment]
        return Contribution(
            learner, incarnation, fragment, number, version, version, steps, steps, step, step=step, units=units
        )

    def send(self, learner: str, fragment: int, step: int, **values: int) -> list[Action]:
        return self.core.contributed(self.now, self.c(learner, fragment, step, **values))  # type: ignore[arg-type]

    @property
    def versions(self) -> list[int]:
        return [state.version for state in self.core.fragments]

    def needed(self, fragment: int, *learners: str, step: int = H) -> int:
        """How many of these learners contribute before the fragment's round is closed; 0: it stays open."""
        for count, learner in enumerate(learners, start=1):
            if "MergeRound" in kinds(self.send(learner, fragment, step)):
                return count
        return 0


QUORUMS = [AllLive(at_least=3), Called(at_least=3, grace=0.0), Pushed(at_least=3)]


# --- K ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quorum", QUORUMS, ids=lambda it: type(it).__name__)
def test_a_round_needs_at_most_the_learners_that_hold_its_fragment(quorum: Quorum) -> None:
    for fragment, expected in ((0, 2), (1, 1), (2, 3)):
        run = Run(quorum)
        for learner, held in (("a", FIRST), ("b", FIRST), ("c", SECOND)):
            run.join(learner, held, step=1)
        for learner in "abc":
            run.beat(learner, H)
        holders = {0: "ab", 1: "c", 2: "abc"}[fragment]
        assert run.needed(fragment, *holders) == expected
        assert sorted(run.core.fragments[fragment].closing.members) == [*holders]  # type: ignore[union-attr]


def test_a_scheduled_round_counts_a_holder_before_its_first_step() -> None:
    """As it waits for a learner of which there may be more to come: the round would lack it for good otherwise."""
    run = Run(AllLive(at_least=2))
    run.join("a", FIRST, step=1)
    run.join("b", SECOND, step=1)
    run.join("c", FIRST)
    assert run.needed(0, "a") == 0
    assert run.core.decision(0.0, 0).reason == "1 of at least 2 learners have contributed"  # type: ignore[union-attr]
    assert run.core.standing("c").start_step < H  # so that its first contribution is to this round
    run.beat("c", 1)
    assert run.needed(0, "c") == 1


@pytest.mark.parametrize("quorum", QUORUMS[1:], ids=lambda it: type(it).__name__)
def test_another_round_waits_for_no_holder_before_its_first_step(quorum: Quorum) -> None:
    run = Run(quorum)
    run.join("a", FIRST, step=1)
    run.join("b", SECOND, step=1)
    run.join("c", FIRST)
    for learner in "ab":
        run.beat(learner, H)
    assert run.needed(0, "a") == 1


@pytest.mark.parametrize("quorum", QUORUMS, ids=lambda it: type(it).__name__)
def test_a_holder_that_has_finished_before_does_not_count(quorum: Quorum) -> None:
    run = Run(quorum)
    for learner, held in (("a", FIRST), ("b", SECOND), ("c", FIRST)):
        run.join(learner, held, step=1)
    run.beat("c", 2, finished=True)
    for learner in "ab":
        run.beat(learner, H)
    assert run.needed(0, "a") == 1


def test_where_all_that_are_there_hold_a_fragment_its_round_waits_for_more_learners() -> None:
    run = Run(AllLive(at_least=2))
    run.join("a", BOTH, step=1)
    assert run.needed(0, "a") == 0


def test_a_holder_that_comes_back_with_another_set_is_not_waited_for() -> None:
    run = Run(AllLive())
    run.join("a", FIRST, step=1)
    run.join("b", SECOND, step=1)
    run.join("c", FIRST, step=1)
    run.send("a", 0, H)
    run.join("c", SECOND, process=2, step=1)
    assert run.core.fragments[0].phase == "merging"
    assert run.core.fragments[0].closing.members == {"a"}  # type: ignore[union-attr]


# --- scale ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "quorum", [Called(at_least=1, grace=0.0), Pushed(at_least=1)], ids=lambda it: type(it).__name__
)
def test_a_partial_round_is_scaled_by_the_share_of_the_holders(quorum: Quorum) -> None:
    run = Run(quorum, partial="scale")
    for learner, held in (("a", FIRST), ("b", FIRST), ("c", SECOND), ("d", SECOND)):
        run.join(learner, held, step=1)
    for learner in "abcd":
        run.beat(learner, H)
    assert only(MergeRound, run.send("a", 0, H)).scale == 1 / 2
    assert only(MergeRound, run.send("a", 2, H)).scale == 1 / 4


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_a_learner_is_neither_waited_for_nor_evicted_for_a_fragment_that_it_does_not_hold() -> None:
    run = Run(AllLive())
    run.join("a", FIRST, step=1)
    run.join("b", SECOND, step=1)
    for round_ in range(100):
        run.now += 10.0
        for learner in "ab":
            run.beat(learner, H * (round_ + 1), steps=H * (round_ + 1))
        assert "MergeRound" in kinds(run.send("b", 1, H * (round_ + 1)))
        publish(run.core, run.now, 1)
        assert "Evict" not in kinds(run.core.tick(run.now))
    assert run.versions == [0, 100, 0]
    assert [*run.core.members] == ["a", "b"]


@pytest.mark.parametrize("quorum", QUORUMS, ids=lambda it: type(it).__name__)
def test_a_contribution_to_a_fragment_that_its_learner_does_not_hold_counts_for_nothing(quorum: Quorum) -> None:
    run = Run(quorum)
    run.join("a", FIRST, step=1)
    before = run.core.accounting.accounts["a"].as_dict()
    with pytest.raises(PayloadError, match="'a' contributes to fragment 1, which it does not hold"):
        run.send("a", 1, H)
    assert run.core.accounting.accounts["a"].as_dict() == before
    assert run.core.rounds.roster(1) == ((), ())


def test_learners_that_block_on_what_they_hold_are_seen_to_block() -> None:
    """Each waits in a round that lacks the other: a circle, which the versions of fragments that they lack do not
    hide."""
    run = Run(AllLive())
    run.join("a", FIRST, step=1)
    run.join("b", (0, 1, 2), step=1)
    member = run.core.members["a"]
    run.beat("a", H, waiting=True, blocked_with=(0, NOTHING, 0))
    assert member.is_blocked_at([0, 7, 0])
    assert not member.is_blocked_at([1, 7, 0])
    run.send("a", 2, 2 * H)
    run.send("b", 0, H)
    for learner, versions in (("a", (0, NOTHING, 0)), ("b", (0, 0, 0))):
        run.beat(learner, 2 * H, waiting=True, blocked_with=versions)
    assert [run.core.fragments[fragment].phase for fragment in (0, 2)] == ["merging", "open"]


def test_what_blocks_a_learner_crosses_the_wire() -> None:
    """A version that it does not hold is sent as 0, beside a run that is further."""
    run = Run(AllLive())
    run.join("a", FIRST, step=1)
    beat = Beat(Claim("a", incarnation=1), 1, 1.0, Report(H, H, 1.0, waiting=True, blocked_with=(0, NOTHING, 0)))
    request = pb.HeartbeatRequest.FromString(heartbeat_request("run", beat).SerializeToString())
    run.beat("a", H, waiting=True, blocked_with=tuple(request.blocked_with))
    assert run.core.members["a"].is_blocked_at([0, 7, 0])


# --- a fragment without a holder --------------------------------------------------------------------------------------


@pytest.mark.parametrize("quorum", [AllLive(), *QUORUMS[1:]], ids=lambda it: type(it).__name__)
def test_a_fragment_without_a_holder_stays_until_a_late_one_takes_it_over(quorum: Quorum) -> None:
    run = Run(quorum)
    run.join("a", FIRST, step=1)
    run.join("b", FIRST, step=1)

    def train(step: int, *learners: str) -> None:
        for learner in learners:
            run.beat(learner, step)
        for fragment in range(3):
            holders = [learner for learner in learners if run.core.members[learner].holds(fragment)]
            calls = {f for learner in holders for f, _ in run.core.standing(learner).calls}
            if isinstance(quorum, Called) and fragment not in calls:
                continue
            if run.needed(fragment, *holders, step=step):
                publish(run.core, run.now, fragment)

    for step in range(H, 6 * H, H):
        train(step, "a", "b")
    assert run.versions[0] == run.versions[2] > 3
    assert run.versions[1] == 0
    assert status_of(run.core, 0.0)["fragments"][1]["reason"] == "no live learner holds it"
    run.core = restarted(run.core, record(run.core)[0], run.now)
    assert status_of(run.core, 0.0)["fragments"][1]["reason"] == "no live learner holds it"
    run.join("c", SECOND, step=6 * H)
    assert status_of(run.core, 0.0)["fragments"][1]["reason"] != "no live learner holds it"
    for step in range(7 * H, 12 * H, H):
        train(step, "a", "b", "c")
    assert run.versions[1] > 2
    assert ledger(run.core, "a", 1).trained == ledger(run.core, "b", 1).trained == 0


@pytest.mark.parametrize("held", [SECOND, BOTH])
def test_a_late_holder_of_a_group_that_none_has_held_starts_where_the_run_is(held: tuple[int, ...] | None) -> None:
    run = Run(AllLive(at_least=2))
    for learner in "ac":
        run.join(learner, FIRST, step=1)
    for step in range(H, 100 * H, H):
        for learner in "ac":
            run.beat(learner, step)
        for fragment in (0, 2):
            assert run.needed(fragment, "a", "c", step=step) == 2
            publish(run.core, run.now, fragment)
    run.join("b", held)
    assert run.core.standing("b").start_step >= 99 * H - 1


def test_late_work_of_the_last_holder_is_merged_once_it_has_left() -> None:
    run = Run(Called(at_least=1, grace=0.0))
    for learner, held in (("a", FIRST), ("b", FIRST), ("c", SECOND)):
        run.join(learner, held, step=1)
    for learner in "abc":
        run.beat(learner, 2)
    run.send("a", 0, 2, steps=2)
    late = run.c("b", 0, 2, steps=2)
    run.core.contributed(run.now, late)  # while the round is merged
    publish(run.core, run.now, 0)
    for learner in "ab":
        run.core.left(run.now, learner, run.incarnation(learner), tokens=2)
    actions = [action for step in range(3, 4 * H) for action in run.beat("c", step)]
    merged = [it for it in actions if isinstance(it, MergeRound)]
    assert [it.contributions for it in merged if it.fragment == 0] == [(late,)]


def test_a_turn_that_no_learner_could_answer_is_not_called_for_a_late_holder() -> None:
    """The clock has gone on: a call for a holder's first step would have no work."""
    run = Run(Called(at_least=1, grace=0.0))
    run.join("a", FIRST, step=1)
    run.beat("a", 5 * H + 1)
    run.join("c", SECOND, step=5 * H + 1)
    assert run.core.standing("c").calls == ((2, 0),)  # the trunk, for which it is not late
    for step in range(5 * H + 2, 7 * H):
        for learner in "ac":
            run.beat(learner, step, steps=step - 5 * H)
    assert (1, 0) in run.core.standing("c").calls


# --- the accounting ---------------------------------------------------------------------------------------------------


def test_tokens_are_accounted_for_in_what_their_incarnation_held() -> None:
    run = Run(AllLive())
    run.join("a", FIRST, process=1)
    run.beat("a", 10)
    run.join("a", SECOND, process=2)
    run.beat("a", 30, steps=20)
    run.core = restarted(run.core, record(run.core)[0], run.now)
    assert [ledger(run.core, "a", fragment).trained for fragment in range(3)] == [10, 20, 30]
    assert [ledger(run.core, "a", fragment).lost for fragment in range(3)] == [10, 0, 10]
    assert run.core.accounting.run_tokens == 30


def test_late_tokens_of_a_process_are_lost_in_what_it_held_whatever_another_one_held_before() -> None:
    """It left after an eviction of which it may not know: nothing was heard of what it had trained."""
    for held, expected in ((SECOND, [10, 7, 17]), (FIRST, [17, 0, 17])):
        run = Run(AllLive())
        run.join("a", FIRST, process=1)
        run.beat("a", 10)
        run.join("a", held, process=2)
        run.core.left_late(run.now, "a", process=2, tokens=7, step=20)
        assert [ledger(run.core, "a", fragment).trained for fragment in range(3)] == expected
        run = Run(AllLive())
        run.join("a", FIRST, process=1)
        run.beat("a", 10)
        run.join("a", held, process=2)
        run.join("a", held, process=2)
        run.beat("a", 20, steps=1, earlier_tokens=6)
        assert [ledger(run.core, "a", fragment).trained for fragment in range(3)] == expected
        assert [ledger(run.core, "a", fragment).lost for fragment in range(3)] == [
            each - (fragment == 2 or fragment in held) for fragment, each in enumerate(expected)
        ]


# --- leases -----------------------------------------------------------------------------------------------------------


def test_a_unit_is_done_once_the_fragments_of_its_learner_have_settled_it() -> None:
    run = Run(AllLive())
    run.join("a", FIRST, step=1)
    run.join("b", SECOND, step=1)
    for learner in "ab":
        run.core.lease(0.0, learner, 1, Ask(1, 4, DATA))
    for fragment in (0, 2):
        run.core.contributed(0.0, run.c("a", fragment, H, units=((0, 4),)))
        if fragment == 2:
            run.core.contributed(0.0, run.c("b", fragment, H, units=((4, 8),)))
        assert run.core.leases.done == ()
        publish(run.core, 0.0, fragment)
    assert run.core.leases.done == ((0, 4),)
    assert [dict(totals.fates) for totals in run.core.leases.totals] == [{MERGED: 4}, {UNHELD: 4}, {MERGED: 4}]
    run.core = restarted(run.core, record(run.core)[0], 0.0)
    assert run.core.leases.leases["b", 1].fates == [{UNHELD: ((4, 8),)}, {}, {MERGED: ((4, 8),)}]
    run.core.contributed(0.0, run.c("b", 1, H, units=((4, 8),)))
    publish(run.core, 0.0, 1)
    assert run.core.leases.done == ((0, 8),)
    assert run.core.leases.status()["returned"] == 0  # type: ignore[index]


def test_units_that_all_held_fragments_discard_come_back() -> None:
    leases = Leases(3)
    leases.ask("a", 1, Ask(1, 4, DATA), held=FIRST)
    for fragment in FIRST:
        assert leases.returned == ()
        c = Contribution("a", 1, fragment, 1, 0, 0, 4, 4, units=((0, 4),), step=H)
        leases.decided(c, LATE, [], version=1)
    assert leases.returned == ((0, 4),)
    assert leases.ask("b", 1, Ask(1, 4, DATA), held=SECOND).units == ((0, 4),)
    assert leases.leases["b", 1].fates == [{UNHELD: ((0, 4),)}, {}, {}]


@pytest.mark.parametrize(("held", "claimed"), [(FIRST, ((0, 6),)), (SECOND, ()), (None, ())])
def test_a_learner_that_comes_back_claims_units_if_it_holds_the_same(
    held: tuple[int, ...] | None, claimed: Ranges
) -> None:
    """Those of its pending work, and those of a batch that it has drawn."""
    leases, queue = Leases(3), UnitQueue(DATA, 10)
    queue.granted(leases.ask("a", 1, queue.ask(((), (), ())), held=FIRST))  # type: ignore[arg-type]
    queue.draw(4)
    queue.take()
    pending = queue.trained()
    queue.draw(2)  # a batch that is not trained yet
    leases.decided(Contribution("a", 1, 0, 1, 0, 0, 4, 4, units=((0, 4),), step=H), None, [], version=1)
    leases.ended("a", 1, [])
    queue.start_over()
    ask = queue.ask(((), (), pending or ()))
    assert ask is not None
    assert ask.claim == (((4, 6),), ((4, 6),), ((0, 6),))
    grant = leases.ask("a", 2, ask, held=held)
    assert grant.claimed == claimed
    assert leases.num_unclaimed == 6 - (6 if claimed else 0)
    fates = leases.leases["a", 2].fates
    assert (fates[0].get(MERGED) == ((0, 4),)) == bool(claimed)
    assert [UNHELD in by_fate for by_fate in fates] == [held is not None and f not in held for f in range(3)]


def test_late_work_for_a_called_round_settles_its_units_in_the_next() -> None:
    run = Run(Called(at_least=1, grace=0.0))
    for learner, held in (("a", FIRST), ("b", FIRST), ("c", SECOND)):
        run.join(learner, held, step=1)
        run.core.lease(0.0, learner, 1, Ask(1, 4, DATA))
    for learner in "abc":
        run.beat(learner, 2 * H)
    late = run.c("b", 0, 2 * H, units=((4, 8),))
    run.core.contributed(0.0, run.c("a", 0, 2 * H, units=((0, 4),)))
    run.core.contributed(0.0, late)  # while the round is merged
    publish(run.core, 0.0, 0)
    run.core.contributed(0.0, run.c("b", 2, 2 * H, units=((4, 8),)))
    publish(run.core, 0.0, 2)
    assert run.core.leases.done == ()
    for learner in "abc":
        run.beat(learner, 4 * H)
    assert (0, 1) in run.core.standing("a").calls
    assert run.core.fragments[0].phase == "open"
    run.core.contributed(0.0, run.c("a", 0, 4 * H, steps=H))
    assert {c.learner for c in run.core.fragments[0].closing.contributions} == {"a", "b"}  # type: ignore[union-attr]
    publish(run.core, 0.0, 0)
    assert run.core.leases.done == ((4, 8),)


# --- the learner ------------------------------------------------------------------------------------------------------


def test_a_learner_has_nothing_of_a_fragment_that_it_does_not_hold() -> None:
    for quorum in QUORUMS:
        core = LearnerCore(Run(quorum, wait=False).core.rules, (0, NOTHING, 0))
        sent = {send.fragment for _ in range(3 * H) for send in core.stepped(1, units=((core.step, core.step + 1),))}
        assert sent == (set() if isinstance(quorum, Called) else {0, 2})
        assert core.called(1, 0) is None
        assert core.received(1, 1, 0) == ()
        assert core.adoptions() == core.waiting() == ()
        assert core.versions == (0, NOTHING, 0)
        assert core.fragments[1].ledger.trained == 0
        assert core.unsent_units[1] == ()
        assert core.rejected(1, 1, OUT_OF_STEP) is None
