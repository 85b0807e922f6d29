"""Worker, disk and spool of a driver in one process, without threads and files. `Later` schedules their work."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol

from diloco.core.actions import MergeRound
from diloco.errors import (
    AlreadyInitialisedError,
    NoRoomError,
    NotInitialisedError,
    PayloadError,
    StoreError,
    VersionError,
)
from diloco.run.ports import (
    Done,
    H,
    InitialModel,
    Json,
    MergedRound,
    ModelLayout,
    P,
    RunMethod,
    S,
    S_contra,
    SavedRun,
)

Later = Callable[[str, int | None, Callable[[], None]], None]
"""Does something later, as an event of its own: what it is ("check", "close", "write" or "written"), of which fragment,
and the call."""

POINTS = ("written", "synced", "renamed", "directory synced", "inserted", "committed")
"""The durable steps of a write, as a real store names them. What is written exists from "committed" on."""


class Jobs(Protocol[H, S_contra, P]):
    """Tensor jobs that are done at once: `diloco.run.tensor_jobs.TensorJobs`, or what stands for it where there are no
    tensors."""

    def contribution_bytes(self, num_elements: int) -> int: ...
    def check(self, slot: S_contra, num_elements: int) -> PayloadError | None: ...
    def close(
        self, action: MergeRound, layout: Any, held: H, slots: Sequence[S_contra]
    ) -> MergedRound[H, P] | PayloadError: ...


class SimulatedWorker(Generic[H, S, P]):
    """Does tensor jobs when `later` says so."""

    def __init__(self, jobs: Jobs[H, S, P], later: Later) -> None:
        self._jobs = jobs
        self._later = later

    def contribution_bytes(self, num_elements: int) -> int:
        """As `ports.WorkerPort`."""
        return self._jobs.contribution_bytes(num_elements)

    def check(self, slot: S, fragment: int, num_elements: int, done: Callable[[PayloadError | None], None]) -> None:
        """As `ports.WorkerPort`."""
        self._later("check", fragment, lambda: done(self._jobs.check(slot, num_elements)))

    def close(
        self, action: MergeRound, layout: ModelLayout, held: H, slots: Sequence[S],
        done: Callable[[MergedRound[H, P] | PayloadError], None],
    ) -> None:  # fmt: skip
        """As `ports.WorkerPort`."""
        self._later("close", action.fragment, lambda: done(self._jobs.close(action, layout, held, slots)))


class MemoryStore(Generic[H, P]):
    """What is durable of a run, in memory: a driver that is gone leaves it behind for the next one. As on a disk, what
    is written and what is read are copies.

    Arguments:
        at: is told each of `POINTS`. OSError from it is a disk that refuses; whatever else it raises is the end of the
            process there.
        saved: what is durable already; None: nothing.
    """

    def __init__(self, at: Callable[[str], None] = lambda _: None, saved: SavedRun[H] | None = None) -> None:
        self._at = at
        self._saved = saved

    def load(self) -> SavedRun[H] | None:
        """The run as it was last made durable; None before `initialise`."""
        return None if self._saved is None else replace(self._saved, fragments=deepcopy(self._saved.fragments))

    def initialise(self, run: str, method: RunMethod, model: InitialModel[H]) -> None:
        """Version 0 of every fragment. Raises AlreadyInitialisedError, StoreError."""
        if self._saved is not None:
            raise AlreadyInitialisedError(f"run {self._saved.run!r} has a model already; join it as it is.")
        self._commit(
            POINTS,
            SavedRun(
                run, method, model.layout, deepcopy(model.fragments), ((),) * len(model.fragments), model.static,
                model.source, model.step, model.tokens, record=None,
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
        fragments[index], contributors[index] = deepcopy(merged.held), merged.update.contributors
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


class SimulatedDisk(Generic[H, P]):
    """Writes to a store when `later` says so: "write" is the write itself, "written" tells the driver of it."""

    def __init__(self, store: MemoryStore[H, P], later: Later) -> None:
        self._store = store
        self._later = later

    def initialise(self, run: str, method: RunMethod, model: InitialModel[H], done: Done) -> None:
        """As `ports.DiskPort`."""
        self._write(None, lambda: self._store.initialise(run, method, model), done)

    def persist_version(self, merged: MergedRound[H, P], record: Json, done: Done) -> None:
        """As `ports.DiskPort`."""
        self._write(merged.update.fragment, lambda: self._store.publish(merged, record), done)

    def persist_record(self, record: Json, done: Done) -> None:
        """As `ports.DiskPort`."""
        self._write(None, lambda: self._store.save_record(record), done)

    def _write(self, fragment: int | None, write: Callable[[], None], done: Done) -> None:
        def now() -> None:
            error: StoreError | None = None
            try:
                write()
            except StoreError as refused:
                error = refused
            self._later("written", fragment, lambda: done(error))

        self._later("write", fragment, now)


@dataclass(eq=False)
class MemorySlot:
    """Room for one payload, which is put here whole."""

    num_bytes: int
    payload: Any = None

    @property
    def tensor(self) -> Any:
        """The payload: uint8, where there are tensors."""
        return self.payload


class MemorySpool:
    """Room for payloads in memory.

    Arguments:
        budget_bytes: the most that may be held; None: no limit.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0

    def allocate(self, num_bytes: int) -> MemorySlot:
        """As `ports.SpoolPort`. Raises NoRoomError."""
        if self.budget_bytes is not None and self.held_bytes + num_bytes > self.budget_bytes:
            raise NoRoomError(f"there is no room for a contribution of {num_bytes} bytes; it is taken once there is.")
        self.held_bytes += num_bytes
        return MemorySlot(num_bytes)

    def release(self, slot: MemorySlot) -> None:
        """As `ports.SpoolPort`."""
        self.held_bytes -= slot.num_bytes
        slot.payload = None


def _plain(record: Json) -> Json:
    """As a disk gives it back. Raises TypeError where it is not plain values."""
    plain: Json = json.loads(json.dumps(record))
    return plain
