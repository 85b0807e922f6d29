"""Ports of a replayed driver, which answer as in the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from diloco.errors import NoRoomError, PayloadError
from diloco.protocol.actions import MergeRound
from diloco.protocol.contribution import Standing
from diloco.run.journal.serialization import TAG, PlainReader
from diloco.run.memory import MemorySlot, MemorySpool
from diloco.run.ports import InitialModel, JobsPort, Json, MergedRound, RunMethod, SavedRun, T


class Formats(Protocol):
    """Functions of a run with tensors, and the kept payloads of its journal."""

    def layout(self, values: Any, /) -> Any:
        """Read a layout from the values of `to_dict`."""

    def method(self, values: Any, /) -> Any:
        """Read a method from the values of `to_dict`."""

    def jobs(self, method: Any) -> JobsPort[Any, Any, Any]:
        """Return the jobs of a method."""

    def contribution(self, digest: str) -> Any:
        """Return a contribution's payload, as in a slot; None: it is not kept."""

    def fragment(self, method: Any, index: int, version: int, digest: str) -> Any:
        """Return an initial fragment of a driver, as in its jobs; None: it is not kept."""

    def digest(self, payload: Any) -> str:
        """Return the digest of a contribution's payload."""


@dataclass(frozen=True, eq=False)
class KnownFragment:
    """A version of a fragment.

    Attributes:
        tensors: None: only the digest is known.
    """

    version: int
    digest: str
    tensors: Any = None


NUM_HELD = 2
"""Newest versions of a fragment whose tensors are kept in memory."""


