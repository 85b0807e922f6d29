"""The SQLite database of a store: its schema, and the functions that read and write its rows."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
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


def advice(path: Path) -> str:
    """What to do about a damaged state directory: the end of an error message."""
    return f"'diloco syncer check {path}' says what can still be served, or start a new run elsewhere"


def read_format(path: Path) -> tuple[int, bool]:
    """The format of the database in a store's directory, and whether it holds a run; format 0: the file is missing or
    empty.

    Nothing is written: a damaged database and its write-ahead log stay as they are, although SQLite would merge the log
    or remove it. Without a log the file is opened as immutable, since SQLite would otherwise create a log to read it.

    Raises:
        StoreError: it is damaged, or of another format.
    """
    database = path / DATABASE
    if not database.exists() or database.stat().st_size == 0:
        return 0, False
    try:
        with closing(_connect_unchanged(path)) as db:
            found = int(db.execute("PRAGMA user_version").fetchone()[0])
            verdict = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
            has_run = found == FORMAT and db.execute("SELECT 1 FROM run").fetchone() is not None
    except sqlite3.OperationalError:  # the disk failed, the data may be whole
        raise
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # UnicodeDecodeError: in SQLite's message
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


def _connect_unchanged(path: Path) -> sqlite3.Connection:
    log = path / LOG
    has_log = log.exists() and log.stat().st_size > 0
    how = "mode=ro" if has_log else "mode=ro&immutable=1"
    return sqlite3.connect(f"{(path / DATABASE).absolute().as_uri()}?{how}", uri=True)


def durable_versions(path: Path) -> list[tuple[int, str]] | None:
    """Version and digest of the newest version of each fragment; empty: there is no run; None: it cannot be read.
    Nothing is written, and a syncer may run on the directory."""
    try:
        if not read_format(path)[1]:
            return []
        with closing(_connect_unchanged(path)) as db:
            return [(each.update.version, each.update.digest) for each in newest_versions(db)]
    except (OSError, sqlite3.Error, StoreError, *MALFORMED):
        return None


def connect(path: Path) -> sqlite3.Connection:
    """Open the database in a store's directory, or create it. The caller has checked the format of an existing one with
    `read_format`."""
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
    """The number of frames of the write-ahead log that belong to the database and that SQLite ignores: those after a
    torn or damaged frame, and those of an uncommitted transaction. The next write overwrites them."""
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
    """Open a database that holds a run, as `read_format` has found. Closing it leaves the write-ahead log in place."""
    return sqlite3.connect(
        f"{(path / DATABASE).absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
    )


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit all statements of the block, or none."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite ends it by itself after some failures
            db.execute("ROLLBACK")
        raise


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
    """Add an epoch, inside the caller's transaction."""
    db.execute("INSERT INTO epochs VALUES (?, ?, ?)", (epoch.number, json.dumps(epoch.versions), started_at))


def epochs_of(db: sqlite3.Connection) -> tuple[Epoch, ...]:
    """All epochs, in ascending order."""
    rows = db.execute("SELECT epoch, versions FROM epochs ORDER BY epoch").fetchall()
    return tuple(Epoch(int(epoch), tuple(map(int, json.loads(versions)))) for epoch, versions in rows)


@dataclass(frozen=True)
class StoredVersion:
    """A published version and its file. `published_at`: Unix time in seconds."""

    update: Update
    file: str
    sha256: str
    tokens: int
    published_at: float


_STORED = "SELECT fragment, version, base, file, sha256, digest, scale, tokens, published_at FROM versions AS v"


def stored_versions(db: sqlite3.Connection) -> dict[int, list[StoredVersion]]:
    """All versions, by fragment, newest first. The database does not hold `lossless`; it is False in all of them."""
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
    """The newest version of each fragment, in ascending order of fragments. Its time does not grow with the number of
    versions."""
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
    """The files of the newest versions of each fragment, and the file of the frozen state."""
    named = {row[0] for row in db.execute("SELECT static_file FROM run")}
    newest = "SELECT file FROM versions WHERE fragment = ? ORDER BY version DESC LIMIT ?"
    for fragment in newest_numbers(db):
        named |= {row[0] for row in db.execute(newest, (fragment, kept_versions))}
    return named


def file_of(db: sqlite3.Connection, fragment: int, version: int) -> str | None:
    """The file of a version; None: the version is not in the database."""
    row = db.execute("SELECT file FROM versions WHERE fragment = ? AND version = ?", (fragment, version)).fetchone()
    return None if row is None else str(row[0])


def is_named(db: sqlite3.Connection, file: str) -> bool:
    """Whether this is the file of any published version, superseded ones included."""
    return db.execute("SELECT 1 FROM versions WHERE file = ?", (file,)).fetchone() is not None


# `run.json`: a copy of the run's row, so that a run survives the loss of its database.
#
# It holds the columns of the table `run` without the record, and a hash over them. It is written when the run is
# initialised, and again at each start.

DESCRIPTION = "run.json"

Row = Mapping[str, Any]
"""A row of the table `run`, by column."""

RUN_COLUMNS = frozenset({
    "id", "run", "method", "layout", "source", "step", "tokens", "static_file", "static_sha256", "created_at", "run_id",
})  # fmt: skip
"""Columns of the table `run`, without the record."""


def run_row(db: sqlite3.Connection) -> dict[str, Any]:
    """The run's row, without the record; empty: the database holds no run."""
    cursor = db.execute("SELECT * FROM run")
    row = cursor.fetchone() or ()
    return {column[0]: value for column, value in zip(cursor.description, row, strict=False) if column[0] != "record"}


def insert_run(db: sqlite3.Connection, row: Row) -> None:
    """Insert the run into an empty database, inside the caller's transaction."""
    columns = ", ".join(row)
    db.execute(f"INSERT INTO run ({columns}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))  # noqa: S608


def write_description(path: Path, row: Row) -> None:
    """Write the run's row to `run.json`.

    Raises:
        OSError: the disk refused; an earlier file is unchanged.
    """
    write_whole(path / DESCRIPTION, json.dumps({"format": FORMAT, "run": row, "sha256": _hash_of(row)}, indent=1))


def read_description(path: Path) -> dict[str, Any] | None:
    """The run's row in `run.json`; None: the file is missing, damaged or of another format.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        plain = json.loads((path / DESCRIPTION).read_bytes())
        row: dict[str, Any] = plain["run"]
        return row if plain["format"] == FORMAT and plain["sha256"] == _hash_of(row) else None
    except (FileNotFoundError, *MALFORMED):
        return None


def _hash_of(row: Row) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()
