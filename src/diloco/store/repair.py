"""Make a damaged state directory one that a syncer serves: each fragment at the newest version that is whole.

Nothing is deleted: what is damaged goes to `set-aside/`. The database is changed in one transaction where it is whole;
otherwise a new one is made from `run.json` and the versions' files, and takes its place. All learners join again.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from diloco.errors import StoreError
from diloco.protocol.lineage import Epoch
from diloco.protocol.records import gone_back
from diloco.store.durable import ignore_point, lock_directory, sync_directory
from diloco.store.files import TensorFiles, set_aside
from diloco.store.inspection import NO_STATIC, DirectoryState, inspect, inspected
from diloco.store.records import DATABASE, INDEX, LOG, connect, insert_run, put_epoch, put_version, write_description

_NEW = ".tmp-repair"


def repair(path: Path) -> tuple[DirectoryState, list[Path]]:
    """Repair a state directory. Returns what was found before, and what was set aside; nothing, where it is whole.

    Raises:
        StoreError: a syncer runs on it; there is too little left of the run, and nothing was changed; or the disk
            refused, and a repair can begin again.
    """
    try:
        found = inspect(path)
        if found.starts:
            return found, []
        _require_enough(found)  # before the lock, which is a file of its own
        with closing(lock_directory(path)):
            found = inspected(path)  # again: a syncer may have run on it since
            if found.starts:
                return found, []
            _require_enough(found)
            aside = _make_database(found)
            aside += [set_aside(path, path / file) for file in _damaged(found) if (path / file).exists()]
            if not found.has_static:
                TensorFiles(path, ignore_point).write_static(NO_STATIC)
            assert found.row is not None
            write_description(path, found.row)
            return found, aside
    except (OSError, sqlite3.DatabaseError) as error:
        raise StoreError(
            f"{path} could not be repaired ({error}); free disk space or repair the disk first."
        ) from error


def _require_enough(found: DirectoryState) -> None:
    if not found.can_be_repaired:
        raise StoreError(
            f"{found.path} cannot be repaired ({_missing(found)}); `diloco syncer restore` makes it anew from a backup."
        )


def _missing(found: DirectoryState) -> str:
    if found.row is None:
        return "neither the database nor run.json says which run it is of"
    if not found.has_static and not found.can_make_static:
        return f"tensors/{found.row['static_file']} is not whole, and there is no other copy of what is in it"
    gone = [str(each.fragment) for each in found.fragments if each.chosen is None]
    return f"no version of fragment {', '.join(gone)} is whole"


def _damaged(found: DirectoryState) -> list[str]:
    """The files of tensors that are of no use, by their path in the directory."""
    return [each.file for each in found.problems if each.file.startswith("tensors/")]


def _make_database(found: DirectoryState) -> list[Path]:
    """Let the database name the chosen versions. Returns what was set aside for that."""
    if found.has_database:
        with closing(connect(found.path)) as db, transaction(db):
            _choose(db, found)
        return []
    new = found.path / _NEW
    shutil.rmtree(new, ignore_errors=True)  # of a repair that was broken off
    new.mkdir()
    with closing(connect(new)) as db, transaction(db):
        assert found.row is not None
        insert_run(db, found.row)
        put_epoch(db, fresh_epoch(each.serves or 0 for each in found.fragments), time.time())
        _choose(db, found)
    old = [found.path / name for name in (LOG, INDEX, DATABASE)]
    aside = [set_aside(found.path, each) for each in old if each.exists()]
    (new / DATABASE).rename(found.path / DATABASE)
    sync_directory(found.path)
    new.rmdir()
    return aside


def _choose(db: sqlite3.Connection, found: DirectoryState) -> None:
    for fragment in found.fragments:
        assert fragment.chosen is not None
        version, index = fragment.chosen.update.version, fragment.fragment
        named = {row[0] for row in db.execute("SELECT file FROM versions WHERE fragment = ?", (index,))}
        first = version if fragment.chosen.file not in named else version + 1
        for table in ("contributors", "versions"):
            db.execute(f"DELETE FROM {table} WHERE fragment = ? AND version >= ?", (index, first))  # noqa: S608
        there = {row[0] for row in db.execute("SELECT version FROM versions WHERE fragment = ?", (index,))}
        for each in (*fragment.earlier, fragment.chosen):
            if each.update.version not in there:
                put_version(db, each.update, each.file, each.sha256, each.tokens, each.published_at)
                there.add(each.update.version)
    versions = [each.serves or 0 for each in found.fragments]
    record = None if found.record is None else json.dumps(gone_back(found.record, versions))
    db.execute("UPDATE run SET record = ?", (record,))


def fresh_epoch(versions: Iterable[int]) -> Epoch:
    """A start on these versions, where the number of the last one is not known: Unix time is later than that."""
    return Epoch(int(time.time()), tuple(versions))


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of what is done in it, or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
