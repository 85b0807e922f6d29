"""The certificates of a run that its syncer refuses although they are still valid: `revoked.toml` beside its own.

[[revoked]]
serial = "3f21…"
name = "site-a"
at = "2026-11-22T20:00:00Z"     # refused from then on: the past, or the end of the time in which a new one is copied
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from diloco.errors import AuthError, ConfigError, UnreachableError
from diloco.secret_files import replace_secret
from diloco.syncer.callers import Caller
from diloco.syncer.certificates import holder_of
from diloco.syncer.ends_soon import EndsSoon
from diloco.tables import Table, read_text, read_toml, validate, write_toml

REVOKED = "revoked.toml"


class Revoked(Table):
    """One certificate that is refused from `at` on."""

    serial: str
    name: str
    at: datetime


class RevokedFile(Table):
    """All of them."""

    revoked: tuple[Revoked, ...] = ()


def read_revoked(path: Path) -> Mapping[str, datetime]:
    """From when on a certificate is refused, by its serial number. Raises ConfigError."""
    found = validate(RevokedFile, read_toml(read_text(path, "list of revoked certificates"), str(path)), str(path))
    for each in found.revoked:
        if each.at.tzinfo is None:
            raise ConfigError(f"{path} revokes {each.name!r} at {each.at} of no time zone; add Z for UTC.")
    return {each.serial: each.at for each in found.revoked}


def write_revoked(path: Path, revoked: Iterable[Revoked]) -> None:
    """Replace a file in one step."""
    text = write_toml(RevokedFile(revoked=tuple(revoked)).model_dump(mode="json"))
    replace_secret(path, f"# certificates that the syncer refuses; `diloco keys` writes this\n{text}".encode())


class RevokedList:
    """The list at `path`, read again whenever the file has changed. Any thread may call it.

    Raises:
        ConfigError: as `read`.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: tuple[tuple[int, int, int], Mapping[str, datetime]] | None = None
        self.read()

    def read(self) -> Mapping[str, datetime]:
        """The newest list, as `read_revoked`.

        Raises:
            ConfigError: the file cannot be read, or does not say what it should.
        """
        with self._lock:
            try:
                stat = self._path.stat()
            except OSError as error:
                raise ConfigError(
                    f"the list of revoked certificates {self._path} cannot be read ({error.strerror}); put it back."
                ) from error
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if self._known is None or self._known[0] != seen:
                self._known = (seen, read_revoked(self._path))
            return self._known[1]


class Holders:
    """Who holds the certificates of a run; `directory`: the syncer's keys. Any thread may call it.

    TLS has verified a certificate against the run's authority when its connection began. What may have changed since,
    its revocation and its end, is looked at here in every call.

    Raises:
        ConfigError: there is no list of revoked certificates.
    """

    def __init__(self, run: str, directory: Path) -> None:
        self._run, self._ends = run, EndsSoon()
        self._revoked = RevokedList(directory / REVOKED)

    def caller(self, cert: bytes) -> Caller:
        """The holder of a certificate, as PEM; `check` says whether it holds.

        Raises:
            AuthError: it names no holder, or is one of another run.
        """
        holder = holder_of(cert)
        if holder.run != self._run:
            raise AuthError(
                f"the certificate of {holder.name!r} is for run {holder.run!r} and this syncer serves {self._run!r}; "
                "use the keys of this run."
            )
        bound = holder.name if holder.role == "learner" else None
        return Caller(holder.name, holder.role, bound, holder.serial, holder.expires)

    def check(self, caller: Caller) -> None:
        """Check that a caller's certificate still holds.

        Raises:
            AuthError: it is revoked or has expired.
            UnreachableError: the list of revoked certificates cannot be read, so no caller is admitted. That is no
                fault of the caller, which tries again: a file is short for a moment while another one is copied over
                it.
        """
        try:
            now, revoked = datetime.now(UTC), self._revoked.read().get(caller.key)
        except ConfigError as error:
            raise UnreachableError(f"no caller can be admitted: {error}") from error
        if revoked is not None and now >= revoked:
            raise AuthError(
                f"the certificate of {caller.name!r} was revoked; ask the run's operator for a new one (`diloco keys`)."
            )
        if caller.expires is not None and now >= caller.expires:
            raise AuthError(
                f"the certificate of {caller.name!r} expired at {caller.expires.astimezone(UTC):%Y-%m-%d %H:%M} UTC; "
                "ask the run's operator for a new one (`diloco keys rotate`)."
            )
        self._ends.look(now, f"the certificate of {caller.name!r}", caller.expires)
