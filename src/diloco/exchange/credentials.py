"""What a caller shows to a syncer, which syncers it trusts, and the reason where TLS between them fails."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from pathlib import Path

import grpc

from diloco.errors import ConfigError, translated
from diloco.exchange.key_pair import CA, CERT, KEY, KeyPair, check_valid_now, read_key_pair
from diloco.exchange.wire.address import is_local, socket_path, split_address

log = logging.getLogger("diloco")

LOOK_TIMEOUT_S, LOOK_AGAIN_S = 2.0, 0.5
"""How long each step of a look at a syncer's TLS takes at most, and the pause before the second look."""


class Credentials:
    """Of one caller at one syncer. Any thread may call any method.

    Arguments:
        address: of the syncer.
        keys: directory of a certificate, its key and the authority, as `diloco keys` makes it; read again for every
            connection, so that a new certificate needs no restart.
        token: where the syncer asks for tokens instead.
        ca: with a token, PEM file of the authority that signed the certificate of the syncer, or of the proxy before
            it; None: the system's authorities, or no TLS at all for an address of this machine and with `insecure`.
        insecure: no TLS beyond this machine, on purpose.

    Attributes:
        metadata: of every call.
        is_secure: whether connections speak TLS.

    Raises:
        ConfigError: files that cannot be used, or arguments that contradict each other.
    """

    def __init__(self, address: str, *, keys: Path | None, token: str | None, ca: Path | None, insecure: bool) -> None:
        given = [name for name, it in (("token", token), ("ca", ca), ("insecure", insecure or None)) if it is not None]
        if keys is not None and given:
            raise ConfigError(f"keys=… and {given[0]}=… contradict each other; drop one of them.")
        if insecure and ca is not None:
            raise ConfigError("insecure=True and ca=… contradict each other; drop one of them.")
        self.metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self.is_secure = keys is not None or ca is not None or not (insecure or is_local(address))
        self._address, self._keys, self._ca = address, keys, ca
        self._pair = None if keys is None else read_key_pair(keys)
        if ca is not None:
            with translated(OSError, ConfigError, f"cannot read the authority's certificate {ca}", "check the path"):
                self._ca_text = ca.read_bytes()

    def for_channel(self) -> grpc.ChannelCredentials | None:
        """Those of a new connection; None: it is plain text.

        Raises:
            AuthError: the certificate is not valid now.
        """
        if not self.is_secure:
            return None
        if self._keys is None:
            return grpc.ssl_channel_credentials(None if self._ca is None else self._ca_text)
        self._pair = pair = self._newest()
        check_valid_now(pair.cert, self._keys / CERT)
        return grpc.ssl_channel_credentials(pair.ca, pair.key, pair.cert)

    def have_changed(self) -> bool:
        """Whether the directory holds another certificate than the newest connection shows."""
        return self._keys is not None and self._newest() != self._pair

    def _newest(self) -> KeyPair:
        assert self._keys is not None
        assert self._pair is not None
        try:
            return read_key_pair(self._keys)
        except ConfigError as error:  # it is being copied, or was damaged since
            log.warning("the keys that were read before are used: %s", error)
            return self._pair

    # --- reasons ------------------------------------------------------------------------------------------------------

    def refusal(self) -> str | None:
        """Why TLS with the syncer fails, by a connection of its own; None: not for a reason that this can see. gRPC
        says only that the connection was closed."""
        if not self.is_secure or socket_path(self._address) is not None:
            return None
        refusal = self._look()
        if refusal is not None:  # a syncer that is being stopped may look the same once, and not twice
            time.sleep(LOOK_AGAIN_S)
            refusal = self._look()
        return refusal

    def _look(self) -> str | None:
        host, port = split_address(self._address)
        try:
            context = ssl.create_default_context(cafile=self._keys / CA if self._keys is not None else self._ca)
            context.set_alpn_protocols(["h2"])
            if self._keys is not None:
                context.load_cert_chain(self._keys / CERT, self._keys / KEY)
            with socket.create_connection((host, port), timeout=LOOK_TIMEOUT_S) as plain:
                return self._verdict(context, plain, host)
        except OSError:  # it does not answer at all, or the files here are being replaced
            return None

    def _verdict(self, context: ssl.SSLContext, plain: socket.socket, host: str) -> str | None:
        """What a handshake comes to. In TLS 1.3 the client's certificate is judged after the client's part of it: a
        syncer that refuses hangs up where it would send its settings."""
        try:
            secure = context.wrap_socket(plain, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            return (
                f"the certificate that the syncer at {self._address} shows is not trusted ({error.verify_message}); "
                "use the ca.pem of this run, and an address that the certificate names."
            )
        except ssl.SSLError as error:
            if error.reason == "WRONG_VERSION_NUMBER":
                return f"what answers at {self._address} does not speak TLS; is it the syncer, and has it keys?"
            return None
        with secure:
            try:
                if secure.recv(1):
                    return None
            except TimeoutError:
                return None
            except OSError:  # hung up
                pass
        if self._keys is None:
            return (
                f"the syncer at {self._address} wants a certificate and none was shown; pass the directory of this "
                "learner's keys (keys=…, syncer.keys or --keys; see `diloco keys`)."
            )
        return (
            f"the syncer at {self._address} refused the certificate in {self._keys}: another authority signed it, or "
            "it is not valid by the syncer's clock; copy the directory again from `diloco keys`."
        )
