"""The database of a store: the SQLite schema, and the plain values that go in and come out."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.core.update import Update
from diloco.errors import StoreError, first_line
from diloco.escaping import MALFORMED
from diloco.protocol.lineage import Epoch
from diloco.store.durable import sync_directory
from diloco.whole_files import write_whole

FORMAT = 10

DATABASE = "store.sqlite"
LOG, INDEX = f"{DATABASE}-wal", f"{DATABASE}-shm"

_LOG_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24  # https://sqlite.org/fileformat2.html#walformat

SCHEMA = """
CREATE TABLE run (
    id INTEGER PRIMARY KEY CHECK (id = 1), run TEXT NOT NULL, method TEXT NOT NULL, layout TEXT NOT NULL, source TEXT
    NOT NULL, step INTEGER NOT NULL, tokens INTEGER NOT NULL, static_file TEXT NOT NULL, static_sha256 TEXT NOT NULL,
    record TEXT, created_at REAL NOT NULL, run_id TEXT NOT NULL);
CREATE TABLE epochs (epoch INTEGER PRIMARY KEY, versions TEXT NOT NULL, started_at REAL NOT NULL);
CREATE TABLE versions (
    fragment INTEGER NOT NULL, version INTEGER NOT NULL, base INTEGER NOT NULL, file TEXT NOT NULL, sha256 TEXT NOT
    NULL, digest TEXT NOT NULL, scale REAL NOT NULL, tokens INTEGER NOT NULL, published_at REAL NOT NULL,
    epoch INTEGER NOT NULL, PRIMARY KEY (fragment, version)) WITHOUT ROWID;
CREATE TABLE contributors (
    fragment INTEGER NOT NULL, version INTEGER NOT NULL, position INTEGER NOT NULL, learner TEXT NOT NULL, weight REAL
    NOT NULL, PRIMARY KEY (fragment, version, position),
    FOREIGN KEY (fragment, version) REFERENCES versions (fragment, version)) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class HistoryLine:
    """A line of the run's history. Version 0 of every fragment is the initial model and has no contributors."""

    fragment: int
    version: int
    base: int
    digest: str
    scale: float
    tokens: int
    published_at: float  # Unix time in seconds
    contributors: tuple[str, ...]
    weights: tuple[float, ...]


def advice(path: Path) -> str:
    """What to do about a damaged state directory: the end of an error's sentence."""
    return f"'diloco syncer check {path}' says what can still be served, or start a new run elsewhere"


def look(path: Path) -> tuple[int, bool]:
    """The format of the database of a store's directory, and whether it holds a run; 0 for one that is not there, or is
    empty.

    Only reads: what is damaged stays as it is, and so does the log that SQLite would bring into it or remove. Where
    there is no log, SQLite is told that the file is immutable: it would make a log to read even this.

    Raises:
        StoreError: it is damaged, or of another format.
    """
    database = path / DATABASE
    if not database.exists() or database.stat().st_size == 0:
        return 0, False
    log = path / LOG
    has_log = log.exists() and log.stat().st_size > 0
    how = "mode=ro" if has_log else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?{how}", uri=True)) as db:
            found = int(db.execute("PRAGMA user_version").fetchone()[0])
            verdict = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
            has_run = found == FORMAT and db.execute("SELECT 1 FROM run").fetchone() is not None
    except sqlite3.OperationalError:  # the disk, not what is on it
        raise
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # UnicodeDecodeError: in what SQLite says of it
        verdict, found, has_run = first_line(error), 0, False
    if verdict != "ok":
        raise StoreError(
            f"{database} could not be opened: it is damaged ({' '.join(verdict.split())}). Nothing was changed or "
            f"removed; {advice(path)}."
        )
    if found > FORMAT:
        raise StoreError(f"{path} has format {found} and this version reads up to {FORMAT}; upgrade diloco to open it.")
    if 0 < found < FORMAT:
        raise StoreError(
            f"{path} has format {found}, of a version before the first release, and this one reads format {FORMAT}. "
            "Nothing was changed; start a new run in another directory, from a checkpoint of this one."
        )
    return found, has_run


