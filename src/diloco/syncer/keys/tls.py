"""TLS credentials of a syncer's port, reloaded when its keys change."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import grpc

from diloco.errors import ConfigError
from diloco.exchange.key_pair import CA, CERT, KEY, KeyPair, check_valid_now, hosts_of, read_key_pair
from diloco.syncer.keys.certificates import ExpiryWarnings, holder_of
from diloco.whole_files import mark_of

log = logging.getLogger("diloco.syncer")


def server_credentials(directory: Path) -> grpc.ServerCredentials:
    """TLS with the keys in `directory`; a client without a certificate of the run is disconnected.

    Every handshake checks the files for changes, so that a new certificate needs no restart.

    Raises:
        ConfigError: the keys cannot be used, or are a learner's. AuthError: the certificate is not valid now.
    """
    files, expiries = [directory / name for name in (CA, CERT, KEY)], ExpiryWarnings()
    looked = [*map(mark_of, files)]
    known = read_syncer_keys(directory)
    expires = holder_of(known.cert).expires
    expiries.warn(dt.datetime.now(dt.UTC), "the syncer's own certificate", expires)

    def newest() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known, looked, expires
        expiries.warn(dt.datetime.now(dt.UTC), "the syncer's own certificate", expires)
        if (marks := [*map(mark_of, files)]) == looked:
            return None
        looked = marks
        try:
            found = read_key_pair(directory)
        except ConfigError as error:
            log.error("the syncer keeps its earlier keys: %s", error)
            return None
        if found == known:
            return None
        known, expires = found, holder_of(found.cert).expires
        log.info("the syncer uses its new certificate, which expires at %s UTC", f"{expires:%Y-%m-%d %H:%M}")
        return _configuration(known)

    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", newest)  # it may return None
    return grpc.dynamic_ssl_server_credentials(_configuration(known), fetch, require_client_authentication=True)


def read_syncer_keys(directory: Path) -> KeyPair:
    """Read a syncer's keys. Raises as `server_credentials`."""
    pair = read_key_pair(directory)
    if not hosts_of(pair.cert):
        raise ConfigError(f"the certificate in {directory} names no host; a syncer needs that of `diloco keys init`.")
    check_valid_now(pair.cert, str(directory))
    return pair


def _configuration(pair: KeyPair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.cert)], root_certificates=pair.ca)
