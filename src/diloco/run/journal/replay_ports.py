"""The world of a driver that is replayed: ports that answer as the journal says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from diloco.errors import NoRoomError, PayloadError, StoreError
from diloco.protocol.actions import MergeRound
from diloco.protocol.contribution import Standing
from diloco.run.journal.serialization import TAG, PlainReader
from diloco.run.memory import MemorySlot, MemorySpool
from diloco.run.ports import InitialModel, JobsPort, Json, MergedRound, RunMethod, SavedRun, T, Work


class KeptPayloads(Protocol):
    """The payloads of a journal."""

    def contribution(self, digest: str) -> Any:
        """The payload of a contribution as a slot has it; None: it is not kept."""

    def fragment(self, method: Any, index: int, version: int, digest: str) -> Any:
        """A fragment that a driver began with, as its jobs have it; None: it is not kept."""

    def digest(self, payload: Any) -> str:
        """Of a contribution's payload."""


@dataclass(frozen=True)
class Formats:
    """What only a run with tensors knows.

    Attributes:
        layout, method: from what `to_dict` gave.
        jobs: of a method.
        payloads: None: the journal has none.
    """

    layout: Callable[[Any], Any]
    method: Callable[[Any], Any]
    jobs: Callable[[Any], JobsPort[Any, Any, Any]]
    payloads: KeptPayloads | None = None


@dataclass(frozen=True, eq=False)
class KnownFragment:
    """A fragment at a version.

    Attributes:
        tensors: None where only its digest is known.
    """

    version: int
    digest: str
    tensors: Any = None


@dataclass
class Past:
    """What the journal says of the event that is replayed.

    Attributes:
        entry: of the journal.
        now_s: its time.
        written: what the recorder writes of it now.
    """

    reader: PlainReader
    entry: Mapping[str, Any] = field(default_factory=dict)
    now_s: float = 0.0
    written: list[str] = field(default_factory=list)

    @property
    def found(self) -> Any:
        """What the job has found whose end it is."""
        return self.reader.read(self.entry["r"])


NUM_HELD = 2
"""Versions of a fragment whose tensors are held."""


class PastJournal:
    """Takes what is written of an event now (`recorder.JournalPort`)."""

    def __init__(self, past: Past) -> None:
        self._past = past

    def append(self, entry: str) -> None:
        self._past.written.append(entry)

    def sync(self) -> None:
        pass


class PastClock:
    """Says the recorded times; the journal has the ticks (`ports.ClockPort`)."""

    def __init__(self, past: Past) -> None:
        self._past = past

    def now_s(self) -> float:
        return self._past.now_s

    def wake_at(self, at_s: float) -> None:
        pass


class PastSpool(MemorySpool):
    """Has no room when there was none."""

    def __init__(self, past: Past) -> None:
        super().__init__()
        self._past = past

    def allocate(self, num_bytes: int) -> MemorySlot:
        """As `ports.SpoolPort`."""
        refusal = self._past.reader.read(self._past.entry.get("i", {}).get("no_room"))
        if isinstance(refusal, NoRoomError):
            raise refusal
        return super().allocate(num_bytes)


class PastWorker:
    """Keeps jobs until the journal has their end (`ports.WorkerPort`).

    Attributes:
        jobs: by number: what it is, the job, and the call with its result.
    """

    def __init__(self) -> None:
        self.jobs: dict[int, tuple[Work, Callable[[], Any], Callable[[Any], None]]] = {}
        self._num_jobs = 0

    def submit(self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None]) -> None:
        self._num_jobs += 1
        self.jobs[self._num_jobs] = what, job, done


class DeafConnection:
    """What is sent on it is in the digest of the event (`ports.ConnectionPort`)."""

    def standing(self, standing: Standing) -> None:
        pass

    def evicted(self, reason: str, *, replaced: bool) -> None:
        pass

    def end(self) -> None:
        pass


class PastPayloads:
    """Digests of contributions: those of kept payloads are made again (`recorder_ports.PayloadsPort`)."""

    def __init__(self, past: Past, kept: KeptPayloads | None) -> None:
        self._past, self._kept = past, kept

    def check(self, slot: MemorySlot, *, is_usable: bool) -> Mapping[str, Any]:
        notes: Mapping[str, Any] = self._past.entry["x"]
        if self._kept is None or slot.payload is None:
            return notes
        return {**notes, "payload": self._kept.digest(slot.payload)}

    def begin(self, model: InitialModel[Any]) -> None:
        pass

    def resume(self, saved: SavedRun[Any]) -> None:
        pass


