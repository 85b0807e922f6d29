"""Replication of a store to a second syncer: the first finds what the copy lacks, the copy applies it.

The copy moves from one state of the run to the next. A `ReplicatedState` is one consistent read of the first's
database; files that it names and the copy lacks are sent before it. The copy applies it in one transaction, after which
record, versions and epochs equal the first's. Versions that only the copy has leave its database, and their files are
set aside.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from diloco.core.update import Update
from diloco.errors import CorruptPayloadError, StoreError, first_line
from diloco.escaping import MALFORMED, MAX_REASON
from diloco.protocol.lineage import Epoch
from diloco.protocol.pair.values import Contents, Position
from diloco.run.ports import Json
from diloco.store.durable import ignore_point, sync_directory
from diloco.store.files import is_static, version_of
from diloco.store.inspection import INVALID, require_record, unreadable
from diloco.store.records import (
    RUN_COLUMNS,
    Row,
    StoredVersion,
    epochs_of,
    insert_run,
    kept_files,
    newest_numbers,
    newest_versions,
    put_epoch,
    put_version,
    run_row,
    versions_after,
    write_description,
)
from diloco.store.store import KEPT_VERSIONS, Store
from diloco.whole_files import write_whole

# `standby.json`: the durable position of a syncer in a pair of syncers (`protocol.pair`).
#
# A syncer that never had a second one has no such file. Its epoch is in the database.

FILE = "standby.json"


def read_position(state_dir: Path) -> Position | None:
    """The position in a state directory; None: there is none.

    Raises:
        StoreError: the file is damaged.
    """
    path = state_dir / FILE
    try:
        plain = json.loads(path.read_bytes())
        place, is_paired, electorate = plain["place"], plain["is_paired"], plain["electorate"]
        base, offered = plain["base"], plain["offered"]
        if place not in ("first", "standby") or type(is_paired) is not bool:
            raise ValueError(f"place {place!r}, is_paired {is_paired!r}")
        if type(base) is not int or base < 0 or type(offered) is not int or offered < 0:
            raise ValueError(f"base {base!r}, offered {offered!r}")
        if type(electorate) is not list or not all(type(each) is str for each in electorate):
            raise ValueError("the electorate")
        return Position(place, is_paired, base, frozenset(electorate), offered)
    except FileNotFoundError:
        return None
    except MALFORMED as error:
        raise StoreError(
            f"{path}, which says whether this syncer may serve the run, is damaged ({first_line(error)}); start it as "
            "the standby of the other syncer in an empty directory, or remove the file if there is no other one."
        ) from error


def write_position(state_dir: Path, position: Position) -> None:
    """Make a position durable.

    Raises:
        StoreError: the disk refused; the earlier position stays.
    """
    plain = {
        "place": position.place, "is_paired": position.is_paired, "base": position.base,
        "electorate": sorted(position.electorate), "offered": position.offered,
    }  # fmt: skip
    try:
        write_whole(state_dir / FILE, json.dumps(plain, indent=1))
        sync_directory(state_dir)
    except OSError as error:
        raise StoreError(
            f"{state_dir / FILE} could not be written ({error}); free disk space, it is tried again."
        ) from error


@dataclass(frozen=True)
class ReplicatedState:
    """A state of the run, as it is sent to a copy.

    Attributes:
        row: the run's, without the record.
        epochs: all epochs, with the Unix times of their beginnings.
        since: by fragment, the newest version that the copy shares with the run; −1: none.
        versions: the versions after `since`.
        electorate: the learner processes that vote on which of the two syncers serves.
    """

    row: Mapping[str, Any]
    record: Mapping[str, Any] | None
    epochs: tuple[tuple[Epoch, float], ...]
    since: Mapping[int, int]
    versions: tuple[StoredVersion, ...]
    electorate: tuple[str, ...] = ()

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps({**asdict(self), "since": list(self.since.items())})

    @classmethod
    def from_json(cls, text: str | bytes) -> ReplicatedState:
        """The state from `to_json`'s text.

        Raises:
            CorruptPayloadError: it is another text.
        """
        try:
            plain = json.loads(text)
            epochs = tuple(
                (Epoch(int(it["number"]), tuple(map(int, it["versions"]))), float(at)) for it, at in plain["epochs"]
            )
            versions = tuple(map(_version, plain["versions"]))
            since = {int(fragment): int(version) for fragment, version in plain["since"]}
            if set(plain["row"]) != RUN_COLUMNS or not is_static(str(plain["row"]["static_file"])):
                raise ValueError("the description of the run")
            return cls(plain["row"], plain["record"], epochs, since, versions, tuple(map(str, plain["electorate"])))
        except MALFORMED as error:
            raise _no_state(error) from error


def _version(plain: Mapping[str, Any]) -> StoredVersion:
    """A version of a state. Raises one of `MALFORMED` for values that no database holds."""
    found = StoredVersion(**{**plain, "update": Update.from_dict(plain["update"])})
    it = found.update
    numbers, texts = (it.base, found.tokens), (it.digest, found.sha256, *it.contributors)
    reals = it.scale, found.published_at, *it.weights
    if (
        version_of(found.file) != (it.fragment, it.version)
        or not all(type(each) is int and 0 <= each < 2**63 for each in numbers)
        or not all(type(each) in (int, float) and math.isfinite(each) for each in reals)
        or not all(type(each) is str for each in texts)
    ):
        raise ValueError(f"{found.file!r} as a version of fragment {it.fragment}")
    return found


@dataclass(frozen=True)
class MissingParts:
    """The state and the files that a copy lacks.

    Attributes:
        serial: of the state (`Store.serial`).
        newest: by fragment, the newest version and the SHA-256 of its file.
        files: name, SHA-256 and the open file of each missing file.
    """

    serial: int
    state: ReplicatedState
    newest: Mapping[int, tuple[int, str]]
    files: tuple[tuple[str, str, IO[bytes]], ...]

    def close(self) -> None:
        """Close the files."""
        for _, _, file in self.files:
            file.close()


class Replica(Store):
    """A `Store` that can be copied to another syncer and be such a copy; the `Durable` of a `PairCore`."""

    def __init__(self, path: str | os.PathLike[str], *, at: Callable[[str], None] = ignore_point) -> None:
        super().__init__(path, at=at)
        self._verified: dict[str, tuple[str, str]] = {}  # files that this process has received: SHA-256 and digest

    def _require_no_run(self, *, is_new: bool) -> None:
        """A copy receives files before the first state that names them."""
        position = read_position(self.path)
        if is_new or position is None or position.place == "first":
            super()._require_no_run(is_new=is_new)

    def contents(self) -> Contents:
        """As `Durable`."""
        with self._mapped("read"):
            with self._using:
                row = run_row(self._db)
                if not row:
                    return Contents()
                newest = {
                    each.update.fragment: (each.update.version, each.sha256) for each in newest_versions(self._db)
                }
                kept = kept_files(self._db, KEPT_VERSIONS)
                epoch = epochs_of(self._db)[-1].number
            files = frozenset(name for name in self._files.names() if name not in kept and version_of(name) != (-1, -1))
            return Contents(str(row["run_id"]), epoch, newest, files)

    def lacking(self, copy: Contents) -> MissingParts | None:
        """What a copy with these contents lacks; None: there is no run yet. The files stay readable until they are
        closed.

        Raises:
            StoreError: the disk refused.
        """
        with self._writing, self._mapped("read"):  # no file is removed in between
            with self._using:
                row = run_row(self._db)
                if not row:
                    return None
                record = self._db.execute("SELECT record FROM run").fetchone()[0]
                epochs = self._db.execute("SELECT epoch, versions, started_at FROM epochs ORDER BY epoch").fetchall()
                newest = {each.update.fragment: each for each in newest_versions(self._db)}
                held = copy.held if copy.run_id == row["run_id"] else {}
                since = {fragment: self._common(fragment, held.get(fragment)) for fragment in newest}
                later = [versions_after(self._db, fragment, since[fragment]) for fragment in sorted(newest)]
            wanted = [
                (each.file, each.sha256) for fragment, each in sorted(newest.items())
                if since[fragment] < each.update.version and each.file not in copy.files
            ]  # fmt: skip
            if not held:
                wanted.insert(0, (str(row["static_file"]), str(row["static_sha256"])))
            state = ReplicatedState(
                row, None if record is None else json.loads(record),
                tuple((Epoch(number, tuple(json.loads(at))), started) for number, at, started in epochs), since,
                tuple(each for versions in later for each in versions),
            )  # fmt: skip
            files = tuple((name, sha256, (self._files.directory / name).open("rb")) for name, sha256 in wanted)
            known = {fragment: (each.update.version, each.sha256) for fragment, each in newest.items()}
            return MissingParts(self.serial, state, known, files)

    def _common(self, fragment: int, held: tuple[int, str] | None) -> int:
        if held is None:
            return -1
        known = self._db.execute(
            "SELECT sha256 FROM versions WHERE fragment = ? AND version = ?", (fragment, held[0])
        ).fetchone()
        return held[0] if known is not None and known[0] == held[1] else -1

    def begin_epoch(self, number: int) -> None:
        """As `Durable`. Raises StoreError: the disk refused."""
        with self._writing, self._mapped("begun"):
            with self._using:
                if any(each.number == number for each in epochs_of(self._db)):
                    return
            with self._transaction() as db:
                put_epoch(db, Epoch(number, tuple(newest_numbers(db).values())), time.time())

    def keep(self, position: Position) -> None:
        """As `Durable`. Raises as `write_position`."""
        write_position(self.path, position)

    def epoch(self) -> int:
        """As `Durable`."""
        with self._mapped("read"), self._using:
            found: int = self._db.execute("SELECT COALESCE(MAX(epoch), 0) FROM epochs").fetchone()[0]
            return found

    def record(self) -> Json | None:
        """As `Durable`."""
        with self._mapped("read"), self._using:
            row = self._db.execute("SELECT record FROM run").fetchone()
            return None if row is None or row[0] is None else json.loads(row[0])

    def versions(self) -> tuple[int, ...]:
        """As `Durable`."""
        with self._mapped("read"), self._using:
            return tuple(newest_numbers(self._db).values())

    # --- as a copy ----------------------------------------------------------------------------------------------------

    def receive(self, name: str, sha256: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Receive a file. Raises as `TensorFiles.receive`, and StoreError: the disk refused."""
        with self._mapped(f"completed by {name[:80]!r}"):
            self._verified[name] = sha256, self._files.receive(name, sha256, chunks)

    def apply(self, state: ReplicatedState) -> None:
        """Replace the state of the run by this one, whose files were received before.

        Raises:
            StoreError: the disk refused, or a file is missing or damaged; the earlier state stays.
            CorruptPayloadError: no syncer could start with the new state; the earlier state stays.
        """
        for each in {each.update.fragment: each for each in state.versions}.values():  # the newest ones
            it = each.update
            if self._verified.get(each.file) != (each.sha256, it.digest):
                self._files.read(each)
        with self._writing, self._mapped("brought to the state of the first syncer"):
            with self._using:
                known = run_row(self._db)
            if known and known["run_id"] != state.row["run_id"]:
                raise StoreError(
                    f"{self.path} holds run {known['run']!r} (id {known['run_id']}), and the syncer to follow serves "
                    f"another one (id {state.row['run_id']}); use an empty directory."
                )
            if not known:
                if (reason := unreadable(state.row)) is not None:
                    raise _no_state(reason)
                self._files.read_static(str(state.row["static_file"]), str(state.row["static_sha256"]))
                write_description(self.path, state.row)
            with self._transaction() as db:
                try:
                    if not known:
                        insert_run(db, state.row)
                    _replace(db, state)
                    _require_startable(db, known or state.row, state.record)
                except INVALID as error:
                    raise _no_state(error) from error
                self._at("inserted")
            self._at("committed")
            self._verified.clear()
            if state.versions or not known:
                self._remove_superseded()


