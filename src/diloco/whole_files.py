"""Small text files that are whole or absent, and names that say which process works on something."""

import glob
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path


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
