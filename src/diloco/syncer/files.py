"""The tensors of a store: a safetensors file for each version of a fragment, and one for the frozen state."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from diloco.core.held import HeldFragment
from diloco.core.layout import digest
from diloco.errors import StoreError
from diloco.syncer.durable import (
    TEMPORARY_PREFIX,
    file_sha256,
    read_tensors,
    sha256_of,
    sync_directory,
    write_bytes,
    write_tensors,
)
from diloco.syncer.records import DATABASE

_OUTER = "outer."

_PUBLISHED = re.compile(r"f\d+-v(?!0+-)\d+-")
"""How the name of a later version than a run's first one begins."""


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
        self.set_aside_directory = path / "set-aside"

    def write(self, held: HeldFragment) -> tuple[str, str]:
        """A version's tensors; returns the file's name and its hash."""
        tensors = {"theta": held.theta, **{_OUTER + name: value for name, value in held.outer_state.items()}}
        if held.residual is not None:
            tensors["residual"] = held.residual
        stem = f"{_prefix(held.fragment)}v{held.version:09d}"

        def digest_of(name: str, tensor: Tensor) -> str:
            return held.digest if name == "theta" else sha256_of(tensor)

        return write_tensors(self.directory, stem, tensors, self._at, digest_of)

    def write_static(self, data: bytes) -> tuple[str, str]:
        """Frozen parameters and buffers, a safetensors file already; returns as `write`."""
        return write_bytes(self.directory, "static", data, self._at)

    def read(self, fragment: int, version: int, file: str, sha256: str, published: str) -> HeldFragment:
        """What `write` has written. `published`: the digest of the version.

        Raises:
            StoreError: the file is missing, or another hash was committed.
        """
        path, holds = self.directory / file, f"fragment {fragment}, version {version}"
        self._require_file(path, holds)
        tensors = read_tensors(path, sha256, lambda name, each: digest(each) if name == "theta" else sha256_of(each))
        if tensors is None:
            raise self._damaged(path, holds)
        theta, residual = tensors.pop("theta"), tensors.pop("residual", None)
        outer_state = {name.removeprefix(_OUTER): tensor for name, tensor in tensors.items()}
        return HeldFragment(fragment, version, theta, outer_state, residual, published)

    def read_static(self, file: str, sha256: str) -> bytes:
        """What `write_static` has written; raises as `read`."""
        path, holds = self.directory / file, "the frozen parameters and buffers"
        self._require_file(path, holds)
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
                f"removed; put the database back from a copy of {self._path}, or start a new run elsewhere."
            )

    def remove(self, name: str) -> None:
        """One that is superseded, if it is still there."""
        (self.directory / name).unlink(missing_ok=True)

    def remove_temporary(self) -> None:
        """What writes that were broken off have left."""
        for file in self.directory.glob(f"{TEMPORARY_PREFIX}*"):
            file.unlink()

    def set_aside(self, name: str) -> Path:
        """Move what is not known out of the way; returns where it is."""
        self.set_aside_directory.mkdir(exist_ok=True)
        target, number = self.set_aside_directory / name, 0
        while target.exists():
            number += 1
            target = self.set_aside_directory / f"{name}.{number}"
        (self.directory / name).rename(target)
        sync_directory(self.set_aside_directory)
        sync_directory(self.directory)
        return target

    def _require_file(self, path: Path, holds: str) -> None:
        if not path.exists():
            raise StoreError(
                f"{path} ({holds}) is missing; put it back from a copy of {self._path}, or start a new run elsewhere."
            )

    def _damaged(self, path: Path, holds: str) -> StoreError:
        return StoreError(
            f"{path} ({holds}) is damaged: its hash is not the one committed; put it back from a copy of "
            f"{self._path}, or start a new run elsewhere."
        )


def _prefix(fragment: int) -> str:
    return f"f{fragment:05d}-"
