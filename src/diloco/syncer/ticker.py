"""A thread that calls a function at the time it was asked to, and now and then."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

log = logging.getLogger("diloco.syncer")

IDLE_S = 1.0
"""Between two ticks when nothing is asked for."""

SHORTEST_S = 0.01
"""Between any two ticks."""


class Ticker:
    """Calls `tick(late_s)` at the time that `wake_at` said last, and once a second.

    Arguments:
        tick: is told how much later than planned it is called: much, where the whole process stood still.
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
        """What ended the ticks."""

    def start(self) -> None:
        """The first tick comes within a second."""
        self._began_at = self._clock()
        self._thread.start()

    def wake_at(self, at: float) -> None:
        """Tick at this time of the clock at the latest; what was said before is void."""
        with self._changed:
            self._wake_at = at
            if at < self._planned:
                self._changed.notify_all()

    def stop(self) -> None:
        """No tick begins after this returns."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
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
        """When the next tick is due, after one from `began_at` to `ended_at`. A pause within a tick delays the next."""
        self._planned = min(began_at + IDLE_S, max(ended_at + SHORTEST_S, self._wake_at))
        return self._planned
