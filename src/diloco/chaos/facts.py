"""What the processes of a chaos run have left on the disk, as plain values."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from diloco.events import Adopted, Event, Gap, read_events

STORE = "store.sqlite"


@dataclass(frozen=True)
class StoredVersion:
    """A row of a syncer's history."""

    fragment: int
    version: int
    digest: str
    tokens: int


@dataclass(frozen=True)
class Facts:
    """What was written down.

    Attributes:
        syncer: all events of all syncers, by time.
        learners: of each learner.
        stores: the versions in the database of each state, also of those that were set aside; the newest at the end.
        tracebacks: of each process, the last line of each exception that its log shows.
    """

    syncer: Sequence[Event]
    learners: dict[str, Sequence[Event]]
    stores: Sequence[Sequence[StoredVersion]]
    tracebacks: dict[str, list[str]] = field(default_factory=dict)

    @property
    def history(self) -> list[StoredVersion]:
        """All versions that any of the databases has."""
        return [row for store in self.stores for row in store]

    @property
    def line(self) -> list[StoredVersion]:
        """The versions that led to the end: a state that was restored or repaired begins with the newest ones that its
        source had, and what was before them is in that."""
        rows: dict[int, list[StoredVersion]] = {}
        for store in reversed(self.stores):
            first = {fragment: min(row.version for row in found) for fragment, found in rows.items()}
            for row in store:
                if row.version < first.get(row.fragment, row.version + 1):
                    rows.setdefault(row.fragment, []).append(row)
        return [row for found in rows.values() for row in found]

    @property
    def num_missing(self) -> int:
        """Events of the syncers that a full disk has refused."""
        return sum(event.missing for event in self.syncer if isinstance(event, Gap))

    @property
    def holdings(self) -> list[tuple[str, Adopted]]:
        """What learners have reported to hold."""
        return [
            (name, event) for name, events in self.learners.items() for event in events if isinstance(event, Adopted)
        ]


def read_facts(directory: Path, state_dirs: Sequence[Path], learners: Iterable[str]) -> Facts:
    """Read everything. Raises StoreError: an event file cannot be read."""
    events = [event for path in state_dirs for event in _events(path)]
    stores = [each for path in state_dirs for each in (*sorted((path / "set-aside").glob(f"*{STORE}*")), path / STORE)]
    logs = sorted((directory / "logs").glob("*.log"))
    return Facts(
        sorted(events, key=lambda event: event.t),
        {name: _events(directory / name) for name in learners},
        [_history(path) for path in stores],
        {path.stem: found for path in logs if (found := _tracebacks(path))},
    )


def _events(directory: Path) -> list[Event]:
    path = directory / "events.jsonl"
    return read_events(path) if path.exists() else []


def _history(path: Path) -> list[StoredVersion]:
    """Nothing where the file is no whole database: one that was damaged on purpose is set aside."""
    if not path.exists():
        return []
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            rows = db.execute("SELECT fragment, version, digest, tokens FROM versions").fetchall()
    except sqlite3.DatabaseError:
        return []
    return [StoredVersion(*row) for row in rows]


def _tracebacks(path: Path) -> list[str]:
    """The last line of each: after those that are indented."""
    found, inside = [], False
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and line and not line.startswith(" "):
            found.append(line)
            inside = False
    return found
