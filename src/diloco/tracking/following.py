"""Trackers of a syncer: fed with what it writes down, while it writes it."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Self

from diloco.errors import StoreError
from diloco.event_log import EventTail
from diloco.tracking.feed import Feed
from diloco.tracking.values import SyncerValues

log = logging.getLogger("diloco.tracking")

EVERY_S = 1.0
READ_BYTES = 1 << 20


class Following:
    """Reads an event log from its beginning, so that totals are the run's, and feeds what is written from now on. A
    context manager that closes it.

    Arguments:
        event_log: the syncer's.
        feed: closed with this. It begins once the run has an id: a standby logs nothing before it takes over.
    """

    def __init__(self, event_log: Path, feed: Feed) -> None:
        self._tail, self._values, self._feed = EventTail(event_log), SyncerValues(), feed
        self._since = time.time()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncer-tracking", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Feed what is written down by now, and let the trackers end."""
        self._stopping.set()
        self._thread.join()
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(EVERY_S):
                self._read()
            self._read()
        except StoreError as error:
            log.error("trackers get nothing more: %s", error)
        except Exception:  # what watches cannot stop what decides
            log.exception("trackers get nothing more; the run goes on without them")

    def _read(self) -> None:
        while events := self._tail.read(READ_BYTES):
            for event in events:
                point = self._values.take(event)
                if point is None or event.t < self._since:
                    continue
                if run_id := self._values.run_id:
                    self._feed.begin(f"{run_id[:16]}-syncer")  # once
                self._feed.put(point)
