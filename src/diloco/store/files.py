"""The tensor files of a store: one safetensors file for each version of a fragment, and one for the frozen state."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch import Tensor

from diloco.core.global_fragment import GlobalFragment
from diloco.core.layout import Digest
from diloco.core.update import Update
from diloco.errors import CorruptPayloadError, StoreError
from diloco.escaping import MALFORMED
from diloco.run.ports import Json
from diloco.store.durable import (
    NAMED_DIGITS,
    TEMPORARY_PREFIX,
    Hasher,
    Sha256,
    file_sha256,
    read_tensors,
    sha256_of,
    sync_directory,
    write_bytes,
    write_tensors,
)
from diloco.store.records import DATABASE, StoredVersion, advice

STATIC = "static"
_OUTER = "outer."
_DESCRIBED = "diloco"

_VERSION = re.compile(r"f(?P<fragment>\d+)-v(?P<version>\d+)-(?P<hash>[0-9a-f]+)\.safetensors")

_STATIC = re.compile(rf"{STATIC}-[0-9a-f]+\.safetensors")

_PUBLISHED = re.compile(r"f\d+-v(?!0+-)\d+-")
"""The beginning of the name of any version but version 0."""


@dataclass(frozen=True)
class VersionFileHeader:
    """The description of a version in its own file, from which a lost database can be restored.

    Attributes:
        run_id: of its run.
        update: that was published.
        tokens: trained tokens in it.
        serial: number of versions published in the run up to this one.
        record: the run's, stored with this version; None: version 0.
    """

    run_id: str
    update: Update
    tokens: int
    serial: int
    record: Json | None

    def to_json(self) -> str:
        """As JSON."""
        plain = {"run_id": self.run_id, "update": self.update.as_dict(), "tokens": self.tokens, "serial": self.serial}
        return json.dumps({**plain, "record": self.record})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The header from `to_json`'s text. Raises KeyError, TypeError or ValueError for any other text."""
        plain = json.loads(text)
        return cls(**{**plain, "update": Update.from_dict(plain["update"])})


@dataclass(frozen=True)
class Recognised:
    """A whole version file, recognised without a database.

    Attributes:
        written_at: Unix time in seconds.
        num_elements: of Θ.
    """

    file: str
    sha256: str
    described: VersionFileHeader
    written_at: float
    num_elements: int

    @property
    def update(self) -> Update:
        """The published update."""
        return self.described.update

    @property
    def stored(self) -> StoredVersion:
        """The version as a database describes it."""
        return StoredVersion(self.update, self.file, self.sha256, self.described.tokens, self.written_at)