def _replace(db: sqlite3.Connection, state: ReplicatedState) -> None:
    record = None if state.record is None else json.dumps(state.record)
    db.execute("UPDATE run SET record = ?", (record,))
    db.execute("DELETE FROM epochs")
    for fragment, version in state.since.items():
        db.execute("DELETE FROM contributors WHERE fragment = ? AND version > ?", (fragment, version))
        db.execute("DELETE FROM versions WHERE fragment = ? AND version > ?", (fragment, version))
    by_epoch = sorted(state.epochs, key=lambda each: each[0].number)
    for epoch, started_at in by_epoch:
        put_epoch(db, epoch, started_at)
    for each in state.versions:
        put_version(db, each.update, each.file, each.sha256, each.tokens, each.published_at)


def _require_startable(db: sqlite3.Connection, row: Row, record: Json | None) -> None:
    """Check that a start can load the transaction's result. Raises one of `INVALID` if it cannot."""
    newest = [each.update for each in newest_versions(db)]
    num_fragments = len(json.loads(row["layout"])["fragments"])
    if [each.fragment for each in newest] != list(range(num_fragments)) or not epochs_of(db):
        raise ValueError(f"versions of {len(newest)} of {num_fragments} fragments")
    require_record(row, [each.version for each in newest], record)


def _no_state(reason: object) -> CorruptPayloadError:
    said = reason if isinstance(reason, str) else repr(reason)
    return CorruptPayloadError(f"the first syncer has sent an invalid state of the run ({said[:MAX_REASON]}).")
