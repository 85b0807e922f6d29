"""Groups of reinforcement learning by scripted events in virtual time: every rule of `protocol.groups`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.protocol.driving import only
from tests.protocol.groups_run import BAD, GOOD, RULES, Run

from diloco.core.presets import DiLoCo
from diloco.errors import ConfigError, NoRoomError, PayloadError, StaleIncarnationError
from diloco.protocol.actions import Action, WakeAt
from diloco.protocol.groups import PACK_S, Assigned, Made, digest_of
from diloco.protocol.leases import Ask, DataSet, Grant
from diloco.protocol.members import Report
from diloco.protocol.records import Record, rolled_back
from diloco.protocol.rounds.base import Rules
from diloco.protocol.steering import Order
from diloco.protocol.syncer import SyncerCore
from diloco.protocol.workers import Score, Work


def refused(match: str) -> Any:
    return pytest.raises(PayloadError, match=match)


# --- the life of a group ----------------------------------------------------------------------------------------------


def test_a_group_is_generated_scored_trained_and_merged() -> None:
    run = Run()
    assert run.work(wants=2) == Assigned((0, 1), (), "", (0,))
    run.totals()
    assert run.core.groups.status()["prompts"] == 2  # type: ignore[index]
    assert run.group(0)
    run.totals(acknowledged=1, waiting=1)
    assert run.work("reward", "r", wants=1).numbers == ()  # it is not durable
    run.record()
    given = run.work("reward", "r", wants=2)
    assert (given.numbers, given.groups[0].made, given.why) == ((0,), run.made[0], "no group waits for a reward")
    run.totals(acknowledged=1, leased=1)
    run.work("reward", "r", scores=[Score(0, GOOD)])
    run.totals(acknowledged=1, waiting=1)
    assert run.lease("a", 1) == Grant(1, ((0, 1),))
    run.totals(acknowledged=1, leased=1)
    (mine,) = run.work("trainer", "a").groups
    assert (mine.made, mine.rewards, mine.worker, mine.pack, mine.start) == (run.made[0], GOOD, "w", 1, 0)
    run.send("a", 0)
    run.send("b")
    run.totals(acknowledged=1, leased=1)
    run.publish()
    run.totals(acknowledged=1, merged=1)
    run.restart()
    run.totals(acknowledged=1, merged=1)
    assert run.work(wants=1, holds=[1]).numbers == (1, 2)


def test_rewards_of_the_same_process_spare_the_reward_worker() -> None:
    run = Run()
    run.generated(GOOD, BAD, GOOD)
    run.totals(acknowledged=3, waiting=2, without_signal=1)
    assert run.lease("a", 2).units == ((0, 1), (2, 3))
    assert run.work("reward", "r", wants=2).numbers == ()
    assert run.core.groups.tasks["sums"].num == 3
    assert run.core.groups.tasks["sums"].mean == pytest.approx(0.5)


def test_rewards_of_the_same_process_are_applied_after_a_restart_whose_record_was_taken_before() -> None:
    run = Run()
    run.work(wants=2)
    run.group(0, rewards=GOOD)
    run.group(1, rewards=BAD)
    before = run.core.saved()
    assert run.lease("a", 1).number == 0  # nothing is offered before it is durable
    run.restarts_with(before)
    run.totals(acknowledged=2, waiting=1, without_signal=1)
    assert run.lease("a", 1).units == ((0, 1),)


def test_a_trainer_gets_all_groups_that_it_asks_for_or_none() -> None:
    run = Run()
    run.generated(GOOD)
    assert run.lease("a", 2) == Grant(0, ())
    run.generated(GOOD)
    assert run.lease("a", 2) == Grant(1, ((0, 2),))
    again, _ = run.core.lease(run.now, "a", 1, Ask(1, 2, run.data))  # its answer was lost
    assert again.units == ((0, 2),)
    assert run.core.groups.staleness == {0: 2}
    run.totals(acknowledged=2, leased=2)


# --- workers ----------------------------------------------------------------------------------------------------------


def test_a_lost_worker_returns_what_it_holds() -> None:
    run = Run()
    run.work(wants=2)
    run.work("rollout", "other", wants=1)
    run.generated()
    assert only(WakeAt, run.actions).at <= 6.0
    run.now = 5.0
    run.work("rollout", "other", holds=[2])
    run.core.tick(6.0)
    run.check()
    assert run.core.groups.workers.free["rollout"] == ((0, 2),)
    run.now = 6.0
    assert run.work("rollout", "other", holds=[2], wants=2).numbers == (0, 1, 2)
    assert run.work("rollout", "w", holds=[0, 1]).numbers == ()  # it was not lost, but slow
    with refused("was sent before, or its prompt is not leased"):
        run.core.groups.workers.live["rollout", "other"].holds.clear()
        run.group(0)


def test_a_lost_reward_worker_returns_groups_and_the_first_score_counts() -> None:
    run = Run()
    run.work(wants=1)
    run.group(0)
    run.record()
    run.work("reward", "r", wants=1)
    run.core.tick(7.0)
    run.totals(acknowledged=1, waiting=1)
    run.now = 7.0
    assert run.work("reward", "s", wants=1).numbers == (0,)
    run.work("reward", "r", scores=[Score(0, GOOD)])
    run.totals(acknowledged=1, waiting=1)
    assert run.work("reward", "s", holds=[0], scores=[Score(0, BAD)]).numbers == ()
    run.totals(acknowledged=1, waiting=1)
    assert run.core.groups.groups[0].rewards == GOOD


def test_a_newer_process_of_a_name_replaces_the_older_one() -> None:
    run = Run()
    assert run.work(wants=2).numbers == (0, 1)
    assert run.work(process=2, wants=1).numbers == (0,)
    assert run.core.groups.workers.free["rollout"] == ((1, 2),)
    with pytest.raises(StaleIncarnationError, match="another process works as rollout 'w' now"):
        run.work(process=1, holds=[0, 1])
    with pytest.raises(StaleIncarnationError, match="process 1 is not rollout worker 'w' now"):
        run.group(0, process=1)
    run.totals()
    assert run.group(0, process=2)


def test_an_overtaken_message_changes_nothing() -> None:
    run = Run()
    assert run.work(wants=1, order=5).numbers == (0,)
    answer = run.work(holds=[7], wants=3, order=4)
    assert (answer.numbers, answer.why) == ((), "this message was overtaken by a newer one")
    assert run.core.groups.workers.live["rollout", "w"].holds == {0}
    run.work("reward", "r", order=2)
    run.now = PACK_S
    run.work("reward", "r", order=1, scores=[Score(0, GOOD)])
    assert run.is_due()  # whoever has sent it gets an answer


def test_what_a_worker_drops_is_free_at_once() -> None:
    run = Run()
    run.work(wants=3)
    run.work(holds=[1])
    assert run.core.groups.workers.free["rollout"] == ((0, 1), (2, 3))
    assert run.work("rollout", "v", wants=3).numbers == (0, 2, 3)


def test_workers_claim_back_what_they_hold_after_a_restart() -> None:
    run = Run()
    run.work(wants=1)
    run.group(0)
    run.record()
    assert run.work(wants=2).numbers == (1, 2)
    assert run.work("reward", "r", wants=1).numbers == (0,)
    run.restart()  # the record knows of no prompt beyond the first
    run.totals(acknowledged=1, waiting=1)
    with pytest.raises(StaleIncarnationError, match="ask for prompts before sending groups"):
        run.group(2)
    assert run.work("rollout", "v", wants=1).numbers == (1,)
    assert run.work(holds=[1, 2]).numbers == (2,)  # another one has 1
    assert run.work("reward", "r", holds=[0]).numbers == (0,)
    assert run.group(2)
    run.totals(acknowledged=2, leased=1, waiting=1)


def test_prompts_that_were_never_leased_are_not_claimed() -> None:
    run = Run()
    assert run.work(holds=[10**6]).numbers == ()
    assert run.core.groups.frontier == 0
    assert run.work(holds=[15]).numbers == (15,)
    assert run.core.groups.workers.free["rollout"] == ((0, 15),)


def test_a_worker_with_other_settings_is_refused() -> None:
    run = Run()
    with pytest.raises(ConfigError, match="rollout 'w' has other settings"):
        run.work(wants=1, digest="x" * 64)
    assert run.core.groups.workers.refusals[-1][0] == "rollout w"
    assert run.core.groups.workers.counts["rollout", "w"]["refused"] == 1
    other = replace(run.data, groups=replace(RULES, max_staleness=3))
    with pytest.raises(ConfigError, match="give all learners the same data"):
        run.core.lease(0.0, "b", 1, Ask(1, 1, other))


def test_before_a_trainer_has_joined_workers_get_nothing() -> None:
    core = SyncerCore(Rules.of(DiLoCo(sync_every=10), 1), [0])
    answer, _ = core.work(0.0, Work("rollout", "w", 1, 1, RULES.digest, wants=2))
    assert (answer.numbers, answer.why) == ((), "no trainer has joined the run yet")
    with refused("no trainer has joined the run yet"):
        core.made(0.0, "w", 1, Made(0, "sums", (0,), "x", "0", 100, 10))


def test_a_paused_run_gives_no_work_and_takes_what_is_done() -> None:
    run = Run()
    run.work(wants=1)
    run.core.steer(0.0, Order("pause"), "ann")
    run.record()
    answer = run.work(holds=[0], wants=2)
    assert answer.numbers == (0,)
    assert answer.why == "the run was paused by ann"
    assert run.group(0)
    run.record()
    assert run.work("reward", "r", wants=1).numbers == ()
    run.core.steer(0.0, Order("resume"), "ann")
    run.record()
    assert run.work("reward", "r", wants=1).numbers == (0,)


def test_a_full_queue_holds_back_rollouts_and_nothing_else() -> None:
    run = Run()
    answer = run.work(wants=99)
    assert (len(answer.numbers), answer.why) == (8, "the run's queue of 8 groups is full")
    for number in range(8):
        run.group(number, rewards=GOOD)
    run.record()
    assert run.work(wants=1) == Assigned((), (), "the run's queue of 8 groups is full", (0,))
    run.core.heartbeat(0.0, "a", 1, Report(step=1, tokens=10))
    run.lease("a", 3)
    assert run.work(wants=99).numbers == (8, 9, 10)  # what trainers have is not ahead of them
    run.round(0, 1, 2)
    assert run.work(wants=99, holds=[8, 9, 10]).numbers == (8, 9, 10)


def test_refusals_of_workers_are_counted_and_the_newest_shown() -> None:
    run = Run(rules=replace(RULES, queue=30))
    prompts = run.work(wants=30).numbers
    run.work(scores=[Score(number, reason=f"prompt {number} cannot be sampled") for number in prompts])
    assert run.core.groups.workers.counts["rollout", "w"]["refused"] == run.core.groups.counts["dropped"] == 30
    assert len(run.core.groups.workers.refusals) == 20
    assert run.core.groups.workers.refusals[-1] == ("rollout w", "prompt 29 cannot be sampled")


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_group_that_arrives_twice_counts_once() -> None:
    run = Run()
    run.work(wants=2)
    assert run.group(0)
    assert not run.sends(run.made[0])  # its answer was lost
    run.record()
    run.actions = list[Action]()
    run.now = 1.0
    assert not run.sends(run.made[0])
    assert run.is_due()
    run.totals(acknowledged=1, waiting=1)
    with refused("group 0 was sent before"):
        run.group(0, digest="other bytes")
    assert run.core.groups.workers.counts["rollout", "w"] == {"generated": 1, "refused": 1}


def test_the_first_of_two_workers_with_one_prompt_counts() -> None:
    run = Run()
    run.work(wants=1)
    run.core.tick(7.0)
    run.now = 7.0
    assert run.work("rollout", "v", wants=1).numbers == (0,)
    run.work()
    assert run.group(0)  # of the one that was thought lost
    run.totals(acknowledged=1, waiting=1)
    with refused("group 0 was sent before"):
        run.group(0, "v")
    assert run.work("rollout", "v", holds=[0]).numbers == ()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weights": "f" * 64}, "was made with weights of digest ffffffffffff, and the run published"),
        ({"versions": (1,)}, r"was made with versions \[1\] of the fragments, and the run has \[0\]"),
        ({"versions": (0, 0)}, r"was made with versions \[0, 0\]"),
        ({"versions": (-1,)}, r"was made with versions \[-1\]"),
        ({"rewards": (math.nan, 0.0)}, r"has rewards \[nan, 0.0\]; send 2 numbers"),
        ({"rewards": (1.0,)}, r"has rewards \[1.0\]; send 2 numbers"),
        ({"fault": "token 100 is outside the vocabulary of 100."}, "is not well formed: token 100"),
        ({"number": 5}, "group 5 was sent before, or its prompt is not leased"),
    ],
)
def test_a_group_that_is_no_good_is_refused_and_counted(changes: dict[str, Any], says: str) -> None:
    run = Run()
    run.work(wants=1)
    with refused(says):
        run.group(0, **changes)
    run.totals()
    assert run.core.groups.workers.counts["rollout", "w"] == {"refused": 1}
    dropped = "number" not in changes
    assert run.work(holds=[0], wants=1).numbers == ((1,) if dropped else (0, 1))  # it may be no good from any worker
    assert run.core.groups.counts["dropped"] == dropped


def test_weights_are_those_of_the_versions_as_long_as_those_are_kept() -> None:
    run = Run(fragments=2)
    run.round(fragment=0)
    assert run.core.groups.weights_of((1, 0)) == digest_of(["1", "0"])
    assert run.core.groups.weights_of((0, 0)) == digest_of(["0", "0"])
    assert run.core.groups.weights_of((2, 0)) is None
    run.restart()
    assert run.core.groups.weights_of((0, 0)) == digest_of(["0", "0"])


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "end", "says"),
    [
        (Score(0, BAD), "without signal", None),
        (Score(0, (math.nan, 1.0)), "refused", "group 0 got rewards"),
        (Score(0, (math.inf, 1.0)), "refused", "group 0 got rewards"),
        (Score(0, (1.0,)), "refused", "group 0 got rewards"),
        (Score(0, (), "the task hangs"), "refused", "the task hangs"),
    ],
)
def test_groups_that_are_not_trained(score: Score, end: str, says: str | None) -> None:
    run = Run()
    run.work(wants=1)
    run.group(0)
    run.record()
    run.work("reward", "r", wants=1)
    run.work("reward", "r", scores=[score])
    run.totals(acknowledged=1, **{end.replace(" ", "_"): 1})
    assert says is None or run.core.groups.workers.refusals[-1][1].startswith(says)
    run.record()
    run.restart()
    run.totals(acknowledged=1, **{end.replace(" ", "_"): 1})
    assert run.durable.values["groups"]["packs"] == []


def test_scores_that_are_not_durable_are_sent_again() -> None:
    run = Run()
    run.work(wants=1)
    run.group(0)
    run.record()
    run.work("reward", "r", wants=1)
    run.now = 1.0
    run.work("reward", "r", scores=[Score(0, GOOD)])
    assert run.is_due()
    run.restart()  # before that record is durable
    run.totals(acknowledged=1, waiting=1)
    assert run.core.groups.groups[0].rewards == ()
    run.work("reward", "r", scores=[Score(0, GOOD)])
    assert run.lease("a", 1).units == ((0, 1),)


# --- records and packs ------------------------------------------------------------------------------------------------


def test_groups_between_two_records_share_a_pack() -> None:
    run = Run()
    run.work(wants=4)
    run.group(0, num_bytes=10)
    run.group(1, num_bytes=20)
    first = run.record()
    run.record()  # without a group
    run.group(2)
    second = run.record()
    places = [(group.pack, group.start) for group in run.core.groups.groups.values()]
    assert places == [(1, 0), (1, 10), (2, 0)]
    assert [first.values["groups"][each] for each in ("pack", "packs", "keep")] == [2, [1], 2]
    assert second.values["groups"]["packs"] == [1, 2]
    run.work("reward", "r", scores=[Score(0, BAD), Score(1, BAD)])
    assert run.record().values["groups"]["packs"] == [2]
    run.restart()
    run.work(holds=[3])
    run.group(3)
    assert run.core.groups.groups[3].pack == 3


def test_records_for_groups_alone_are_paced() -> None:
    run = Run()
    run.work(wants=2)
    run.now = 1.0
    run.record()
    assert run.core.groups.due_at(1.5) == math.inf
    run.now = 1.05
    run.group(0)
    assert not run.is_due()
    assert only(WakeAt, run.actions).at == run.core.groups.due_at(run.now) == 1.0 + PACK_S
    run.actions = run.core.tick(1.0 + PACK_S)
    assert run.is_due()
    taken = run.core.saved()  # under way
    run.group(1)
    run.core.recorded(1.3, taken.serial)
    assert run.core.groups.due_at(1.3) == 1.3 + PACK_S  # for the second one
    assert [*run.core.groups._unsaved] == [1]


def test_a_clock_that_stood_still_loses_no_worker() -> None:
    run = Run()
    run.work(wants=1)
    run.core.was_suspended(100.0)
    run.core.tick(101.0)
    assert run.core.groups.workers.live["rollout", "w"].holds == {0}


# --- staleness --------------------------------------------------------------------------------------------------------


def test_a_group_that_is_too_old_ends_as_stale_wherever_it_is() -> None:
    run = Run(rules=replace(RULES, max_staleness=0))
    late, *_ = run.work(wants=5).numbers
    old = replace(Made(late, "sums", (0,), digest_of(["0"]), "late", 100, 10))
    run.group(1)  # it waits for a reward
    run.group(2)
    run.group(3, rewards=GOOD)
    run.record()
    assert run.work("reward", "r", wants=1).numbers == (1,)
    run.group(4)  # not durable
    run.totals(acknowledged=4, waiting=3, leased=1)
    run.round()
    run.totals(acknowledged=4, stale=4)
    assert run.work("reward", "r", holds=[1], scores=[Score(1, GOOD)]).numbers == ()
    assert not run.sends(old)  # it is stale as it arrives
    run.totals(acknowledged=5, stale=5)
    assert run.lease("a", 1).number == 0
    with refused("group 0 was sent before"):
        run.sends(old)
    assert run.record().values["groups"]["packs"] == []
    run.restart()
    run.totals(acknowledged=5, stale=5)


def test_a_trainer_keeps_what_becomes_stale_in_its_hands_or_gives_it_up() -> None:
    run = Run(rules=replace(RULES, max_staleness=0))
    run.generated(GOOD, GOOD, GOOD)
    run.lease("a", 3)
    run.send("a", 0)
    run.send("b")
    run.publish()
    run.totals(acknowledged=3, merged=1, leased=2)
    run.send("a", 1)  # the next round
    held = run.work(
        "trainer", "a", scores=[Score(1, reason="stale"), Score(2, reason="stale"), Score(77, reason="stale")]
    )
    assert held.numbers == (1,)  # what is sent is not given up
    run.totals(acknowledged=3, merged=1, leased=1, stale=1)
    assert run.work("trainer", "a", scores=[Score(2, reason="stale")]).numbers == (1,)  # again
    run.send("b")
    run.publish()
    run.totals(acknowledged=3, merged=2, stale=1)
    assert run.core.groups.staleness == {0: 3}
    with pytest.raises(StaleIncarnationError):
        run.work("trainer", "a", process=9)


def test_a_group_that_a_trainer_cannot_use_is_refused() -> None:
    run = Run()
    run.generated(GOOD)
    run.lease("a", 1)
    run.work("trainer", "a", scores=[Score(0, reason="its object is missing")])
    run.totals(acknowledged=1, refused=1)
    assert run.core.groups.workers.refusals == [("trainer a", "its object is missing")]


@pytest.mark.parametrize("how", ["leaves", "is rejected"])
def test_what_returns_too_old_is_not_leased_again(how: str) -> None:
    run = Run(rules=replace(RULES, max_staleness=0))
    run.generated(GOOD)
    run.lease("a", 1)
    run.round()
    run.totals(acknowledged=1, leased=1)
    if how == "leaves":
        run.core.left(run.now, "a", 1, tokens=10)
    else:
        run.send("a", 0)
        run.send("b")
        run.core.abandoned(run.now, 0, "outlier")
    run.check()
    run.totals(acknowledged=1, stale=1)
    assert run.lease("b", 1).number == 0


def test_staleness_is_the_largest_difference_over_the_fragments() -> None:
    run = Run(fragments=2)
    run.work(wants=2)
    run.group(0, rewards=GOOD)
    run.record()
    run.round(fragment=0)
    run.group(1, rewards=GOOD)  # made with version 1 of the first fragment
    run.record()
    run.round(fragment=1)
    run.lease("a", 2)
    assert run.core.groups.staleness == {1: 2}
    run.core.left(run.now, "a", 1, tokens=10)
    run.totals(acknowledged=2, waiting=2)
    run.send("b", fragment=0)
    run.publish(0)
    run.totals(acknowledged=2, waiting=1, stale=1)


# --- trainers that leave, and repairs ---------------------------------------------------------------------------------


def test_a_group_counts_as_merged_once_every_fragment_has_a_fate_for_it() -> None:
    run = Run(fragments=2)
    run.generated(GOOD)
    run.lease("a", 1)
    run.round(0, fragment=0)
    run.totals(acknowledged=1, leased=1)
    run.restart()
    run.totals(acknowledged=1, leased=1)
    run.send("a", fragment=1, overwritten=((0, 1),))
    run.send("b", fragment=1)
    run.publish(1)
    run.totals(acknowledged=1, merged=1)


def test_a_group_of_a_trainer_that_leaves_halfway_is_trained_again_and_counts_once() -> None:
    run = Run(fragments=2)
    run.generated(GOOD)
    run.lease("a", 1)
    run.round(0, fragment=0)
    run.core.left(run.now, "a", 1, tokens=10)
    run.totals(acknowledged=1, waiting=1)
    run.lease("b", 1)
    for fragment in (0, 1):
        run.send("b", 0, fragment=fragment)
        run.publish(fragment)
        run.totals(acknowledged=1, **{"leased" if fragment == 0 else "merged": 1})
    assert [(each.merges, each.repeated) for each in run.core.leases.totals] == [(2, 1), (1, 0)]


def test_a_lost_trainer_after_a_restart_returns_its_groups() -> None:
    run = Run()
    run.generated(GOOD, GOOD)
    run.lease("a", 2)
    run.record()
    run.core.left(run.now, "a", 1, tokens=10)
    gone = run.record()
    run.restarts_with(gone)
    run.totals(acknowledged=2, waiting=2)
    assert run.lease("b", 2).units == ((0, 2),)


def test_groups_in_versions_that_a_repair_has_lost_end_as_stale() -> None:
    run = Run()
    run.generated(GOOD, GOOD, GOOD)
    run.lease("a", 2)
    run.round(0, 1)
    run.work(wants=1)
    run.group(3, rewards=GOOD)  # with the version that is lost
    run.record()
    run.totals(acknowledged=4, merged=2, waiting=2)
    mended = Record(run.durable.serial, rolled_back(run.durable.values, (0,)))
    run.restarts_with(mended, (0,))
    run.totals(acknowledged=4, waiting=1, stale=3)
    assert run.core.leases.returned == ((2, 3),)
    run.asked.clear()
    run.core.joined(0.0, "a")
    assert run.lease("a", 1, incarnation=2).units == ((2, 3),)


def test_a_worker_is_lost_when_the_wake_up_for_it_comes_to_the_bit() -> None:
    for tenths in range(1, 100):
        groups = Run().core.groups
        groups.work(0.1 * tenths, Work("rollout", "w", 1, 1, RULES.digest))
        at = groups.workers.wake_at(6.1)
        groups.workers.tick(at, 6.1)
        assert not groups.workers.live


def test_a_reward_that_fp32_could_not_square_is_refused() -> None:
    run = Run()
    [number] = run.generated(())
    run.work("reward", "r", wants=1)
    run.work("reward", "r", scores=[Score(number, (1e300, 0.0))])
    assert run.core.groups.counts["refused"] == 1
    assert run.core.groups.tasks == {}


def test_without_a_trainer_scores_ask_for_one_record_only() -> None:
    core = SyncerCore(Rules.of(DiLoCo(sync_every=10), 1), [0])
    core.work(0.0, Work("reward", "r", 1, 1, "r", scores=(Score(3, GOOD),)))
    assert core.groups.due_at(1.0) < math.inf
    record = core.saved()
    core.recorded(1.0, record.serial)
    assert core.groups.due_at(2.0) == math.inf


def test_a_learner_of_other_data_gives_up_none_as_groups() -> None:
    core = SyncerCore(Rules.of(DiLoCo(sync_every=10), 1), [0])
    core.joined(0.0, "a")
    grant, _ = core.lease(0.0, "a", 1, Ask(1, 10, DataSet(100, 1, "d")))
    with pytest.raises(PayloadError, match="the run has none"):
        core.work(0.0, Work("trainer", "a", 1, 1, "d", scores=(Score(3, reason="no"),)))
    assert core.leases.leased == grant.units


def test_trainers_may_differ_in_the_queue_which_the_first_one_sets() -> None:
    run = Run()
    run.data = replace(run.data, groups=replace(RULES, queue=99))
    assert run.lease("b", 1).number == 0
    assert run.core.groups.rules == RULES
    with pytest.raises(ConfigError, match="'b' needs 9 groups at once, and the run generates 8 ahead"):
        run.lease("b", 9)
    run.data = replace(run.data, groups=replace(RULES, max_tokens=99))
    with pytest.raises(ConfigError, match="or the same"):
        run.lease("b", 1)


def test_a_rollout_worker_does_not_score_where_reward_workers_do() -> None:
    run = Run(rules=replace(RULES, inline=False))
    run.work(wants=1)
    with pytest.raises(PayloadError, match="group 0 has rewards, but reward workers score this run's groups"):
        run.group(0, rewards=GOOD)
    assert (run.core.groups.counts["acknowledged"], run.core.groups.counts["dropped"]) == (0, 1)


def test_no_more_packs_are_begun_than_a_manifest_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.protocol.groups.MAX_PACKS", 1)
    monkeypatch.setattr("diloco.protocol.groups.MORE_PACKS", 1)
    run = Run()
    numbers = run.work(wants=4).numbers
    for number in numbers[:2]:
        run.group(number)
        run.record()
    with pytest.raises(NoRoomError, match="repeat the call"):
        run.group(numbers[2])
    for number in numbers[:2]:
        run.work("reward", "r", wants=1)
        run.work("reward", "r", scores=[Score(number, BAD)])
    assert run.group(numbers[2])
