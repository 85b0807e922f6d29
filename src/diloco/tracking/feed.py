"""Feeds points to trackers, each in a thread with a bounded queue. Training and merging never wait for a tracker."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.closing import Closing
from diloco.errors import DilocoError, StoreError, first_line, translated
from diloco.event_log import EventTail
from diloco.tracking import THREADS
from diloco.tracking.trackers import END_S, MLflow, TensorBoard, TrackedRun, Tracker, Trackio, WeightsAndBiases
from diloco.tracking.values import Point, SyncerValues
from diloco.whole_files import write_whole

if TYPE_CHECKING:
    from diloco.config import RunConfig

log = logging.getLogger("diloco.tracking")

QUEUE_POINTS = 1000
"""Capacity of a tracker's queue; a full queue drops its oldest point."""

BEHIND_S = 60.0
"""A warning is logged when the queue of a tracker spans more than this time."""

ID_FILE = "tracked-as"

PRIVATE_TABLES = {"syncer", "track", "learner"}
"""Tables of the run file that trackers do not receive: they describe machines, with paths and URLs that may hold
passwords."""


class Feed(Closing):
    """Feeds trackers with the points of one process. A context manager closes it. Any thread may call any method.

    A tracker that falls behind loses the oldest points; one that raises loses that point; one that cannot start loses
    all. The first fault of each tracker is logged, and at the end the number of points that it has lost.

    Arguments:
        trackers: by name.
    """

    def __init__(self, run: TrackedRun, trackers: Mapping[str, Tracker], *, queue_points: int = QUEUE_POINTS) -> None:
        self.run = run
        self._threads = [_TrackerThread(name, it, run, queue_points) for name, it in trackers.items()]
        for thread in self._threads:
            thread.start()

    def put(self, point: Point) -> None:
        """Queue a point for each tracker, without blocking."""
        for thread in self._threads:
            thread.put(point)

    def close(self, timeout_s: float = END_S) -> None:
        """Let the trackers log their queues and end; abandon those that have not ended within `timeout_s`."""
        end_at = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.finish()
        for thread in self._threads:
            thread.join(max(0.0, end_at - time.monotonic()))
            thread.abandon(timeout_s)


class _TrackerThread(threading.Thread):
    """The thread of one tracker, with its queue. A daemon: the end of the process does not wait for it."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, queue_points: int) -> None:
        super().__init__(name=f"{THREADS}{name}", daemon=True)
        self._label, self._tracker, self._run = name, tracker, run
        self._changed = threading.Condition()
        self._queue: deque[Point] = deque(maxlen=queue_points)  # a full one drops its oldest
        self._num_points = self._num_logged = 0
        self._is_finishing = self._has_failed = False

    def put(self, point: Point) -> None:
        with self._changed:
            is_full = len(self._queue) == self._queue.maxlen
            is_behind = is_full or (bool(self._queue) and point.t - self._queue[0].t > BEHIND_S)
            self._num_points += 1
            self._queue.append(point)
            self._changed.notify()
        if is_behind and self.is_alive():
            self._fail(f"is behind the run, which continues, and loses the oldest points beyond {self._queue.maxlen}")

    def finish(self) -> None:
        """Log what is queued, then end."""
        with self._changed:
            self._is_finishing = True
            self._changed.notify()

    def abandon(self, after_s: float) -> None:
        """Drop the queue, and log how many points are lost. `after_s`: time that the tracker had to end."""
        with self._changed:
            self._queue.clear()
        if self.is_alive():
            log.warning("%s has not ended within %g s and is abandoned", self._label, after_s)
        if missing := self._num_points - self._num_logged:
            log.warning("%s has lost %d of %d points", self._label, missing, self._num_points)

    def run(self) -> None:
        if not self._attempt("could not start", self._tracker.start, self._run):
            return
        while (point := self._next()) is not None:
            self._num_logged += self._attempt("failed and loses points", self._tracker.log, point)
        self._attempt("failed at its end", self._tracker.end)

    def _next(self) -> Point | None:
        """The oldest point; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_finishing)
            return self._queue.popleft() if self._queue else None

    def _attempt(self, fault: str, method: Callable[..., None], *arguments: object) -> bool:
        """Call the tracker. Returns False if it raised: a tracker never stops training or merging."""
        try:
            method(*arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a library raises anything
            kind = "" if isinstance(error, DilocoError) else f"{type(error).__name__}: "
            self._fail(f"{fault}, and the run continues: {kind}{first_line(error)}")
            return False
        return True

    def _fail(self, what: str) -> None:
        """Log the first fault only; `abandon` logs how many points are lost."""
        if not self._has_failed:
            self._has_failed = True
            log.warning("%s %s", self._label, what)


class SyncerFeed(Closing):
    """Feeds trackers from the event log of a syncer. A context manager closes it.

    It reads the log from its beginning, so that totals are those of the run, and feeds events that are written from
    now on.

    Arguments:
        opened: makes the feed from an id, once the run has one. A standby logs nothing before it takes over.
    """

    def __init__(self, event_log: Path, opened: Callable[[str], Feed]) -> None:
        self._tail, self._values, self._opened = EventTail(event_log), SyncerValues(), opened
        self._feed: Feed | None = None
        self._early: deque[Point] = deque(maxlen=QUEUE_POINTS)  # points from before the run has an id
        self._since = time.time()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="syncer-tracking", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Feed the events written so far, and let the trackers end."""
        self._stopping.set()
        self._thread.join()
        if self._feed is not None:
            self._feed.close()

    def _follow(self) -> None:
        try:
            while not self._stopping.wait(1.0):
                self._read()
            self._read()
        except StoreError as error:
            log.error("trackers receive no more points: %s", error)
        except Exception:  # a fault of tracking must not stop the syncer
            log.exception("trackers receive no more points; the run continues without them")

    def _read(self) -> None:
        while events := self._tail.read(1 << 20):
            for event in events:
                point = self._values.take(event)
                if point is None or event.t < self._since:
                    continue
                self._early.append(point)
                if self._feed is None and self._values.run_id:
                    self._feed = self._opened(f"{self._values.run_id[:16]}-syncer")
                while self._feed is not None and self._early:
                    self._feed.put(self._early.popleft())


def open_feed(config: RunConfig, who: str, id_: str) -> Feed:
    """Open the trackers of a run file for one process of the run.

    Arguments:
        who: "syncer", or the learner's name.
        id_: `TrackedRun.id`.
    """
    table = config.track
    folder = (config.dir / "tracking" if table.folder is None else table.folder).absolute()
    made: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder),
        "wandb": lambda: WeightsAndBiases(folder, table.wandb_mode or "online"),
        "trackio": lambda: Trackio(folder),
        "mlflow": lambda: MLflow(folder, table.mlflow_tracking_uri),
    }
    public: dict[str, Any] = config.model_dump(mode="json", exclude_none=True, exclude=PRIVATE_TABLES)
    run = TrackedRun(id_, table.project, config.run.name, f"{table.name or config.run.name}-{who}", public)
    return Feed(run, {name: made[name]() for name in table.trackers})


def persistent_id(folder: Path) -> str:
    """The id of the tracked run of this folder, drawn once and kept in it.

    Raises:
        StoreError: the folder cannot be read or written.
    """
    path = folder / ID_FILE
    with translated(OSError, StoreError, f"cannot keep {path}", "set [run] dir to a writable directory"):
        if path.is_file() and (found := path.read_text(encoding="utf-8")):
            return found
        drawn = secrets.token_hex(8)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, drawn)
        return drawn
