"""Durable safetensors files (written under a temporary name, synced, renamed), and the lock of a directory."""

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
from diloco.exchange.wire.tensors import bytes_of

TEMPORARY_PREFIX = ".tmp-"

NAMED_DIGITS = 16
"""Digits of a file's hash in its name, which verify the file when the database is lost."""

READERS_OF_A_FILE = 2
"""Threads that read and hash the tensors of one file."""

LOCK = "store.lock"

PIECE_BYTES = 4 << 20
"""A tensor is read and hashed in pieces of this size, which fit the processor's cache; a multiple of any element
size."""

DigestOf = Callable[[str, Tensor], str]


class Hasher(Protocol):
    """A hash of contiguous host tensors' bytes."""

    def update(self, part: Tensor, /) -> None:
        """Add the next elements."""

    def hex(self) -> str:
        """The hash of all parts so far, 32 bytes in hex."""


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
    """The content of a safetensors file.

    Attributes:
        sha256: the file's hash, as `write_tensors` returns it.
        tensors: by name, in memory of their own.
        digests: the hash of each tensor.
        metadata: of the file.
    """

    sha256: str
    tensors: Mapping[str, Tensor]
    digests: Mapping[str, str]
    metadata: Mapping[str, str]


def ignore_point(point: str) -> None:
    """The default callback for durable steps: do nothing."""


def write_tensors(
    directory: Path, stem: str, tensors: Mapping[str, Tensor], at: Callable[[str], None], digest_of: DigestOf,
    metadata: Mapping[str, str],
) -> tuple[str, str]:  # fmt: skip
    """Write a safetensors file durably; return its name, `<stem>-<start of its hash>.safetensors`, and its hash
    (`_hash_of`).

    The name depends on the content, so that writing a version again after a failure never damages a file that an
    uncertain commit may name. Tensors are written and hashed in place, without a copy: the hash is that of the tensors
    in memory, not of the file as read back.

    Arguments:
        digest_of: the hash of a tensor by its name, 32 bytes in hex.
        metadata: of the safetensors file.

    Raises:
        OSError: the disk refused; no temporary file is left.
    """

    def write(path: Path) -> str:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        try:
            safetensors.torch.save_file(contiguous, path, metadata=dict(metadata))
        except SafetensorError as error:  # the library raises this for a failed write
            raise OSError(str(error)) from error
        return _hash_of(path, lambda name: digest_of(name, contiguous[name]))

    return _write(directory, stem, write, at)


def write_bytes(directory: Path, stem: str, data: bytes, at: Callable[[str], None]) -> tuple[str, str]:
    """As `write_tensors`, for the bytes of a whole safetensors file. Their hash is SHA-256."""

    def write(path: Path) -> str:
        path.write_bytes(data)
        return hashlib.sha256(data).hexdigest()

    return _write(directory, stem, write, at)


def sha256_of(tensor: Tensor) -> str:
    """SHA-256 of a contiguous tensor's bytes, in hex."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def _hash_of(path: Path, digest_of: Callable[[str], str]) -> str:
    """The hash of a safetensors file: SHA-256 of its header and of each tensor's own hash, in the header's order. It
    covers every byte of the file."""
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
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensors(path: Path, hasher_of: Callable[[str], Hasher]) -> ReadTensors | None:
    """Read a safetensors file; `hasher_of` gives the hasher of a tensor by its name. None: it is not such a file.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        mapped = safetensors.torch.load_file(path)  # the header is checked; no tensor's bytes are read
    except SafetensorError:
        return None
    with path.open("rb") as file, ThreadPoolExecutor(READERS_OF_A_FILE) as readers:
        num_header_bytes = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(num_header_bytes))
        metadata = header.pop("__metadata__", {})

        def read(name: str) -> tuple[Tensor, str]:
            first, _ = header[name]["data_offsets"]
            return _read_like(mapped[name], file, 8 + num_header_bytes + first, hasher_of(name))

        found = dict(zip(header, readers.map(read, header), strict=True))
    digests = {name: digest for name, (_, digest) in found.items()}
    tensors = {name: tensor for name, (tensor, _) in found.items()}
    return ReadTensors(_hash_of(path, digests.__getitem__), tensors, digests, metadata)


def _read_like(mapped: Tensor, file: IO[bytes], place: int, hasher: Hasher) -> tuple[Tensor, str]:
    """Read a tensor of `mapped`'s shape, and hash it. It has memory of its own, since the mapped file is deleted later,
    and is read in order, not page by page."""
    tensor = torch.empty_like(mapped)
    for piece in tensor.view(-1).split(PIECE_BYTES // tensor.element_size()):
        data = bytes_of(piece)
        while data:
            num_bytes = os.preadv(file.fileno(), [data], place)
            if not num_bytes:
                raise OSError(f"{file.name} became shorter while it was read")
            data, place = data[num_bytes:], place + num_bytes
        hasher.update(piece)
    return tensor, hasher.hex()


def lock_directory(path: Path) -> IO[str]:
    """Lock a directory for this process, until the returned file is closed; the kernel closes it when the process ends.

    Raises:
        StoreError: another process holds the lock; the message names it.
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
def locked_unchanged(path: Path) -> Iterator[str | None]:
    """Lock an existing directory without changing it; gives the process that holds the lock, or None."""
    if not (path / LOCK).exists():
        yield None
        return
    with translated(OSError, StoreError, f"cannot read {path / LOCK}", "check the disk"):
        file = (path / LOCK).open()
    with file:
        yield _holder(file)


def _holder(file: IO[str]) -> str | None:
    """The process that holds the lock of this file; None: this process has taken it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return file.read().strip() or "another process"
    return None
