"""The durable state of one run in one directory: SQLite (write-ahead log, full sync) for facts, safetensors files for
tensors.

    store.sqlite                              run, its record (members, ledgers, verdicts), versions, contributors
    tensors/static-<sha>.safetensors          frozen parameters and buffers
    tensors/f00003-v000000012-<sha>.safetensors   theta, residual, outer.<name> of one version of one fragment
    run.json                                  a copy of the run's row in the database
    set-aside/                                files that were found in tensors/ and belong to no version
    store.lock                                held while a syncer has the directory open

Published means durable: `Store.publish` writes the file, then commits one SQLite transaction that names it; before the
commit the version does not exist, after it the version survives a power cut.

Only two kinds of files are removed: superseded versions (older than the two newest of their fragment, once a newer one
is published or was read), and temporary files of interrupted writes. A directory with a damaged database, or with
tensors and no database, is not opened; files that no version names are moved to `set-aside/`. The header of a version
file describes the version, so that `inspection` and `repair` work without the database.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from diloco.core.global_fragment import GlobalFragment
from diloco.core.layout import Layout
from diloco.core.method import Method
from diloco.core.update import Update
from diloco.errors import (
    AlreadyInitialisedError,
    DilocoError,
    NotInitialisedError,
    StoreError,
    VersionError,
    first_line,
)
from diloco.escaping import MALFORMED
from diloco.run.ports import InitialModel, Json, MergedRound, RunMethod, SavedRun, first_epoch
from diloco.store.durable import ignore_point, lock_directory
from diloco.store.files import TensorFiles, VersionFileHeader, keep_copy, set_aside
from diloco.store.records import (
    DATABASE,
    DESCRIPTION,
    LOG,
    advice,
    connect,
    connect_read_only,
    epochs_of,
    file_of,
    insert_run,
    is_named,
    kept_files,
    newest_numbers,
    newest_versions,
    num_unread_frames,
    put_epoch,
    put_version,
    read_description,
    read_format,
    run_row,
    transaction,
    write_description,
)

log = logging.getLogger("diloco.syncer")

KEPT_VERSIONS = 2  # files of a fragment: the newest and the one before it

READERS = 4
"""Fragments that a start reads and hashes in parallel."""


class Store:
    """The state of one run, in a directory that this object alone has open.

    Any thread may call any method. Writers wait for each other; readers wait only for the short SQLite transaction, not
    for tensors being written. `at` is called with the name of each durable step, so that tests can stop there.

    Attributes:
        serial: grows with every durable change of the run.

    Raises:
        StoreError: the directory is in use, was written by a newer format, is damaged, or cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], *, at: Callable[[str], None] = ignore_point) -> None:
        self.path = Path(path)
        if self.path.is_file():
            raise StoreError(f"{self.path} is a file; name a directory for the state.")
        self._files = TensorFiles(self.path, at)
        self._at = at
        self.serial = 0
        self._writing = threading.Lock()  # one writer at a time, tensors included
        self._using = threading.Lock()  # one user of the SQLite connection at a time
        with self._mapped("opened"):
            self._files.directory.mkdir(parents=True, exist_ok=True)
            self._lock = lock_directory(self.path)
        try:
            with self._mapped("opened"):
                found, has_run = read_format(self.path)
                if not has_run:
                    self._require_no_run(is_new=found == 0)
                # Read-only at first: a start that is refused must neither merge nor truncate the write-ahead log.
                self._db = connect_read_only(self.path) if has_run else connect(self.path)
                self._may_write = not has_run
        except BaseException:
            self._lock.close()
            raise

    def _require_no_run(self, *, is_new: bool) -> None:
        """`TensorFiles.require_no_run`; a copy of another store overrides it."""
        self._files.require_no_run(is_new=is_new)

    def close(self) -> None:
        """Release the directory. Nothing is lost by not calling it."""
        with self._writing, self._using:
            self._db.close()
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # writing

    def initialise(self, run: str, method: RunMethod, model: InitialModel[GlobalFragment]) -> None:
        """Store the run's initial model, once: every fragment at version 0.

        Raises:
            AlreadyInitialisedError: the run has a model, which is unchanged.
            StoreError: the disk refused; nothing is initialised and a later call can succeed.
        """
        with self._writing, self._mapped("initialised"):
            with self._using:
                stored = run_row(self._db)
            if stored:
                raise AlreadyInitialisedError(
                    f"run {stored['run']!r} in {self.path} has a model already; join it as it is, or use another "
                    "directory for a new run."
                )
            static_file, static_sha256 = self._files.write_static(model.static)
            rows = []
            for fragment in model.fragments:
                first = Update(fragment.fragment, 0, 0, (), (), 1.0, fragment.digest, lossless=True)
                rows.append((first, *self._files.write(fragment, VersionFileHeader(model.run_id, first, 0, 0, None))))
            row = {
                "id": 1, "run": run, "method": json.dumps(method.to_dict()),
                "layout": json.dumps(model.layout.to_dict()), "source": model.source,
                "step": model.step, "tokens": model.tokens, "static_file": static_file,
                "static_sha256": static_sha256, "created_at": time.time(), "run_id": model.run_id,
            }  # fmt: skip
            write_description(self.path, row)
            with self._transaction() as db:
                put_epoch(db, first_epoch(model), time.time())
                insert_run(db, row)
                for version in rows:
                    put_version(db, *version, tokens=0, published_at=time.time())
                self._at("inserted")
        self._at("committed")

    def begin(self, saved: SavedRun[GlobalFragment]) -> SavedRun[GlobalFragment]:
        """Make the next driver's epoch durable, for the run that `load` has read; returns the run in that epoch.

        Raises:
            StoreError: the disk refused.
        """
        begun = saved.begun()
        with self._writing:
            with self._mapped("begun"), self._transaction() as db:
                put_epoch(db, begun.epochs[-1], time.time())
                self._at("inserted")
            self._at("committed")
        return begun

    def publish(self, merged: MergedRound[GlobalFragment, Any], record: Json) -> None:
        """Make a version and its record durable. The version must not be published before this returns.

        Raises:
            StoreError: the disk refused; the previous version stays the newest and the same call can be repeated.
            VersionError: another version comes next. NotInitialisedError: the run has no model.
        """
        update = merged.update
        with self._writing:
            with self._mapped(f"stored as version {update.version} of fragment {update.fragment}"):
                self._check_next(update)
                described = self._described(update, merged.tokens, record)
                file, sha256 = self._files.write(merged.held, described)
                with self._transaction() as db:
                    put_version(db, update, file, sha256, merged.tokens, time.time())
                    db.execute("UPDATE run SET record = ?", (json.dumps(record),))
                    self._at("inserted")
            self._at("committed")
            # The version is durable, so nothing here may report a failure. A file that cannot be removed now is removed
            # at the next start.
            with contextlib.suppress(OSError, sqlite3.DatabaseError):
                with self._using:
                    superseded = file_of(self._db, update.fragment, update.version - KEPT_VERSIONS)
                if superseded is not None:
                    self._files.remove(superseded)

    def save_record(self, record: Json) -> None:
        """Replace the record between publications.

        Raises:
            StoreError: the disk refused; the earlier record stays. NotInitialisedError: the run has no model.
        """
        with self._writing:
            with self._mapped("stored as the run's record"), self._transaction() as db:
                if db.execute("UPDATE run SET record = ?", (json.dumps(record),)).rowcount == 0:
                    raise NotInitialisedError(f"there is no model in {self.path}; initialise the run first.")
                self._at("inserted")
            self._at("committed")

    def tidy(self, saved: SavedRun[GlobalFragment] | None) -> list[Path]:
        """Remove the files that `saved`, which `load` has read, supersedes, and set aside those that no version names;
        returns the latter. `run.json` is written again.

        Raises:
            StoreError: the disk refused.
        """
        with self._writing, self._mapped("tidied up"):
            self._files.remove_temporary()
            if saved is not None:
                self._describe_run()
            return self._remove_superseded()

    def _remove_superseded(self) -> list[Path]:
        """Remove the files of superseded versions, and set aside those that no version names; returns the latter."""
        with self._using:
            kept = kept_files(self._db, KEPT_VERSIONS)
            others = [name for name in self._files.names() if name not in kept]
            superseded = {name for name in others if is_named(self._db, name)}
        for name in superseded:
            self._files.remove(name)
        directory = self._files.directory
        return [set_aside(self.path, directory / name) for name in others if name not in superseded]

    # reading

    def load(self) -> SavedRun[GlobalFragment] | None:
        """The run at its newest versions, every file checked against its committed hash; None before `initialise`.

        Raises:
            StoreError: a file or the database is missing or damaged; the message names fragment and version. No older
                version takes its place.
        """
        with self._mapped("read"), checked_values(self.path):
            with self._using:
                run = self._db.execute(
                    "SELECT run, method, layout, source, step, tokens, static_file, static_sha256, record, run_id"
                    " FROM run"
                ).fetchone()
                versions = {each.update.fragment: each for each in newest_versions(self._db)}
                epochs = epochs_of(self._db)
            if run is None:
                return None
            self._require_as_described()
            name, method, layout_text, source, step, tokens, static_file, static_sha256, record, run_id = run
            layout = Layout.from_dict(json.loads(layout_text))
            newest = [versions[fragment.index] for fragment in layout.fragments]
            with ThreadPoolExecutor(READERS) as readers:
                fragments = tuple(readers.map(self._files.read, newest))
            return SavedRun(
                name,
                Method.from_dict(json.loads(method)),
                layout,
                fragments,
                tuple(each.update.contributors for each in newest),
                self._files.read_static(static_file, static_sha256),
                source,
                int(step),
                int(tokens),
                str(run_id),
                epochs,
                None if record is None else json.loads(record),
            )

    def _described(self, update: Update, tokens: int, record: Json) -> VersionFileHeader:
        with self._using:
            num_published = sum(newest_numbers(self._db).values())
            (run_id,) = self._db.execute("SELECT run_id FROM run").fetchone()
        return VersionFileHeader(run_id, update, tokens, num_published + 1, record)

    def _require_as_described(self) -> None:
        with self._using:
            row = run_row(self._db)
        if (described := read_description(self.path)) is not None and described != row:
            raise StoreError(
                f"{self.path / DATABASE} and {self.path / DESCRIPTION} describe different runs. Nothing was changed or "
                f"removed; {advice(self.path)}."
            )

    def _describe_run(self) -> None:
        """Write the run's row to `run.json`; a damaged file is set aside first."""
        if read_description(self.path) is None and (self.path / DESCRIPTION).exists():
            target = set_aside(self.path, self.path / DESCRIPTION)
            log.warning("%s is damaged: set aside as %s, and written again", self.path / DESCRIPTION, target)
        with self._using:
            row = run_row(self._db)
        write_description(self.path, row)

    def _check_next(self, update: Update) -> None:
        with self._using:
            newest = self._db.execute(
                "SELECT MAX(version) FROM versions WHERE fragment = ?", (update.fragment,)
            ).fetchone()[0]
        if newest is None:
            raise NotInitialisedError(
                f"fragment {update.fragment} has no model in {self.path}; initialise the run first."
            )
        if update.version != newest + 1:
            raise VersionError(
                f"version {update.version} of fragment {update.fragment} cannot follow the stored version {newest}; "
                f"publish version {newest + 1} next."
            )

    # edges

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._using:
            self._open_to_write()
            with transaction(self._db):
                yield self._db
            self.serial += 1

    def _open_to_write(self) -> None:
        """Reopen the database for writing before its first write, and keep a copy of frames that SQLite would drop."""
        if not self._may_write:
            if num := num_unread_frames(self.path):
                copy = keep_copy(self.path, self.path / LOG)
                log.warning("%s has %d frames that SQLite ignores: copied to %s", self.path / LOG, num, copy)
            self._db.close()
            self._db = connect(self.path)
            self._may_write = True

    @contextlib.contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.DatabaseError) as error:
            raise StoreError(
                f"the state in {self.path} could not be {what} ({first_line(error)}); {_free(self.path)}free space or "
                "repair the disk and try again; versions published before are unharmed."
            ) from error


@contextlib.contextmanager
def checked_values(path: Path) -> Iterator[None]:
    """Raise StoreError for invalid values in the database: SQLite's own check covers only its pages."""
    try:
        yield
    except DilocoError:
        raise
    except MALFORMED as error:
        raise StoreError(
            f"{path / DATABASE} is damaged: the run in it cannot be read ({error!r}). Nothing was changed or "
            f"removed; {advice(path)}."
        ) from error


def _free(path: Path) -> str:
    try:
        return f"its disk has {shutil.disk_usage(path).free / 1e6:.0f} MB free; "
    except OSError:  # the directory itself is missing, as the caller's error says
        return ""
