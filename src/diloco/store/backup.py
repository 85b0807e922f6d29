"""Backups of a run: snapshots, taken while it is served, and how a run is restored from one.

    snapshots/<epoch>-<versions published>-<UTC>.json    the run's record and versions at one moment; written last
    tensors/…                                            files of versions, as in the state directory, each once

A snapshot is one consistent read of the database. Its files are hard-linked at once, so that the syncer can supersede
them meanwhile. Each file is verified before it is written, and read back afterwards.
"""

from __future__ import annotations

import calendar
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from diloco import events
from diloco.core.update import Update
from diloco.errors import ConfigError, DilocoError, NotInitialisedError, StoreError, first_line
from diloco.escaping import MALFORMED
from diloco.event_log import EventLog
from diloco.protocol.lineage import Epoch
from diloco.protocol.records import without_members
from diloco.store.durable import ignore_point, sync_directory
from diloco.store.files import TensorFiles, is_file_name
from diloco.store.inspection import inspected
from diloco.store.records import (
    DATABASE,
    FORMAT,
    StoredVersion,
    connect,
    connect_read_only,
    epochs_of,
    insert_run,
    newest_versions,
    put_epoch,
    put_version,
    run_row,
    transaction,
    write_description,
)
from diloco.store.repair import fresh_epoch
from diloco.store.targets import Target, open_target
from diloco.whole_files import hidden_name, remove_leftovers

log = logging.getLogger("diloco.syncer")

SNAPSHOTS, TENSORS = "snapshots", "tensors"

_UTC = "%Y%m%dT%H%M%SZ"
_NAME = re.compile(r"\d{16}-\d{12}-(\d{8}T\d{6}Z)\.json")
"""The file name of a snapshot; other files in the place are ignored."""

