"""`Recorder`: journals every event of a driver, with all that it learnt from its ports.

A recorder stands around a driver's ports. Each event becomes one entry, written when the event is over and before the
jobs that it began are handed to the worker:

    e   the event: a method of `Driver` ("__init__" when a driver begins to serve the run), or "#check", "#close" or
        "#write", the end of a job
    t   the time; one event has one time
    a   the arguments (`run.plain`)
    i   what a port refused: {"no_room": error}
    n   of a job: its number among those of its driver
    f   of a job: the fragment
    r   of a job: what it has found
    x   of a job: digests of what it read: {"payload": …, "kept": …} or {"crc32": …} of a contribution, {"record": …}
    d   what was decided, in words
    o   the digest of all that, of the entry before, and of everything that the driver did: its actions, the jobs and
        writes it began, what it sent to learners, what it answered, and when it wants to be woken

A write to the store begins once all entries before it are durable. So no version is published that the journal cannot
explain, and what a `kill -9` takes from the journal's end has had no durable effect.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from diloco.core.actions import Action, MergeRound
from diloco.core.contribution import Standing
from diloco.errors import DilocoError, NoRoomError, PayloadError
from diloco.run.decisions import told
from diloco.run.driver import Upload
from diloco.run.plain import write_plain
from diloco.run.ports import (
    ClockPort,
    ConnectionPort,
    H,
    InitialModel,
    JobsPort,
    Json,
    MergedRound,
    P,
    Ports,
    RunMethod,
    S,
    SpoolPort,
    StorePort,
    T,
    Work,
)

log = logging.getLogger("diloco.syncer")

S_contra = TypeVar("S_contra", contravariant=True)


class JournalPort(Protocol):
    """Where entries go. Neither call fails: entries that cannot be kept are counted, and told by a gap."""

    def append(self, entry: str) -> None:
        """Keep an entry: JSON on one line."""

    def sync(self) -> None:
        """All entries before are durable when this returns, unless the disk refuses them."""


class PayloadsPort(Protocol[S_contra]):
    """Digests of payloads, and where they are kept."""

    def check(self, slot: S_contra, *, is_usable: bool) -> Mapping[str, Any]:
        """What is journalled: {"payload": SHA-256, "kept": whether the disk took it}, or {"crc32": …} of a payload that
        is not to be kept, or cannot be used."""

    def begin(self, model: InitialModel[Any]) -> None:
        """Keep the model that a run begins with, where payloads are kept."""


_NOTES: ContextVar[dict[str, Any]] = ContextVar("notes of the job that runs")


class Recorder(Generic[S]):
    """One driver's recorder.

    Arguments:
        journal: takes the entries.
        payloads: takes the payloads of contributions.

    Attributes:
        digest: of the last entry.
    """

    def __init__(self, journal: JournalPort, payloads: PayloadsPort[S]) -> None:
        self._journal = journal
        self.payloads = payloads
        self.digest = ""
        self._clock: ClockPort | None = None
        self._now_s: float | None = None  # None: no event is under way
        self._did: list[object] = []
        self._decided: list[str] = []
        self._inputs: dict[str, object] = {}
        self._begun: list[Callable[[], None]] = []
        self._num_jobs = 0
        self._numbers: WeakKeyDictionary[object, tuple[str, int]] = WeakKeyDictionary()
        self._num_numbered = 0
        self._connections: dict[ConnectionPort, _Connection] = {}

    def around(self, ports: Ports[H, S, P]) -> Ports[H, S, P]:
        """The ports of a driver that is recorded."""
        self._clock = ports.clock
        return replace(
            ports,
            clock=_Clock(self, ports.clock),
            spool=_Spool(self, ports.spool),
            jobs=_Jobs(self, ports.jobs),
            store=_Store(self, ports.store),
            worker=_Worker(self, ports.worker),
            recorder=self,
        )

    # --- what a driver calls ------------------------------------------------------------------------------------------

    def event(self, name: str, method: Callable[..., T], arguments: Mapping[str, Any]) -> T:
        """As `ports.RecorderPort`."""
        if self._now_s is not None:  # within an event
            return method(**arguments)
        called = {key: self._recorded(value) for key, value in arguments.items()}
        given = {key: each for key, each in called.items() if not callable(each) and not isinstance(each, Ports)}
        try:
            answer = self._happens({"e": name}, "a", given, lambda: method(**called))
        except Exception:
            self._forget_connections(arguments)
            raise
        if name == "disconnected":
            self._forget_connections(arguments)
        return answer

    def number_of(self, push: object) -> int:
        """The number of an upload that `begin_push` gave."""
        return self._numbers[push][1]

    def decided(self, actions: Sequence[Action]) -> None:
        """As `ports.RecorderPort`."""
        self._did += actions
        self._decided += [said for action in actions if (said := told(action)) is not None]

    def _happens(self, head: dict[str, object], key: str, given: object, do: Callable[[], T]) -> T:
        assert self._clock is not None
        self._now_s = self._clock.now_s()
        entry = {**head, "t": self._now_s, key: given}
        is_defect = False
        try:
            answer = do()
            if (number := self._number(answer)) is not None:
                self._did.append(number)
            elif answer is not None:
                self._did.append(answer)
        except Exception as error:
            self._decided.append(f"refuses: {type(error).__name__}")
            self._did.append(str(error))
            is_defect = not isinstance(error, DilocoError)
            raise
        finally:
            if self._inputs:
                entry["i"] = self._inputs
            self._write({**entry, "d": self._decided}, self._did)
            begun = self._begun
            self._now_s, self._did, self._decided, self._inputs, self._begun = None, [], [], {}, []
            if is_defect:
                self._journal.sync()
            for begin in begun:
                begin()
        return answer

    def _write(self, entry: dict[str, object], did: list[object]) -> None:
        try:
            line = write_plain(entry, self._numbered)
            data = f"{self.digest}{line}{write_plain(did, self._numbered)}".encode()
            self.digest = hashlib.blake2b(data, digest_size=6).hexdigest()
            line = f'{line[:-1]},"o":"{self.digest}"}}'
        except (TypeError, ValueError):  # a defect of this module; the run goes on
            log.exception("an event of the syncer cannot be journalled")
            line = write_plain({"e": "#gap", "t": entry["t"], "missing": 1})
        self._journal.append(line)

    # --- objects that only the driver has -----------------------------------------------------------------------------

    def _recorded(self, value: Any) -> Any:
        """An argument as the driver gets it."""
        if hasattr(value, "standing"):
            return self._connection(value)
        return self._answering(value) if callable(value) else value

    def _connection(self, inner: ConnectionPort) -> _Connection:
        if (found := self._connections.get(inner)) is None:
            found = self._connections[inner] = _Connection(self, inner)
            self._num_numbered += 1
            self._numbers[found] = "connection", self._num_numbered
        return found

    def _forget_connections(self, arguments: Mapping[str, Any]) -> None:
        for value in arguments.values():
            if hasattr(value, "standing"):
                self._connections.pop(value, None)

    def _number(self, answer: object) -> tuple[str, int] | None:
        """Of an upload that an event gives out."""
        if not isinstance(answer, Upload):
            return None
        self._num_numbered += 1
        self._numbers[answer] = number = "push", self._num_numbered
        return number

    def _numbered(self, value: object) -> tuple[str, int] | None:
        return self._numbers.get(value) if isinstance(value, Upload | _Connection) else None

    def _answering(self, done: Callable[..., None]) -> Callable[..., None]:
        def answer(*values: object) -> None:
            self.did("answer", *values)
            self._decided += [f"answers: {type(each).__name__}" for each in values if isinstance(each, Exception)]
            done(*values)

        return answer

    # --- what the ports of a recorded driver call ---------------------------------------------------------------------

    def did(self, *what: object) -> None:
        """Something that the driver does."""
        self._did.append(what)

    def refused(self, error: NoRoomError) -> None:
        """The spool has no room."""
        self._inputs["no_room"] = error

    def now_s(self, clock: ClockPort) -> float:
        """The time of the event that is under way."""
        return clock.now_s() if self._now_s is None else self._now_s

    def begin_job(
        self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None],
        submit: Callable[[Callable[[], tuple[T, dict[str, Any]]], Callable[[tuple[T, dict[str, Any]]], None]], None],
    ) -> None:  # fmt: skip
        """A job begins once the event's entry is written."""
        self._num_jobs += 1
        number = self._num_jobs
        self.did("begins", what, fragment, number)

        def run() -> tuple[T, dict[str, Any]]:
            notes: dict[str, Any] = {}
            token = _NOTES.set(notes)
            try:
                return job(), notes
            finally:
                _NOTES.reset(token)

        def ended(found: tuple[T, dict[str, Any]]) -> None:
            result, notes = found
            head: dict[str, object] = {"e": f"#{what}", "n": number, "f": fragment, "x": notes}
            self._happens(head, "r", _finding(result), lambda: done(result))

        self._begun.append(lambda: submit(run, ended))

    def sync(self) -> None:
        """What was journalled so far is durable."""
        self._journal.sync()


