"""Files that are whole or absent: written under a temporary name, synced, renamed, directory synced. And a directory's lock."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from diloco.errors import StoreError

TEMPORARY_PREFIX = ".tmp-"


def ignore_point(point: str) -> None:
    """The default for a callable that is told each durable step: nothing happens there."""


def write_tensors(
    directory: Path, stem: str, tensors: Mapping[str, Tensor], at: Callable[[str], None]
) -> tuple[str, str]:
    """Write a safetensors file durably; return its name, `<stem>-<start of its SHA-256>.safetensors`, and its SHA-256.

    The name depends on the content, so writing a version again after a failure can never damage a file that a half-failed commit
    may still name. Tensors are written from where they lie, without a copy.

    Raises:
        OSError: whatever the disk says; nothing is left under a temporary name.
    """

    def write(path: Path) -> None:
        try:
            safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        except SafetensorError as error:  # the library's name for a failed write
            raise OSError(str(error)) from error

    return _write(directory, stem, write, at)


def write_bytes(directory: Path, stem: str, data: bytes, at: Callable[[str], None]) -> tuple[str, str]:
    """`write_tensors` for bytes that are a safetensors file already."""
    return _write(directory, stem, lambda path: _dump(path, data), at)


def _dump(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _write(directory: Path, stem: str, write: Callable[[Path], None], at: Callable[[str], None]) -> tuple[str, str]:
    temporary = directory / f"{TEMPORARY_PREFIX}{stem}"
    try:
        write(temporary)
        at("written")
        with temporary.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        at("synced")
        name = f"{stem}-{sha256[:8]}.safetensors"
        temporary.replace(directory / name)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    at("renamed")
    sync_directory(directory)
    at("directory synced")
    return name, sha256


def sync_directory(directory: Path) -> None:
    """Make renames and new names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, in memory of their own.

    Raises:
        OSError: unreadable, or not a safetensors file.
    """
    try:
        # clones: mapped tensors would lean on a file that is deleted two versions later
        return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    except SafetensorError as error:
        raise OSError(str(error)) from error


def lock_directory(path: Path) -> IO[str]:
    """Take a directory for this process until the file returned is closed, if only by the kernel when the process ends.

    Raises:
        StoreError: someone has it, named.
    """
    file = (path / "store.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise StoreError(
            f"{path} is in use by {holder}; stop that syncer, or give this one a directory of its own."
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file