_TRIES = 10
"""A snapshot is tried again when its files were superseded before they were linked."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment.

    Attributes:
        row: the run's, without the record.
        versions: the newest of each fragment.
        taken_at: Unix time in seconds.
    """

    row: dict[str, Any]
    record: dict[str, Any] | None
    epoch: Epoch
    versions: tuple[StoredVersion, ...]
    taken_at: float

    @property
    def name(self) -> str:
        """The name of its file. Names sort by epoch, then by versions."""
        published = sum(each.update.version for each in self.versions)
        taken = time.strftime(_UTC, time.gmtime(self.taken_at))
        return f"{self.epoch.number:016d}-{published:012d}-{taken}.json"

    @property
    def files(self) -> list[str]:
        """The names of its tensor files."""
        return [str(self.row["static_file"]), *(each.file for each in self.versions)]

    def to_json(self) -> str:
        """As JSON, with a hash of all fields."""
        plain = {"format": FORMAT, **asdict(self)}
        return json.dumps({"sha256": _hash_of(plain), **plain}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The snapshot from `to_json`'s text. Raises KeyError, TypeError or ValueError for any other text."""
        plain = json.loads(text)
        if plain.pop("sha256") != _hash_of(plain) or plain.pop("format") != FORMAT:
            raise ValueError("it is damaged, or of another version of diloco")
        versions = tuple(
            StoredVersion(**{**each, "update": Update.from_dict(each["update"])}) for each in plain["versions"]
        )
        epoch = Epoch(plain["epoch"]["number"], tuple(plain["epoch"]["versions"]))
        named = [plain["row"]["static_file"], *(each.file for each in versions)]
        if not all(is_file_name(each) for each in named) or not all(map(str.isidentifier, plain["row"])):
            raise ValueError("a file or column has an invalid name")
        return cls(**{**plain, "versions": versions, "epoch": epoch})


def back_up(state_dir: Path, target: Target, keep: int) -> Snapshot:
    """Take a snapshot of a run, served or not, and remove all but the newest `keep` from the target.

    Raises:
        ConfigError: there is no state directory. NotInitialisedError: the run has no model. StoreError: a file is
            damaged, the disk or the target refused, or the target has backups of another run or of a later epoch.
    """
    if not (state_dir / DATABASE).exists():
        raise ConfigError(f"{state_dir} is not the state directory of a syncer; check the path.")
    newest = next((each for _, each in _usable(target)), None)
    try:
        remove_leftovers(state_dir, "backup")
        staging = state_dir / hidden_name("backup")
        staging.mkdir()
        try:
            snapshot = _linked(state_dir, staging / TENSORS)
            if newest is not None:
                _require_follows(snapshot, newest, target.name)
            _verify(snapshot, staging)
            for file in snapshot.files:
                target.put(staging / TENSORS / file, f"{TENSORS}/{file}")
            (staging / snapshot.name).write_text(snapshot.to_json())
            target.put(staging / snapshot.name, f"{SNAPSHOTS}/{snapshot.name}")
            _remove_old(target, keep)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except (OSError, sqlite3.DatabaseError) as error:
        raise StoreError(f"no backup of {state_dir} could be taken ({error}); it is tried again.") from error
    return snapshot


def taken_last_at(target: Target) -> float | None:
    """The Unix time (seconds) in the name of the newest snapshot; None: there is none.

    Raises:
        StoreError: the target refuses.
    """
    for name in reversed(names_in(target)):
        with suppress(ValueError):  # not a valid date
            return calendar.timegm(time.strptime(_NAME.sub(r"\1", name), _UTC))
    return None


def names_in(target: Target) -> list[str]:
    """The names of a target's snapshots, oldest first. Raises StoreError: the target refuses."""
    return sorted(filter(_NAME.fullmatch, target.names(SNAPSHOTS)))


def _usable(target: Target) -> Iterator[tuple[str, Snapshot]]:
    """The whole snapshots with their names, newest first. Damaged ones are logged."""
    for name in reversed(names_in(target)):
        text = _text_of(target, name)
        try:
            yield name, Snapshot.from_json(text)
        except MALFORMED as error:
            log.warning("%s", _unusable(target, name, error))


def _text_of(target: Target, name: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory) / name
        target.get(f"{SNAPSHOTS}/{name}", here)
        return here.read_text(errors="replace")


def _unusable(target: Target, name: str, error: Exception) -> StoreError:
    return StoreError(f"the snapshot {name} in {target.name} cannot be used: {first_line(error)}.")


def _require_follows(snapshot: Snapshot, other: Snapshot, place: str) -> None:
    if other.row["run_id"] != snapshot.row["run_id"]:
        raise StoreError(
            f"{place} has backups of another run ({other.row['run']!r}, id {other.row['run_id']}); use another place."
        )
    if other.epoch.number > snapshot.epoch.number:
        raise StoreError(
            f"{place} has backups of epoch {other.epoch.number} of this run, which is in epoch {snapshot.epoch.number} "
            "here: another syncer serves it now; use another place for this state."
        )


def read_snapshot(target: Target, name: str) -> Snapshot:
    """A snapshot by the name of its file.

    Raises:
        StoreError: it is missing or damaged.
    """
    text = _text_of(target, name)
    try:
        return Snapshot.from_json(text)
    except MALFORMED as error:
        raise _unusable(target, name, error) from error


def restore(target: Target, state_dir: Path, name: str | None = None) -> Snapshot:
    """Make a state directory from a snapshot, by default the newest. It begins a later epoch than any before, so that
    learners that have seen later versions join it again.

    Raises:
        ConfigError: `state_dir` exists and is not empty; nothing was changed. StoreError: the snapshot is missing or
            damaged, or the disk refused; no file is left.
    """
    if state_dir.exists() and (not state_dir.is_dir() or any(state_dir.iterdir())):
        raise ConfigError(f"{state_dir} exists already; move it away first, or restore into another directory.")
    names = names_in(target)
    chosen = name if name is not None else next(reversed(names), None)
    if chosen not in names:
        if not names:
            raise StoreError(f"there is no snapshot in {target.name}; name the place that backups went to.")
        raise StoreError(f"there is no snapshot {name} in {target.name}; it has {', '.join(names[-3:])}.")
    staging = state_dir.with_name(hidden_name(state_dir.name))
    before = names[: names.index(chosen)]
    try:
        remove_leftovers(state_dir.parent, glob.escape(state_dir.name))
        (staging / TENSORS).mkdir(parents=True)
        snapshot = read_snapshot(target, chosen)
        _fill(staging, target, snapshot)
        found = inspected(staging)
        if not found.starts:
            problem = found.problems[0]
            raise StoreError(f"the snapshot {chosen} in {target.name} is damaged: {problem.file} {problem.what}.")
        staging.rename(state_dir)
        sync_directory(state_dir.parent)
    except StoreError as error:
        advice = f"; `--snapshot {before[-1]}` is the one before it" if before else ""
        raise StoreError(f"{str(error).rstrip('.')}{advice}.") from error
    except (sqlite3.InterfaceError, *MALFORMED) as error:
        raise StoreError(f"the snapshot {chosen} in {target.name} is damaged: {first_line(error)}.") from error
    except (OSError, sqlite3.DatabaseError) as error:
        raise StoreError(f"{state_dir} could not be restored ({error}); free disk space and try again.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return snapshot


def _fill(staging: Path, target: Target, snapshot: Snapshot) -> None:
    for file in snapshot.files:
        target.get(f"{TENSORS}/{file}", staging / TENSORS / file)
    sync_directory(staging / TENSORS)
    record = None if snapshot.record is None else json.dumps(without_members(snapshot.record))
    with closing(connect(staging)) as db, transaction(db):
        insert_run(db, snapshot.row)
        db.execute("UPDATE run SET record = ?", (record,))
        later = fresh_epoch(each.update.version for each in snapshot.versions)
        put_epoch(db, snapshot.epoch, snapshot.taken_at)
        put_epoch(db, replace(later, number=max(later.number, snapshot.epoch.number + 1)), time.time())
        for each in snapshot.versions:
            put_version(db, each.update, each.file, each.sha256, each.tokens, each.published_at)
    write_description(staging, snapshot.row)


def _linked(state_dir: Path, tensors: Path) -> Snapshot:
    """A snapshot, with its files linked into a directory of their own."""
    for _ in range(_TRIES):
        snapshot = _read(state_dir)
        shutil.rmtree(tensors, ignore_errors=True)
        tensors.mkdir()
        try:
            for file in snapshot.files:
                os.link(state_dir / TENSORS / file, tensors / file)
        except FileNotFoundError:  # superseded in between
            continue
        return snapshot
    raise StoreError(f"a file of the newest versions in {state_dir} is missing; 'diloco syncer check {state_dir}'.")


def _read(state_dir: Path) -> Snapshot:
    with closing(connect_read_only(state_dir)) as db:
        db.execute("BEGIN")
        row = run_row(db)
        if not row:
            raise NotInitialisedError(f"the run in {state_dir} has no model yet, so there is nothing to back up.")
        record = db.execute("SELECT record FROM run").fetchone()[0]
        newest, epoch = tuple(newest_versions(db)), epochs_of(db)[-1]
    return Snapshot(row, None if record is None else json.loads(record), epoch, newest, time.time())


def _verify(snapshot: Snapshot, staging: Path) -> None:
    files = TensorFiles(staging, ignore_point)
    files.read_static(snapshot.row["static_file"], snapshot.row["static_sha256"])
    for each in snapshot.versions:
        files.read(each)


def _remove_old(target: Target, keep: int) -> None:
    """Remove all but the newest `keep` snapshots, and files that only the removed ones name. A damaged snapshot does
    not count, and stays for inspection."""
    usable = list(_usable(target))
    needed = {file for _, each in usable[:keep] for file in each.files}
    for name, each in usable[keep:]:
        target.remove(f"{SNAPSHOTS}/{name}")
        for file in {*each.files} - needed:
            target.remove(f"{TENSORS}/{file}")


def _hash_of(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class BackupPlan:
    """Where snapshots are stored, how often one is taken (seconds), and how many are kept."""

    place: str
    every_s: float
    keep: int


class Backups:
    """Takes snapshots on a thread until it is closed.

    Raises:
        ConfigError: the place cannot be used.
    """

    def __init__(self, plan: BackupPlan, state_dir: Path, events_log: EventLog) -> None:
        self._plan, self._state_dir, self._events = plan, state_dir, events_log
        self._target = open_target(plan.place)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncer-backup", daemon=True)

    def start(self) -> None:
        """Start. The first snapshot is due `every_s` after the newest in the place, whichever process took that."""
        self._thread.start()

    def close(self) -> None:
        """Finish the snapshot in progress, and stop."""
        self._is_closing.set()
        self._thread.join()

    def _run(self) -> None:
        wait_s = self._first_in_s()
        while not self._is_closing.wait(wait_s):
            self._back_up()
            wait_s = self._plan.every_s

    def _first_in_s(self) -> float:
        try:
            return due_in_s(taken_last_at(self._target), time.time(), self._plan.every_s)
        except StoreError:  # the first snapshot reports it
            return 0.0

    def _back_up(self) -> None:
        started, place = time.monotonic(), self._plan.place
        try:
            snapshot = back_up(self._state_dir, self._target, self._plan.keep)
        except NotInitialisedError:
            return
        except DilocoError as error:
            log.error("the run is not backed up: %s", error)
            self._events.append(events.BackupRefused(place=place, error=str(error)))
            return
        versions = tuple(each.update.version for each in snapshot.versions)
        seconds = time.monotonic() - started
        self._events.append(events.BackedUp(place=place, snapshot=snapshot.name, versions=versions, seconds=seconds))


def due_in_s(taken_at: float | None, now: float, every_s: float) -> float:
    """Seconds from `now` to the next snapshot; `taken_at`: time of the newest one, None: there is none."""
    return 0.0 if taken_at is None else min(max(0.0, taken_at + every_s - now), every_s)
