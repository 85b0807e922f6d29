"""The feed of trackers: one that is slow, hangs or fails costs points, and nothing else."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco import events as ev
from diloco.config import RunConfig, parse_config
from diloco.errors import ConfigError, StoreError
from diloco.event_log import EventLog
from diloco.tracking import THREADS
from diloco.tracking.feed import BEHIND_S, Feed, SyncerFeed, open_feed, persistent_id
from diloco.tracking.trackers import TrackedRun
from diloco.tracking.values import Point

RUN = TrackedRun("77aa", "project", "demo", "demo-syncer", {"run": {"name": "demo"}})
LONG_S = 300.0


def point(step: int, t: float = 0.0) -> Point:
    return Point(step, t, {"run/tokens": float(step)})


class Recording:
    """Keeps what it is told; raises where the script says so, and hangs where it is told to."""

    def __init__(self, *fails: str | int, hangs_at: str | int | None = None, error: type[BaseException] = ValueError):
        self.told: list[str | int] = []
        self.run: TrackedRun | None = None
        self.points: list[Point] = []
        self.hangs, self.goes_on, self.did = threading.Event(), threading.Event(), threading.Semaphore(0)
        self._fails, self._hangs_at, self._error = fails, hangs_at, error

    def _do(self, what: str | int) -> None:
        if what == self._hangs_at:
            self.hangs.set()
            self.goes_on.wait()
        if what in self._fails:
            raise self._error(f"no {what}\nand more of it")
        self.told.append(what)
        self.did.release()

    def start(self, run: TrackedRun) -> None:
        self.run = run
        self._do("start")

    def log(self, point: Point) -> None:
        self.points.append(point)
        self._do(point.step)

    def end(self) -> None:
        self._do("end")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(THREADS):
            thread.join(LONG_S)
            assert not thread.is_alive()


def fed(tracker: Recording, *points: Point) -> None:
    feed = Feed(RUN, {"it": tracker})
    for each in points:
        feed.put(each)
    feed.close(LONG_S)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_points_come_in_order_between_start_and_end(caplog: pytest.LogCaptureFixture) -> None:
    a, b = Recording(), Recording()
    feed = Feed(RUN, {"a": a, "b": b})
    for step in (1, 2):
        feed.put(point(step))
    feed.close(LONG_S)
    assert a.told == b.told == ["start", 1, 2, "end"]
    assert a.run == b.run == RUN
    assert said(caplog) == []


def test_a_tracker_that_hangs_loses_the_oldest_and_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    hangs, well = Recording(hangs_at=0), Recording()
    feed = Feed(RUN, {"hangs": hangs, "well": well}, queue_points=3)
    feed.put(point(0))
    assert hangs.hangs.wait(LONG_S)
    for _ in ("start", 0):
        assert well.did.acquire(timeout=LONG_S)
    for step in range(1, 8):  # of which the one that hangs can keep 3
        feed.put(point(step))
        assert well.did.acquire(timeout=LONG_S)
    hangs.goes_on.set()
    feed.close(LONG_S)
    assert hangs.told == ["start", 0, 5, 6, 7, "end"]
    assert well.told == ["start", *range(8), "end"]
    assert said(caplog) == [
        "hangs is behind the run, which continues, and loses the oldest points beyond 3",
        "hangs has lost 4 of 8 points",
    ]


def test_a_tracker_that_is_late_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    hangs = Recording(hangs_at=0)
    feed = Feed(RUN, {"hangs": hangs})
    feed.put(point(0))
    assert hangs.hangs.wait(LONG_S)
    feed.put(point(1, t=1000.0))
    feed.put(point(2, t=1000.0 + BEHIND_S))
    assert said(caplog) == []
    for step in (3, 4):
        feed.put(point(step, t=1001.0 + BEHIND_S))
    hangs.goes_on.set()
    feed.close(LONG_S)
    assert said(caplog) == ["hangs is behind the run, which continues, and loses the oldest points beyond 1000"]
    assert hangs.told == ["start", 0, 1, 2, 3, 4, "end"]


@pytest.mark.parametrize(("where", "num"), [("start", 3), (0, 3), ("end", 0)])
def test_a_tracker_that_does_not_end_is_left_alone(
    caplog: pytest.LogCaptureFixture, where: str | int, num: int
) -> None:
    hangs = Recording(hangs_at=where)
    feed = Feed(RUN, {"hangs": hangs})
    for step in range(num):
        feed.put(point(step))
    if num:
        assert hangs.hangs.wait(LONG_S)
    feed.close(timeout_s=0.0)
    missed = [f"hangs has lost {num} of {num} points"] if num else []
    assert said(caplog) == ["hangs has not ended within 0 s and is abandoned", *missed]
    hangs.goes_on.set()


def test_a_tracker_that_fails_misses_that_point_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    fails = Recording(1, 3)
    fed(fails, *map(point, range(5)))
    assert fails.told == ["start", 0, 2, 4, "end"]
    assert said(caplog) == [
        "it failed and loses points, and the run continues: ValueError: no 1", "it has lost 2 of 5 points",
    ]  # fmt: skip


@pytest.mark.parametrize("error", [ConfigError, SystemExit])
def test_a_tracker_that_cannot_start_misses_all(caplog: pytest.LogCaptureFixture, error: type[BaseException]) -> None:
    fails = Recording("start", error=error)
    fed(fails, point(0), point(1))
    assert fails.told == []
    kind = "" if error is ConfigError else "SystemExit: "
    assert said(caplog) == [
        f"it could not start, and the run continues: {kind}no start", "it has lost 2 of 2 points",
    ]  # fmt: skip


def test_what_fails_at_the_end_is_said(caplog: pytest.LogCaptureFixture) -> None:
    fed(Recording("end"), point(0))
    assert said(caplog) == ["it failed at its end, and the run continues: ValueError: no end"]


LEFT_ALONE = """
import atexit, threading
hangs = threading.Event()
threading.Thread(target=hangs.wait, name="tracking-it", daemon=True).start()  # as a feed leaves it
atexit.register(hangs.wait)  # as its library does
from diloco.cli import main
main({arguments})
"""


@pytest.mark.parametrize(("arguments", "code", "out"), [(["--version"], 0, "diloco "), (["plan", "--no"], 2, "")])
def test_a_tracker_that_is_left_alone_holds_no_process_up(arguments: list[str], code: int, out: str) -> None:
    command = [sys.executable, "-c", LEFT_ALONE.format(arguments=arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(out)


# --------------------------------------------------------------------------------------------------------- a syncer's


def progress(step: int, run_id: str = "0123456789abcdef0123456789abcdef") -> ev.Progress:
    return ev.Progress(step=step, tokens=10 * step, learners={}, run_id=run_id)


def followed(event_log: Path, *trackers: Recording) -> SyncerFeed:
    """The tracker is told the id that the feed is opened with."""

    def opened(run_id: str) -> Feed:
        run = TrackedRun(run_id, RUN.project, RUN.group, RUN.name, {})
        return Feed(run, {str(number): tracker for number, tracker in enumerate(trackers)})

    return SyncerFeed(event_log, opened)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers have all the time that a busy machine needs."""
    monkeypatch.setattr("diloco.tracking.feed.END_S", LONG_S)


