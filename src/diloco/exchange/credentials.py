"""What a caller shows to a syncer, and which syncers it trusts."""

from __future__ import annotations

import logging
import time

import grpc

from diloco.errors import ConfigError
from diloco.exchange.diagnosis import Reason, Way, find_reason
from diloco.exchange.key_pair import VARIABLE, AnyKeys, KeyPair, check_valid_now, find_keys
from diloco.exchange.wire.address import is_local

log = logging.getLogger("diloco")

LOOK_AGAIN_S = 0.5
"""The pause before a second look at why a syncer refuses."""


class Credentials:
    """Of one caller at one syncer. Any thread may call any method.

    Arguments:
        address: of the syncer.
        keys: a directory or line of `diloco keys`; None: what DILOCO_KEYS holds. A directory is read again for every
            connection, so that a new certificate needs no restart.
        insecure: no TLS beyond this machine, on purpose.

    Raises:
        ConfigError: keys that cannot be used, none for a syncer on another machine, or arguments that contradict each
            other.
    """

    def __init__(self, address: str, *, keys: AnyKeys | None, insecure: bool) -> None:
        self._address, self._keys = address, find_keys(keys, address, insecure=insecure)
        if self._keys is None and not (insecure or is_local(address)):
            raise ConfigError(
                f"{address} is on another machine and no keys are given; give the directory or line that `diloco keys "
                f"add` made (keys, or the environment variable {VARIABLE}), or accept with insecure that all that "
                "passes can be read and changed on the way."
            )
        self._pair = None if self._keys is None else self._keys.read()

    def for_channel(self) -> grpc.ChannelCredentials | None:
        """Those of a new connection; None: it is plain text.

        Raises:
            AuthError: the certificate is not valid now.
        """
        if self._keys is None:
            return None
        self._pair = pair = self._newest()
        assert pair is not None
        check_valid_now(pair.cert, self._keys.where)
        return grpc.ssl_channel_credentials(pair.ca, pair.key, pair.cert)

    def have_changed(self) -> bool:
        """Whether the directory holds another certificate than the newest connection shows."""
        return self._newest() != self._pair

    def _newest(self) -> KeyPair | None:
        if self._keys is None:
            return None
        try:
            return self._keys.read()
        except ConfigError as error:  # it is being copied, or was damaged since
            log.warning("the keys that were read before are used: %s", error)
            return self._pair

    def reason(self) -> Reason | None:
        """Why the syncer is not reached, as `find_reason`. A refusal is looked at twice: a syncer that is being stopped
        may look the same once."""
        where = "" if self._keys is None else self._keys.where
        way = Way(self._address, self._newest(), where)
        reason = find_reason(way)
        if reason is not None and reason.is_refusal:
            time.sleep(LOOK_AGAIN_S)
            reason = find_reason(way)
        return reason
