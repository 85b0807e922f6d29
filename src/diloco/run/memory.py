"""A spool and a store in memory, for a run in one process. What is durable of it outlives its driver."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Generic

from diloco.errors import AlreadyInitialisedError, NotInitialisedError, StoreError, VersionError
from diloco.run.ports import H, InitialModel, Json, MergedRound, P, RunMethod, SavedRun, first_epoch

POINTS = ("written", "synced", "renamed", "directory synced", "inserted", "committed")
"""The durable steps of a write, as a real store names them. What is written exists from "committed" on."""


@dataclass(eq=False)
class MemorySlot:
    """Room for one payload, which is stored whole."""

    num_bytes: int
    payload: Any = None

    @property
    def tensor(self) -> Any:
        """The payload: uint8, where there are tensors."""
        return self.payload


class MemorySpool:
    """Room for payloads in memory."""

    def __init__(self) -> None:
        self.held_bytes = 0

    def allocate(self, num_bytes: int) -> MemorySlot:
        """As `ports.SpoolPort`."""
        self.held_bytes += num_bytes
        return MemorySlot(num_bytes)

    def release(self, slot: MemorySlot) -> None:
        """As `ports.SpoolPort`."""
        self.held_bytes -= slot.num_bytes
        slot.payload = None


class MemoryStore(Generic[H, P]):
    """The durable state of a run, in memory, which outlives its driver. As on a disk, written and read values are
    copies.

    Arguments:
        at: called with each of `POINTS`. An OSError that it raises is a refusal of the disk; any other error is the end
            of the process at that point.
        saved: the durable state at the start; None: there is none.
    """

    def __init__(self, at: Callable[[str], None] = lambda _: None, saved: SavedRun[H] | None = None) -> None:
        self._at = at
        self._saved = saved

    @property
    def is_initialised(self) -> bool:
        """Whether the run has a model."""
        return self._saved is not None

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
                model.source, model.step, model.tokens, model.run_id, (first_epoch(model),), record=None,
            ),
        )  # fmt: skip

    def begin(self, saved: SavedRun[H]) -> SavedRun[H]:
        """Make the epoch of the next driver durable, of the run that `load` has read; returns what it starts from."""
        self._saved = replace(self._require(), epochs=saved.begun().epochs)
        return saved.begun()

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


def _plain(record: Json) -> Json:
    """As a disk gives it back. Raises TypeError where it is not plain values."""
    plain: Json = json.loads(json.dumps(record))
    return plain
