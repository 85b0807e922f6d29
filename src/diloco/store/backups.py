"""A thread that takes snapshots of a syncer's run, every so often. What it fails with ends nothing else."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from diloco import events
from diloco.errors import DilocoError, NotInitialisedError, StoreError
from diloco.event_log import EventLog
from diloco.store.backup import back_up, taken_last_at
from diloco.store.targets import open_target

log = logging.getLogger("diloco.syncer")


@dataclass(frozen=True)
class BackupPlan:
    """Where snapshots go, how often one is taken, and how many are kept."""

    place: str
    every_s: float
    keep: int


class Backups:
    """Takes snapshots until it is closed.

    Raises:
        ConfigError: the place cannot be used.
    """

    def __init__(self, plan: BackupPlan, state_dir: Path, events_log: EventLog) -> None:
        self._plan, self._state_dir, self._events = plan, state_dir, events_log
        self._target = open_target(plan.place)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncer-backup", daemon=True)

    def start(self) -> None:
        """Take the first one `every_s` after the newest that is there, whichever process took that."""
        self._thread.start()

    def close(self) -> None:
        """Finish the one under way."""
        self._is_closing.set()
        self._thread.join()

    def _run(self) -> None:
        wait_s = self._first_in_s()
        while not self._is_closing.wait(wait_s):
            self._back_up()
            wait_s = self._plan.every_s

    def _first_in_s(self) -> float:
        try:
            return due_in_s(taken_last_at(self._target), time.time(), self._plan.every_s)
        except StoreError:  # the first try says it
            return 0.0

    def _back_up(self) -> None:
        started, place = time.monotonic(), self._plan.place
        try:
            snapshot = back_up(self._state_dir, self._target, self._plan.keep)
        except NotInitialisedError:
            return
        except DilocoError as error:
            log.error("the run is not backed up: %s", error)
            self._events.append(events.BackupRefused(place=place, error=str(error)))
            return
        versions = tuple(each.update.version for each in snapshot.versions)
        seconds = time.monotonic() - started
        self._events.append(events.BackedUp(place=place, snapshot=snapshot.name, versions=versions, seconds=seconds))


def due_in_s(taken_at: float | None, now: float, every_s: float) -> float:
    """Seconds from `now` to the next snapshot, of which the last was taken at `taken_at`; None: there is none."""
    return 0.0 if taken_at is None else min(max(0.0, taken_at + every_s - now), every_s)