class PastJobs:
    """Does the jobs again whose payloads are kept, and otherwise finds what was found (`ports.JobsPort`).

    Arguments:
        method: the run's.
        fragment: merge only this one again; None: all.

    Attributes:
        is_equal: whether the last round was merged again, with the digest of then.
    """

    def __init__(self, past: Past, formats: Formats, method: Any, *, fragment: int | None) -> None:
        self._past, self._real, self._kept, self._fragment = past, formats.jobs(method), formats.payloads, fragment
        self.is_equal = False

    def contribution_bytes(self, num_elements: int) -> int:
        return self._real.contribution_bytes(num_elements)

    def check(self, slot: MemorySlot, num_elements: int) -> PayloadError | None:
        digest = self._past.entry["x"].get("payload")
        slot.payload = None if self._kept is None or digest is None else self._kept.contribution(digest)
        if slot.payload is not None:
            return self._real.check(slot, num_elements)
        error = self._past.found
        assert error is None or isinstance(error, PayloadError)
        return error

    def close(
        self, action: MergeRound, layout: Any, held: KnownFragment, slots: Sequence[MemorySlot]
    ) -> MergedRound[KnownFragment, None] | PayloadError:
        self.is_equal = False
        is_asked = self._fragment in (None, action.fragment)
        if not is_asked or held.tensors is None or any(slot.payload is None for slot in slots):
            return self._as_found(action)
        merged = self._real.close(action, layout, held.tensors, slots)
        if isinstance(merged, PayloadError):
            self.is_equal = TAG in self._past.entry["r"]
            return merged
        found = self._past.entry["r"].get("update")
        self.is_equal = found is not None and found["digest"] == merged.held.digest
        new = merged.held
        return replace(merged, held=KnownFragment(new.version, new.digest, new), payload=None)

    def _as_found(self, action: MergeRound) -> MergedRound[KnownFragment, None] | PayloadError:
        found = self._past.entry["r"]
        if "update" not in found:
            error = self._past.found
            assert isinstance(error, PayloadError)
            return error
        update, refused = self._past.reader.read(found["update"]), self._past.reader.read(found["refused"])
        return MergedRound(
            action, update, KnownFragment(update.version, update.digest), None, found["num_bytes"], refused
        )


class History:
    """Every version that was published, and the tensors of the newest of each fragment: a store keeps as many, so that
    a run may go back to them."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, int], KnownFragment] = {}

    def take(self, index: int, held: KnownFragment) -> None:
        """A version of a fragment is durable."""
        self._told[index, held.version] = held
        if (old := self._told.get((index, held.version - NUM_HELD))) is not None:
            self._told[index, held.version - NUM_HELD] = replace(old, tensors=None)

    def find(self, index: int, version: int, digest: str) -> KnownFragment | None:
        """A version with this digest; None: there was none."""
        found = self._told.get((index, version))
        return found if found is not None and found.digest == digest else None


class PastStore:
    """What is durable (`ports.StorePort`). A disk that refused refuses again.

    Attributes:
        fragments: the newest version of each; empty: there is no model.
        record: that belongs to them.
    """

    def __init__(self, past: Past, history: History) -> None:
        self.fragments: list[KnownFragment] = []
        self.record: Json | None = None
        self._past, self._history = past, history

    def initialise(self, run: str, method: RunMethod, model: InitialModel[KnownFragment]) -> None:
        self._refuse()
        self.fragments, self.record = list(model.fragments), None
        for index, held in enumerate(model.fragments):
            self._history.take(index, held)

    def publish(self, merged: MergedRound[KnownFragment, None], record: Json) -> None:
        self._refuse()
        self.fragments[merged.update.fragment], self.record = merged.held, record
        self._history.take(merged.update.fragment, merged.held)

    def save_record(self, record: Json) -> None:
        self._refuse()
        self.record = record

    def _refuse(self) -> None:
        error = self._past.found
        if isinstance(error, StoreError):
            raise error