@pytest.mark.usefixtures("patient")
def test_a_syncers_log_is_followed_and_what_was_before_it_counts_and_is_not_logged_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, who="syncer", clock=lambda: 1000.0) as log:
        log.append(ev.Evicted(learner="a", incarnation=1, reason="silent"))
        log.append(progress(1))
    tracker = Recording()
    following = followed(path, tracker)
    with EventLog(path, who="syncer") as log:
        log.append(progress(2))
        for _ in ("start", 2):
            assert tracker.did.acquire(timeout=LONG_S)  # while the syncer runs
        log.append(ev.Evicted(learner="b", incarnation=1, reason="silent"))
        log.append(progress(3))
    following.close()
    assert [(point.step, point.values["run/evictions"]) for point in tracker.points] == [(2, 1.0), (3, 2.0)]
    assert tracker.run is not None
    assert tracker.run.id == "0123456789abcdef-syncer"


@pytest.mark.usefixtures("patient")
def test_what_is_told_before_the_run_has_an_id_is_logged_once_it_has(tmp_path: Path) -> None:
    tracker = Recording()
    following = followed(tmp_path / "events.jsonl", tracker)
    with EventLog(tmp_path / "events.jsonl", who="syncer") as log:
        log.append(ev.Reported(by="a", tokens=5, loss=2.5))
        log.append(progress(1))
    following.close()
    assert [point.values.get("global_model/held_out_loss") for point in tracker.points] == [2.5, None]


def test_a_standby_starts_no_tracker(tmp_path: Path) -> None:
    tracker = Recording()
    following = followed(tmp_path / "events.jsonl", tracker)
    with EventLog(tmp_path / "events.jsonl", who="syncer") as log:
        log.append(ev.StandingChanged(standing="following", epoch=1, why="the other one serves"))
    following.close()
    assert tracker.run is None


def test_a_log_that_cannot_be_read_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events.jsonl").write_text("not an event\n")
    followed(tmp_path / "events.jsonl", Recording()).close()
    assert "trackers receive no more points: line 1 of" in caplog.text


# ------------------------------------------------------------------------------------------------------- the run file


def config(*overrides: str) -> RunConfig:
    return parse_config('[run]\nname = "demo"\ntokens = 1_000_000\n', overrides=overrides)


def test_the_run_as_trackers_know_it() -> None:
    tracked = config("track.project=islands", "syncer.copy_to=s3://user:secret@host/x")
    run = open_feed(tracked, "paris", "77aa").run
    assert (run.id, run.project, run.group, run.name) == ("77aa", "islands", "demo", "demo-paris")
    assert run.config["run"]["tokens"] == 1_000_000
    assert "secret" not in str(run.config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["track.trackers=['wandb', 'wandb']"], "names a tracker twice"),
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
    assert parse_config(text, learner="inland").track.trackers == ()
    assert parse_config(text, learner="island").track.wandb_mode == "offline"


def test_an_id_is_drawn_once_for_a_folder(tmp_path: Path) -> None:
    first = persistent_id(tmp_path / "a" / "paris")
    assert persistent_id(tmp_path / "a" / "paris") == first
    assert persistent_id(tmp_path / "a" / "oslo") != first
    (tmp_path / "b").write_text("a file")
    with pytest.raises(StoreError, match="cannot keep"):
        persistent_id(tmp_path / "b")
