"""Threads of a syncer's process: clocks that call at a requested time, and jobs whose results become events."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from diloco.run.ports import Work

log = logging.getLogger("diloco.syncer")

IDLE_S = 1.0
"""The time between two ticks unless an earlier one is requested."""

SHORTEST_S = 0.01
"""The shortest time between two ticks."""


class Ticker:
    """A clock, such as the driver's: calls `tick(late_s)` at the last time given to `wake_at`, and at least once a
    second.

    Arguments:
        tick: gets the delay of the call; it is long if the whole process was suspended.
        clock: monotonic seconds.
    """

    def __init__(self, tick: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tick, self._clock = tick, clock
        self._wake_at = math.inf
        self._planned = math.inf
        self._changed = threading.Condition()
        self._began_at = math.inf
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="syncer-tick", daemon=True)
        self.failure: BaseException | None = None
        """The error that ended the ticks."""

    def start(self) -> None:
        """Start; the first tick comes within a second."""
        self._began_at = self._clock()
        self._thread.start()

    def now_s(self) -> float:
        """As `ports.ClockPort`."""
        return self._clock()

    def wake_at(self, at_s: float) -> None:
        """Tick at this time of the clock at the latest; replaces the earlier request."""
        with self._changed:
            self._wake_at = at_s
            if at_s < self._planned:
                self._changed.notify_all()

    def stop(self) -> None:
        """No tick begins after this returns."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        began_at = self._began_at
        while True:
            ended_at = self._clock()
            with self._changed:
                while not self._stopping and (left_s := self._plan(began_at, ended_at) - self._clock()) > 0:
                    self._changed.wait(left_s)
                if self._stopping:
                    return
                late_s = self._clock() - self._planned
                self._wake_at = math.inf
            began_at = self._clock()
            try:
                self._tick(late_s)
            except BaseException as error:
                log.critical("the tick thread failed", exc_info=error)
                self.failure = error
                return

    def _plan(self, began_at: float, ended_at: float) -> float:
        """Plan the tick after one from `began_at` to `ended_at`. A long tick delays the next."""
        self._planned = min(began_at + IDLE_S, max(ended_at + SHORTEST_S, self._wake_at))
        return self._planned


T = TypeVar("T")

NUM_CHECKERS = 4
"""Most threads that check payloads; each reads a contribution once."""


NUM_WRITERS = 4
"""Most objects that are stored at a time."""


class JobThreads:
    """Executes jobs on threads; each result becomes an event of the driver.

    Arguments:
        event: executes an event of the driver, one at a time.
        failed: called with an unexpected error of a job.

    Attributes:
        is_stopping: no job is started any more.
    """

    def __init__(self, event: Callable[[Callable[[], None]], None], failed: Callable[[BaseException], None]) -> None:
        num_threads: dict[Work, int] = {
            "check": min(NUM_CHECKERS, os.cpu_count() or 1), "close": 1, "put": NUM_WRITERS, "swap": 1, "delete": 1,
        }  # fmt: skip
        self._pools = {
            what: ThreadPoolExecutor(number, thread_name_prefix=f"syncer-{what}")
            for what, number in num_threads.items()
        }
        self._event = event
        self._failed = failed
        self.is_stopping = False

    def submit(self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """As `ports.WorkerPort`."""

        def run() -> None:
            try:
                found = job()
                self._event(lambda: done(found))
            except BaseException as error:
                log.critical("a job of the syncer failed", exc_info=error)
                self._failed(error)

        if not self.is_stopping:
            self._pools[what].submit(run)

    def stop(self) -> None:
        """Finish the started jobs, and none that waits for its turn."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
