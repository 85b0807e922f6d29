"""`diloco report`: what a run's event files say, in numbers and on a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco import events as ev
from diloco.cli import main
from diloco.errors import ConfigError, StoreError
from diloco.event_log import EventLog
from diloco.report.page import numbers, read_run, summary, write_page

METHOD = {"name": "DiLoCo", "outer": {"lr": 0.7, "momentum": 0.9}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two learners; the second is given up and comes back; the syncer is restarted between two merges."""
    merged = ev.Merged(fragment=0, round=0, version=1, contributors=("a", "b"), weights=(0.5, 0.5), tokens=(60, 60))
    traffic = {"contributions": 70, "updates": 30}
    syncer = [
        ev.SyncerStarted(t=100.0, run="tiny", address="x", method=METHOD),
        ev.Initialised(t=101.0, learner="a", source="seed", layout_digest="", num_parameters=12, tokens=0),
        ev.Joined(t=101.0, learner="a", incarnation=1), ev.Joined(t=103.0, learner="b", incarnation=1),
        merged.model_copy(update={"t": 105.0}),
        ev.Traffic(t=106.0, learner="a", sent_bytes=traffic, received_bytes={"joins": 5}),
        ev.Evicted(t=108.0, learner="b", incarnation=1, reason="nothing heard for 6.0 s"),
        ev.SyncerStarted(t=109.0, run="tiny", address="x", versions=(1,), method=METHOD),
        ev.Joined(t=110.0, learner="b", incarnation=2),
        merged.model_copy(update={"t": 111.0, "contributors": ("a",), "weights": (1.0,), "tokens": (60,)}),
        ev.Traffic(t=112.0, learner="a", sent_bytes={"updates": 10}, received_bytes={}),
        ev.Left(t=113.0, learner="a", incarnation=1, tokens=120),
        ev.Finished(t=120.0, steps=6, tokens=190, seconds=20.0, reason="stopped"),
    ]  # fmt: skip
    learner = [
        ev.Stepped(t=104.0, step=3, loss=2.5, lr=0.1, tokens=60, tokens_per_s=20.0, gradient_norm=1.0),
        ev.Waited(t=105.0, step=3, seconds=1.25, times=1), ev.Waited(t=111.0, step=6, seconds=0.5, times=1),
        ev.Evaluated(t=112.0, step=6, tokens=180, loss=2.0, num_sequences=4),
    ]  # fmt: skip
    control = [ev.Evaluated(t=112.0, step=6, tokens=500, loss=1.0, num_sequences=4)]
    for who, written in (("syncer", syncer), ("a", learner), ("baseline", control)):
        with EventLog(tmp_path / "folders" / f"of-{who}" / "events.jsonl", who=who) as log:
            for event in written:
                log.append(event)
    return tmp_path / "folders"


def test_events_that_could_not_be_written_are_counted(run: Path) -> None:
    with EventLog(run / "of-a" / "events.jsonl", who="a") as log:
        log.append(ev.Gap(missing=7))
    found = numbers(read_run([run])[0])
    assert found["missing_events"] == 7
    assert summary(found).endswith("; 7 events are missing from the files")


def test_numbers(run: Path) -> None:
    found = numbers(read_run([run])[0])
    learners = found.pop("learners")
    assert found == {
        "run": "tiny",
        "as_of": None,
        "method": "DiLoCo",
        "num_parameters": 12,
        "duration_s": 20.0,
        "tokens": 190,
        "loss": 2.0,
        "merges": 2,
        "num_bytes": 115,
        "syncer_restarts": 1,
        "missing_events": 0,
    }
    assert learners == {
        "a": {
            "present_s": 12.0,
            "joined": 1,
            "given_up": [],
            "step": 3,
            "merges": 2,
            "waited_s": 1.75,
            "num_bytes": 115,
        },
        "b": {
            "present_s": 5.0 + 10.0,
            "joined": 2,
            "given_up": ["nothing heard for 6.0 s"],
            "step": 0,
            "merges": 1,
            "waited_s": None,
            "num_bytes": 0,
        },
    }


def test_folders_of_several_machines_are_one_run(run: Path) -> None:
    apart = [run / "of-a", run / "of-syncer", run / "of-baseline"]
    assert numbers(read_run(apart)[0]) == numbers(read_run([run])[0])


