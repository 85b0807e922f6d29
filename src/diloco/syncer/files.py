"""The tensors of a store: one safetensors file for each version of a fragment, and one for what training leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from diloco.core.update import Closed
from diloco.errors import StoreError
from diloco.syncer.durable import file_sha256, read_tensors, write_bytes, write_tensors
from diloco.syncer.records import SavedFragment

_OUTER = "outer."


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

    def write(self, fragment: int, version: int, closed: Closed) -> tuple[str, str]:
        """A version's tensors; returns the file's name and its SHA-256."""
        tensors = {"theta": closed.theta, **{_OUTER + name: value for name, value in closed.outer_state.items()}}
        if closed.residual is not None:
            tensors["residual"] = closed.residual
        return write_tensors(self.directory, f"{_prefix(fragment)}v{version:09d}", tensors, self._at)

    def write_static(self, data: bytes) -> tuple[str, str]:
        """Frozen parameters and buffers, a safetensors file already; returns as `write`."""
        return write_bytes(self.directory, "static", data, self._at)

    def read(self, fragment: int, version: int, file: str, sha256: str, digest: str) -> SavedFragment:
        """What `write` has written.

        Raises:
            StoreError: the file is missing, or another SHA-256 was committed.
        """
        tensors = read_tensors(self._checked(file, sha256, f"fragment {fragment}, version {version}"))
        theta, residual = tensors.pop("theta"), tensors.pop("residual", None)
        outer_state = {name.removeprefix(_OUTER): tensor for name, tensor in tensors.items()}
        return SavedFragment(version, theta, outer_state, residual, digest)

    def read_static(self, file: str, sha256: str) -> bytes:
        """What `write_static` has written; raises as `read`."""
        return self._checked(file, sha256, "the frozen parameters and buffers").read_bytes()

    def remove_others(self, named: Collection[str], only: int | None = None) -> None:
        """Remove what is not `named`: of one fragment, or of all and with them whatever a crash left behind."""
        prefix = "" if only is None else _prefix(only)
        for file in self.directory.iterdir():
            if file.name.startswith(prefix) and file.name not in named:
                file.unlink()

    def _checked(self, file: str, sha256: str, holds: str) -> Path:
        path = self.directory / file
        if not path.exists():
            raise StoreError(
                f"{path} ({holds}) is missing; put it back from a copy of {self._path}, or start a new run elsewhere."
            )
        if file_sha256(path) != sha256:
            raise StoreError(
                f"{path} ({holds}) is damaged: its SHA-256 is not the one committed; put it back from a copy of "
                f"{self._path}, or start a new run elsewhere."
            )
        return path


def _prefix(fragment: int) -> str:
    return f"f{fragment:05d}-"
