"""Files that are whole or absent (written under a temporary name, synced, renamed), and the lock of a directory."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from diloco.errors import StoreError, translated
from diloco.exchange.wire.frames import bytes_of

TEMPORARY_PREFIX = ".tmp-"

NAMED_DIGITS = 16
"""Digits of a file's hash in its name: where the database is lost, the file is checked against these."""

READERS_OF_A_FILE = 2
"""Threads that read and hash the tensors of one file."""

LOCK = "store.lock"

PIECE_BYTES = 4 << 20
"""What is read at once of a tensor, and hashed while the processor still has it at hand; a multiple of any element's
size."""

DigestOf = Callable[[str, Tensor], str]


class Hasher(Protocol):
    """Makes a hash of contiguous host tensors' bytes."""

    def update(self, part: Tensor, /) -> None:
        """Take up the next elements."""

    def hex(self) -> str:
        """Of all parts so far, 32 bytes."""


class Sha256:
    """The `Hasher` of `sha256_of`."""

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()

    def update(self, part: Tensor, /) -> None:
        """As `Hasher`."""
        self._hasher.update(bytes_of(part))

    def hex(self) -> str:
        """As `Hasher`."""
        return self._hasher.hexdigest()


@dataclass(frozen=True)
class ReadTensors:
    """What a safetensors file holds.

    Attributes:
        sha256: its hash, as `write_tensors` has returned it.
        tensors: by name, in memory of their own.
        digests: of each tensor.
    """

    sha256: str
    tensors: Mapping[str, Tensor]
    digests: Mapping[str, str]


def ignore_point(point: str) -> None:
    """The default for a callable that is told each durable step: nothing happens there."""


def write_tensors(
    directory: Path, stem: str, tensors: Mapping[str, Tensor], at: Callable[[str], None], digest_of: DigestOf,
    metadata: Mapping[str, str],
) -> tuple[str, str]:  # fmt: skip
    """Write a safetensors file durably; return its name, `<stem>-<start of its hash>.safetensors`, and its hash
    (`_hash_of`).

    The name depends on the content, so writing a version again after a failure can never damage a file that a
    half-failed commit may still name. Tensors are written from where they lie, without a copy, and hashed there: the
    hash is that of what was to be written, not of what is read back.

    Arguments:
        digest_of: the hash of a tensor by its name, 32 bytes in hex.
        metadata: of the safetensors file.

    Raises:
        OSError: whatever the disk says; nothing is left under a temporary name.
    """

    def write(path: Path) -> str:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        try:
            safetensors.torch.save_file(contiguous, path, metadata=dict(metadata))
        except SafetensorError as error:  # the library's name for a failed write
            raise OSError(str(error)) from error
        return _hash_of(path, lambda name: digest_of(name, contiguous[name]))

    return _write(directory, stem, write, at)


def write_bytes(directory: Path, stem: str, data: bytes, at: Callable[[str], None]) -> tuple[str, str]:
    """`write_tensors` for bytes that are a safetensors file already. Their hash is SHA-256."""

    def write(path: Path) -> str:
        path.write_bytes(data)
        return hashlib.sha256(data).hexdigest()

    return _write(directory, stem, write, at)


def sha256_of(tensor: Tensor) -> str:
    """Of a contiguous tensor's bytes, in hex."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def _hash_of(path: Path, digest_of: Callable[[str], str]) -> str:
    """The hash of a safetensors file that holds these tensors: SHA-256 of its header and of each tensor's own hash, in
    the header's order. Every byte of the file counts."""
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
    hasher = hashlib.sha256(length + header)
    for name in (name for name in json.loads(header) if name != "__metadata__"):
        hasher.update(bytes.fromhex(digest_of(name)))
    return hasher.hexdigest()


def _write(directory: Path, stem: str, write: Callable[[Path], str], at: Callable[[str], None]) -> tuple[str, str]:
    temporary = directory / f"{TEMPORARY_PREFIX}{stem}"
    try:
        sha256 = write(temporary)
        at("written")
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        at("synced")
        name = f"{stem}-{sha256[:NAMED_DIGITS]}.safetensors"
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


def read_tensors(path: Path, hasher_of: Callable[[str], Hasher]) -> ReadTensors | None:
    """A safetensors file, with `hasher_of` each of its tensors by name; None where it is no safetensors file.

    Raises:
        OSError: unreadable.
    """
    try:
        mapped = safetensors.torch.load_file(path)  # the header is checked; no tensor's bytes are read
    except SafetensorError:
        return None
    with path.open("rb") as file, ThreadPoolExecutor(READERS_OF_A_FILE) as readers:
        num_header_bytes, header = _header_of(file)

        def read(name: str) -> tuple[Tensor, str]:
            first, _ = header[name]["data_offsets"]
            return _read_like(mapped[name], file, 8 + num_header_bytes + first, hasher_of(name))

        found = dict(zip(header, readers.map(read, header), strict=True))
    digests = {name: digest for name, (_, digest) in found.items()}
    return ReadTensors(
        _hash_of(path, digests.__getitem__), {name: tensor for name, (tensor, _) in found.items()}, digests
    )


def _read_like(mapped: Tensor, file: IO[bytes], place: int, hasher: Hasher) -> tuple[Tensor, str]:
    """A tensor as large as `mapped`, and its hash; in memory of its own: a mapped one leans on a file that is deleted
    later. Read in order, not page by page."""
    tensor = torch.empty_like(mapped)
    for piece in tensor.view(-1).split(PIECE_BYTES // tensor.element_size()):
        data = bytes_of(piece)
        while data:
            num_bytes = os.preadv(file.fileno(), [data], place)
            if not num_bytes:
                raise OSError(f"{file.name} has become shorter while it was read")
            data, place = data[num_bytes:], place + num_bytes
        hasher.update(piece)
    return tensor, hasher.hex()


def _header_of(file: IO[bytes]) -> tuple[int, dict[str, Any]]:
    """The length of a safetensors file's header, and its tensors in order."""
    num_bytes = int.from_bytes(file.read(8), "little")
    header: dict[str, Any] = json.loads(file.read(num_bytes))
    header.pop("__metadata__", None)
    return num_bytes, header


def read_metadata(path: Path) -> Mapping[str, str]:
    """The metadata of a safetensors file that `read_tensors` has read."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    metadata: Mapping[str, str] = header.get("__metadata__", {})
    return metadata


def lock_directory(path: Path) -> IO[str]:
    """Take a directory for this process until the file returned is closed, if only by the kernel when the process ends.

    Raises:
        StoreError: another process has it, named.
    """
    file = (path / LOCK).open("a+")
    if (holder := _holder(file)) is not None:
        file.close()
        raise StoreError(f"{path} is in use by {holder}; stop that syncer, or give this one a directory of its own.")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


@contextmanager
def look_locked(path: Path) -> Iterator[str | None]:
    """Keep others from taking a directory, without a change to it; gives the process that has it, or None."""
    if not (path / LOCK).exists():
        yield None
        return
    with translated(OSError, StoreError, f"cannot read {path / LOCK}", "check the disk"):
        file = (path / LOCK).open()
    with file:
        yield _holder(file)


def _holder(file: IO[str]) -> str | None:
    """The process that has the lock of this file; None: this one has it now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return file.read().strip() or "another process"
    return None
