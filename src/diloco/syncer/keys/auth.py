"""Authentication of callers by certificate, the list of revoked certificates, and the addresses that a syncer may bind
without keys.

`revoked.toml`, beside the syncer's own certificate, lists certificates that it refuses before they expire:

    [[revoked]]
    serial = "3f21…"
    name = "site-a"
    at = "2026-11-22T20:00:00Z"     # refused from then on; in the future while a new one is being copied
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.errors import AuthError, ConfigError, UnreachableError
from diloco.exchange.wire.address import is_local, socket_path
from diloco.syncer.keys.certificates import BOUND, UNKNOWN, Caller, ExpiryWarnings, holder_of
from diloco.tables import Table, read_text, read_toml, validate, write_toml
from diloco.whole_files import mark_of, replace_secret

if TYPE_CHECKING:
    import grpc

REVOKED = "revoked.toml"


class Revoked(Table):
    """A certificate that is refused from `at` on."""

    serial: str
    name: str
    at: datetime


class RevokedFile(Table):
    """The content of `revoked.toml`."""

    revoked: tuple[Revoked, ...] = ()


def read_revoked(path: Path) -> Mapping[str, datetime]:
    """The time from which each certificate is refused, by its serial number. Raises ConfigError."""
    found = validate(RevokedFile, read_toml(read_text(path, "list of revoked certificates"), str(path)), str(path))
    for each in found.revoked:
        if each.at.tzinfo is None:
            raise ConfigError(f"{path} revokes {each.name!r} at {each.at} without a time zone; add Z for UTC.")
    return {each.serial: each.at for each in found.revoked}


def write_revoked(path: Path, revoked: Iterable[Revoked]) -> None:
    """Replace the file atomically."""
    text = write_toml(RevokedFile(revoked=tuple(revoked)).model_dump(mode="json"))
    replace_secret(path, f"# certificates that the syncer refuses; `diloco keys` writes this\n{text}".encode())


class RevokedList:
    """The list at `path`, read again when the file has changed. Any thread may call it.

    Raises:
        ConfigError: as `read`.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: tuple[tuple[int, ...] | None, Mapping[str, datetime]] | None = None
        self.read()

    def read(self) -> Mapping[str, datetime]:
        """The newest list, as `read_revoked`.

        Raises:
            ConfigError: the file cannot be read, or is invalid.
        """
        with self._lock:
            seen = mark_of(self._path)
            if self._known is None or seen is None or self._known[0] != seen:
                self._known = (seen, read_revoked(self._path))
            return self._known[1]


class Authenticator:
    """Identifies callers by the certificate of their connection, without parsing the request. Any thread may call.

    TLS has verified the certificate against the run's authority when the connection began. Revocation and expiry, which
    may have come since, are checked in every call.

    Arguments:
        run: that certificates must name.
        keys: the syncer's directory of keys; None: the syncer asks for no certificates, and every caller is `UNKNOWN`.

    Raises:
        ConfigError: there is no list of revoked certificates, or it cannot be read.
    """

    def __init__(self, run: str, *, keys: Path | None = None) -> None:
        self._run, self._expiries = run, ExpiryWarnings()
        self._revoked = None if keys is None else RevokedList(keys / REVOKED)

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """The holder of the certificate that a call's connection shows; `check` tells whether it is still valid.

        Raises:
            AuthError: there is no certificate, it names no holder, or it is for another run.
        """
        if self._revoked is None:
            return UNKNOWN
        shown: Any = context.auth_context()  # its values are lists of bytes
        found = list(shown.get("x509_pem_cert", ()))
        if not found:
            raise AuthError("this syncer requires a certificate and the caller presented none; give its keys.")
        holder = holder_of(found[0])
        if holder.run != self._run:
            raise AuthError(
                f"the certificate of {holder.name!r} is for run {holder.run!r} and this syncer serves {self._run!r}; "
                "use the keys of this run."
            )
        bound = holder.name if holder.role in BOUND else None
        return Caller(holder.name, holder.role, bound, holder.serial, holder.expires)

    def check(self, caller: Caller) -> None:
        """Check that a caller's certificate is still valid, at the beginning of a call and while it lasts.

        Raises:
            AuthError: the certificate was revoked, or has expired.
            UnreachableError: the list of revoked certificates cannot be read, so no caller is admitted. Callers try
                again, since the file is incomplete for a moment while it is copied.
        """
        if self._revoked is None:
            return
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
        self._expiries.warn(now, f"the certificate of {caller.name!r}", caller.expires)


def check_binding(address: str, *, keys: bool, insecure: bool) -> None:
    """Refuse a port that other machines could reach unprotected. Loopback ports and unix sockets are always allowed.

    Arguments:
        keys: the syncer has keys: the port uses TLS, and callers show certificates.
        insecure: plain text is accepted.

    Raises:
        ConfigError: the port would be open although `insecure` is False; or the address is invalid.
    """
    if keys and socket_path(address) is not None:
        raise ConfigError(f"{address} is only for this user's processes and has no TLS; drop keys, or bind a port.")
    if not (is_local(address) or keys or insecure):
        raise ConfigError(
            f"{address} can be reached from other machines and has no keys; make them with `diloco keys init` and name "
            "their directory (syncer.keys), bind 127.0.0.1, or accept with --insecure that all traffic can be read "
            "and changed on the way."
        )
