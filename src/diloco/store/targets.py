"""Targets of backups: a directory, or any storage that fsspec reaches by a URL."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import fsspec

from diloco.errors import ConfigError, StoreError
from diloco.store.durable import file_sha256, sync_directory
from diloco.whole_files import hidden_name, remove_leftovers

_CHUNK_BYTES = 1 << 24


class Target(Protocol):
    """Files by name ("tensors/…"), written atomically if the storage can. All methods raise StoreError."""

    @property
    def name(self) -> str:
        """The path or URL that the user gave."""

    def names(self, directory: str) -> list[str]:
        """The names of a directory's files, ascending; empty if there is no such directory."""

    def put(self, source: Path, name: str) -> None:
        """Write a file, and verify that it reads back as `source`. An equal file is not written again."""

    def get(self, name: str, destination: Path) -> None:
        """Copy a file to this machine, durably."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""


def open_target(url: str) -> Target:
    """The target of a path, or of a URL that fsspec understands ("s3://bucket/run", "sftp://…", "memory://…").

    Raises:
        ConfigError: the URL's scheme is unknown, or its package is not installed.
    """
    if "://" not in url:
        return LocalDirectory(Path(url))
    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"backups cannot go to {url} ({error}); install what it needs, or use a directory."
        ) from error
    return RemoteDirectory(url, files, path)


class LocalDirectory:
    """A directory on this machine."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path

    def names(self, directory: str) -> list[str]:
        with _mapped("read", self.name):
            if not (self._path / directory).is_dir():
                return []
            found = [each.name for each in (self._path / directory).iterdir()]
            return sorted(each for each in found if not each.startswith("."))

    def put(self, source: Path, name: str) -> None:
        final = self._path / name
        partial = final.with_name(hidden_name(f"tmp-{final.name}"))
        with _mapped("written", self.name):
            if final.exists() and file_sha256(final) == file_sha256(source):
                return
            final.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(final.parent, "tmp-*")
            try:
                _copy(source, partial)
                _require_same(source, file_sha256(partial), name)
                partial.replace(final)
            except OSError:
                partial.unlink(missing_ok=True)
                raise
            sync_directory(final.parent)

    def get(self, name: str, destination: Path) -> None:
        with _mapped("read", self.name):
            _copy(self._path / name, destination)

    def remove(self, name: str) -> None:
        with _mapped("written", self.name):
            (self._path / name).unlink(missing_ok=True)


class RemoteDirectory:
    """A path in a file system of fsspec."""

    def __init__(self, url: str, files: fsspec.AbstractFileSystem, path: str) -> None:
        self.name = url
        self._files, self._path = files, path.rstrip("/")

    def names(self, directory: str) -> list[str]:
        with _mapped("read", self.name):
            self._files.invalidate_cache()
            if not self._files.isdir(self._at(directory)):
                return []
            return sorted(str(each).rsplit("/", 1)[-1] for each in self._files.ls(self._at(directory), detail=False))

    def put(self, source: Path, name: str) -> None:
        with _mapped("written", self.name):
            if self._files.exists(self._at(name)) and self._sha256(name) == file_sha256(source):
                return
            self._files.makedirs(self._at(name).rsplit("/", 1)[0], exist_ok=True)
            self._files.put_file(str(source), self._at(name))
            _require_same(source, self._sha256(name), name)

    def get(self, name: str, destination: Path) -> None:
        with _mapped("read", self.name):
            self._files.get_file(self._at(name), str(destination))
            _sync(destination)

    def remove(self, name: str) -> None:
        with _mapped("written", self.name):
            if self._files.exists(self._at(name)):
                self._files.rm_file(self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _sha256(self, name: str) -> str:
        hasher = hashlib.sha256()
        with self._files.open(self._at(name), "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
        return hasher.hexdigest()


@contextmanager
def _mapped(what: str, name: str) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except Exception as error:  # a backend of fsspec raises its library's errors
        raise StoreError(
            f"the backups in {name} cannot be {what} ({type(error).__name__}: {error}); check the storage, its space "
            "and the rights to it."
        ) from error


def _require_same(source: Path, sha256: str, name: str) -> None:
    if sha256 != file_sha256(source):
        raise OSError(f"{name} does not read back as it was written")


def _copy(source: Path, destination: Path) -> None:
    shutil.copyfile(source, destination)
    _sync(destination)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
