"""The feed of trackers: one that is slow, hangs or fails costs points, and nothing else."""

from __future__ import annotations

import logging
import threading

import pytest

from diloco.errors import TrackerError
from diloco.tracking.base import Point, TrackedRun
from diloco.tracking.feed import Feed

RUN = TrackedRun("", "project", "demo", "demo-syncer", {"run": {"name": "demo"}})


def point(step: int) -> Point:
    return Point(step, float(step), {"run/tokens": float(step)})


class Recording:
    """Keeps what it is told; fails where the script says so, and stands still where it is told to."""

    def __init__(self, *fails: str | int, stands_at: int | None = None) -> None:
        self.told: list[str | int] = []
        self.run: TrackedRun | None = None
        self.stands, self.goes_on, self.did = threading.Event(), threading.Event(), threading.Semaphore(0)
        self._fails, self._stands_at = fails, stands_at
        self._is_abandoned = False

    def _do(self, what: str | int) -> None:
        if what == self._stands_at:
            self.stands.set()
            self.goes_on.wait()
        if what in self._fails or self._is_abandoned:
            raise TrackerError(f"no {what}")
        self.told.append(what)
        self.did.release()

    def start(self, run: TrackedRun) -> None:
        self.run = run
        self._do("start")

    def log(self, point: Point) -> None:
        self._do(point.step)

    def end(self) -> None:
        self._do("end")

    def abandon(self) -> None:
        self._is_abandoned = True
        self.goes_on.set()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_points_come_in_order_between_start_and_end(caplog: pytest.LogCaptureFixture) -> None:
    a, b = Recording(), Recording()
    with Feed(RUN, {"a": a, "b": b}) as feed:
        feed.put(point(1))  # waits until it begins
        feed.begin("77aa")
        feed.begin("88bb")  # it has begun
        feed.put(point(2))
    assert a.told == b.told == ["start", 1, 2, "end"]
    assert a.run is not None
    assert (a.run.id, a.run.name) == ("77aa", "demo-syncer")
    assert feed.dropped == {"a": 0, "b": 0}
    assert said(caplog) == []


def test_a_tracker_that_hangs_loses_the_oldest_and_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    hangs, well = Recording(stands_at=0), Recording()
    feed = Feed(RUN, {"hangs": hangs, "well": well}, most_waiting=3)
    feed.begin()
    feed.put(point(0))
    assert hangs.stands.wait(60)
    assert well.did.acquire(timeout=60)  # has started
    assert well.did.acquire(timeout=60)
    for step in range(1, 8):  # of which the one that hangs can keep 3
        feed.put(point(step))
        assert well.did.acquire(timeout=60)
    assert feed.dropped == {"hangs": 4, "well": 0}
    hangs.goes_on.set()
    feed.close()
    assert hangs.told == ["start", 0, 5, 6, 7, "end"]
    assert well.told == ["start", *range(8), "end"]
    assert said(caplog) == [
        "hangs is slower than the run: it misses points, the oldest first; the run goes on",
        "hangs has missed 4 of 8 points",
    ]


def test_a_tracker_that_never_ends_is_left_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.tracking.feed.ABANDON_S", 60.0)  # on a busy machine
    hangs = Recording(stands_at=0)
    feed = Feed(RUN, {"hangs": hangs})
    feed.begin()
    for step in range(3):
        feed.put(point(step))
    assert hangs.stands.wait(60)
    feed.close(timeout_s=0.0)
    assert hangs.told == ["start"]
    assert feed.dropped["hangs"] == 3
    assert said(caplog) == ["hangs has not ended within 0 s and is left alone", "hangs has missed 3 of 3 points"]
    feed.put(point(9))
    assert feed.dropped["hangs"] == 4


def test_a_tracker_that_stands_still_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = Recording(stands_at=0)
    with Feed(RUN, {"hangs": hangs}) as feed:
        feed.begin()
        feed.put(point(0))
        assert hangs.stands.wait(60)
        feed.put(point(1))
        assert said(caplog) == []
        monkeypatch.setattr("diloco.tracking.feed.HANGS_S", 0.0)
        for step in (2, 3):
            feed.put(point(step))
        hangs.goes_on.set()
    assert said(caplog) == ["hangs has not answered for 0 s; points wait for it, and the run goes on"]
    assert hangs.told == ["start", 0, 1, 2, 3, "end"]


def test_a_tracker_that_fails_misses_that_point_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    fails = Recording(1, 3)
    with Feed(RUN, {"fails": fails}) as feed:
        feed.begin()
        for step in range(5):
            feed.put(point(step))
    assert fails.told == ["start", 0, 2, 4, "end"]
    assert said(caplog) == ["fails failed, and misses points: no 1", "fails has missed 2 of 5 points"]


def test_a_tracker_that_cannot_start_misses_all(caplog: pytest.LogCaptureFixture) -> None:
    fails = Recording("start")
    with Feed(RUN, {"fails": fails}) as feed:
        feed.put(point(0))
        feed.begin()
        feed.put(point(1))
    assert fails.told == []
    assert feed.dropped == {"fails": 2}
    assert said(caplog) == ["fails could not start, and logs nothing: no start", "fails has missed 2 of 2 points"]


def test_what_fails_at_the_end_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with Feed(RUN, {"fails": Recording("end")}) as feed:
        feed.begin()
    assert said(caplog) == ["fails failed at its end: no end"]


def test_a_feed_that_never_begins_starts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recording()
    with Feed(RUN, {"a": tracker}) as feed:
        feed.put(point(0))
    feed.begin()  # closed
    assert tracker.told == []
    assert said(caplog) == []
