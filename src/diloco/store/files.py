"""The tensors of a store: a safetensors file for each version of a fragment, and one for the frozen state."""

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
    read_metadata,
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
"""How the name of a later version than a run's first one begins."""


@dataclass(frozen=True)
class VersionFileHeader:
    """What a version's file says of itself, so that a lost database costs little.

    Attributes:
        run_id: of its run.
        update: what was published.
        tokens: trained tokens whose work is in it.
        serial: versions published in the run up to this one.
        record: the run's, stored with this version; None: version 0.
    """

    run_id: str
    update: Update
    tokens: int
    serial: int
    record: Json | None

    def to_json(self) -> str:
        """As text."""
        plain = {"run_id": self.run_id, "update": self.update.as_dict(), "tokens": self.tokens, "serial": self.serial}
        return json.dumps({**plain, "record": self.record})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` gave. Raises KeyError, TypeError or ValueError for anything else."""
        plain = json.loads(text)
        return cls(**{**plain, "update": Update.from_dict(plain["update"])})


@dataclass(frozen=True)
class Recognised:
    """A whole file of a version, without a database.

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
        """What was published."""
        return self.described.update

    @property
    def stored(self) -> StoredVersion:
        """As a database would have it."""
        return StoredVersion(self.update, self.file, self.sha256, self.described.tokens, self.written_at)


class TensorFiles:
    """Writes files that are whole or absent, and reads none that is not what was written.

    Arguments:
        path: the store's directory.
        at: is told each durable step by name.
    """

    def __init__(self, path: Path, at: Callable[[str], None]) -> None:
        self._path = path
        self._at = at
        self.directory = path / "tensors"

    def write(self, held: GlobalFragment, described: VersionFileHeader) -> tuple[str, str]:
        """A version's tensors, and what it is; returns the file's name and its hash."""
        tensors = {"theta": held.theta, **{_OUTER + name: value for name, value in held.outer_state.items()}}
        if held.residual is not None:
            tensors["residual"] = held.residual
        stem = _stem(held.fragment, held.version)

        def digest_of(name: str, tensor: Tensor) -> str:
            return held.digest if name == "theta" else sha256_of(tensor)

        return write_tensors(self.directory, stem, tensors, self._at, digest_of, {_DESCRIBED: described.to_json()})

    def write_static(self, data: bytes) -> tuple[str, str]:
        """Frozen parameters and buffers, a safetensors file already; returns as `write`."""
        return write_bytes(self.directory, STATIC, data, self._at)

    def read(self, stored: StoredVersion) -> GlobalFragment:
        """What `write` has written.

        Raises:
            StoreError: the file is missing, or another hash was committed.
        """
        fragment, version, file = stored.update.fragment, stored.update.version, stored.file
        holds = f"fragment {fragment}, version {version}"
        path = self._require_file(file, holds)
        found = read_tensors(path, _hasher_of)
        if found is None or found.sha256 != stored.sha256 or found.digests.get("theta") != stored.update.digest:
            raise self._damaged(path, holds)
        if not file.startswith(_stem(fragment, version)):
            raise StoreError(
                f"{self._path / DATABASE} is damaged: it has {file} as {holds}. Nothing was changed or removed; "
                f"{advice(self._path)}."
            )
        return _held(fragment, version, found.tensors, stored.update.digest)

    def recognise(self, name: str) -> Recognised | None:
        """A version by its file alone: it says what it is, and has the hash that is in its name and the digest that it
        gives; None where that is not so.

        Raises:
            OSError: unreadable.
        """
        return self._recognised(self.directory / name, name)

    def _recognised(self, path: Path, name: str) -> Recognised | None:
        match = _VERSION.fullmatch(name)
        if match is None or not path.is_file() or (found := read_tensors(path, _hasher_of)) is None:
            return None
        if found.sha256[:NAMED_DIGITS] != match["hash"]:
            return None
        try:
            described = VersionFileHeader.from_json(read_metadata(path)[_DESCRIBED])
        except MALFORMED:  # an earlier version of this package has written it
            return None
        update = described.update
        if (update.fragment, update.version) != version_of(name) or found.digests.get("theta") != update.digest:
            return None
        num_elements = found.tensors["theta"].numel()
        return Recognised(name, found.sha256, described, path.stat().st_mtime, num_elements)

    def receive(self, name: str, sha256: str, chunks: Iterable[bytes | memoryview]) -> str:
        """Write a file that another store has, as it is; returns the digest of its version, "" of the frozen state.

        Raises:
            CorruptPayloadError: it is not what `name` and `sha256` say; nothing is left. OSError: the disk refuses.
        """
        if not (_VERSION.fullmatch(name) or is_static(name)):
            raise CorruptPayloadError(f"{name[:80]!r} is no name of a file of tensors.")
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
            raise CorruptPayloadError(f"what came as {name[:80]!r} has another content than its digest says.")
        return published

    def read_static(self, file: str, sha256: str) -> bytes:
        """What `write_static` has written; raises as `read`."""
        holds = "the frozen parameters and buffers"
        path = self._require_file(file, holds)
        if file_sha256(path) != sha256:
            raise self._damaged(path, holds)
        return path.read_bytes()

    def names(self) -> list[str]:
        """Of everything that is there, but for what a write that was broken off has left."""
        return sorted(each.name for each in self.directory.iterdir() if not each.name.startswith(TEMPORARY_PREFIX))

    def require_no_run(self, *, is_new: bool) -> None:
        """The database holds no run, so there can be no version that was published. `is_new`: it is not even there.

        The initial model of a run that was killed while it was initialised belongs to no run yet; a database that is
        there comes before it.

        Raises:
            StoreError: there are tensors all the same.
        """
        orphans = [name for name in self.names() if is_new or _PUBLISHED.match(name)]
        if orphans:
            raise StoreError(
                f"{self._path / DATABASE} {'is missing or empty' if is_new else 'holds no run'}, and "
                f"{self.directory} has {len(orphans)} files of a run, such as {orphans[-1]}. Nothing was changed or "
                f"removed; {advice(self._path)}."
            )

    def remove(self, name: str) -> None:
        """One that is superseded, if it is still there."""
        if is_file_name(name):
            (self.directory / name).unlink(missing_ok=True)

    def remove_temporary(self) -> None:
        """What writes that were broken off have left."""
        for file in self.directory.glob(f"{TEMPORARY_PREFIX}*"):
            file.unlink()

    def set_aside(self, name: str) -> Path:
        """Move what is not known out of the way; returns where it is."""
        return set_aside(self._path, self.directory / name)

    def _require_file(self, file: str, holds: str) -> Path:
        path = self.directory / file if is_file_name(file) else self.directory
        if not path.is_file():
            raise StoreError(f"{self.directory / str(file)} ({holds}) is missing; {advice(self._path)}.")
        return path

    def _damaged(self, path: Path, holds: str) -> StoreError:
        return StoreError(f"{path} ({holds}) is damaged: its hash is not the one committed; {advice(self._path)}.")


def is_file_name(name: object) -> bool:
    """Whether a name that was read is that of a file in its folder, and leads to no other one."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\0"}


def set_aside(state_dir: Path, path: Path) -> Path:
    """Move what is not known, or is damaged, to `set-aside` in the state directory; returns where it is."""
    target = _place_aside(state_dir, path)
    path.rename(target)
    sync_directory(target.parent)
    sync_directory(path.parent)
    return target


def keep_copy(state_dir: Path, path: Path) -> Path:
    """Copy what will be changed to `set-aside` in the state directory; returns where the copy is."""
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
    """Whether a file may hold frozen parameters and buffers, by its name."""
    return _STATIC.fullmatch(name) is not None


def version_of(name: str) -> tuple[int, int]:
    """The fragment and version that a file is named after; −1 and −1 for any other name."""
    match = _VERSION.fullmatch(name)
    return (-1, -1) if match is None else (int(match["fragment"]), int(match["version"]))


def _held(fragment: int, version: int, tensors: Mapping[str, Tensor], published: str) -> GlobalFragment:
    outer_state = {name.removeprefix(_OUTER): tensor for name, tensor in tensors.items() if name.startswith(_OUTER)}
    return GlobalFragment(fragment, version, tensors["theta"], outer_state, tensors.get("residual"), published)


def _hasher_of(name: str) -> Hasher:
    return Digest() if name == "theta" else Sha256()


def _stem(fragment: int, version: int) -> str:
    return f"f{fragment:05d}-v{version:09d}"
