"""Who may reach a syncer: callers by certificate, and which addresses it may bind without any."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.errors import AuthError, ConfigError
from diloco.exchange.wire.address import is_local, socket_path
from diloco.syncer.callers import UNKNOWN, Caller
from diloco.syncer.revocation import Holders

if TYPE_CHECKING:
    import grpc


class Authenticator:
    """Says who calls, from the call's connection; the request itself is not needed. Any thread may call.

    Arguments:
        run: that certificates have to be for.
        keys: the syncer's directory of keys; None: it asks for no certificates, and every caller is `UNKNOWN`.

    Raises:
        ConfigError: a file that cannot be read.
    """

    def __init__(self, run: str, *, keys: Path | None = None) -> None:
        self._holders = None if keys is None else Holders(run, keys)

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """The sender that a call's certificate names; `check` says whether it holds.

        Raises:
            AuthError: it names none.
        """
        if self._holders is None:
            return UNKNOWN
        shown: Any = context.auth_context()  # its values are lists of bytes
        found = list(shown.get("x509_pem_cert", ()))
        if not found:
            raise AuthError("no certificate was shown and this syncer wants one; give this holder's keys.")
        return self._holders.caller(found[0])

    def check(self, caller: Caller) -> None:
        """Check that a caller's certificate holds, at the beginning of a call and while it lasts.

        Raises:
            AuthError: it was revoked, or has expired.
        """
        if self._holders is not None:
            self._holders.check(caller)


def check_binding(address: str, *, keys: bool, insecure: bool) -> None:
    """Refuse a port that strangers could reach unprotected. A loopback port and a unix socket are this machine's own.

    Arguments:
        keys: the syncer has keys: the port speaks TLS, and callers show certificates.
        insecure: accepts plain text.

    Raises:
        ConfigError: it would be open, and no option accepts that; or the address is none.
    """
    if keys and socket_path(address) is not None:
        raise ConfigError(f"{address} is for this user's processes alone and speaks no TLS; drop keys, or bind a port.")
    if not (is_local(address) or keys or insecure):
        raise ConfigError(
            f"{address} can be reached from other machines and has no keys; make them with `diloco keys init` and name "
            "their directory (syncer.keys), bind 127.0.0.1, or accept with --insecure that all that passes can be read "
            "and changed on the way."
        )
