"""Inspection of a state directory: which versions are whole, and what a syncer could serve. Changes nothing.

The database is read from a copy, since SQLite would merge its write-ahead log or remove it. A version is whole if its
file has the hash in the database; for a version that the database does not name, the hash in the file's name and the
digest in its header count.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch

from diloco.core.layout import Layout
from diloco.core.method import Method
from diloco.errors import ConfigError, DilocoError, StoreError, first_line
from diloco.escaping import MALFORMED
from diloco.protocol.rounds.base import Rules
from diloco.protocol.syncer import SyncerCore
from diloco.store.durable import ignore_point, locked_unchanged
from diloco.store.files import TensorFiles, VersionFileHeader, version_of
from diloco.store.records import (
    DATABASE,
    DESCRIPTION,
    LOG,
    Row,
    StoredVersion,
    epochs_of,
    read_description,
    read_format,
    run_row,
    stored_versions,
)

NO_STATIC = safetensors.torch.save({})
"""The static file of a run without frozen parameters and buffers."""

_TEXTS = ("run", "source", "static_file", "static_sha256", "run_id")
"""Text columns of a run's row."""

INVALID = (DilocoError, *MALFORMED)
"""Errors that invalid values in a row or record raise."""


@dataclass(frozen=True)
class Problem:
    """A file that is missing, damaged or unknown."""

    file: str
    what: str


@dataclass(frozen=True)
class FoundFragment:
    """The versions of a fragment, in the database and on the disk.

    Attributes:
        fragment: its index.
        published: the newest version in the database, or else among the names of files; None: there is neither.
        chosen: the version to serve. The newest in the database if that is whole for every fragment (a later file was
            being written when the syncer stopped), otherwise the newest whole one.
        earlier: whole versions before `chosen`, newest first.
        lost_tokens: trained tokens in the versions after `chosen`, as far as the database has them.
    """

    fragment: int
    published: int | None
    chosen: StoredVersion | None
    earlier: tuple[StoredVersion, ...]
    lost_tokens: int

    @property
    def serves(self) -> int | None:
        """The number of `chosen`."""
        return None if self.chosen is None else self.chosen.update.version

    @property
    def lost(self) -> tuple[int, ...]:
        """The published versions after `chosen`."""
        first = 0 if self.serves is None else self.serves + 1
        return () if self.published is None else tuple(range(first, self.published + 1))


@dataclass
class DirectoryState:
    """The result of an inspection.

    Attributes:
        row: the run's, from the database or `run.json`; None: neither has it.
        has_database: the database is whole and agrees with `run.json`.
        has_static: the file of frozen parameters and buffers is whole.
        can_make_static: the run has none, so that their file can be written again.
        record: the newest readable record of members and ledgers; None: there is none.
        has_record: `record` is the database's.
        starts: a syncer can serve the directory, at the newest version of each fragment.
        problems: files for which a start is refused, and lost ones.
        notes: other findings.
    """

    path: Path
    row: Row | None = None
    has_database: bool = False
    has_static: bool = False
    can_make_static: bool = False
    record: Mapping[str, Any] | None = None
    has_record: bool = False
    fragments: tuple[FoundFragment, ...] = ()
    starts: bool = False
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)

    @property
    def can_be_repaired(self) -> bool:
        """Whether the whole files suffice to continue the run."""
        has_static = self.has_static or self.can_make_static
        return has_static and bool(self.fragments) and all(each.chosen is not None for each in self.fragments)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "path": str(self.path),
            "run": None if self.row is None else self.row["run"],
            "starts": self.starts,
            "can_be_repaired": self.can_be_repaired,
            "database": self.has_database,
            "static": self.has_static,
            "record": self.has_record,
            "fragments": [
                {
                    "fragment": each.fragment, "published": each.published, "serves": each.serves,
                    "lost": list(each.lost), "lost_tokens": each.lost_tokens,
                }
                for each in self.fragments
            ],
            "problems": [{"file": each.file, "what": each.what} for each in self.problems],
            "notes": [{"file": each.file, "what": each.what} for each in self.notes],
        }  # fmt: skip


def inspect(path: Path) -> DirectoryState:
    """Inspect a state directory.

    Raises:
        ConfigError: it is not a state directory. StoreError: a syncer runs on it, or it cannot be read.
    """
    if not any((path / name).exists() for name in (DATABASE, DESCRIPTION, "tensors")):
        raise ConfigError(f"{path} is not the state directory of a syncer; check the path.")
    with locked_unchanged(path) as holder:
        if holder is not None:
            raise StoreError(f"{path} is in use by {holder}; ask that syncer with `diloco status`, or stop it first.")
        return inspected(path)


