"""Repair a damaged state directory so that a syncer can serve it: each fragment goes back to its newest intact version.

Nothing is deleted: damaged files move to `set-aside/`. An intact database is changed in one transaction; a damaged one
is replaced by a new one, made from `run.json` and the version files. All learners join again.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from diloco.errors import StoreError
from diloco.protocol.lineage import Epoch
from diloco.protocol.records import rolled_back
from diloco.store.durable import ignore_point, lock_directory, sync_directory
from diloco.store.files import TensorFiles, set_aside
from diloco.store.inspection import NO_STATIC, DirectoryState, inspect, inspected
from diloco.store.records import (
    DATABASE,
    INDEX,
    LOG,
    connect,
    insert_run,
    put_epoch,
    put_version,
    transaction,
    write_description,
)

_NEW = ".tmp-repair"


def repair(path: Path) -> tuple[DirectoryState, list[Path]]:
    """Repair a state directory. Returns its state before the repair, and the files that were set aside (none if the
    directory was intact).

    Raises:
        StoreError: a syncer runs on it; too little of the run is left, and nothing was changed; or the disk refused,
            and the repair can be repeated.
    """
    try:
        found = inspect(path)
        if found.starts:
            return found, []
        _require_repairable(found)  # before the lock, which creates a file
        with closing(lock_directory(path)):
            found = inspected(path)  # a syncer may have run on it in between
            if found.starts:
                return found, []
            _require_repairable(found)
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


def _require_repairable(found: DirectoryState) -> None:
    if not found.can_be_repaired:
        raise StoreError(
            f"{found.path} cannot be repaired ({_missing(found)}); `diloco syncer restore` restores a backup."
        )


def _missing(found: DirectoryState) -> str:
    if found.row is None:
        return "neither the database nor run.json identifies the run"
    if not found.has_static and not found.can_make_static:
        return f"tensors/{found.row['static_file']} is not whole, and there is no other copy of it"
    lost = [str(each.fragment) for each in found.fragments if each.chosen is None]
    return f"no version of fragment {', '.join(lost)} is whole"


def _damaged(found: DirectoryState) -> list[str]:
    """The damaged tensor files, by their path in the directory."""
    return [each.file for each in found.problems if each.file.startswith("tensors/")]


def _make_database(found: DirectoryState) -> list[Path]:
    """Record the chosen versions in the database, a new one if the old one is damaged. Returns the files set aside."""
    if found.has_database:
        with closing(connect(found.path)) as db, transaction(db):
            _choose(db, found)
        return []
    new = found.path / _NEW
    shutil.rmtree(new, ignore_errors=True)  # left by an interrupted repair
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
        present = {row[0] for row in db.execute("SELECT version FROM versions WHERE fragment = ?", (index,))}
        for each in (*fragment.earlier, fragment.chosen):
            if each.update.version not in present:
                put_version(db, each.update, each.file, each.sha256, each.tokens, each.published_at)
                present.add(each.update.version)
    versions = [each.serves or 0 for each in found.fragments]
    record = None if found.record is None else json.dumps(rolled_back(found.record, versions))
    db.execute("UPDATE run SET record = ?", (record,))


def fresh_epoch(versions: Iterable[int]) -> Epoch:
    """An epoch that begins at these versions when the last epoch's number is unknown: Unix time exceeds every earlier
    number."""
    return Epoch(int(time.time()), tuple(versions))