def test_a_run_that_has_not_ended_has_the_tokens_of_its_newest_progress(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", who="syncer") as log:
        log.append(ev.SyncerStarted(t=100.0, run="tiny", address="x", method=METHOD))
        log.append(ev.Joined(t=101.0, learner="a", incarnation=1))
        for t, tokens in ((110.0, 70), (120.0, 150)):
            log.append(ev.Progress(t=t, step=1, tokens=tokens, learners={}))
    found = numbers(read_run([tmp_path])[0])
    assert found["tokens"] == 150
    assert "1 learner: 150 tokens" in summary(found)


def test_all_figures_of_a_run_under_way_are_of_one_moment(tmp_path: Path) -> None:
    """That of the syncer's newest progress, which it writes every ten seconds; a control has another time."""
    merged = ev.Merged(fragment=0, round=0, version=1, contributors=("a",), weights=(1.0,), tokens=(60,))
    stepped = ev.Stepped(step=3, loss=2.5, lr=0.1, tokens=60, tokens_per_s=20.0, gradient_norm=1.0)
    evaluated = ev.Evaluated(step=3, tokens=60, loss=2.0, num_sequences=4)
    written = {
        "syncer": [
            ev.SyncerStarted(t=100.0, run="tiny", address="x", method=METHOD),
            ev.Initialised(t=101.0, learner="a", source="seed", layout_digest="", num_parameters=12),
            ev.Joined(t=101.0, learner="a", incarnation=1),
            merged.model_copy(update={"t": 104.0}),
            ev.Traffic(t=105.0, learner="a", sent_bytes={"updates": 10}, received_bytes={}),
            ev.Progress(t=110.0, step=3, tokens=70, learners={}),
            merged.model_copy(update={"t": 112.0, "version": 2}),
            ev.Joined(t=113.0, learner="b", incarnation=1),
            ev.Traffic(t=114.0, learner="a", sent_bytes={"updates": 90}, received_bytes={}),
            ev.Steered(t=114.5, order="pause", by="anna", learner="", text="anna paused the run"),
        ],
        "a": [
            stepped.model_copy(update={"t": 104.0}), evaluated.model_copy(update={"t": 109.0}),
            stepped.model_copy(update={"t": 115.0, "step": 9}),
            evaluated.model_copy(update={"t": 116.0, "tokens": 500, "loss": 1.0}),
        ],
        "data-parallel": [evaluated.model_copy(update={"t": 200.0, "tokens": 900})],
    }  # fmt: skip
    for who, events in written.items():
        with EventLog(tmp_path / who / "events.jsonl", who=who) as log:
            for event in events:
                log.append(event)
    timeline, story = read_run([tmp_path])
    found, shown = numbers(timeline), story.since(0)
    assert (found["tokens"], found["merges"], found["num_bytes"], found["duration_s"]) == (70, 1, 10, 10.0)
    assert (found["loss"], found["learners"]["a"]["step"], list(found["learners"])) == (2.0, 3, ["a"])
    assert "1 merges, 0.00 MB on the wire, held-out loss 2.0000; as of 00:01:50 UTC" in summary(found)
    assert (shown["head"]["tokens"], shown["num_merges"], shown["head"]["num_bytes"]) == (70, 1, 10)
    assert shown["head"]["state"] == "paused"
    assert shown["loss"]["data-parallel"] == [[900, 2.0]]
    with EventLog(tmp_path / "syncer" / "events.jsonl", who="syncer") as log:
        log.append(ev.Finished(t=117.0, steps=9, tokens=120, seconds=17.0, reason="stopped"))
    found = numbers(read_run([tmp_path])[0])
    assert (found["tokens"], found["merges"], found["as_of"]) == (500, 2, None)


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run)])
    assert not ended.value.code
    assert "190 tokens in 20.0 s, 2 merges" in " ".join(capsys.readouterr().out.split())
    text = (run / "run-report.html").read_text()
    shown = json.loads(text.partition('id="frozen">')[2].partition("</script>")[0])
    assert shown["head"]["loss"] == 2.0
    assert shown["head"]["method"]["outer"] == {"lr": 0.7, "momentum": 0.9}
    assert "<script src=" not in text
    assert '<link rel="stylesheet' not in text
    with pytest.raises(SystemExit):
        main(["report", str(run), "--json"])
    assert json.loads(capsys.readouterr().out) == numbers(read_run([run])[0])


def test_what_cannot_be_shown_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no events.jsonl below .*empty; name the folder of a run"):
        read_run([tmp_path / "empty"])
    with pytest.raises(ConfigError, match="is of a syncer; name the syncer's folder too"):
        read_run([run / "of-a"])
    with pytest.raises(StoreError, match="choose another place with --out"):
        write_page(tmp_path / "no" / "page.html", read_run([run])[1])
