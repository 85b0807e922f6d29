"""Cancels a transfer that stands still."""

from __future__ import annotations

import threading
import time
from typing import Any, Self

from diloco.core.session.lanes import StallTimeout


class Watchdog:
    """Cancels a call that stands still for longer than its stall timeout; a context manager around the call.

    Only one call at a time uses a stall timeout.

    Arguments:
        call: has `cancel()`, which wakes the thread that waits for the call.
        timeout: of the channel that the call runs over.

    Attributes:
        stood_still_s: how long the call stood still when it was cancelled; None: it was not.
    """

    def __init__(self, call: Any, timeout: StallTimeout) -> None:
        self.stood_still_s: float | None = None
        self._call = call
        self._timeout = timeout
        self._moved_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="diloco-watchdog", daemon=True)

    def moved(self) -> None:
        """Some bytes have arrived."""
        now = time.monotonic()
        self._timeout.paused(now - self._moved_at)
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
        if self.stood_still_s is not None:
            self._timeout.paused(self.stood_still_s)

    def _watch(self) -> None:
        while True:
            paused_s = time.monotonic() - self._moved_at
            left_s = self._timeout.limit_s - paused_s
            if left_s <= 0:
                self.stood_still_s = paused_s
                self._call.cancel()
                return
            if self._over.wait(left_s):
                return
