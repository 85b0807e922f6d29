"""A disk and a spool in memory that refuse when a test says so. What is durable of a run outlives its driver."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic

from diloco.errors import AlreadyInitialisedError, NoRoomError, NotInitialisedError, StoreError, VersionError
from diloco.run.memory_spool import MemorySlot, MemorySpool
from diloco.run.ports import H, InitialModel, Json, MergedRound, P, RunMethod, SavedRun, T, Work

Later = Callable[[str, int | None, Callable[[], None]], None]
"""Does something later, as an event of its own: what it is ("check", "close", "write" or "written"), of which fragment,
and the call."""

POINTS = ("written", "synced", "renamed", "directory synced", "inserted", "committed")
"""The durable steps of a write, as a real store names them. What is written exists from "committed" on."""


class MemoryStore(Generic[H, P]):
    """What is durable of a run, in memory: a driver that is gone leaves it behind for the next one.

    Arguments:
        at: is told each of `POINTS`. OSError from it is a disk that refuses; whatever else it raises is the end of the
            process there.
    """

    def __init__(self, at: Callable[[str], None] = lambda _: None) -> None:
        self._at = at
        self._saved: SavedRun[H] | None = None

    def load(self) -> SavedRun[H] | None:
        """The run as it was last made durable; None before `initialise`."""
        return self._saved

    def initialise(self, run: str, method: RunMethod, model: InitialModel[H]) -> None:
        """Version 0 of every fragment. Raises AlreadyInitialisedError, StoreError."""
        if self._saved is not None:
            raise AlreadyInitialisedError(f"run {self._saved.run!r} has a model already; join it as it is.")
        self._commit(
            POINTS,
            SavedRun(
                run, method, model.layout, model.fragments, ((),) * len(model.fragments), model.static, model.source,
                model.step, model.tokens, record=None,
            ),
        )  # fmt: skip

    def publish(self, merged: MergedRound[H, P], record: Json) -> None:
        """A version together with its record. Raises StoreError, VersionError, NotInitialisedError."""
        saved, index = self._require(), merged.update.fragment
        if merged.held.version != saved.fragments[index].version + 1:
            raise VersionError(
                f"version {merged.held.version} of fragment {index} cannot follow version "
                f"{saved.fragments[index].version}."
            )
        fragments, contributors = list(saved.fragments), list(saved.contributors)
        fragments[index], contributors[index] = merged.held, merged.update.contributors
        self._commit(
            POINTS,
            replace(saved, fragments=tuple(fragments), contributors=tuple(contributors), record=_plain(record)),
        )

    def save_record(self, record: Json) -> None:
        """A record alone. Raises StoreError, NotInitialisedError."""
        self._commit(POINTS[-2:], replace(self._require(), record=_plain(record)))

    def _require(self) -> SavedRun[H]:
        if self._saved is None:
            raise NotInitialisedError("there is no model; initialise the run first.")
        return self._saved

    def _commit(self, points: Sequence[str], saved: SavedRun[H]) -> None:
        try:
            for point in points[:-1]:
                self._at(point)
        except OSError as error:
            raise StoreError(f"the simulated disk refused ({error}); try again.") from error
        self._saved = saved
        self._at(points[-1])


class LaterWorker:
    """Does jobs when `later` says so. Of a write, "write" is the write itself, and "written" tells the driver."""

    def __init__(self, later: Later) -> None:
        self._later = later

    def submit(self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """As `ports.WorkerPort`."""
        if what != "write":
            self._later(what, fragment, lambda: done(job()))
            return

        def write() -> None:
            found = job()
            self._later("written", fragment, lambda: done(found))

        self._later("write", fragment, write)


class LimitedSpool(MemorySpool):
    """Room for payloads in memory, up to a budget.

    Attributes:
        budget_bytes: the most that may be held; None: no limit.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes

    def allocate(self, num_bytes: int) -> MemorySlot:
        """As `ports.SpoolPort`. Raises NoRoomError."""
        if self.budget_bytes is not None and self.held_bytes + num_bytes > self.budget_bytes:
            raise NoRoomError(f"there is no room for a contribution of {num_bytes} bytes; it is taken once there is.")
        return super().allocate(num_bytes)


def _plain(record: Json) -> Json:
    """As a disk gives it back. Raises TypeError where it is not plain values."""
    plain: Json = json.loads(json.dumps(record))
    return plain
