"""The store of a run by its place: a directory, or the URL of a bucket."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

from diloco.errors import ConfigError, MissingObjectError, NotInitialisedError, StoreError
from diloco.protocol.manifest import Manifest
from diloco.run.objects import Objects, Readable
from diloco.store.bucket import Bucket
from diloco.store.directory import Directory

T = TypeVar("T")

_TRIES = 10


def open_store(place: str | os.PathLike[str], *, lock: bool = False) -> Directory | Bucket:
    """Open a store.

    Arguments:
        place: a path, or a URL such as "s3://bucket/run" (extra `bucket`).
        lock: make the directory if there is none, and lock it for this process; otherwise it can only be read, also
            while another process has locked it, and is not changed. A bucket has no lock.

    Raises:
        ConfigError: the URL is of no bucket, or its package is not installed. StoreError: as `Directory`.
    """
    if not is_url(place):
        return Directory(place, lock=lock)
    return Bucket(str(place))


def opened(place: str | os.PathLike[str], *, lock: bool = False) -> closing[Directory | Bucket]:
    """As `open_store`, for a `with` that releases the directory at its end."""
    return closing(open_store(place, lock=lock))


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether this is the place of a bucket, and not of a directory; also with a slash too few, which no bucket has."""
    return re.match(r"(?!unix:)\w+:/", str(place)) is not None


def is_same(place: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether these are one store, by whatever paths."""
    if is_url(place) or is_url(other):
        return str(place) == str(other)
    return Path(place).resolve() == Path(other).resolve()


def read_manifest(objects: Readable) -> Manifest:
    """The manifest of a run that has a model.

    Raises:
        ConfigError: there is none. NotInitialisedError: the run has no model yet. StoreError: it is damaged, or of
            another format.
    """
    if (found := objects.manifest()) is None:
        raise ConfigError(f"there is no run in {objects.name}; check the path or URL.")
    manifest = Manifest.from_bytes(found.data, objects.name)
    if not manifest.fragments:
        raise NotInitialisedError(f"the run in {objects.name} has no model yet; start a learner that initialises it.")
    return manifest


def require_manifest(objects: Objects) -> None:
    """Raise StoreError for a store that has objects and no manifest: it has lost it."""
    if objects.manifest() is None and (names := objects.list()):
        raise StoreError(
            f"the manifest of {objects.name} is missing, and it has {len(names)} objects of a run, such as "
            f"{names[-1]}; `diloco syncer check {objects.name}` says what can still be served."
        )


def repeated(read: Callable[[], T]) -> T:
    """Read a store; again where an object was superseded, and deleted, before it was read."""
    for _ in range(_TRIES - 1):
        with suppress(MissingObjectError):
            return read()
    return read()
