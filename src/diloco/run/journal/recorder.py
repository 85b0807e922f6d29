"""`Recorder`: journals every event of a driver, with every input from its ports.

A recorder wraps a driver's ports. Each event becomes one entry, written when the event ends and before its jobs and
requests begin:

    e   the event: a method of `Driver` ("__init__" when a driver begins to serve the run), or the end of a job
        ("#check", "#close") or of a request to the store ("#initialise", "#put", "#commit")
    t   the time; an event has a single time
    a   the arguments (`run.journal.serialization`)
    i   refusals of ports: {"no_room": error}
    n   of a job or request: its number among those of its driver
    f   of a job or request: the fragment
    r   of a job or request: its result
    x   of a check: digests of its input: {"payload": …, "kept": …} or {"crc32": …} of a contribution
    d   the decisions, in words
    o   the digest of all of the above, of the previous entry, and of everything that the driver did: its actions, its
        jobs, its requests to the store with their records, its messages to learners, its answers, and its wake-up time
    w   the reasons of evictions and refusals, as sentences. The digest excludes them, as it excludes those of rounds:
        another version of diloco may word them otherwise

The store calls `Recorder.sync` before it stores what a commit or an initialisation names. So no version is published
that the journal cannot explain, and the entries that a `kill -9` loses had no durable effect.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol
from weakref import WeakKeyDictionary

from diloco.errors import DilocoError, NoRoomError, PayloadError, StoreError
from diloco.escaping import read_json
from diloco.protocol.actions import Acknowledge, Action, Evict, MergeRound, Publish, Reject
from diloco.protocol.contribution import Contribution, Standing
from diloco.run.journal.serialization import write_plain
from diloco.run.ports import (
    ClockPort,
    ConnectionPort,
    H,
    InitialModel,
    Json,
    MergedRound,
    P,
    Ports,
    RunMethod,
    S,
    S_contra,
    SavedRun,
    T,
    Work,
)
from diloco.run.uploads import Upload

log = logging.getLogger("diloco.syncer")


def is_entry(values: Any) -> bool:
    """Whether plain values have the form of an entry, a gap, or the header of a journal's part."""
    match values:
        case {
            "e": "#journal",
            "format": int(),
            "wall_s": float() | int() as wall_s,
            "t": float() | int() as at_s,
            "follows": _,
        }:
            return all(-_LATEST_S < each < _LATEST_S for each in (wall_s, at_s))
        case {"e": "#gap" | "#damage"}:
            return isinstance(values.get("why", ""), str) and ("why" in values or "missing" in values)
        case {"e": str(), "t": float() | int() as at_s, "d": list(decided), "o": str()}:
            said = [*decided, *reasons] if isinstance(reasons := values.get("w", []), list) else [None]
            is_right = isinstance(values.get("a", {}), dict) and all(isinstance(each, str) for each in said)
            return is_right and -_LATEST_S < at_s < _LATEST_S
    return False


def entry_of(line: str) -> dict[str, Any]:
    """Parse an entry of a journal.

    Raises:
        StoreError: the line is not an entry of this version.
    """
    values: dict[str, Any] = read_json(line, "a line of the journal", StoreError, _OTHER)
    if not is_entry(values):
        raise StoreError(f"the journal has the line {line[:200]!r}, which is not an entry; {_OTHER}.")
    return values


_LATEST_S = 1e15
"""Upper limit of times, in seconds."""

_OTHER = "read it with the version that wrote it"


class JournalPort(Protocol):
    """Stores entries. Neither call fails: entries that cannot be stored are counted, and reported by a gap entry."""

    def append(self, entry: str) -> None:
        """Store an entry: JSON on one line."""

    def sync(self) -> None:
        """Make all earlier entries durable, unless the disk refuses them."""


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


