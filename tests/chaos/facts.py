"""Evidence of a chaos run as plain values: what was done to it (`Record`), and what its processes wrote (`Facts`)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from diloco.store.records import epochs_of
from tests.chaos.leaks import Curve
from tests.chaos.plan import ANSWERS, ChaosPlan, Fault
from tests.chaos.processes import End

from diloco.event_log import read_events
from diloco.events import Adopted, Event, Gap
from diloco.protocol.accounting import Account
from diloco.protocol.lineage import Epoch

STORE = "store.sqlite"


@dataclass(frozen=True)
class Injected:
    """A fault as it happened. Unix times in seconds; `hit`: there was something to hit."""

    fault: Fault
    began_at: float
    ended_at: float
    hit: bool

    def overlaps(self, since: float, until: float) -> bool:
        """Whether it was active between these times."""
        return self.began_at <= until and self.ended_at >= since


@dataclass(frozen=True)
class Record:
    """A run as the process that drove it has seen it.

    Attributes:
        lost_s: deadline of a silent learner.
        calm, troubled: Unix times in seconds, from and to.
        ends: processes that ended and were started again, by what they had been sent or by themselves.
        settled: after the last fault all learners have merged again.
        status: of the run, after its learners had left.
        exit_codes: of the processes that were ended when the run was over.
        state: what `diloco syncer check` says of the state at the end.
        replays: what `diloco replay` says of each state that was served, the oldest first.
        state_dirs: as `World.state_dirs`.
        stale_dirs: older copies that were served.
        failures: what stopped the run before its end.
        curves: of a soak, what its processes and files held.
    """

    plan: ChaosPlan
    lost_s: float
    calm: tuple[float, float]
    troubled: tuple[float, float]
    injected: tuple[Injected, ...]
    ends: tuple[End, ...]
    settled: bool
    status: dict[str, Any]
    exit_codes: dict[str, int]
    state: dict[str, Any]
    replays: tuple[dict[str, Any], ...]
    state_dirs: tuple[Path, ...]
    stale_dirs: tuple[Path, ...]
    failures: tuple[str, ...]
    curves: Mapping[str, Curve]

    def hits(self, *kinds: str) -> list[Injected]:
        """The faults that have hit something; of these kinds, where any are named."""
        return [each for each in self.injected if each.hit and (not kinds or each.fault.kind in kinds)]


@dataclass(frozen=True)
class StoredVersion:
    """A row of a syncer's history."""

    fragment: int
    version: int
    digest: str
    tokens: int


@dataclass(frozen=True)
class Facts:
    """Files of a run, as values.

    Attributes:
        syncer: all events of the syncer.
        learners: of each learner.
        stores: the versions in the database of each state, also of those that were set aside; the newest at the end.
        stale: the events of each older copy of the state, since it was put in the state's place.
        refusals: how often learners have said that they do not follow an older or a second copy.
        epochs: the run's, each with the versions that it began with.
        trained: tokens that each learner has trained, as the syncer has counted them.
        tracebacks: of each process, the last line of each exception that its log shows.
        answers: of a soak, how often each viewer was answered, and what it met instead.
    """

    syncer: Sequence[Event]
    learners: dict[str, Sequence[Event]]
    stores: Sequence[Sequence[StoredVersion]]
    tracebacks: dict[str, list[str]] = field(default_factory=dict)
    epochs: Sequence[Epoch] = ()
    stale: Sequence[Sequence[Event]] = ()
    refusals: int = 0
    trained: Mapping[str, int] = field(default_factory=dict)
    answers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def history(self) -> list[StoredVersion]:
        """All versions in any of the databases."""
        return [row for store in self.stores for row in store]

    @property
    def line(self) -> list[StoredVersion]:
        """The versions that led to the end: a state that was restored or repaired begins with the newest ones of its
        source, which has those before them."""
        rows: dict[int, list[StoredVersion]] = {}
        for store in reversed(self.stores):
            first = {fragment: min(row.version for row in found) for fragment, found in rows.items()}
            for row in store:
                if row.version < first.get(row.fragment, row.version + 1):
                    rows.setdefault(row.fragment, []).append(row)
        return [row for found in rows.values() for row in found]

    @property
    def num_missing(self) -> int:
        """Events of the syncer that a full disk has refused."""
        return sum(event.missing for event in self.syncer if isinstance(event, Gap))

    @property
    def holdings(self) -> list[tuple[str, Adopted]]:
        """The versions that learners have reported to hold."""
        return [
            (name, event) for name, events in self.learners.items() for event in events if isinstance(event, Adopted)
        ]


def read_facts(record: Record) -> Facts:
    """Read everything. Raises StoreError: an event file cannot be read."""
    directory, dirs = record.plan.directory, record.state_dirs
    own = [directory / name for name in record.plan.names]
    twins = [path.parent for path in sorted((directory / "twins").glob("*/*/events.jsonl"))]
    stores = [each for path in dirs for each in (*sorted((path / "set-aside").glob(f"*{STORE}*")), path / STORE)]
    logs = sorted((directory / "logs").glob("*.log"))
    answers = directory / ANSWERS
    return Facts(
        sorted(chain.from_iterable(map(_events, dirs)), key=lambda event: event.t),
        {path.relative_to(directory).as_posix(): _events(path) for path in (*own, *twins)},
        [_history(path) for path in stores],
        {path.stem: found for path in logs if (found := _tracebacks(path))},
        tuple(_read(dirs[-1] / STORE, epochs_of)),
        [_events(path) for path in record.stale_dirs],
        sum(_refusals(path) for path in logs),
        _trained(dirs[-1] / STORE),
        json.loads(answers.read_text()) if answers.exists() else {},
    )


def _events(directory: Path) -> list[Event]:
    path = directory / "events.jsonl"
    return read_events(path) if path.exists() else []


def _history(path: Path) -> list[StoredVersion]:
    """Versions in a database; none where the file is damaged: one that was damaged on purpose is set aside."""
    query = "SELECT fragment, version, digest, tokens FROM versions"
    return [StoredVersion(*row) for row in _read(path, lambda db: db.execute(query).fetchall())]


def _trained(path: Path) -> dict[str, int]:
    for (record,) in _read(path, lambda db: db.execute("SELECT record FROM run WHERE record IS NOT NULL").fetchall()):
        accounts = {name: Account.from_dict(each) for name, each in json.loads(record)["accounts"].items()}
        return {name: account.ledgers[0].trained for name, account in accounts.items()}
    return {}


def _read(path: Path, ask: Callable[[sqlite3.Connection], Iterable[Any]]) -> Iterable[Any]:
    if not path.exists():
        return ()
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            return ask(db)
    except sqlite3.DatabaseError:
        return ()


def _refusals(path: Path) -> int:
    text = path.read_text(encoding="utf-8", errors="replace")
    return text.count("older copy of its state") + text.count("started on copies of the run's state")


def _tracebacks(path: Path) -> list[str]:
    """The last line of each traceback, after those that are indented."""
    found, inside = [], False
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line and not line.startswith(" "):
            found.append(line)
            inside = False
    return found