class Past(MemorySpool):
    """The past of one driver: its clock, spool and worker, and the recorder's journal and payloads.

    Jobs and requests wait for their end in the journal; wake-ups are ticks in the journal.

    Attributes:
        entry: in the journal, of the current event.
        written: entries that the recorder writes in the replay of that event.
        jobs: under way, by number: kind, job, and callback for the result.
    """

    def __init__(self, reader: PlainReader, formats: Formats, entry: Mapping[str, Any]) -> None:
        super().__init__()
        self.reader, self._formats = reader, formats
        self.jobs: dict[int, tuple[str, Callable[[], Any], Callable[[Any], None]]] = {}
        self._num_jobs = 0
        self.begin_entry(entry)

    def begin_entry(self, entry: Mapping[str, Any]) -> None:
        """The event of an entry begins."""
        self.entry = entry
        self.written: list[str] = []

    @property
    def found(self) -> Any:
        """The recorded result of the job that ends."""
        return self.reader.read(self.entry["r"])

    def now_s(self) -> float:
        """As `ports.ClockPort`."""
        at_s: float = self.entry["t"]
        return at_s

    def wake_at(self, at_s: float) -> None:
        """As `ports.ClockPort`."""

    def allocate(self, num_bytes: int) -> MemorySlot:
        """As `ports.SpoolPort`; refuses where the journal has a refusal."""
        refusal = self.reader.read(self.entry.get("i", {}).get("no_room"))
        if isinstance(refusal, NoRoomError):
            raise refusal
        return super().allocate(num_bytes)

    def submit(self, what: str, fragment: int | None, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """As `ports.WorkerPort`."""
        self._num_jobs += 1
        self.jobs[self._num_jobs] = what, job, done

    def append(self, entry: str) -> None:
        """As `recorder.JournalPort`."""
        self.written.append(entry)

    def sync(self) -> None:
        """As `recorder.JournalPort`."""

    def check(self, slot: MemorySlot, *, is_usable: bool) -> Mapping[str, Any]:
        """As `recorder.PayloadsPort`: digests are computed again for kept payloads."""
        notes: Mapping[str, Any] = self.entry["x"]
        return notes if slot.tensor is None else {**notes, "payload": self._formats.digest(slot.tensor)}

    def begin(self, model: InitialModel[Any]) -> None:
        """As `recorder.PayloadsPort`."""

    def resume(self, saved: SavedRun[Any]) -> None:
        """As `recorder.PayloadsPort`."""


class DeafConnection:
    """Discards messages; the digest of the event covers them (`ports.ConnectionPort`)."""

    def standing(self, standing: Standing) -> None:
        pass

    def evicted(self, reason: str, *, replaced: bool) -> None:
        pass

    def end(self) -> None:
        pass


class PastJobs:
    """Executes jobs again whose payloads are kept, and returns recorded results otherwise (`ports.JobsPort`).

    Arguments:
        method: the run's.
        fragment: the only one to merge again; None: all.

    Attributes:
        is_equal: whether the last round was merged again with the recorded digest.
    """

    def __init__(self, past: Past, formats: Formats, method: Any, *, fragment: int | None) -> None:
        self._past, self._real, self._kept, self._fragment = past, formats.jobs(method), formats, fragment
        self.is_equal = False

    def contribution_bytes(self, fragment: int, num_elements: int) -> int:
        return self._real.contribution_bytes(fragment, num_elements)

    def check(self, slot: MemorySlot, fragment: int, num_elements: int) -> PayloadError | None:
        digest = self._past.entry["x"].get("payload")
        slot.tensor = None if digest is None else self._kept.contribution(digest)
        if slot.tensor is not None:
            return self._as_worded(self._real.check(slot, fragment, num_elements))
        error = self._past.found
        assert error is None or isinstance(error, PayloadError)
        return error

    def close(
        self, action: MergeRound, layout: Any, held: KnownFragment, slots: Sequence[MemorySlot]
    ) -> MergedRound[KnownFragment, None] | PayloadError:
        self.is_equal = False
        is_asked = self._fragment in (None, action.fragment)
        if not is_asked or held.tensors is None or any(slot.tensor is None for slot in slots):
            return self._as_found(action)
        merged = self._real.close(action, layout, held.tensors, slots)
        if isinstance(merged, PayloadError):
            self.is_equal = TAG in self._past.entry["r"]
            return self._as_worded(merged)
        found = self._past.entry["r"].get("update")
        self.is_equal = found is not None and found["digest"] == merged.held.digest
        new = merged.held
        return replace(merged, held=KnownFragment(new.version, new.digest, new), payload=None)

    def _as_worded(self, error: T) -> T:
        """Return the recorded error if it has the same type: its words are no decision."""
        found = self._past.found
        return found if type(found) is type(error) else error

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


class PastStore:
    """The durable state (`ports.StorePort`), and all published versions: of each fragment the newest ones with their
    tensors, those that a store keeps and to which a run may be rolled back. A recorded refusal of the initial model is
    repeated.

    Attributes:
        fragments: the newest version of each; empty: there is no model.
        record: of these versions.
    """

    is_refusing = False

    def __init__(self) -> None:
        self._versions: dict[tuple[int, int], KnownFragment] = {}

    def restart(self, past: Past, saved: SavedRun[KnownFragment] | None) -> None:
        """A driver begins from this state; None: there is no model."""
        self._past = past
        self.fragments: list[KnownFragment] = [] if saved is None else list(saved.fragments)
        self.record: Json | None = None if saved is None else saved.record

    def find(self, index: int, version: int, digest: str) -> KnownFragment | None:
        """Return a version with this digest; None: there is none."""
        found = self._versions.get((index, version))
        return found if found is not None and found.digest == digest else None

    def initialise(
        self, run: str, method: RunMethod, model: InitialModel[KnownFragment], done: Callable[[Any], None]
    ) -> None:
        def initialised() -> Any:
            if self._past.found is None:
                self._take(None, enumerate(model.fragments))
            return self._past.found

        self._past.submit("initialise", None, initialised, done)

    def put(self, merged: MergedRound[KnownFragment, None], done: Callable[[], None]) -> None:
        self._past.submit("put", merged.update.fragment, lambda: None, lambda _: done())

    def commit(
        self, versions: Sequence[MergedRound[KnownFragment, None]], record: Json, pack: Sequence[bytes],
        done: Callable[[], None],
    ) -> None:  # fmt: skip
        held = [(each.update.fragment, each.held) for each in versions]
        self._past.submit("commit", None, lambda: self._take(record, held), lambda _: done())

    def _take(self, record: Json | None, held: Iterable[tuple[int, KnownFragment]]) -> None:
        self.record = record
        for index, each in held:
            self.fragments[index : index + 1] = [each]
            self._versions[index, each.version] = each
            if (old := self._versions.get((index, each.version - NUM_HELD))) is not None:
                self._versions[index, each.version - NUM_HELD] = replace(old, tensors=None)
