"""Files that hold a secret: written and read so that other users of the machine cannot read them."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.errors import ConfigError, translated

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
