"""Hands points to trackers, each in a thread with a bounded queue: what trains or merges never waits for a tracker."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from diloco.errors import DilocoError, StoreError, first_line, translated
from diloco.event_log import EventTail
from diloco.tracking import THREADS
from diloco.tracking.trackers import END_S, MLflow, TensorBoard, TrackedRun, Tracker, Trackio, WeightsAndBiases
from diloco.tracking.values import Point, SyncerValues
from diloco.whole_files import write_whole

if TYPE_CHECKING:
    from diloco.config import RunConfig

log = logging.getLogger("diloco.tracking")

MOST_WAITING = 1000
"""Points that wait for a tracker; of more the oldest is dropped."""

BEHIND_S = 60.0
"""A tracker that is later than this by the time of its points is said to be."""

ID_FILE = "tracked-as"

NOT_TOLD = {"syncer", "track", "learner"}
"""Tables of the run file that are about machines: they have paths, and URLs that may have passwords in them."""


class Feed:
    """Feeds trackers with the points of one process. A context manager that closes it. Any thread may call any method.

    A tracker that falls behind misses the oldest points, one that raises misses that point, one that cannot start
    misses all. The first fault of each is logged, and at the end how many points it has missed.

    Arguments:
        trackers: by name.
    """

    def __init__(self, run: TrackedRun, trackers: Mapping[str, Tracker], *, most_waiting: int = MOST_WAITING) -> None:
        self.run = run
        self._threads = [_TrackerThread(name, it, run, most_waiting) for name, it in trackers.items()]
        for thread in self._threads:
            thread.start()

    def put(self, point: Point) -> None:
        """A point for each tracker; it never blocks."""
        for thread in self._threads:
            thread.put(point)

    def close(self, timeout_s: float) -> None:
        """Let trackers log what waits and end, for so long at most; leave those alone that have not ended then."""
        end_at = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.finish()
        for thread in self._threads:
            thread.join(max(0.0, end_at - time.monotonic()))
            thread.leave(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(END_S)


class _TrackerThread(threading.Thread):
    """One tracker and its queue. A daemon: the process does not wait for it."""

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun, most_waiting: int) -> None:
        super().__init__(name=f"{THREADS}{name}", daemon=True)
        self._label, self._tracker, self._run = name, tracker, run
        self._changed = threading.Condition()
        self._waiting: deque[Point] = deque(maxlen=most_waiting)  # a full one drops its oldest
        self._num_points = self._num_logged = 0
        self._is_finishing = self._has_failed = False

    def put(self, point: Point) -> None:
        with self._changed:
            is_full = len(self._waiting) == self._waiting.maxlen
            is_behind = is_full or (bool(self._waiting) and point.t - self._waiting[0].t > BEHIND_S)
            self._num_points += 1
            self._waiting.append(point)
            self._changed.notify()
        if is_behind and self.is_alive():
            self._fail(f"is behind the run, which goes on, and misses the oldest points beyond {self._waiting.maxlen}")

    def finish(self) -> None:
        """Nothing more comes."""
        with self._changed:
            self._is_finishing = True
            self._changed.notify()

    def leave(self, after_s: float) -> None:
        """Drop what waits, and say how many points are missing. `after_s`: that the tracker had to end."""
        with self._changed:
            self._waiting.clear()
        if self.is_alive():
            log.warning("%s has not ended within %g s and is left alone", self._label, after_s)
        if missing := self._num_points - self._num_logged:
            log.warning("%s has missed %d of %d points", self._label, missing, self._num_points)

    def run(self) -> None:
        if not self._attempt("could not start", self._tracker.start, self._run):
            return
        while (point := self._next()) is not None:
            self._num_logged += self._attempt("failed, misses points", self._tracker.log, point)
        self._attempt("failed at its end", self._tracker.end)

    def _next(self) -> Point | None:
        """The oldest point; None: there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_finishing)
            return self._waiting.popleft() if self._waiting else None

    def _attempt(self, fault: str, method: Callable[..., None], *arguments: object) -> bool:
        """Call the tracker; return False where it raised. What watches never stops what decides."""
        try:
            method(*arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a library raises anything
            kind = "" if isinstance(error, DilocoError) else f"{type(error).__name__}: "
            self._fail(f"{fault}, and the run goes on: {kind}{first_line(error)}")
            return False
        return True

    def _fail(self, what: str) -> None:
        """Log the first fault only: the end says how many points are missing."""
        if not self._has_failed:
            self._has_failed = True
            log.warning("%s %s", self._label, what)


class SyncerFeed:
    """Follows the event log of a syncer from its beginning, so that totals are the run's, and feeds trackers with what
    is written from now on. A context manager that closes it.

    Arguments:
        opened: makes the feed from an id, once the run has one: a standby logs nothing before it takes over.
    """

    def __init__(self, event_log: Path, opened: Callable[[str], Feed]) -> None:
        self._tail, self._values, self._opened = EventTail(event_log), SyncerValues(), opened
        self._feed: Feed | None = None
        self._early: deque[Point] = deque(maxlen=MOST_WAITING)  # before the run has an id
        self._since = time.time()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="syncer-tracking", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Feed what is written by now, and let the trackers end."""
        self._stopping.set()
        self._thread.join()
        if self._feed is not None:
            self._feed.close(END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self) -> None:
        try:
            while not self._stopping.wait(1.0):
                self._read()
            self._read()
        except StoreError as error:
            log.error("trackers get nothing more: %s", error)
        except Exception:  # what watches cannot stop what decides
            log.exception("trackers get nothing more; the run goes on without them")

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
    """The feed of one process of a run to the trackers of its run file.

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
    told: dict[str, Any] = config.model_dump(mode="json", exclude_none=True, exclude=NOT_TOLD)
    run = TrackedRun(id_, table.project, config.run.name, f"{table.name or config.run.name}-{who}", told)
    return Feed(run, {name: made[name]() for name in table.trackers})


def persistent_id(folder: Path) -> str:
    """The id of what a process of this folder logs, drawn once.

    Raises:
        StoreError: it cannot be kept.
    """
    path = folder / ID_FILE
    with translated(OSError, StoreError, f"cannot keep {path}", "set [run] dir to a writable directory"):
        if path.is_file() and (found := path.read_text(encoding="utf-8")):
            return found
        drawn = secrets.token_hex(8)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, drawn)
        return drawn