def connect(path: Path) -> sqlite3.Connection:
    """The database of a store's directory, made where there is none (`look` has found the others to be of this
    format)."""
    db = sqlite3.connect(path / DATABASE, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA foreign_keys = ON")
    if db.execute("PRAGMA user_version").fetchone()[0] == 0:
        db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
        sync_directory(path)
        sync_directory(path.parent)
    return db


def num_unread_frames(path: Path) -> int:
    """Frames of the log of a store's directory that belong to it and that SQLite does not read: after a torn or damaged
    one, or of a transaction that was under way. The next write replaces them."""
    log = path / LOG
    data = log.read_bytes() if log.exists() else b""
    if len(data) < _LOG_HEADER_BYTES:
        return 0
    frame_bytes, salts = _FRAME_HEADER_BYTES + int.from_bytes(data[8:12], "big"), data[16:24]
    frames = range(_LOG_HEADER_BYTES, len(data) - _FRAME_HEADER_BYTES + 1, frame_bytes)
    with tempfile.TemporaryDirectory() as directory:
        for name in (DATABASE, LOG):
            shutil.copyfile(path / name, Path(directory) / name)
        with closing(sqlite3.connect(Path(directory) / DATABASE)) as db:
            num_read = int(db.execute("PRAGMA wal_checkpoint").fetchone()[1])
    if num_read <= 0:  # the header is damaged
        return len(frames)
    return sum(data[at + 8 : at + 16] == salts for at in frames) - num_read


def connect_read_only(path: Path) -> sqlite3.Connection:
    """The database of a store's directory, which `look` has found to hold a run. Closing it leaves SQLite's log."""
    return sqlite3.connect(
        f"{(path / DATABASE).absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
    )


def put_version(
    db: sqlite3.Connection, update: Update, file: str, sha256: str, tokens: int, published_at: float
) -> None:
    """Add a version of the newest epoch and its contributors, inside the caller's transaction."""
    key = (update.fragment, update.version)
    db.execute(
        "INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT MAX(epoch) FROM epochs))",
        (*key, update.base, file, sha256, update.digest, update.scale, tokens, published_at),
    )
    pairs = zip(update.contributors, update.weights, strict=True)
    db.executemany(
        "INSERT INTO contributors VALUES (?, ?, ?, ?, ?)", [(*key, i, *pair) for i, pair in enumerate(pairs)]
    )


def put_epoch(db: sqlite3.Connection, epoch: Epoch, started_at: float) -> None:
    """Add a start, inside the caller's transaction."""
    db.execute("INSERT INTO epochs VALUES (?, ?, ?)", (epoch.number, json.dumps(epoch.versions), started_at))


def epochs_of(db: sqlite3.Connection) -> tuple[Epoch, ...]:
    """All starts, the last one at the end."""
    rows = db.execute("SELECT epoch, versions FROM epochs ORDER BY epoch").fetchall()
    return tuple(Epoch(int(epoch), tuple(map(int, json.loads(versions)))) for epoch, versions in rows)


@dataclass(frozen=True)
class StoredVersion:
    """A version and its file. `published_at`: Unix time in seconds."""

    update: Update
    file: str
    sha256: str
    tokens: int
    published_at: float


_STORED = "SELECT fragment, version, base, file, sha256, digest, scale, tokens, published_at FROM versions AS v"


def stored_versions(db: sqlite3.Connection) -> dict[int, list[StoredVersion]]:
    """All versions, by fragment, newest first; `lossless` is not known of them."""
    contributors: dict[tuple[int, int], list[tuple[str, float]]] = {}
    for fragment, version, learner, weight in db.execute(
        "SELECT fragment, version, learner, weight FROM contributors ORDER BY position"
    ):
        contributors.setdefault((fragment, version), []).append((learner, weight))
    versions: dict[int, list[StoredVersion]] = {}
    for row in db.execute(f"{_STORED} ORDER BY version DESC"):
        versions.setdefault(row[0], []).append(_stored(row, contributors.get(row[:2], [])))
    return versions


def newest_numbers(db: sqlite3.Connection) -> dict[int, int]:
    """The newest version of each fragment, in ascending order of fragments; as fast however long the history is."""
    newest, fragment = dict[int, int](), -1
    following = "SELECT MIN(fragment) FROM versions WHERE fragment > ?"
    while (found := db.execute(following, (fragment,)).fetchone()[0]) is not None:
        fragment = int(found)
        row = db.execute("SELECT MAX(version) FROM versions WHERE fragment = ?", (fragment,)).fetchone()
        newest[fragment] = int(row[0])
    return newest


def newest_versions(db: sqlite3.Connection) -> list[StoredVersion]:
    """The newest version of each fragment."""
    one = f"{_STORED} WHERE fragment = ? AND version = ?"
    rows = [db.execute(one, key).fetchone() for key in newest_numbers(db).items()]
    return [_stored(row, _pairs(db, *row[:2])) for row in rows]


def versions_after(db: sqlite3.Connection, fragment: int, version: int) -> list[StoredVersion]:
    """The versions of a fragment after one of them, ascending."""
    later = "WHERE fragment = ? AND version > ? ORDER BY version"
    rows = db.execute(f"{_STORED} {later}", (fragment, version)).fetchall()
    return [_stored(row, _pairs(db, *row[:2])) for row in rows]


def _pairs(db: sqlite3.Connection, fragment: int, version: int) -> list[tuple[str, float]]:
    rows = "SELECT learner, weight FROM contributors WHERE fragment = ? AND version = ? ORDER BY position"
    return db.execute(rows, (fragment, version)).fetchall()


def _stored(row: tuple[Any, ...], pairs: list[tuple[str, float]]) -> StoredVersion:
    fragment, version, base, file, sha256, digest, scale, tokens, published_at = row
    names, weights = tuple(name for name, _ in pairs), tuple(weight for _, weight in pairs)
    update = Update(int(fragment), int(base), int(version), names, weights, scale, digest, lossless=False)
    return StoredVersion(update, str(file), str(sha256), int(tokens), float(published_at))


def kept_files(db: sqlite3.Connection, kept_versions: int) -> set[str]:
    """The files that the newest versions name, and the one of what training leaves alone."""
    named = {row[0] for row in db.execute("SELECT static_file FROM run")}
    newest = "SELECT file FROM versions WHERE fragment = ? ORDER BY version DESC LIMIT ?"
    for fragment in newest_numbers(db):
        named |= {row[0] for row in db.execute(newest, (fragment, kept_versions))}
    return named


def file_of(db: sqlite3.Connection, fragment: int, version: int) -> str | None:
    """The file of a version; None: there is no such version."""
    row = db.execute("SELECT file FROM versions WHERE fragment = ? AND version = ?", (fragment, version)).fetchone()
    return None if row is None else str(row[0])


def is_named(db: sqlite3.Connection, file: str) -> bool:
    """Whether any version that was ever published names this file."""
    return db.execute("SELECT 1 FROM versions WHERE file = ?", (file,)).fetchone() is not None


def read_history(db: sqlite3.Connection, since: float) -> list[HistoryLine]:
    """Versions published at or after a time, oldest first, each with its contributors."""
    took_part: dict[tuple[int, int], list[tuple[str, float]]] = {}
    for fragment, version, learner, weight in db.execute(
        "SELECT c.fragment, c.version, learner, weight FROM contributors AS c JOIN versions AS v"
        " ON c.fragment = v.fragment AND c.version = v.version WHERE published_at >= ? ORDER BY position",
        (since,),
    ):
        took_part.setdefault((fragment, version), []).append((learner, weight))
    versions = db.execute(
        "SELECT fragment, version, base, digest, scale, tokens, published_at FROM versions WHERE published_at >= ?"
        " ORDER BY published_at, version, fragment",
        (since,),
    )
    history = []
    for fragment, version, base, digest, scale, tokens, published_at in versions:
        pairs = took_part.get((fragment, version), [])
        names, weights = tuple(name for name, _ in pairs), tuple(weight for _, weight in pairs)
        history.append(HistoryLine(fragment, version, base, digest, scale, tokens, published_at, names, weights))
    return history


# `run.json`: what the database says of the run, once more, so that a lost database does not cost the run.
#
# It has the columns of the table `run` without the record, and a hash over them. It is written when the run is
# initialised, and at each start where it is not as the database says.

DESCRIPTION = "run.json"

Row = Mapping[str, Any]
"""A row of the table `run`, by column."""

RUN_COLUMNS = frozenset({
    "id", "run", "method", "layout", "source", "step", "tokens", "static_file", "static_sha256", "created_at", "run_id",
})  # fmt: skip
"""Of the table `run`, without the record."""


def run_row(db: sqlite3.Connection) -> dict[str, Any]:
    """The row of the run, without the record; empty: there is no run."""
    cursor = db.execute("SELECT * FROM run")
    row = cursor.fetchone() or ()
    return {column[0]: value for column, value in zip(cursor.description, row, strict=False) if column[0] != "record"}


def insert_run(db: sqlite3.Connection, row: Row) -> None:
    """Put a run into an empty database, inside the caller's transaction."""
    columns = ", ".join(row)
    db.execute(f"INSERT INTO run ({columns}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))  # noqa: S608


def write_description(path: Path, row: Row) -> None:
    """Describe the run in a store's directory.

    Raises:
        OSError: what was there before still is.
    """
    write_whole(path / DESCRIPTION, json.dumps({"format": FORMAT, "run": row, "sha256": _hash_of(row)}, indent=1))


def read_description(path: Path) -> dict[str, Any] | None:
    """The row of the run; None: the file is missing, damaged or of another format.

    Raises:
        OSError: unreadable.
    """
    try:
        plain = json.loads((path / DESCRIPTION).read_bytes())
        row: dict[str, Any] = plain["run"]
        return row if plain["format"] == FORMAT and plain["sha256"] == _hash_of(row) else None
    except (FileNotFoundError, *MALFORMED):
        return None


def _hash_of(row: Row) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()
