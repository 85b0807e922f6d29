"""The feed of a process from its run file, and a syncer's from its event log."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from diloco import events as ev
from diloco.config import RunConfig, parse_config
from diloco.errors import ConfigError, StoreError
from diloco.event_log import EventLog
from diloco.tracking.base import Point, TrackedRun
from diloco.tracking.feed import Feed
from diloco.tracking.following import Following
from diloco.tracking.opening import kept_id, open_feed

RUN = TrackedRun("", "project", "demo", "demo-syncer", {})


def config(*overrides: str) -> RunConfig:
    return parse_config('[run]\nname = "demo"\ntokens = 1_000_000\n', overrides=overrides)


def test_a_run_file_without_trackers_has_no_feed() -> None:
    assert open_feed(config(), "syncer") is None


def test_the_run_as_trackers_know_it() -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    tracked = config("track.trackers=['tensorboard']", "track.project=islands", "syncer.backup=s3://user:secret@host/x")
    feed = open_feed(tracked, "paris")
    assert feed is not None
    run = feed.run
    assert (run.project, run.group, run.name) == ("islands", "demo", "demo-paris")
    assert run.config["run"]["tokens"] == 1_000_000
    assert "secret" not in str(run.config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["track.trackers=['wandb', 'wandb']"], "names one twice"),
        (["track.trackers=['tensorboard']", "track.wandb_mode=offline"], 'wandb_mode has no effect without "wandb"'),
        (["track.trackers=['wandb']", "track.mlflow_tracking_uri=http://x"], 'without "mlflow" among'),
        (["track.trackers=['sacred']"], '"sacred": input should be'),
        (["track.name=a/b"], 'track.name = "a/b"'),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*overrides)


def test_a_learner_may_turn_trackers_off() -> None:
    text = """
    [run]
    name = "demo"
    tokens = 1_000_000
    [track]
    trackers = ["wandb"]
    wandb_mode = "online"
    [learner.inland]
    track.trackers = []
    [learner.island]
    track.wandb_mode = "offline"
    """
    assert open_feed(parse_config(text, learner="inland"), "inland") is None
    assert parse_config(text, learner="island").track.wandb_mode == "offline"


def test_an_id_is_drawn_once_for_a_folder(tmp_path: Path) -> None:
    first = kept_id(tmp_path / "a" / "paris")
    assert kept_id(tmp_path / "a" / "paris") == first
    assert kept_id(tmp_path / "a" / "oslo") != first
    (tmp_path / "b").write_text("a file")
    with pytest.raises(StoreError, match="cannot keep"):
        kept_id(tmp_path / "b")


class Recording:
    """A tracker that says when it was told something."""

    def __init__(self) -> None:
        self.id = ""
        self.points: list[Point] = []
        self.did = threading.Semaphore(0)

    def start(self, run: TrackedRun) -> None:
        self.id = run.id

    def log(self, point: Point) -> None:
        self.points.append(point)
        self.did.release()

    def end(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def progress(step: int, run_id: str = "0123456789abcdef0123456789abcdef") -> ev.Progress:
    return ev.Progress(step=step, tokens=10 * step, learners={}, run_id=run_id)


def test_a_syncers_log_is_followed_and_what_was_before_it_counts_and_is_not_logged_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, who="syncer", clock=lambda: 1000.0) as log:
        log.append(ev.Evicted(learner="a", incarnation=1, reason="silent"))
        log.append(progress(1))
    tracker = Recording()
    following = Following(path, Feed(RUN, {"it": tracker}))
    with EventLog(path, who="syncer") as log:
        log.append(progress(2))
        assert tracker.did.acquire(timeout=60)  # while the syncer runs
        log.append(ev.Evicted(learner="b", incarnation=1, reason="silent"))
        log.append(progress(3))
    following.close()
    assert [(point.step, point.values["run/evictions"]) for point in tracker.points] == [(2, 1.0), (3, 2.0)]
    assert tracker.id == "0123456789abcdef-syncer"


def test_a_standby_starts_no_tracker(tmp_path: Path) -> None:
    tracker = Recording()
    following = Following(tmp_path / "events.jsonl", Feed(RUN, {"it": tracker}))
    with EventLog(tmp_path / "events.jsonl", who="syncer") as log:
        log.append(ev.Stands(standing="following", epoch=1, why="the other one serves"))
    following.close()
    assert (tracker.id, tracker.points) == ("", [])


def test_a_log_that_cannot_be_read_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events.jsonl").write_text("not an event\n")
    Following(tmp_path / "events.jsonl", Feed(RUN, {"it": Recording()})).close()
    assert "trackers get nothing more: line 1 of" in caplog.text
