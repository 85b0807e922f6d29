"""Hands points to trackers, each from a thread and a bounded queue of its own: what trains or merges never waits for
them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from diloco.errors import TrackerError
from diloco.tracking.base import Point, TrackedRun, Tracker

log = logging.getLogger("diloco.tracking")

MOST_WAITING = 1000
"""Points that wait for a tracker; with more of them the oldest goes."""

END_S = 15.0
"""Trackers have this long to log what waits and to end, all together."""

ABANDON_S = 1.0
"""For a tracker to notice that it was abandoned."""

HANGS_S = 60.0
"""After this long without an answer of a tracker it is said, once."""


class Outlet(Tracker, Protocol):
    """A tracker whose methods raise TrackerError and nothing else, and that can be given up."""

    def abandon(self) -> None:
        """End a method that is under way in another thread, which then raises."""


class Feed:
    """Feeds trackers with the points of one process. A context manager that closes it. Any thread may call any method.

    A tracker that is slow loses points, the oldest first; one that raises loses that point; one that cannot start loses
    all. Each of these is said once in the log, and at the end the number.

    Arguments:
        run: as trackers know it.
        outlets: by name.
    """

    def __init__(self, run: TrackedRun, outlets: Mapping[str, Outlet], *, most_waiting: int = MOST_WAITING) -> None:
        self.run = run
        self._lanes = [_Lane(name, outlet, most_waiting) for name, outlet in outlets.items()]
        self._lock = threading.Lock()
        self._has_begun = self._is_closed = False

    def begin(self, run_id: str | None = None) -> None:
        """Start the trackers, once.

        Arguments:
            run_id: replaces `TrackedRun.id`, where it was not known before.
        """
        with self._lock:
            if self._has_begun or self._is_closed:
                return
            self._has_begun = True
        run = self.run if run_id is None else replace(self.run, id=run_id)
        for lane in self._lanes:
            lane.begin(run)

    def put(self, point: Point) -> None:
        """A point for each tracker; it never blocks."""
        for lane in self._lanes:
            lane.put(point)

    @property
    def dropped(self) -> dict[str, int]:
        """By tracker, points that it did not log and will not."""
        return {lane.name: lane.num_dropped for lane in self._lanes}

    def close(self, timeout_s: float = END_S) -> None:
        """Let trackers log what waits and end, for so long at most."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if not self._has_begun:
                return
        for lane in self._lanes:
            lane.finish()
        end_at = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.join(max(0.0, end_at - time.monotonic()), timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Lane:
    """One tracker, its queue and its thread."""

    def __init__(self, name: str, outlet: Outlet, most_waiting: int) -> None:
        self.name = name
        self.num_dropped = 0
        self._outlet, self._most_waiting = outlet, most_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Point] = deque()
        self._num_points = 0
        self._busy_since: float | None = None  # what the tracker does now, if anything
        self._is_finishing = self._is_abandoned = self._has_failed = self._is_slow = self._hangs = False
        self._thread: threading.Thread | None = None

    def begin(self, run: TrackedRun) -> None:
        self._busy_since = time.monotonic()
        self._thread = threading.Thread(target=self._work, args=(run,), name=f"tracking-{self.name}", daemon=True)
        self._thread.start()

    def put(self, point: Point) -> None:
        with self._changed:
            self._num_points += 1
            if self._is_finishing or self._is_abandoned:
                self.num_dropped += 1
                return
            if is_full := len(self._waiting) == self._most_waiting:
                self._waiting.popleft()
                self.num_dropped += 1
            says, self._is_slow = is_full and not self._is_slow, self._is_slow or is_full
            busy_s = 0.0 if self._busy_since is None else time.monotonic() - self._busy_since
            hangs, self._hangs = busy_s > HANGS_S and not self._hangs, self._hangs or busy_s > HANGS_S
            self._waiting.append(point)
            self._changed.notify()
        if says:
            log.warning("%s is slower than the run: it misses points, the oldest first; the run goes on", self.name)
        if hangs:
            log.warning("%s has not answered for %.0f s; points wait for it, and the run goes on", self.name, busy_s)

    def finish(self) -> None:
        """Nothing more comes."""
        with self._changed:
            self._is_finishing = True
            self._changed.notify()

    def join(self, timeout_s: float, of_s: float) -> None:
        """Wait for the end, give up the tracker after `timeout_s` of the `of_s` that all of them have, and say how many
        points are missing."""
        assert self._thread is not None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._changed:
                self._is_abandoned = True
                self.num_dropped += len(self._waiting)
                self._waiting.clear()
            log.warning("%s has not ended within %g s and is left alone", self.name, of_s)
            self._outlet.abandon()
            self._thread.join(ABANDON_S)
        if self.num_dropped:
            log.warning("%s has missed %d of %d points", self.name, self.num_dropped, self._num_points)

    # --- the thread

    def _next(self) -> Point | None:
        """The oldest point; None: there are no more."""
        with self._changed:
            self._busy_since = None
            self._changed.wait_for(lambda: self._waiting or self._is_finishing or self._is_abandoned)
            point = self._waiting.popleft() if self._waiting else None
            self._busy_since = time.monotonic()
            return point

    def _work(self, run: TrackedRun) -> None:
        try:
            self._outlet.start(run)
        except TrackerError as error:
            self._failed(error, "could not start, and logs nothing")
            with self._changed:
                self._is_abandoned = True
                self.num_dropped += len(self._waiting)
                self._waiting.clear()
            return
        while (point := self._next()) is not None:
            try:
                self._outlet.log(point)
            except TrackerError as error:
                with self._changed:
                    self.num_dropped += 1
                self._failed(error, "failed, and misses points")
        try:
            self._outlet.end()
        except TrackerError as error:
            self._failed(error, "failed at its end")

    def _failed(self, error: TrackerError, what: str) -> None:
        """Say it once."""
        if not self._has_failed and not self._is_abandoned:
            self._has_failed = True
            log.error("%s %s: %s", self.name, what, error)
