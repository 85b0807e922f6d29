"""What a caller shows to a syncer, and which syncers it trusts."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import grpc

from diloco.errors import ConfigError, translated
from diloco.exchange.diagnosis import Reason, Way, find_reason
from diloco.exchange.key_pair import CERT, KeyPair, check_valid_now, read_key_pair
from diloco.exchange.wire.address import is_local

log = logging.getLogger("diloco")

LOOK_AGAIN_S = 0.5
"""The pause before a second look at why a syncer refuses."""


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
            raise ConfigError(f"keys and {given[0]} contradict each other; drop one of them.")
        if insecure and ca is not None:
            raise ConfigError("insecure and ca contradict each other; drop one of them.")
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

    def reason(self) -> Reason | None:
        """Why the syncer is not reached, as `find_reason`. A refusal is looked at twice: a syncer that is being stopped
        may look the same once."""
        way = Way(self._address, self.is_secure, self._keys, self._ca)
        reason = find_reason(way)
        if reason is not None and reason.is_refusal:
            time.sleep(LOOK_AGAIN_S)
            reason = find_reason(way)
        return reason
