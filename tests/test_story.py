"""The story of a run: what its page shows, from its events."""

from __future__ import annotations

import json

import pytest

from diloco import events as ev
from diloco.report.series import MAX_POINTS, Numbers, Series
from diloco.report.story import MAX_MERGES, Story


def syncers(story: Story, *events: ev.Event) -> None:
    for event in events:
        story.take(event.model_copy(update={"who": "syncer"}))


def member(step: int, *, tokens: int = 0, state: str = "healthy", loss: float | None = None) -> ev.LearnerProgress:
    return ev.LearnerProgress(
        incarnation=1, state=state, step=step, tokens=tokens, step_s=0.5, silent_s=0.25, training_loss=loss,
        versions=(3, 1),
    )  # fmt: skip


def merged(t: float, version: int, who: tuple[str, ...], members: tuple[str, ...] = ("a", "b")) -> ev.Merged:
    return ev.Merged(
        t=t, fragment=0, round=version - 1, version=version, contributors=who, weights=(1.0,) * len(who),
        tokens=(10,) * len(who), members=members, reason="all have contributed",
    )  # fmt: skip


@pytest.fixture
def story() -> Story:
    """Two learners of four planned, of whom one is evicted; a budget of 1,000 tokens."""
    story = Story()
    syncers(
        story,
        ev.SyncerStarted(t=100.0, run="tiny", address="x", method={"name": "DiLoCo"}, learners=4, budget_tokens=1000),
        ev.Initialised(t=101.0, learner="a", source="seed", layout_digest="", num_parameters=50),
        ev.Joined(t=101.0, learner="a", incarnation=1),
        ev.Joined(t=102.0, learner="b", incarnation=1),
        ev.Progress(t=110.0, step=4, tokens=100, learners={"a": member(4), "b": member(4)}),
        merged(115.0, 1, ("a", "b")),
        ev.Progress(t=120.0, step=8, tokens=300, learners={"a": member(8, loss=2.5), "b": member(6)}),
        merged(125.0, 2, ("a",)),
        ev.Evicted(t=126.0, learner="b", incarnation=1, reason="nothing heard for 6.0 s"),
        ev.Traffic(t=126.0, learner="a", sent_bytes={"updates": 30}, received_bytes={"contributions": 70}),
        ev.Reported(t=127.0, by="a", tokens=310, loss=2.25),
    )
    return story


def test_the_head_says_how_the_run_goes(story: Story) -> None:
    head = story.since(0)["head"]
    assert (head["run"], head["state"], head["live"], head["planned"]) == ("tiny", "training", 1, 4)
    assert (head["loss"], head["loss_at"], head["tokens"]) == (2.25, 310, 310)
    assert head["tokens_per_s"] == 20.0
    assert head["eta_s"] == (1000 - 300) / 20.0
    assert head["num_bytes"] == 100
    # a took 4 more steps and b 2: a ring of two sends 2 * 1/2 * 2 bytes * 50 values for each learner and step
    assert head["parallel_bytes"] == 6 * 2 * 50
    assert head["ratio"] == 6.0


def test_members_have_shares_silence_and_reasons(story: Story) -> None:
    a, b = story.since(0, now=130.0)["learners"]
    assert (a["name"], a["state"], a["share"], a["merges"]) == ("a", "healthy", 1.0, 2)
    assert a["silent_s"] == 0.25 + (130.0 - 120.0)
    assert a["behind"] == [0]  # of the one fragment that has a version
    assert (a["sent_bytes"], a["received_bytes"]) == (70, 30)
    assert (b["state"], b["reason"], b["share"]) == ("gone", "nothing heard for 6.0 s", 0.5)
    assert (b["silent_s"], b["behind"]) == (None, [])


def test_a_learner_is_not_behind_in_fragments_that_it_does_not_hold(story: Story) -> None:
    part = member(9).model_copy(update={"versions": (1, -1)})
    syncers(
        story,
        merged(127.0, 1, ("c",)).model_copy(update={"fragment": 1}),
        ev.Progress(t=128.0, step=9, tokens=320, learners={"a": part}),
    )
    assert story.since(0, now=130.0)["learners"][0]["behind"] == [1, None]


GROUPS: list[tuple[tuple[tuple[int, int], ...], ...]] = [(((2, 4), (5, 6)),), (((4, 7),),), ()]
"""Experts of each contributor to a merge: two groups, and the trunk."""