class TensorFiles:
    """Writes tensor files atomically, and reads them only if their hash is right.

    Arguments:
        path: the store's directory.
        at: called with the name of each durable step.
    """

    def __init__(self, path: Path, at: Callable[[str], None]) -> None:
        self._path = path
        self._at = at
        self.directory = path / "tensors"

    def write(self, held: GlobalFragment, described: VersionFileHeader) -> tuple[str, str]:
        """Write a version's tensors and its description; returns the file's name and its hash."""
        tensors = {"theta": held.theta, **{_OUTER + name: value for name, value in held.outer_state.items()}}
        if held.residual is not None:
            tensors["residual"] = held.residual
        stem = _stem(held.fragment, held.version)

        def digest_of(name: str, tensor: Tensor) -> str:
            return held.digest if name == "theta" else sha256_of(tensor)

        return write_tensors(self.directory, stem, tensors, self._at, digest_of, {_DESCRIBED: described.to_json()})

    def write_static(self, data: bytes) -> tuple[str, str]:
        """Write the frozen parameters and buffers, the bytes of a safetensors file; returns as `write`."""
        return write_bytes(self.directory, STATIC, data, self._at)

    def read(self, stored: StoredVersion) -> GlobalFragment:
        """Read a version.

        Raises:
            StoreError: the file is missing, or its hash is not the committed one.
        """
        fragment, version, file = stored.update.fragment, stored.update.version, stored.file
        holds = f"fragment {fragment}, version {version}"
        path = self._require_file(file, holds)
        found = read_tensors(path, _hasher_of)
        if found is None or found.sha256 != stored.sha256 or found.digests.get("theta") != stored.update.digest:
            raise self._damaged(path, holds)
        if not file.startswith(_stem(fragment, version)):
            raise StoreError(
                f"{self._path / DATABASE} is damaged: it names {file} as {holds}. Nothing was changed or removed; "
                f"{advice(self._path)}."
            )
        return _held(fragment, version, found.tensors, stored.update.digest)

    def recognise(self, name: str) -> Recognised | None:
        """Recognise a version by its file alone; None: its hash is not the one in its name, or its header does not
        match.

        Raises:
            OSError: the file cannot be read.
        """
        return self._recognised(self.directory / name, name)

    def _recognised(self, path: Path, name: str) -> Recognised | None:
        match = _VERSION.fullmatch(name)
        if match is None or not path.is_file() or (found := read_tensors(path, _hasher_of)) is None:
            return None
        if found.sha256[:NAMED_DIGITS] != match["hash"]:
            return None
        try:
            described = VersionFileHeader.from_json(found.metadata[_DESCRIBED])
        except MALFORMED:  # written by an earlier version of this package
            return None
        update = described.update
        if (update.fragment, update.version) != version_of(name) or found.digests.get("theta") != update.digest:
            return None
        num_elements = found.tensors["theta"].numel()
        return Recognised(name, found.sha256, described, path.stat().st_mtime, num_elements)

    def receive(self, name: str, sha256: str, chunks: Iterable[bytes | memoryview]) -> str:
        """Write a file of another store; returns the digest of its version, or "" for the frozen state.

        Raises:
            CorruptPayloadError: the content does not match `name` and `sha256`; no file is left. OSError: the disk
                refuses.
        """
        if not (_VERSION.fullmatch(name) or is_static(name)):
            raise CorruptPayloadError(f"{name[:80]!r} is not the name of a tensor file.")
        temporary = self.directory / f"{TEMPORARY_PREFIX}{name}"
        try:
            with temporary.open("wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                self._at("received")
                file.flush()
                os.fsync(file.fileno())
            published = self._digest_of_content(temporary, name, sha256)
            temporary.replace(self.directory / name)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(self.directory)
        return published

    def _digest_of_content(self, path: Path, name: str, sha256: str) -> str:
        published = ""
        if name.startswith(STATIC):
            is_right = file_sha256(path) == sha256 and name == f"{STATIC}-{sha256[:NAMED_DIGITS]}.safetensors"
        else:
            found = self._recognised(path, name)
            is_right = found is not None and found.sha256 == sha256
            published = "" if found is None else found.update.digest
        if not is_right:
            raise CorruptPayloadError(f"the content of {name[:80]!r} does not match its digest.")
        return published

    def read_static(self, file: str, sha256: str) -> bytes:
        """Read the frozen parameters and buffers; raises as `read`."""
        holds = "the frozen parameters and buffers"
        path = self._require_file(file, holds)
        if file_sha256(path) != sha256:
            raise self._damaged(path, holds)
        return path.read_bytes()

    def names(self) -> list[str]:
        """The names of all files but temporary ones."""
        return sorted(each.name for each in self.directory.iterdir() if not each.name.startswith(TEMPORARY_PREFIX))

    def require_no_run(self, *, is_new: bool) -> None:
        """Check that there is no published version, since the database holds no run. `is_new`: there is no database.

        A run that was killed while it was initialised leaves files of version 0 and a database without a run.

        Raises:
            StoreError: there are files of a run.
        """
        orphans = [name for name in self.names() if is_new or _PUBLISHED.match(name)]
        if orphans:
            raise StoreError(
                f"{self._path / DATABASE} {'is missing or empty' if is_new else 'holds no run'}, and "
                f"{self.directory} has {len(orphans)} files of a run, such as {orphans[-1]}. Nothing was changed or "
                f"removed; {advice(self._path)}."
            )

    def remove(self, name: str) -> None:
        """Remove a superseded file, if it exists."""
        if is_file_name(name):
            (self.directory / name).unlink(missing_ok=True)

    def remove_temporary(self) -> None:
        """Remove temporary files of interrupted writes."""
        for file in self.directory.glob(f"{TEMPORARY_PREFIX}*"):
            file.unlink()

    def _require_file(self, file: str, holds: str) -> Path:
        path = self.directory / file if is_file_name(file) else self.directory
        if not path.is_file():
            raise StoreError(f"{self.directory / str(file)} ({holds}) is missing; {advice(self._path)}.")
        return path

    def _damaged(self, path: Path, holds: str) -> StoreError:
        return StoreError(f"{path} ({holds}) is damaged: its hash is not the one committed; {advice(self._path)}.")


def is_file_name(name: object) -> bool:
    """Whether a name from the database or a snapshot is a plain file name that leads to no other folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\0"}


def set_aside(state_dir: Path, path: Path) -> Path:
    """Move an unknown or damaged file to `set-aside/` in the state directory; returns its new path."""
    target = _place_aside(state_dir, path)
    path.rename(target)
    sync_directory(target.parent)
    sync_directory(path.parent)
    return target


def keep_copy(state_dir: Path, path: Path) -> Path:
    """Copy a file to `set-aside/` in the state directory before it is changed; returns the copy's path."""
    target = _place_aside(state_dir, path)
    shutil.copyfile(path, target)
    return target


def _place_aside(state_dir: Path, path: Path) -> Path:
    directory = state_dir / "set-aside"
    directory.mkdir(exist_ok=True)
    target, number = directory / path.name, 0
    while target.exists():
        number += 1
        target = directory / f"{path.name}.{number}"
    return target


def is_static(name: str) -> bool:
    """Whether this is the name of a file of frozen parameters and buffers."""
    return _STATIC.fullmatch(name) is not None


def version_of(name: str) -> tuple[int, int]:
    """The fragment and version in a file's name; (−1, −1): it is not the name of a version file."""
    match = _VERSION.fullmatch(name)
    return (-1, -1) if match is None else (int(match["fragment"]), int(match["version"]))


def _held(fragment: int, version: int, tensors: Mapping[str, Tensor], published: str) -> GlobalFragment:
    outer_state = {name.removeprefix(_OUTER): tensor for name, tensor in tensors.items() if name.startswith(_OUTER)}
    return GlobalFragment(fragment, version, tensors["theta"], outer_state, tensors.get("residual"), published)


def _hasher_of(name: str) -> Hasher:
    return Digest() if name == "theta" else Sha256()


def _stem(fragment: int, version: int) -> str:
    return f"f{fragment:05d}-v{version:09d}"