def inspected(path: Path) -> DirectoryState:
    """`inspect` a state directory whose lock the caller holds."""
    try:
        return _Inspection(path).found
    except (OSError, sqlite3.DatabaseError) as error:
        raise StoreError(f"{path} cannot be read ({first_line(error)}); repair the disk and try again.") from error


class _Inspection:
    def __init__(self, path: Path) -> None:
        self.found = DirectoryState(path)
        self._path = path
        self._files = TensorFiles(path, ignore_point)
        self._names = self._files.names() if self._files.directory.is_dir() else []
        self._whole = {name: each for name in self._names if (each := self._files.recognise(name)) is not None}
        stored, record = self._look_at_database()
        if self.found.row is None:
            self._problem(str(path), "has no whole description of its run, neither in store.sqlite nor in run.json")
            return
        self._layout = Layout.from_dict(json.loads(self.found.row["layout"]))
        self._look_at_static()
        self._look_at_fragments(stored)
        self._look_at_record(record)
        found = self.found
        found.starts = found.has_database and found.has_static and found.has_record and self._is_as_published

    def _problem(self, file: str, what: str) -> None:
        self.found.problems.append(Problem(file, what))

    def _look_at_database(self) -> tuple[dict[int, list[StoredVersion]], str | None]:
        """Versions in the database by fragment, newest first, and the text of its record."""
        described = read_description(self._path)
        if described is None:
            what = "is damaged" if (self._path / DESCRIPTION).exists() else "is missing"
            self.found.notes.append(Problem(DESCRIPTION, f"{what}; a start writes it again if the database is whole"))
        usable = None if described is None or unreadable(described) else described
        with _database_copy(self._path) as database:
            if isinstance(database, str):
                self._problem(DATABASE, database)
                self.found.row = usable
                return {}, None
            try:
                row = run_row(database)
            except (UnicodeDecodeError, sqlite3.DatabaseError) as error:
                self._problem(DATABASE, f"is damaged: the run in it cannot be read ({first_line(error)})")
                self.found.row = usable
                return {}, None
            reason = unreadable(row)
            if described is not None and described != row:
                self._problem(
                    DATABASE, f"differs from {DESCRIPTION}, whose own hash is right, in its description of the run"
                )
            elif reason is not None:
                self._problem(DATABASE, f"is damaged: the run in it cannot be read ({reason})")
            self.found.has_database = reason is None and described in (None, row)
            self.found.row = row if self.found.has_database else usable
            record = database.execute("SELECT record FROM run").fetchone()[0]
            try:
                stored = stored_versions(database)
                epochs_of(database)[-1]
            except INVALID as error:
                self._problem(DATABASE, f"is damaged: the versions in it cannot be read ({error!r})")
                self.found.has_database = False
                return {}, record
            return stored, record

    def _look_at_static(self) -> None:
        assert self.found.row is not None
        file, sha256 = self.found.row["static_file"], self.found.row["static_sha256"]
        try:
            self._files.read_static(file, sha256)
            self.found.has_static = True
        except StoreError:
            self.found.can_make_static = hashlib.sha256(NO_STATIC).hexdigest() == sha256
            what = "is damaged" if file in self._names else "is missing"
            holds = "no tensors" if self.found.can_make_static else "the frozen parameters and buffers, the only copy"
            self._problem(f"tensors/{file}", f"{what}: {holds}")

    def _look_at_fragments(self, stored: Mapping[int, Sequence[StoredVersion]]) -> None:
        assert self.found.row is not None
        named = {each.file: each for versions in stored.values() for each in versions}
        others: dict[int, list[StoredVersion]] = {}
        for name in self._names:
            if name == self.found.row["static_file"]:
                continue
            each, is_own = self._whole.get(name), self._is_of_run(name)
            if each is not None and is_own and name not in named:
                others.setdefault(each.update.fragment, []).append(each.stored)
                self.found.notes.append(
                    Problem(f"tensors/{name}", "is a whole version that the database does not name")
                )
            elif name not in named:
                self.found.notes.append(Problem(f"tensors/{name}", "is damaged, or not of this run"))
        newest = [stored.get(fragment.index, [None])[0] for fragment in self._layout.fragments]
        self._is_as_published = all(each is not None and self._is_whole(each) for each in newest)
        self.found.fragments = tuple(
            self._fragment(each.index, stored.get(each.index, ()), others.get(each.index, ()))
            for each in self._layout.fragments
        )

    def _fragment(self, index: int, stored: Sequence[StoredVersion], others: Sequence[StoredVersion]) -> FoundFragment:
        """`stored`: versions in the database, newest first. `others`: whole files that the database does not name."""
        whole = [each for each in stored if self._is_whole(each)]
        if stored and not self._is_whole(stored[0]):
            file = stored[0].file
            what = "is damaged" if file in self._names else "is missing"
            self._problem(f"tensors/{file}", f"{what}: version {stored[0].update.version} of fragment {index}")
        if not stored and self.found.has_database:
            self._problem(DATABASE, f"has no version of fragment {index}")
        newest_first = sorted([*whole, *others], key=lambda each: -each.update.version)
        chosen = stored[0] if self._is_as_published else next(iter(newest_first), None)
        on_disk = [version for fragment, version in map(version_of, self._names) if fragment == index]
        published = stored[0].update.version if stored else max(on_disk, default=None)
        serves = -1 if chosen is None else chosen.update.version
        earlier = tuple(each for each in newest_first if each.update.version < serves)
        lost_tokens = sum(each.tokens for each in stored if each.update.version > serves)
        return FoundFragment(index, published, chosen, earlier, lost_tokens)

    def _is_of_run(self, name: str) -> bool:
        assert self.found.row is not None
        each, fragments = self._whole.get(name), self._layout.fragments
        return (
            each is not None
            and each.described.run_id == self.found.row["run_id"]
            and each.update.fragment < len(fragments)
            and each.num_elements == fragments[each.update.fragment].numel
        )

    def _is_whole(self, stored: StoredVersion) -> bool:
        each = self._whole.get(stored.file)
        is_same = each is not None and (each.sha256, each.update.digest) == (stored.sha256, stored.update.digest)
        return is_same and version_of(stored.file) == (stored.update.fragment, stored.update.version)

    def _look_at_record(self, text: str | None) -> None:
        """Find the newest record that can be restored."""
        if self.found.has_database:
            try:
                self.found.record = None if text is None else json.loads(text)
                self._restore(self.found.record)
                self.found.has_record = True
                return
            except INVALID as error:
                self._problem(DATABASE, f"is damaged: its record of members and tokens cannot be read ({error!r})")
        described = [each.described for name, each in self._whole.items() if self._is_of_run(name)]
        self.found.record = self._newest_record(described)

    def _newest_record(self, described: Sequence[VersionFileHeader]) -> Mapping[str, Any] | None:
        for each in sorted(described, key=lambda it: it.serial, reverse=True):
            try:
                self._restore(each.record)
            except INVALID:
                continue
            return each.record
        return None

    def _restore(self, record: Mapping[str, Any] | None) -> None:
        assert self.found.row is not None
        require_record(self.found.row, [each.serves or 0 for each in self.found.fragments], record)