def test_a_learner_is_not_absent_from_merges_of_fragments_that_it_does_not_hold(story: Story) -> None:
    part = member(9).model_copy(update={"versions": (2, -1), "experts": ((0, 4),), "holds_part": True})
    syncers(
        story,
        ev.Joined(t=127.0, learner="c", incarnation=1, step=8, holds=((4, 6),)),
        ev.Progress(t=128.0, step=9, tokens=320, learners={"a": part, "c": member(9)}),
        *(merged(129.0, n, ("c",), members=("c",)).model_copy(update={"fragment": 1}) for n in (1, 2)),
        merged(129.0, 3, ("c",), members=("a", "c")),
    )
    found = story.since(0, now=130.0)
    assert [it["share"] for it in found["learners"]] == [2 / 3, 0.5, 1.0]
    assert [it["absent"] for it in found["merges"]][-3:] == [[], [], [0]]
    assert [it["holds_part"] for it in found["learners"]] == [True, False, False]
    assert "c joined at step 8, with experts 4–5" in [it["text"] for it in found["events"]]
    syncers(
        story,
        ev.Joined(t=131.0, learner="a", incarnation=2),  # with all: nothing is known of what it holds
        merged(132.0, 3, ("c",), members=("c",)).model_copy(update={"fragment": 1}),
    )
    assert [it["absent"] for it in story.since(0, now=133.0)["merges"]][-1] == [0]
    silent = member(9).model_copy(update={"incarnation": 3, "versions": ()})  # nothing was heard of its versions
    syncers(
        story,
        ev.Joined(t=134.0, learner="a", incarnation=3, holds=((0, 2), (6, 8))),
        ev.Progress(t=134.0, step=9, tokens=330, learners={"a": silent, "c": member(9)}),
        *(
            merged(135.0, 4 + n, ("c",)).model_copy(update={"members": (), "experts": own})
            for n, own in enumerate(GROUPS)
        ),
    )
    assert [it["absent"] for it in story.since(0, now=136.0)["merges"]][-3:] == [[], [0], [0]]


def test_a_replaced_incarnation_is_not_the_new_ones_end(story: Story) -> None:
    syncers(
        story,
        ev.Joined(t=130.0, learner="a", incarnation=2),
        ev.Evicted(t=130.0, learner="a", incarnation=1, reason="replaced by a newer incarnation"),
    )
    assert story.since(0)["head"]["live"] == 1


def test_the_recovery_of_the_learner_that_was_lost_last_lasts_until_its_next_merge(story: Story) -> None:
    def recovery() -> dict[str, object]:
        found: dict[str, object] = story.since(0)["head"]["recovery"]
        return found

    assert recovery() == {"learner": "b", "kind": "evicted", "seconds": None}  # evicted at 126
    syncers(story, ev.Joined(t=130.0, learner="b", incarnation=2), merged(131.0, 3, ("a",)), merged(132.0, 4, ("b",)))
    assert recovery() == {"learner": "b", "kind": "evicted", "seconds": 6.0}
    syncers(
        story,
        merged(140.5, 5, ("a", "b")),  # with what a had sent before it was killed
        ev.Joined(t=143.0, learner="a", incarnation=2),
        ev.Evicted(t=143.1, learner="a", incarnation=1, reason="replaced by a newer incarnation"),
        *(merged(144.0 + n, 6 + n, ("a", "b")) for n in range(2 * MAX_MERGES)),
    )
    assert recovery() == {"learner": "a", "kind": "evicted", "seconds": pytest.approx(0.9)}
    story.tell(140.0, "bad", "a was killed", "killed", "a")
    story.tell(140.0, "bad", "rollout-1 was killed", "killed", "rollout-1")  # no learner
    assert recovery() == {"learner": "a", "kind": "killed", "seconds": 4.0}


def test_a_merge_says_who_missed_it_and_why_it_was_made(story: Story) -> None:
    first, second = story.since(0)["merges"]
    assert (first["who"], first["absent"], first["reason"]) == ([0, 1], [], "all have contributed")
    assert (second["who"], second["absent"]) == ([0], [1])


def test_a_reader_gets_what_is_new(story: Story) -> None:
    number = story.since(0)["number"]
    assert story.since(number)["merges"] == story.since(number)["events"] == []
    assert story.since(number)["loss"] == {"global model": []}
    syncers(story, merged(130.0, 3, ("a",)), ev.Reported(t=131.0, by="a", tokens=400, loss=2.0))
    new = story.since(number)
    assert [each["version"] for each in new["merges"]] == [3]
    assert new["loss"] == {"global model": [[400, 2.0]]}
    assert len(new["learners"]) == 2  # small parts come whole


def test_an_evaluation_that_two_files_have_is_shown_once(story: Story) -> None:
    story.take(ev.Evaluated(t=127.0, who="a", step=8, tokens=310, loss=2.25, num_sequences=4))
    story.take(ev.Evaluated(t=127.0, who="baseline", step=8, tokens=320, loss=2.0, num_sequences=4))
    shown = story.since(0)
    assert shown["loss"] == {"global model": [[310, 2.25]], "baseline": [[320, 2.0]]}
    assert shown["head"]["loss"] == 2.25  # a control's loss is none of the run's
    story.take(ev.Evaluated(t=128.0, who="a", step=9, tokens=330, loss=1.5, num_sequences=4, of_part=True))
    shown = story.since(0)
    assert shown["loss"]["a's part"] == [[330, 1.5]]
    assert (shown["loss"]["global model"], shown["head"]["loss"]) == ([[310, 2.25]], 2.25)


