"""Who may reach a syncer: callers by certificate or token, and which addresses it may bind without either."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.errors import AuthError, ConfigError
from diloco.exchange.wire.address import is_local, socket_path
from diloco.syncer.callers import UNKNOWN, Caller
from diloco.syncer.revocation import Holders
from diloco.syncer.tokens import BearerTokens

if TYPE_CHECKING:
    import grpc


class Authenticator:
    """Says who calls, from the call's connection and metadata; the request itself is not needed. Any thread may call.

    Arguments:
        run: that certificates have to be for.
        keys: the syncer's directory of keys, where it asks for client certificates.
        tokens_file: the tokens and what they may do. With neither, every caller is `UNKNOWN`.

    Raises:
        ConfigError: both, or a file that cannot be read.
    """

    def __init__(self, run: str, *, keys: Path | None = None, tokens_file: Path | None = None) -> None:
        if keys is not None and tokens_file is not None:
            raise ConfigError(
                "a syncer that asks for client certificates takes no tokens; drop tokens_file, or set "
                "no_client_certificates."
            )
        self._holders = None if keys is None else Holders(run, keys)
        self._tokens = None if tokens_file is None else BearerTokens(tokens_file)

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """The sender that a call's credentials name; `check` says whether they hold.

        Raises:
            AuthError: they name none. The text never holds a token.
        """
        if self._holders is not None:
            shown: Any = context.auth_context()  # its values are lists of bytes
            found = list(shown.get("x509_pem_cert", ()))
            if not found:
                raise AuthError(
                    "no certificate was shown and this syncer wants one; name the directory of this holder's keys."
                )
            return self._holders.caller(found[0])
        if self._tokens is not None:
            authorization = str(dict(context.invocation_metadata()).get("authorization", ""))
            return self._tokens.owner(authorization.removeprefix("Bearer "))
        return UNKNOWN

    def check(self, caller: Caller) -> None:
        """Check that a caller's credentials hold, at the beginning of a call and while it lasts.

        Raises:
            AuthError: the certificate or token was revoked, or has expired.
        """
        if self._holders is not None:
            self._holders.check(caller)
        if self._tokens is not None:
            self._tokens.check(caller)


def check_binding(address: str, *, keys: bool, client_certificates: bool, tokens: bool, insecure: bool) -> None:
    """Refuse a port that strangers could reach unprotected. A loopback port and a unix socket are this machine's own.

    Arguments:
        keys: the syncer has a certificate, so that the port speaks TLS.
        client_certificates: callers have to show one too.
        tokens: callers have to send one.

        insecure: accepts plain text.

    Raises:
        ConfigError: it would be open, and no option accepts that; or the address is none.
    """
    if keys and socket_path(address) is not None:
        raise ConfigError(f"{address} is for this user's processes alone and speaks no TLS; drop keys, or bind a port.")
    if is_local(address) or client_certificates:
        return
    if not keys and not insecure:
        raise ConfigError(
            f"{address} can be reached from other machines and has no keys; make them with `diloco keys init` and name "
            "their directory (syncer.keys), bind 127.0.0.1, or accept with --insecure that all that passes can be read "
            "and changed on the way."
        )
    if keys and not tokens:
        raise ConfigError(
            f"{address} can be reached from other machines and would admit every caller; let it ask for client "
            "certificates, or give it a tokens_file."
        )
