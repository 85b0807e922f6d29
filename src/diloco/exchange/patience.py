"""How long something may stand still before it is tried again: measured, not guessed."""

from __future__ import annotations

import threading
import time
from typing import Any, Self

TIMES = 8.0
"""A transfer is given up when it stands still for this many times the longest pause of late."""

FORGETS = 0.9
"""What a long pause counts for after each later one."""


class Patience:
    """A limit on standing still that follows what the link does: a multiple of the longest pause of late, never below a floor.

    A pause that ran into the limit counts too, so a link that has become much slower is given more and more time, up to the cap.
    Any thread may call any method.

    Arguments:
        floor_s: the limit before anything is known, and the lowest.
        cap_s: the highest.
    """

    def __init__(self, floor_s: float, cap_s: float) -> None:
        self.floor_s, self.cap_s = floor_s, cap_s
        self._longest_s = 0.0
        self._lock = threading.Lock()

    @property
    def limit_s(self) -> float:
        """Seconds."""
        return min(self.cap_s, max(self.floor_s, TIMES * self._longest_s))

    def paused(self, pause_s: float) -> None:
        """It stood still for so long, and then moved or was given up."""
        with self._lock:
            self._longest_s = max(pause_s, FORGETS * self._longest_s)


class Watchdog:
    """Cancels a call that stands still for longer than its patience; a context manager around the call.

    Arguments:
        call: has `cancel()`; whoever waits for it is woken by that.
        patience: of the channel it runs over.
    """

    def __init__(self, call: Any, patience: Patience) -> None:
        self._call = call
        self._patience = patience
        self._moved_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="diloco-watchdog", daemon=True)
        self.stood_still_s: float | None = None
        """How long it stood still when it was cancelled; None: it was not."""

    def moved(self) -> None:
        """Some bytes have arrived."""
        now = time.monotonic()
        self._patience.paused(now - self._moved_at)
        self._moved_at = now

    def stop(self) -> None:
        """There is nothing more to watch."""
        self._over.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            paused_s = time.monotonic() - self._moved_at
            left_s = self._patience.limit_s - paused_s
            if left_s <= 0:
                self.stood_still_s = paused_s
                self._patience.paused(paused_s)
                self._call.cancel()
                return
            if self._over.wait(left_s):
                return