def test_a_moment_that_was_shown_before_it_was_written_counts_once(story: Story) -> None:
    moment = ev.Progress(t=130.0, who="syncer", step=9, tokens=330, learners={"a": member(9, loss=2.4)})
    story.at_this_moment(moment)
    shown = story.since(0)
    story.take(moment.model_copy(update={"t": 129.0}))
    assert story.since(0) == shown


@pytest.mark.parametrize(("order", "state"), [("pause", "paused"), ("end", "ended by an operator")])
def test_the_head_says_what_an_operator_has_the_run_do(story: Story, order: str, state: str) -> None:
    def steered(order: str) -> ev.Steered:
        return ev.Steered(t=130.0, order=order, by="anna", learner="", text="so")

    syncers(
        story,
        steered(order),
        steered("quorum"),
        ev.SyncerStarted(t=140.0, run="tiny", address="x", versions=(2,), method={}),
    )
    head = story.since(0)["head"]
    assert (head["state"], head["live"], head["eta_s"], head["tokens_per_s"]) == (state, 1, None, None)
    syncers(story, steered("resume"))
    assert story.since(0)["head"]["state"] == "training"
    syncers(story, steered(order), ev.Finished(t=150.0, steps=9, tokens=400, seconds=9.0, reason="stopped"))
    assert story.since(0)["head"]["state"] == "ended"


def test_learners_are_numbered_as_they_joined_whatever_a_moment_has_shown(story: Story) -> None:
    early = {name: member(9) for name in ("a", "c", "d")}
    story.at_this_moment(ev.Progress(t=130.0, who="syncer", step=9, tokens=330, learners=early))
    syncers(story, *(ev.Joined(t=131.0, learner=name, incarnation=1) for name in ("d", "c", "b")))
    assert {it["name"]: it["number"] for it in story.since(0)["learners"]} == {"a": 0, "b": 1, "c": 3, "d": 2}


def test_bytes_add_up_over_restarts_of_the_syncer(story: Story) -> None:
    syncers(
        story,
        ev.SyncerStarted(t=140.0, run="tiny", address="x", versions=(2,), method={}),
        ev.Joined(t=141.0, learner="a", incarnation=2),
        ev.Traffic(t=142.0, learner="a", sent_bytes={"updates": 5}, received_bytes={}),
    )
    head = story.since(0)["head"]
    assert (head["num_bytes"], head["restarts"], head["state"]) == (105, 1, "training")


def test_bytes_are_counted_once_where_a_standby_starts_beside_the_syncer(story: Story) -> None:
    story.take(ev.SyncerStarted(t=140.0, who="syncer", run="tiny", address="y", versions=(), method={}), "standby")
    syncers(story, ev.Traffic(t=142.0, learner="a", sent_bytes={"updates": 120}, received_bytes={}))
    assert story.since(0)["head"]["num_bytes"] == 120


def test_memory_is_bounded_and_the_curve_keeps_its_ends(story: Story) -> None:
    syncers(story, *(merged(200.0 + n, n, ("a",)) for n in range(3, 3 + 2 * MAX_MERGES)))
    shown = story.since(0)
    assert len(shown["merges"]) == MAX_MERGES
    assert shown["num_merges"] == 2 + 2 * MAX_MERGES
    curve = Series(Numbers())
    for x in range(10 * MAX_POINTS):
        curve.add(x, -x)
    points = curve.since(0)
    assert MAX_POINTS / 4 <= len(points) < MAX_POINTS
    assert points[0][0] < 0.01 * 10 * MAX_POINTS
    assert points[-1][0] > 0.99 * 10 * MAX_POINTS


def test_losses_that_are_no_numbers_are_null(story: Story) -> None:
    syncers(story, ev.Progress(t=130.0, step=9, tokens=330, learners={"a": member(9, loss=float("nan"))}))
    shown = story.since(0)
    json.dumps(shown, allow_nan=False)
    assert shown["learners"][0]["loss"] is None


def test_the_load_of_experts_is_summed_over_the_newest_reports(story: Story) -> None:
    assert story.since(0)["load"] == []
    for who, tokens, entropy in (("a", (9, 9), 0.1), ("a", (3, 0), 0.5), ("b", (1, 0), 0.25)):
        story.take(ev.Routed(who=who, step=7, blocks=("layers.0.mlp",), tokens=(tokens,), entropy=(entropy,)))
    assert story.since(0)["load"] == [{"block": "layers.0.mlp", "tokens": [4, 0], "entropy": 0.375}]
