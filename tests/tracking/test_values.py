"""Events and counters as named numbers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from diloco import events as ev
from diloco.tracking.values import Point, SyncerValues, learner_values, trainer_point

DOCS = Path(__file__).parents[2] / "docs" / "operate.md"

METRICS: dict[str, Any] = {
    "learner": "paris", "incarnation": 1, "steps": 40, "tokens": 400, "run_tokens": 800, "versions": [3, 2],
    "updates": 5, "merges": 4, "step_s": 0.25, "blocked_s": 1.5, "num_blocked": 3, "blocked_histogram": {},
    "num_bytes": {"contributions": 70, "updates": 50, "joins": 10, "control": 9}, "resumed_bytes": 6,
    "ledger": [
        {"trained": 400, "merged": 200, "pending": 100, "lost": 0, "discarded": {"overlap": 60, "late": 40}},
        {"trained": 400, "merged": 200, "pending": 160, "lost": 40, "discarded": {}},
    ],
}  # fmt: skip


def progress(t: float, step: int, tokens: int, *names: str, **more: Any) -> ev.Progress:
    learners = {
        name: ev.LearnerProgress(
            incarnation=1, state="healthy", step=step, tokens=tokens // 2, step_s=0.5, silent_s=0.125, training_loss=2.5
        )
        for name in names
    }
    return ev.Progress(t=t, who="syncer", step=step, tokens=tokens, learners=learners, **more)


def merged(contributors: tuple[str, ...], members: tuple[str, ...], merge_s: float) -> ev.Merged:
    weights, tokens = (1.0,) * len(contributors), (5,) * len(contributors)
    return ev.Merged(
        fragment=0, round=0, version=1, contributors=contributors, weights=weights, tokens=tokens, members=members,
        merge_s=merge_s,
    )  # fmt: skip


def traffic(learner: str, received: int, sent: int) -> ev.Traffic:
    return ev.Traffic(
        learner=learner, sent_bytes={"updates": sent}, received_bytes={"contributions": received - 1, "control": 1}
    )


START = ev.SyncerStarted(run="demo", address="x")

GROUPS = ev.GroupsProgress(
    acknowledged=9, waiting=1, leased=2, ended={"merged": 3, "stale": 1, "without signal": 2, "refused": 0}, prompts=4,
    queue=8, max_staleness=4, staleness={"0": 5}, rewards={"TASK": 0.5}, scored={"TASK": 8}, workers=(), refusals=(),
)  # fmt: skip


def test_a_runs_progress() -> None:
    values = SyncerValues()
    ledger = {"merged": 60, "pending": 20, "lost": 10, "discarded: overlap": 6, "discarded: late": 4}
    before = [
        START, ev.Initialised(learner="a", source="seed", layout_digest="", num_parameters=1, step=30),
        ev.Joined(learner="a", incarnation=1), ev.Joined(learner="b", incarnation=1),
        merged(("a", "b"), ("a", "b"), 0.5), merged(("a",), (), 0.25), traffic("a", 100, 50), traffic("b", 10, 5),
    ]  # fmt: skip
    assert [values.take(event) for event in before] == [None] * len(before)
    point = values.take(progress(1000.0, 40, 800, "a", "b", ledger=ledger, run_id="77aa"))
    shared = {"step": 40.0, "tokens": 400.0, "step_s": 0.5, "silent_s": 0.125, "training_loss": 2.5}
    assert point == Point(
        40, 1000.0,
        {
            "run/tokens": 800.0, "run/live_learners": 2.0, "run/healthy_learners": 2.0,
            "run/merges": 2.0, "run/contributors": 1.5, "run/participation": 0.75, "run/merge_s": 0.375,
            "run/joins": 2.0, "run/goodbyes": 0.0, "run/evictions": 0.0, "run/rejected_contributions": 0.0,
            "run/refused_calls": 0.0,
            "run/received_bytes": 110.0, "run/sent_bytes": 55.0,
            "run/merged_share": 0.6, "run/pending_share": 0.2, "run/discarded_share": 0.1, "run/lost_share": 0.1,
            **{f"learner/a/{key}": value for key, value in shared.items()},
            **{f"learner/b/{key}": value for key, value in shared.items()},
            "learner/a/received_bytes": 100.0, "learner/a/sent_bytes": 50.0,
            "learner/b/received_bytes": 10.0, "learner/b/sent_bytes": 5.0,
        },
    )  # fmt: skip
    assert values.run_id == "77aa"


def test_the_end_of_a_syncer_has_the_totals_of_its_last_seconds() -> None:
    values = SyncerValues()
    for event in (progress(1000.0, 40, 800, "a"), traffic("a", 100, 50), ev.Left(learner="a", incarnation=1)):
        values.take(event)
    point = values.take(ev.Finished(t=1001.0, steps=41, tokens=820, seconds=9.0, reason="stopped"))
    assert point is not None
    assert (point.step, point.t) == (41, 1001.0)
    assert [point.values[f"run/{total}"] for total in ("tokens", "goodbyes", "received_bytes")] == [820, 1, 100]


def test_speed_and_means_are_of_the_time_between_two_points() -> None:
    values = SyncerValues()
    values.take(merged(("a",), ("a",), 1.0))
    first = values.take(progress(1000.0, 40, 800, "a"))
    values.take(ev.Evicted(learner="a", incarnation=1, reason="silent"))
    values.take(ev.Refused(call="Join", name="x", peer="p", reason="AuthError", text="no", times=7))
    second = values.take(progress(1010.0, 45, 1000, "a"))
    assert first is not None
    assert second is not None
    assert "run/tokens_per_s" not in first.values  # not known yet
    assert second.values["run/tokens_per_s"] == 20.0
    assert "run/participation" not in second.values  # nothing was merged since
    assert (second.values["run/merges"], second.values["run/evictions"], second.values["run/refused_calls"]) == (
        1,
        1,
        7,
    )


def test_totals_go_on_after_a_restart_and_speed_begins_anew() -> None:
    values = SyncerValues()
    for event in (START, traffic("a", 100, 50), merged(("a",), ("a",), 1.0), progress(1000.0, 40, 800, "a"), START):
        values.take(event)
    values.take(traffic("a", 7, 3))
    point = values.take(progress(2000.0, 41, 810, "a"))
    assert point is not None
    assert (point.values["run/merges"], point.values["run/received_bytes"], point.values["run/sent_bytes"]) == (
        1,
        107,
        53,
    )
    assert "run/tokens_per_s" not in point.values  # it was not there meanwhile


def test_a_learner_is_no_part_of_participation_in_what_it_does_not_hold() -> None:
    values = SyncerValues()
    part = ev.LearnerProgress(incarnation=1, state="healthy", step=1, tokens=1, versions=(-1, 0))
    learners = {"a": part.model_copy(update={"versions": (0, 0)}), "b": part}
    moment = ev.Progress(t=1.0, step=1, tokens=2, learners=learners)
    values.take(moment)
    values.take(merged(("a",), (), 0.5))
    point = values.take(moment.model_copy(update={"t": 2.0}))
    assert point is not None
    assert point.values["run/participation"] == 1.0
    values.take(ev.Joined(learner="b", incarnation=2))
    values.take(merged(("a",), (), 0.5))
    point = values.take(moment.model_copy(update={"t": 3.0}))
    assert point is not None
    assert point.values["run/participation"] == 0.5


def test_a_lost_learner_is_not_live_and_is_no_part_of_participation() -> None:
    values = SyncerValues()
    here, gone = progress(1000.0, 40, 800, "a", "b").learners.values()
    learners = {"a": here, "b": gone.model_copy(update={"state": "lost"})}
    values.take(ev.Progress(t=1000.0, step=40, tokens=800, learners=learners))
    values.take(merged(("a",), (), 1.0))
    point = values.take(ev.Progress(t=1010.0, step=41, tokens=810, learners=learners))
    assert point is not None
    assert (point.values["run/live_learners"], point.values["run/participation"]) == (1.0, 1.0)


def test_an_evaluation_is_a_point_at_once() -> None:
    values = SyncerValues()
    values.take(progress(1000.0, 40, 800, "a"))
    told = values.take(ev.Reported(t=1003.0, by="a", tokens=790, loss=2.25))
    assert told == Point(40, 1003.0, {"global_model/held_out_loss": 2.25, "global_model/evaluated_at_tokens": 790.0})


def test_a_trainers_steps_evaluations_and_checkpoints() -> None:
    stepped = ev.Stepped(t=5.0, step=7, loss=2.5, lr=0.01, tokens=70, tokens_per_s=9.0, gradient_norm=1.5)
    assert trainer_point(stepped) == Point(
        7, 5.0,
        {
            "train/loss": 2.5, "train/lr": 0.01, "train/gradient_norm": 1.5, "train/tokens": 70.0,
            "train/tokens_per_s": 9.0,
        },
    )  # fmt: skip
    evaluated = ev.Evaluated(t=6.0, step=8, tokens=160, loss=2.0, num_sequences=4)
    assert trainer_point(evaluated) == Point(
        8, 6.0, {"global_model/held_out_loss": 2.0, "global_model/evaluated_at_tokens": 160.0}
    )
    of_part = evaluated.model_copy(update={"of_part": True})
    assert trainer_point(of_part) == Point(8, 6.0, {"part/held_out_loss": 2.0})
    saved = ev.Checkpointed(t=7.0, step=8, path="x", num_bytes=99, seconds=0.5)
    assert trainer_point(saved) == Point(8, 7.0, {"train/checkpoint_s": 0.5, "train/checkpoint_bytes": 99.0})
    assert trainer_point(ev.Waited(step=8, seconds=1.0, times=1)) is None


def test_a_loss_that_is_no_number_is_told_as_it_is() -> None:
    stepped = ev.Stepped(step=7, loss=math.nan, lr=0.01, tokens=70, tokens_per_s=9.0, gradient_norm=math.inf)
    point = trainer_point(stepped)
    assert point is not None
    assert math.isnan(point.values["train/loss"])
    assert math.isinf(point.values["train/gradient_norm"])


def test_a_learners_counters() -> None:
    assert learner_values(METRICS) == pytest.approx({
        "exchange/run_tokens": 800, "exchange/updates": 5, "exchange/merges": 4, "exchange/step_s": 0.25,
        "exchange/blocked_s": 1.5, "exchange/blocked_steps": 3, "exchange/sent_bytes": 70,
        "exchange/received_bytes": 60, "exchange/resumed_bytes": 6,
        "exchange/merged_share": 0.5, "exchange/pending_share": 0.325, "exchange/discarded_share": 0.125,
        "exchange/lost_share": 0.05,
    })  # fmt: skip
    assert learner_values({}) == {}  # a baseline's


def test_the_documentation_has_every_name_and_no_other() -> None:
    """The names that all kinds of events give, against the first column of the tables."""
    values = SyncerValues()
    told: list[Point | None] = [
        values.take(event)
        for event in (
            progress(1.0, 1, 1, "a"), merged(("a",), ("a",), 1.0), traffic("a", 2, 1),
            ev.Reported(by="a", tokens=1, loss=1.0, scores={"TASK/METRIC": 1.0}),
            progress(2.0, 2, 2, "a", ledger={"merged": 1}, groups=GROUPS),
        )
    ]  # fmt: skip
    told += map(trainer_point, (
        ev.Stepped(step=7, loss=2.5, lr=0.01, tokens=70, tokens_per_s=9.0, gradient_norm=1.5),
        ev.Routed(step=7, blocks=("b",), tokens=((3, 1),), entropy=(0.5,)),
        ev.Checkpointed(step=8, path="x", num_bytes=99, seconds=0.5),
    ))  # fmt: skip
    names = {name.replace("/a/", "/NAME/") for point in told if point is not None for name in point.values}
    names = {re.sub(r"/b/(load_)?\d?", lambda it: f"/BLOCK/{it[1] + 'E' if it[1] else ''}", name) for name in names}
    names |= learner_values(METRICS).keys()
    rows = re.findall(r"^\| (`.*?) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"`(\w+/[\w/]+)`", row)]
    assert sorted(documented) == sorted(names)
