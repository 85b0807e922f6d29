"""A file that is read again whenever it has changed, so that what it says holds without a restart."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from diloco.errors import ConfigError, UnreachableError

T = TypeVar("T")


class Reread(Generic[T]):
    """What `read` makes of the file at `path`; `what` names it in errors. Any thread may call any method."""

    def __init__(self, path: Path, what: str, read: Callable[[Path], T]) -> None:
        self._path, self._what, self._read = path, what, read
        self._lock = threading.Lock()
        self._known: tuple[tuple[int, int, int], T] | None = None

    def get(self) -> T:
        """The newest content.

        Raises:
            ConfigError: the file cannot be read, or does not say what it should.
        """
        with self._lock:
            try:
                stat = self._path.stat()
            except OSError as error:
                raise ConfigError(
                    f"the {self._what} {self._path} cannot be read ({error.strerror}); put it back."
                ) from error
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if self._known is None or self._known[0] != seen:
                self._known = (seen, self._read(self._path))
            return self._known[1]

    def admitting(self) -> T:
        """As `get`, for a call: a file that has become unreadable admits no caller.

        Raises:
            UnreachableError: the file cannot be read. That is no fault of the caller, which tries again: a file is
                short for a moment where it is copied over the one before.
        """
        try:
            return self.get()
        except ConfigError as error:
            raise UnreachableError(f"no caller can be admitted: {error}") from error