def _finding(result: object) -> object:
    """What a job has found, as it is journalled; the seconds that it took are no input of the driver."""
    if isinstance(result, MergedRound):
        return {"update": result.update, "num_bytes": result.num_bytes, "refused": result.refused}
    return result


class _Clock:
    def __init__(self, recorder: Recorder[Any], clock: ClockPort) -> None:
        self._recorder, self._clock = recorder, clock

    def now_s(self) -> float:
        return self._recorder.now_s(self._clock)

    def wake_at(self, at_s: float) -> None:
        self._recorder.did("wake at", at_s)
        self._clock.wake_at(at_s)


class _Connection:
    def __init__(self, recorder: Recorder[Any], connection: ConnectionPort) -> None:
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


class _Spool(Generic[S]):
    def __init__(self, recorder: Recorder[S], spool: SpoolPort[S]) -> None:
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


class _Jobs(Generic[H, S, P]):
    def __init__(self, recorder: Recorder[S], jobs: JobsPort[H, S, P]) -> None:
        self._recorder, self._jobs = recorder, jobs

    def contribution_bytes(self, num_elements: int) -> int:
        return self._jobs.contribution_bytes(num_elements)

    def check(self, slot: S, num_elements: int) -> PayloadError | None:
        error = self._jobs.check(slot, num_elements)
        _NOTES.get().update(self._recorder.payloads.check(slot, is_usable=error is None))
        return error

    def close(self, action: MergeRound, layout: Any, held: H, slots: Sequence[S]) -> MergedRound[H, P] | PayloadError:
        return self._jobs.close(action, layout, held, slots)


class _Store(Generic[H, P]):
    def __init__(self, recorder: Recorder[Any], store: StorePort[H, P]) -> None:
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
        _NOTES.get()["record"] = record_digest(record)
        self._recorder.sync()


def record_digest(record: Json) -> str:
    """The digest of a run's record."""
    return hashlib.blake2b(json.dumps(record).encode(), digest_size=16).hexdigest()


class _Worker:
    def __init__(self, recorder: Recorder[Any], worker: Any) -> None:
        self._recorder, self._worker = recorder, worker

    def submit(self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None]) -> None:
        self._recorder.begin_job(
            what, fragment, job, done, lambda run, ended: self._worker.submit(what, fragment, run, ended)
        )
