"""Atomic writes of files, and files that other users may not read."""

import glob
import itertools
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diloco.errors import ConfigError, translated


def write_whole(path: Path, text: str) -> None:
    """Write a text in UTF-8, atomically and durably: readers find the old content or the whole text.

    A file with the same text is not rewritten, so that a full disk cannot refuse it.

    Raises:
        OSError: the write failed; the old content is unchanged, and no partial file is left.
    """
    data = text.encode()
    if path.is_file() and path.read_bytes() == data:
        return
    with whole_file(path) as partial:
        partial.write_bytes(data)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write to; the file replaces `path` at the end, atomically and durably.

    Raises:
        OSError: the disk refused; the old content is unchanged, and no partial file is left.
    """
    partial = path.with_name(hidden_name(path.name))
    with suppress(OSError):  # leftovers do no harm
        remove_leftovers(path.parent, glob.escape(path.name))
    try:
        yield partial
        sync_file(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def free_path(named: Callable[[int], Path]) -> Path:
    """The first path, by numbers from 1 on, that does not exist."""
    return next(path for path in map(named, itertools.count(1)) if not path.exists())


def sync_directory(directory: Path) -> None:
    """Make renames and new names in a directory durable."""
    sync_file(directory, os.O_DIRECTORY)


def sync_file(path: Path, flags: int = 0) -> None:
    """Make the content of a file, or with `os.O_DIRECTORY` the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mark_of(path: Path) -> tuple[int, ...] | None:
    """What changes with a file: its inode, size and times. None: it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def hidden_name(what: str) -> str:
    """A hidden name for a file of this process that is incomplete or being removed."""
    return f".{what}.{socket.gethostname()}.{os.getpid()}"


def remove_leftovers(directory: Path, what: str) -> None:
    """Remove files and directories with a `hidden_name` of this process, or of a dead process of this host.

    Arguments:
        what: a glob pattern for the argument of `hidden_name`.

    Raises:
        OSError: the disk refuses.
    """
    for path in directory.glob(f".{what}.{socket.gethostname()}.*"):
        pid = path.name.rpartition(".")[2]
        if pid.isdecimal() and (int(pid) == os.getpid() or not _is_alive(int(pid))):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        return True
    return True


OTHERS = stat.S_IRWXO
"""Permissions of users other than the owner and the group; group access is allowed, since Kubernetes grants it."""


def write_secret(path: Path, data: bytes) -> None:
    """Create a file atomically that only its owner can read, from the first byte on.

    Raises:
        FileExistsError: the file exists.
    """
    remove_leftovers(path.parent, path.name)
    partial = path.with_name(hidden_name(path.name))
    replace_secret(partial, data)
    try:
        path.hardlink_to(partial)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        open(path, "xb", opener=_for_the_owner).close()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def replace_secret(path: Path, data: bytes) -> None:
    """Replace a file atomically; only its owner can read the new one."""
    with whole_file(path) as partial, open(partial, "xb", opener=_for_the_owner) as file:
        file.write(data)


def _for_the_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def read_secret(path: str | Path, what: str) -> bytes:
    """Read a file with a secret; `what` names it in errors.

    Raises:
        ConfigError: the file cannot be read, or other users of this machine may access it.
    """
    with translated(OSError, ConfigError, f"cannot read the {what} {path}", "check the path"):
        with open(path, "rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode, file.read()
    if mode & OTHERS:
        raise ConfigError(
            f"the {what} {path} is open to every user of this machine (mode {stat.S_IMODE(mode):04o}); "
            "run chmod 600 on it, and replace the secret if others may have read it."
        )
    return data