class Recorder(Generic[S]):
    """The recorder of one driver.

    Arguments:
        journal: stores the entries.
        payloads: receives the payloads of contributions.

    Attributes:
        digest: of the last entry.
    """

    def __init__(self, journal: JournalPort, payloads: PayloadsPort[S]) -> None:
        self._journal = journal
        self.payloads = payloads
        self.digest = ""
        self._clock: ClockPort | None = None
        self._now_s: float | None = None  # None: no event in progress
        self._did: list[object] = []
        self._decided: list[str] = []
        self._reasons: list[str] = []
        self._inputs: dict[str, object] = {}
        self._begun: list[Callable[[], None]] = []
        self._unkept: InitialModel[Any] | None = None
        self._num_jobs = 0
        self._numbers: WeakKeyDictionary[object, tuple[str, int]] = WeakKeyDictionary()
        self._num_numbered = 0
        self._connections: dict[ConnectionPort, RecordedConnection] = {}

    def around(self, ports: Ports[H, S, P]) -> Ports[H, S, P]:
        """Return the recorded ports of a driver."""
        self._clock = ports.clock
        own = RecordedPorts(self, ports)
        return replace(ports, clock=own, spool=own, jobs=own, store=own, worker=own, recorder=self)

    # --- calls of the driver ------------------------------------------------------------------------------------------

    def event(self, name: str, method: Callable[..., T], arguments: Mapping[str, Any]) -> T:
        """As `ports.RecorderPort`."""
        if self._now_s is not None:  # called within an event
            return method(**arguments)
        if (saved := arguments.get("saved")) is not None:
            self.payloads.resume(saved)
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
        """Return the number of an upload that `begin_push` returned."""
        return self._numbers[push][1]

    def decided(self, actions: Sequence[Action]) -> None:
        """As `ports.RecorderPort`."""
        self._did += map(_without_reason, actions)
        self._reasons += [action.reason for action in actions if isinstance(action, Evict)]
        self._decided += [said for action in actions if (said := describe_decision(action)) is not None]

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
            self._refuses("refuses", error)
            is_defect = not isinstance(error, DilocoError)
            raise
        finally:
            if self._inputs:
                entry["i"] = self._inputs
            self._write({**entry, "d": self._decided}, self._did, self._reasons)
            begun = self._begun
            self._now_s, self._did, self._decided, self._inputs, self._begun = None, [], [], {}, []
            self._reasons = []
            if is_defect:
                self._journal.sync()
            for begin in begun:
                begin()
        return answer

    def _refuses(self, how: str, error: Exception) -> None:
        self._decided.append(f"{how}: {type(error).__name__}")
        self._reasons.append(str(error))

    def _write(self, entry: dict[str, object], did: list[object], reasons: list[str]) -> None:
        try:
            line = write_plain(entry, self._numbered)
            data = f"{self.digest}{line}{write_plain(did, self._numbered)}".encode()
            self.digest = hashlib.blake2b(data, digest_size=6).hexdigest()
            line = f'{line[:-1]},"o":"{self.digest}"}}'
            line = f'{line[:-1]},"w":{write_plain(reasons)}}}' if reasons else line
        except (TypeError, ValueError):  # a defect of this module; the run continues
            log.exception("an event of the syncer cannot be journalled")
            line = write_plain({"e": "#gap", "t": entry["t"], "missing": 1})
        self._journal.append(line)

    # --- numbered objects ---------------------------------------------------------------------------------------------

    def _recorded(self, value: Any) -> Any:
        """Wrap an argument for the driver."""
        if hasattr(value, "standing"):
            return self._connection(value)
        return self._answering(value) if callable(value) else value

    def _connection(self, inner: ConnectionPort) -> RecordedConnection:
        if (found := self._connections.get(inner)) is None:
            found = self._connections[inner] = RecordedConnection(self, inner)
            self._num_numbered += 1
            self._numbers[found] = "connection", self._num_numbered
        return found

    def _forget_connections(self, arguments: Mapping[str, Any]) -> None:
        for value in arguments.values():
            if hasattr(value, "standing"):
                self._connections.pop(value, None)

    def _number(self, answer: object) -> tuple[str, int] | None:
        """Number an upload that an event returns."""
        if not isinstance(answer, Upload):
            return None
        self._num_numbered += 1
        self._numbers[answer] = number = "push", self._num_numbered
        return number

    def _numbered(self, value: object) -> tuple[str, int] | None:
        return self._numbers.get(value) if isinstance(value, Upload | RecordedConnection) else None

    def _answering(self, done: Callable[..., None]) -> Callable[..., None]:
        def answer(*values: object) -> None:
            self.did("answer", *map(_without_reason, values))
            for error in values:
                if isinstance(error, Exception):
                    self._refuses("answers", error)
            done(*values)

        return answer

    # --- calls of the recorded ports ----------------------------------------------------------------------------------

    def did(self, *what: object) -> None:
        """Note an effect of the driver."""
        self._did.append(what)

    def refused(self, error: NoRoomError) -> None:
        """Note that the spool has no room."""
        self._inputs["no_room"] = error

    def now_s(self, clock: ClockPort) -> float:
        """Return the time of the current event."""
        return clock.now_s() if self._now_s is None else self._now_s

    def begin(
        self, what: str, fragment: int | None, submit: Callable[[Callable[..., None]], None],
        done: Callable[..., None], notes: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Begin a job or a request once the event's entry is written. Its end is an event.

        Arguments:
            submit: begins it, given what is called with its result, if it has one.
            notes: digests of its input, once it has ended.
        """
        self._num_jobs += 1
        number = self._num_jobs
        self.did("begins", what, fragment, number)

        def ended(*found: object) -> None:
            head: dict[str, object] = {"e": f"#{what}", "n": number, "f": fragment, "x": notes}
            self._happens(head, "r", _finding(*found), lambda: done(*found))

        self._begun.append(partial(submit, ended))

    def initialises(self, model: InitialModel[Any]) -> None:
        """Note the model that a run begins with, to be kept with the next `sync`."""
        self._unkept = model

    def sync(self) -> None:
        """Make all entries so far durable."""
        model, self._unkept = self._unkept, None
        if model is not None:
            self.payloads.begin(model)
        self._journal.sync()


def _finding(result: object = None) -> object:
    """Return the journalled result of a job, without its duration, which is not an input of the driver."""
    if isinstance(result, MergedRound):
        return {"update": result.update, "num_bytes": result.num_bytes, "refused": result.refused}
    return result


def _without_reason(value: object) -> object:
    """Return an action or answer without its reason in words, which is no decision."""
    if isinstance(value, DilocoError):
        return type(value).__name__
    return replace(value, reason="") if isinstance(value, Evict | MergeRound) else value


def describe_decision(action: Action) -> str | None:
    """Describe an action in a few words; None: it follows from others (a wake-up, a standing, a record), and only the
    digest of an entry covers it."""
    match action:
        case MergeRound():
            merged = ", ".join(f"{each.learner}#{each.number}" for each in action.contributions)
            return (
                f"closes round {action.round} of fragment {action.fragment} with {merged}, "
                f"weights {list(action.weights)}, scale {action.scale}"
            )
        case Reject():
            return f"rejects {_name_contribution(action.contribution)}: {action.reason}"
        case Acknowledge(duplicate=False):
            return f"takes {_name_contribution(action.contribution)}"
        case Acknowledge():
            return f"has {_name_contribution(action.contribution)} already"
        case Publish():
            return f"publishes version {action.version} of fragment {action.fragment}"
        case Evict():
            return f"evicts {action.learner} (incarnation {action.incarnation})"
    return None


def _name_contribution(c: Contribution) -> str:
    return f"contribution {c.number} of {c.learner} to fragment {c.fragment}"


# --- the recorded ports: each notes what the driver does through it --------------------------------------------------


class RecordedConnection:
    """As `ports.ConnectionPort`."""

    def __init__(self, recorder: Recorder[Any], connection: ConnectionPort) -> None:
        self._recorder, self._connection = recorder, connection

    def standing(self, standing: Standing) -> None:
        self._recorder.did(self, standing)
        self._connection.standing(standing)

    def evicted(self, reason: str, *, replaced: bool) -> None:
        self._recorder.did(self, "evicted", replaced)
        self._connection.evicted(reason, replaced=replaced)

    def end(self) -> None:
        self._recorder.did(self, "end")
        self._connection.end()


class RecordedPorts(Generic[H, S, P]):
    """The clock, spool, jobs, store and worker of a driver, as the protocols in `ports`."""

    def __init__(self, recorder: Recorder[S], ports: Ports[H, S, P]) -> None:
        self._recorder, self._ports = recorder, ports

    # the clock: one time per event

    def now_s(self) -> float:
        return self._recorder.now_s(self._ports.clock)

    def wake_at(self, at_s: float) -> None:
        self._recorder.did("wake at", at_s)
        self._ports.clock.wake_at(at_s)

    # the spool

    @property
    def held_bytes(self) -> int:
        return self._ports.spool.held_bytes

    def allocate(self, num_bytes: int) -> S:
        self._recorder.did("allocate", num_bytes)
        try:
            return self._ports.spool.allocate(num_bytes)
        except NoRoomError as error:
            self._recorder.refused(error)
            raise

    def release(self, slot: S) -> None:
        self._recorder.did("release")
        self._ports.spool.release(slot)

    # the jobs: the digests of contributions are noted

    def contribution_bytes(self, fragment: int, num_elements: int) -> int:
        return self._ports.jobs.contribution_bytes(fragment, num_elements)

    def check(self, slot: S, fragment: int, num_elements: int) -> PayloadError | None:
        error = self._ports.jobs.check(slot, fragment, num_elements)
        NOTES.get().update(self._recorder.payloads.check(slot, is_usable=error is None))
        return error

    def close(self, action: MergeRound, layout: Any, held: H, slots: Sequence[S]) -> MergedRound[H, P] | PayloadError:
        return self._ports.jobs.close(action, layout, held, slots)

    # the store

    @property
    def is_refusing(self) -> bool:
        return self._ports.store.is_refusing

    def initialise(
        self, run: str, method: RunMethod, model: InitialModel[H], done: Callable[[StoreError | None], None]
    ) -> None:
        self._recorder.initialises(model)
        self._recorder.begin("initialise", None, partial(self._ports.store.initialise, run, method, model), done, {})

    def put(self, merged: MergedRound[H, P], done: Callable[[], None]) -> None:
        self._recorder.begin("put", merged.update.fragment, partial(self._ports.store.put, merged), done, {})

    def commit(
        self, versions: Sequence[MergedRound[H, P]], record: Json, pack: Sequence[bytes], done: Callable[[], None]
    ) -> None:
        self._recorder.did("commits", [(each.update.fragment, each.update.version) for each in versions], record)
        self._recorder.begin("commit", None, partial(self._ports.store.commit, versions, record, pack), done, {})

    # the worker

    def submit(self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None]) -> None:
        notes: dict[str, Any] = {}

        def run() -> T:
            token = NOTES.set(notes)
            try:
                return job()
            finally:
                NOTES.reset(token)

        self._recorder.begin(what, fragment, partial(self._ports.worker.submit, what, fragment, run), done, notes)
