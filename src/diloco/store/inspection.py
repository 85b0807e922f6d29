"""What is whole in a state directory, and what can still be served. Reads everything and changes nothing.

The database is read from a copy: SQLite would bring its log into it, or remove that. A version is whole where its file
has the hash that the database has, or, where that does not name it, the hash in the file's own name and the digest that
the file gives.
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
from diloco.store.durable import ignore_point, look_locked
from diloco.store.files import TensorFiles, VersionFileHeader, version_of
from diloco.store.records import (
    DATABASE,
    DESCRIPTION,
    LOG,
    Row,
    StoredVersion,
    epochs_of,
    look,
    read_description,
    run_row,
    stored_versions,
)

NO_STATIC = safetensors.torch.save({})
"""The file of a run that freezes nothing."""

_TEXTS = ("run", "source", "static_file", "static_sha256", "run_id")
"""Columns of a run's row."""

NONSENSE = (DilocoError, *MALFORMED)
"""What values that make no sense end in."""


@dataclass(frozen=True)
class Problem:
    """A file that is missing, damaged or not known."""

    file: str
    what: str


@dataclass(frozen=True)
class FoundFragment:
    """A fragment, in the database and on the disk.

    Attributes:
        fragment: its index.
        published: the newest version that the database names, or a file's name where there is none; None: there is no
            trace of one.
        chosen: the newest version that is whole; the newest of the database, as long as that is whole for every
            fragment: a file beyond it was being written when the syncer stopped.
        earlier: versions before it that are whole, newest first.
        lost_tokens: trained tokens whose work is in the versions after `chosen`, as far as the database has them.
    """

    fragment: int
    published: int | None
    chosen: StoredVersion | None
    earlier: tuple[StoredVersion, ...]
    lost_tokens: int

    @property
    def serves(self) -> int | None:
        """The newest version that is whole."""
        return None if self.chosen is None else self.chosen.update.version

    @property
    def lost(self) -> tuple[int, ...]:
        """The versions after it."""
        first = 0 if self.serves is None else self.serves + 1
        return () if self.published is None else tuple(range(first, self.published + 1))


@dataclass
class DirectoryState:
    """What is in a state directory.

    Attributes:
        row: of the run, from the database or `run.json`; None: neither has it.
        has_database: the database is whole and says of the run what `run.json` says.
        has_static: the frozen parameters and buffers are whole.
        can_make_static: there are none, so that their file can be made again.
        record: the newest members and ledgers that can be read; None: there are none.
        has_record: they are the database's.
        starts: a syncer serves it, at the newest version of each fragment.
        problems: what a start would refuse, or has lost.
        notes: what else was found.
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
        """Whether the run can go on from what is whole."""
        has_static = self.has_static or self.can_make_static
        return has_static and bool(self.fragments) and all(each.chosen is not None for each in self.fragments)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
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
    """Read a state directory.

    Raises:
        ConfigError: it is none. StoreError: a syncer runs on it, or it cannot be read.
    """
    if not any((path / name).exists() for name in (DATABASE, DESCRIPTION, "tensors")):
        raise ConfigError(f"{path} is not the state directory of a syncer; check the path.")
    with look_locked(path) as holder:
        if holder is not None:
            raise StoreError(f"{path} is in use by {holder}; ask that syncer with `diloco status`, or stop it first.")
        return inspected(path)


def inspected(path: Path) -> DirectoryState:
    """`inspect` a state directory whose lock the caller has."""
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
            self._problem(str(path), "has no whole description of its run: neither store.sqlite nor run.json")
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
        """The versions that it has, by fragment, newest first, and its record."""
        described = read_description(self._path)
        if described is None:
            what = "is damaged" if (self._path / DESCRIPTION).exists() else "is missing"
            self.found.notes.append(
                Problem(DESCRIPTION, f"{what}; it is written again from the database, if that is whole")
            )
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
                self._problem(DATABASE, f"describes the run otherwise than {DESCRIPTION}, which has its own hash")
            elif reason is not None:
                self._problem(DATABASE, f"is damaged: the run in it cannot be read ({reason})")
            self.found.has_database = reason is None and described in (None, row)
            self.found.row = row if self.found.has_database else usable
            record = database.execute("SELECT record FROM run").fetchone()[0]
            try:
                stored = stored_versions(database)
                epochs_of(database)[-1]
            except NONSENSE as error:
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
                self.found.notes.append(Problem(f"tensors/{name}", "is damaged, or nothing of this run's"))
        newest = [stored.get(fragment.index, [None])[0] for fragment in self._layout.fragments]
        self._is_as_published = all(each is not None and self._is_whole(each) for each in newest)
        self.found.fragments = tuple(
            self._fragment(each.index, stored.get(each.index, ()), others.get(each.index, ()))
            for each in self._layout.fragments
        )

    def _fragment(self, index: int, stored: Sequence[StoredVersion], others: Sequence[StoredVersion]) -> FoundFragment:
        """`stored`: in the database, newest first. `others`: whole files that it does not name."""
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
        """The newest record that can be restored."""
        if self.found.has_database:
            try:
                self.found.record = None if text is None else json.loads(text)
                self._restore(self.found.record)
                self.found.has_record = True
                return
            except NONSENSE as error:
                self._problem(DATABASE, f"is damaged: its record of members and tokens cannot be read ({error!r})")
        described = [each.described for name, each in self._whole.items() if self._is_of_run(name)]
        self.found.record = self._newest_record(described)

    def _newest_record(self, described: Sequence[VersionFileHeader]) -> Mapping[str, Any] | None:
        for each in sorted(described, key=lambda it: it.serial, reverse=True):
            try:
                self._restore(each.record)
            except NONSENSE:
                continue
            return each.record
        return None

    def _restore(self, record: Mapping[str, Any] | None) -> None:
        assert self.found.row is not None
        require_record(self.found.row, [each.serves or 0 for each in self.found.fragments], record)


@contextmanager
def _database_copy(path: Path) -> Iterator[sqlite3.Connection | str]:
    """A copy of the database of a store's directory that is whole and holds a run, or what is wrong with it."""
    if not (path / DATABASE).exists():
        yield "is missing"
        return
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for name in (DATABASE, LOG):
            if (path / name).exists():
                shutil.copyfile(path / name, copy / name)
        try:
            found, has_run = look(copy)
        except (StoreError, sqlite3.DatabaseError) as error:
            yield f"cannot be used: {str(error).replace(directory, str(path)).partition('. Nothing')[0]}"
            return
        if not has_run:
            yield "is empty" if found == 0 else "holds no run"
            return
        with closing(sqlite3.connect(copy / DATABASE)) as database:
            yield database


def require_record(row: Row, versions: Sequence[int], record: Mapping[str, Any] | None) -> None:
    """Restore a record as a start does, at these versions. Raises one of `NONSENSE` where it is none."""
    method = Method.from_dict(json.loads(row["method"]))
    core = SyncerCore(Rules.of(method, len(versions)), versions, step=int(row["step"]))
    if record is not None:
        core.restore(0.0, record)


def unreadable(row: Row) -> str | None:
    """Why this is no row of a run; None: it is one."""
    try:
        Method.from_dict(json.loads(row["method"]))
        Layout.from_dict(json.loads(row["layout"]))
        numbers, texts = [row[key] for key in ("step", "tokens")], [row[key] for key in _TEXTS]
    except NONSENSE as error:
        return repr(error)
    if not all(type(each) is int and each >= 0 for each in numbers) or not all(type(each) is str for each in texts):
        return "a text or a number is of another kind"
    return None
