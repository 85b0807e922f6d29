"""A spool and a store in memory, for a run in one process. What is durable of it outlives its driver."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Generic

from diloco.errors import NotInitialisedError, StoreError, VersionError
from diloco.run.ports import H, InitialModel, Json, MergedRound, P, RunMethod, SavedRun, first_epoch


@dataclass(eq=False)
class MemorySlot:
    """Room for one payload, which is stored whole. `tensor`: the payload, uint8 where there are tensors."""

    num_bytes: int
    tensor: Any = None


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
        slot.tensor = None


class MemoryStore(Generic[H, P]):
    """The durable state of a run, in memory, which outlives its driver. As in a real store, written and read values are
    copies.

    Arguments:
        later: calls a function soon, as an event of its own.
        saved: the durable state at the start; None: there is none.
    """

    is_refusing = False

    def __init__(self, later: Callable[[Callable[[], None]], None], saved: SavedRun[H] | None = None) -> None:
        self._later = later
        self._saved = saved
        self._put: dict[int, H] = {}

    def load(self) -> SavedRun[H] | None:
        """The run as it was last made durable; None before `initialise`."""
        return None if self._saved is None else replace(self._saved, fragments=deepcopy(self._saved.fragments))

    def begin(self, saved: SavedRun[H]) -> SavedRun[H]:
        """Make the epoch of the next driver durable, of the run that `load` has read; returns what it starts from."""
        self._saved = replace(self._require(), epochs=saved.begun().epochs)
        return saved.begun()

    def initialise(
        self, run: str, method: RunMethod, model: InitialModel[H], done: Callable[[StoreError | None], None]
    ) -> None:
        """As `ports.StorePort`."""
        assert self._saved is None
        self._saved = SavedRun(
            run, method, model.layout, deepcopy(model.fragments), ((),) * len(model.fragments), model.static,
            model.source, model.step, model.tokens, model.run_id, (first_epoch(model),), record=None,
        )  # fmt: skip
        self._later(lambda: done(None))

    def put(self, merged: MergedRound[H, P], done: Callable[[], None]) -> None:
        """As `ports.StorePort`."""
        self._put[merged.update.fragment] = deepcopy(merged.held)
        self._later(done)

    def commit(
        self, versions: Sequence[MergedRound[H, P]], record: Json, pack: Sequence[bytes], done: Callable[[], None]
    ) -> None:
        """As `ports.StorePort`. Raises VersionError: another version comes next."""
        saved = self._require()
        fragments, contributors = list(saved.fragments), list(saved.contributors)
        for merged in versions:
            index = merged.update.fragment
            if merged.update.version != fragments[index].version + 1:
                raise VersionError(
                    f"version {merged.update.version} of fragment {index} cannot follow version "
                    f"{fragments[index].version}."
                )
            fragments[index], contributors[index] = self._put.pop(index), merged.update.contributors
        plain = json.loads(json.dumps(record))  # as a store gives it back; TypeError where it is not plain values
        self._saved = replace(saved, fragments=tuple(fragments), contributors=tuple(contributors), record=plain)
        self._later(done)

    def _require(self) -> SavedRun[H]:
        if self._saved is None:
            raise NotInitialisedError("there is no model; initialise the run first.")
        return self._saved
