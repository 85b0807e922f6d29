"""The recorded ports of a driver: each notes what the driver does through it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar

from diloco.errors import NoRoomError, PayloadError
from diloco.protocol.actions import MergeRound
from diloco.protocol.contribution import Standing
from diloco.run.ports import (
    ClockPort,
    ConnectionPort,
    H,
    InitialModel,
    JobsPort,
    Json,
    MergedRound,
    P,
    RunMethod,
    S,
    SavedRun,
    SpoolPort,
    StorePort,
    T,
    Work,
    WorkerPort,
)

S_contra = TypeVar("S_contra", contravariant=True)

NOTES: ContextVar[dict[str, Any]] = ContextVar("notes of the job that runs")
"""Digests of a job's input, by kind."""


class PayloadsPort(Protocol[S_contra]):
    """Computes digests of payloads, and keeps payloads."""

    def check(self, slot: S_contra, *, is_usable: bool) -> Mapping[str, Any]:
        """Return the journalled values: {"payload": SHA-256, "kept": whether the disk stored it}, or {"crc32": …} of a
        payload that is not kept or not usable."""

    def begin(self, model: InitialModel[Any]) -> None:
        """Keep the initial model of a run, if payloads are kept."""

    def resume(self, saved: SavedRun[Any]) -> None:
        """Keep the fragments of a run that began before its payloads were kept."""


class Recording(Protocol[S_contra]):
    """The recorder, as the ports see it."""

    @property
    def payloads(self) -> PayloadsPort[S_contra]:
        """Receives payloads."""

    def did(self, *what: object) -> None:
        """Note an effect of the driver."""

    def refused(self, error: NoRoomError) -> None:
        """Note that the spool has no room."""

    def now_s(self, clock: ClockPort) -> float:
        """Return the time of the current event."""

    def begin_job(
        self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None], worker: WorkerPort
    ) -> None:
        """Submit a job once the event's entry is written."""

    def sync(self) -> None:
        """Make all entries so far durable."""


class RecordedClock:
    """Returns one time per event (`ports.ClockPort`)."""

    def __init__(self, recorder: Recording[Any], clock: ClockPort) -> None:
        self._recorder, self._clock = recorder, clock

    def now_s(self) -> float:
        return self._recorder.now_s(self._clock)

    def wake_at(self, at_s: float) -> None:
        self._recorder.did("wake at", at_s)
        self._clock.wake_at(at_s)


class RecordedConnection:
    """As `ports.ConnectionPort`."""

    def __init__(self, recorder: Recording[Any], connection: ConnectionPort) -> None:
        self._recorder, self._connection = recorder, connection

    def standing(self, standing: Standing) -> None:
        self._recorder.did(self, standing)
        self._connection.standing(standing)

    def evicted(self, reason: str, *, replaced: bool) -> None:
        self._recorder.did(self, "evicted", reason, replaced)
        self._connection.evicted(reason, replaced=replaced)

    def end(self) -> None:
        self._recorder.did(self, "end")
        self._connection.end()


class RecordedSpool(Generic[S]):
    """As `ports.SpoolPort`."""

    def __init__(self, recorder: Recording[S], spool: SpoolPort[S]) -> None:
        self._recorder, self._spool = recorder, spool

    @property
    def held_bytes(self) -> int:
        return self._spool.held_bytes

    def allocate(self, num_bytes: int) -> S:
        self._recorder.did("allocate", num_bytes)
        try:
            return self._spool.allocate(num_bytes)
        except NoRoomError as error:
            self._recorder.refused(error)
            raise

    def release(self, slot: S) -> None:
        self._recorder.did("release")
        self._spool.release(slot)


class RecordedJobs(Generic[H, S, P]):
    """As `ports.JobsPort`; notes the digests of contributions."""

    def __init__(self, recorder: Recording[S], jobs: JobsPort[H, S, P]) -> None:
        self._recorder, self._jobs = recorder, jobs

    def contribution_bytes(self, num_elements: int) -> int:
        return self._jobs.contribution_bytes(num_elements)

    def check(self, slot: S, num_elements: int) -> PayloadError | None:
        error = self._jobs.check(slot, num_elements)
        NOTES.get().update(self._recorder.payloads.check(slot, is_usable=error is None))
        return error

    def close(self, action: MergeRound, layout: Any, held: H, slots: Sequence[S]) -> MergedRound[H, P] | PayloadError:
        return self._jobs.close(action, layout, held, slots)


class RecordedStore(Generic[H, P]):
    """As `ports.StorePort`; all earlier entries are durable when a write begins."""

    def __init__(self, recorder: Recording[Any], store: StorePort[H, P]) -> None:
        self._recorder, self._store = recorder, store

    def initialise(self, run: str, method: RunMethod, model: InitialModel[H]) -> None:
        self._recorder.payloads.begin(model)
        self._recorder.sync()
        self._store.initialise(run, method, model)

    def publish(self, merged: MergedRound[H, P], record: Json) -> None:
        self._begin(record)
        self._store.publish(merged, record)

    def save_record(self, record: Json) -> None:
        self._begin(record)
        self._store.save_record(record)

    def _begin(self, record: Json) -> None:
        NOTES.get()["record"] = record_digest(record)
        self._recorder.sync()


def record_digest(record: Json) -> str:
    """Return the digest of a run's record."""
    return hashlib.blake2b(json.dumps(record).encode(), digest_size=16).hexdigest()


class RecordedWorker:
    """As `ports.WorkerPort`."""

    def __init__(self, recorder: Recording[Any], worker: WorkerPort) -> None:
        self._recorder, self._worker = recorder, worker

    def submit(self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None]) -> None:
        self._recorder.begin_job(what, fragment, job, done, self._worker)