@contextmanager
def _database_copy(path: Path) -> Iterator[sqlite3.Connection | str]:
    """Give a copy of the database if it is whole and holds a run, otherwise the problem as text."""
    if not (path / DATABASE).exists():
        yield "is missing"
        return
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in (DATABASE, LOG):
            if (path / name).exists():
                shutil.copyfile(path / name, copy / name)
        try:
            found, has_run = read_format(copy)
        except (StoreError, sqlite3.DatabaseError) as error:
            yield f"cannot be used: {str(error).replace(directory, str(path)).partition('. Nothing')[0]}"
            return
        if not has_run:
            yield "is empty" if found == 0 else "holds no run"
            return
        with closing(sqlite3.connect(copy / DATABASE)) as database:
            yield database


def require_record(row: Row, versions: Sequence[int], record: Mapping[str, Any] | None) -> None:
    """Restore a record at these versions as a start does. Raises one of `INVALID` if that fails."""
    method = Method.from_dict(json.loads(row["method"]))
    core = SyncerCore(Rules.of(method, len(versions)), versions, step=int(row["step"]))
    if record is not None:
        core.restore(0.0, record)


def unreadable(row: Row) -> str | None:
    """Why this is not a valid row of a run; None: it is valid."""
    try:
        Method.from_dict(json.loads(row["method"]))
        Layout.from_dict(json.loads(row["layout"]))
        numbers, texts = [row[key] for key in ("step", "tokens")], [row[key] for key in _TEXTS]
    except INVALID as error:
        return repr(error)
    if not all(type(each) is int and each >= 0 for each in numbers) or not all(type(each) is str for each in texts):
        return "a column has a value of another type"
    return None
