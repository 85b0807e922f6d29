"""Files that are whole or absent, and files that others may not read."""

import glob
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diloco.errors import ConfigError, translated


def write_whole(path: Path, text: str) -> None:
    """Write a text in UTF-8, durably: readers find what was there before or all of the text.

    A file that has this text already is left alone, so that a full disk does not refuse it again.

    Raises:
        OSError: what was there before still is, and nothing else.
    """
    data = text.encode()
    if path.is_file() and path.read_bytes() == data:
        return
    partial = path.with_name(hidden_name(path.name))
    with suppress(OSError):  # they are not in the way
        remove_leftovers(path.parent, glob.escape(path.name))
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def hidden_name(what: str) -> str:
    """The name of what this process writes or removes."""
    return f".{what}.{socket.gethostname()}.{os.getpid()}"


def remove_leftovers(directory: Path, what: str) -> None:
    """Remove what has a `hidden_name` of this process, or of one of this host that is dead.

    Arguments:
        what: a glob pattern.

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
    except PermissionError:  # another user's
        return True
    return True


OTHERS = stat.S_IRWXO
"""What other users than the owner and the group may do with a file; a group may be let in, as Kubernetes does."""


def write_secret(path: Path, data: bytes) -> None:
    """Write a new file, whole or not at all, that only its owner can read, from its first byte on.

    Raises:
        FileExistsError: there is one.
    """
    with _written(path, data) as temporary:
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            temporary.replace(path)


def replace_secret(path: Path, data: bytes) -> None:
    """Replace a file in one step: a reader sees the old one or the new one, and only its owner can read either."""
    with _written(path, data) as temporary:
        temporary.replace(path)


@contextmanager
def _written(path: Path, data: bytes) -> Iterator[Path]:
    """A file beside `path` with this data, which is removed afterwards."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.unlink(missing_ok=True)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def read_secret(path: str | Path, what: str) -> bytes:
    """The bytes of a file that holds a secret, `what` for the error.

    Raises:
        ConfigError: it cannot be read, or other users of this machine may use it.
    """
    with translated(OSError, ConfigError, f"cannot read the {what} {path}", "check the path"):
        with open(path, "rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode, file.read()
    if mode & OTHERS:
        raise ConfigError(
            f"the {what} {path} is open to every user of this machine (mode {stat.S_IMODE(mode):04o}); "
            "run chmod 600 on it, and replace it with a new one where others may have read it."
        )
    return data
