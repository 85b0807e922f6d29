"""The durable state of one run in one directory: SQLite (write-ahead log, full sync) for facts, safetensors files for
tensors.

    store.sqlite                              run, its record (members, ledgers, verdicts), versions, contributors
    tensors/static-<sha>.safetensors          frozen parameters and buffers
    tensors/f00003-v000000012-<sha>.safetensors   theta, residual, outer.<name> of one version of one fragment
    run.json                                  what the database says of the run, once more
    set-aside/                                what was found in tensors/ and no version names
    store.lock                                held while a syncer has the directory open

Published means durable: `Store.publish` writes the file, then commits one SQLite transaction that names it; before the
commit the version does not exist, after it the version survives a power cut.

Nothing is removed that was not read, understood and superseded: versions older than the two newest of each fragment,
once a newer one is published or was read, and what a broken-off write has left under a temporary name. A directory
whose database is damaged, or is gone while tensors are there, is not opened; files that no version names are moved to
`set-aside/`. Every file of a version says what it is: `inspection` and `repair` go on without the database.
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
    HistoryLine,
    advice,
    connect,
    connect_read_only,
    epochs_of,
    file_of,
    insert_run,
    is_named,
    kept_files,
    look,
    newest_numbers,
    newest_versions,
    num_unread_frames,
    put_epoch,
    put_version,
    read_description,
    read_history,
    run_row,
    write_description,
)

log = logging.getLogger("diloco.syncer")

KEPT_VERSIONS = 2  # files of a fragment: the newest and the one before it

READERS = 4
"""Fragments that are read and hashed at a time: a start waits for the disk, or for one processor's hashes."""


class Store:
    """The state of one run, in a directory that this object alone has open.

    Any thread may call any method. Writers wait for each other; readers wait only for the short SQLite transaction, not
        for tensors being written. `at` is called with the name of each durable step, so that tests can stop there.

    Attributes:
        serial: grows with every change of the run that is durable.

    Raises:
        StoreError: the directory is in use, was written by a newer format, is damaged, or cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], *, at: Callable[[str], None] = ignore_point) -> None:
        self.path = Path(path)
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
                found, has_run = look(self.path)
                if not has_run:
                    self._require_no_run(is_new=found == 0)
                # What a refused start would leave otherwise: SQLite's log brought into the database, or cut.
                self._db = connect_read_only(self.path) if has_run else connect(self.path)
                self._may_write = not has_run
        except BaseException:
            self._lock.close()
            raise

    def _require_no_run(self, *, is_new: bool) -> None:
        """As `TensorFiles.require_no_run`."""
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
        """Give the run its model, once: every fragment at version 0.

        Raises:
            AlreadyInitialisedError: the run has a model; it is left as it is.
            StoreError: the disk refused; nothing is initialised and a later call can succeed.
        """
        with self._writing, self._mapped("initialised"):
            if (held := self._run_name()) is not None:
                raise AlreadyInitialisedError(
                    f"run {held!r} in {self.path} has a model already; join it as it is, or use another directory "
                    "for a new run."
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
        """Make the epoch of the next driver durable, of the run that `load` has read; returns what it starts from.

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
        """Make a version durable, and the record that belongs to it. Only after this returns may it be seen.

        Raises:
            StoreError: the disk refused; the previous version stays the newest and the same call can be repeated.
            VersionError, NotInitialisedError: wrong use.
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
            # The version is durable, so nothing here may report failure. What cannot be removed now is removed at the
            # next start.
            with contextlib.suppress(OSError, sqlite3.DatabaseError):
                with self._using:
                    superseded = file_of(self._db, update.fragment, update.version - KEPT_VERSIONS)
                if superseded is not None:
                    self._files.remove(superseded)

    def save_record(self, record: Json) -> None:
        """Replace the record between publications.

        Raises:
            StoreError: the disk refused; what was held stays. NotInitialisedError: wrong use.
        """
        with self._writing:
            with self._mapped("stored as the run's record"), self._transaction() as db:
                if db.execute("UPDATE run SET record = ?", (json.dumps(record),)).rowcount == 0:
                    raise NotInitialisedError(f"there is no model in {self.path}; initialise the run first.")
                self._at("inserted")
            self._at("committed")

    def tidy(self, saved: SavedRun[GlobalFragment] | None) -> list[Path]:
        """Remove what is superseded by `saved`, which `load` has read, and set aside what no version names; returns
        that. The run is described once more (`run.json`) where it is not.

        Raises:
            StoreError: the disk refused.
        """
        with self._writing, self._mapped("tidied up"):
            self._files.remove_temporary()
            if saved is not None:
                self._describe_run()
            with self._using:
                kept = kept_files(self._db, KEPT_VERSIONS)
                others = [name for name in self._files.names() if name not in kept]
                superseded = {name for name in others if saved is not None and is_named(self._db, name)}
            for name in superseded:
                self._files.remove(name)
            return [self._files.set_aside(name) for name in others if name not in superseded]

    # reading

    def load(self) -> SavedRun[GlobalFragment] | None:
        """The run as last published, every file checked against the hash committed with it; None before `initialise`.

        Raises:
            StoreError: a file is missing or damaged, named with its fragment and version, or the database is. Nothing
                older is used in its place.
        """
        with self._mapped("read"), understood(self.path):
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

    def history(self, since: float = 0.0) -> list[HistoryLine]:
        """Everything published at or after a time (seconds since the epoch), oldest first."""
        with self._mapped("read"), self._using:
            return read_history(self._db, since)

    def _run_name(self) -> str | None:
        with self._using:
            row = self._db.execute("SELECT run FROM run").fetchone()
        return None if row is None else str(row[0])

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
        """Write what the database says of the run, where `run.json` does not have it; a damaged one is set aside."""
        if read_description(self.path) is None and (self.path / DESCRIPTION).exists():
            target = set_aside(self.path, self.path / DESCRIPTION)
            log.warning("%s is damaged: set aside as %s, and written anew", self.path / DESCRIPTION, target)
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
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
                self.serial += 1
            except BaseException:
                if self._db.in_transaction:  # SQLite ends it by itself after some failures
                    self._db.execute("ROLLBACK")
                raise

    def _open_to_write(self) -> None:
        """Before the first write to a database that was found: it may change from now on."""
        if not self._may_write:
            if num := num_unread_frames(self.path):
                copy = keep_copy(self.path, self.path / LOG)
                log.warning("%s has %d frames that SQLite does not read: copied to %s", self.path / LOG, num, copy)
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
                "repair the disk and try again, what was published before is unharmed."
            ) from error


@contextlib.contextmanager
def understood(path: Path) -> Iterator[None]:
    """Turn values of the database that make no sense into StoreError: SQLite only checks that pages are whole."""
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
    except OSError:  # the directory itself is gone: the error at hand says it better
        return ""
