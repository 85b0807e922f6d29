"""A caller's credentials at a syncer, and the diagnosis of why a syncer is not reached.

gRPC reports only that a connection failed; `find_reason` makes a connection of its own to find out why.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from cryptography import x509

from diloco.errors import ConfigError
from diloco.exchange.key_pair import VARIABLE, AnyKeys, KeyPair, check_valid_now, find_keys, hosts_of
from diloco.exchange.wire.address import is_local, socket_path, split_address

log = logging.getLogger("diloco")

CONFIRM_AFTER_S = 0.5
"""The pause before the second diagnosis of a refusal."""

TIMEOUT_S = 2.0
"""The timeout of each step of a diagnosis."""

WRONG_HOST = frozenset((62, 64))
EXPIRED, NOT_YET_VALID = 10, 9
"""OpenSSL's error numbers for a rejected certificate (X509_V_ERR_…)."""


@dataclass(frozen=True)
class FailureReason:
    """A sentence with the reason and advice. `is_refusal`: one end rejects the other, so waiting does not help."""

    text: str
    is_refusal: bool = False


@dataclass(frozen=True)
class DialSettings:
    """How a caller dials a syncer. `pair`: its keys, which `where` names; None: it uses plain text."""

    address: str
    pair: KeyPair | None
    where: str


class Credentials:
    """The credentials of one caller at one syncer. Any thread may call any method.

    Arguments:
        address: of the syncer.
        keys: a directory or line of `diloco keys`; None: the value of DILOCO_KEYS. A directory is read again for every
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
        """The credentials of a new connection; None: it is plain text.

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
        """Whether the directory has another certificate than the newest connection uses."""
        return self._newest() != self._pair

    def _newest(self) -> KeyPair | None:
        if self._keys is None:
            return None
        try:
            return self._keys.read()
        except ConfigError as error:  # it is being copied, or was damaged
            log.warning("the keys that were read earlier stay in use: %s", error)
            return self._pair

    def reason(self) -> FailureReason | None:
        """Why the syncer is not reached, as `find_reason`. A refusal is confirmed by a second diagnosis: once, a syncer
        that is being stopped may look the same."""
        where = "" if self._keys is None else self._keys.where
        way = DialSettings(self._address, self._newest(), where)
        reason = find_reason(way)
        if reason is not None and reason.is_refusal:
            time.sleep(CONFIRM_AFTER_S)
            reason = find_reason(way)
        return reason


def find_reason(way: DialSettings) -> FailureReason | None:
    """Why calls to a syncer fail; None: the diagnosis finds no reason. Blocks for a few seconds at most."""
    if socket_path(way.address) is not None:
        return _of_socket(way)
    host, port = split_address(way.address)
    try:
        plain = socket.create_connection((host, port), timeout=TIMEOUT_S)
    except socket.gaierror as error:
        advice = "check the address, or this machine's DNS"
        return FailureReason(f"the host name {host!r} of the syncer is not known here ({error.strerror}); {advice}.")
    except ConnectionRefusedError:
        there = "" if is_local(way.address) else " on an address that other machines reach"
        start = f"start the syncer{there} (`diloco syncer RUN_FILE`), or correct the address"
        return FailureReason(f"nothing listens at {way.address}; {start}.")
    except OSError as error:
        said = "no answer within 2 s" if isinstance(error, TimeoutError) else error.strerror or error
        advice = "check the address, and that firewalls let its port through"
        return FailureReason(f"{way.address} cannot be reached ({said}); {advice}.")
    with plain:
        return _of_plain_text(way, plain) if way.pair is None else _of_tls(way, way.pair, plain, host)


def _of_socket(way: DialSettings) -> FailureReason | None:
    path = socket_path(way.address)
    assert path is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as plain:
        try:
            plain.connect(path)
        except OSError as error:
            advice = "start the syncer, or correct the address"
            return FailureReason(f"nothing listens at {way.address} ({error.strerror}); {advice}.")
    return None


def _of_plain_text(way: DialSettings, plain: socket.socket) -> FailureReason | None:
    """Check whether the server requires TLS, in which case it answers a handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        _Tls(context, plain)
    except OSError as error:
        if not (isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or "")):
            return None
    advice = f"give the directory or line that `diloco keys add` made (keys, or the environment variable {VARIABLE})"
    return FailureReason(
        f"the syncer at {way.address} wants TLS, and no keys are given here; {advice}.", is_refusal=True
    )


class _Tls:
    """A client's end of TLS on a connected socket, which stays its owner's: `SSLContext.wrap_socket` takes it over, and
    leaves it open where the peer resets the connection just then.

    Raises:
        OSError: no handshake; an `ssl.SSLError` says why.
    """

    def __init__(self, context: ssl.SSLContext, plain: socket.socket, host: str | None = None) -> None:
        self._plain, self._received, self._to_send = plain, ssl.MemoryBIO(), ssl.MemoryBIO()
        self.secure = context.wrap_bio(self._received, self._to_send, server_hostname=host)
        self._done(self.secure.do_handshake)

    def receive(self) -> bytes:
        """A byte of what the peer sends; none: it has ended the connection. Raises OSError."""
        received: bytes = self._done(lambda: self.secure.read(1))
        return received

    def _done(self, action: Callable[[], Any]) -> Any:
        ends_at = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return action()
            except ssl.SSLWantReadError:
                if (left_s := ends_at - time.monotonic()) <= 0:
                    raise TimeoutError from None
                self._plain.settimeout(left_s)
                self._plain.sendall(self._to_send.read())
                if received := self._plain.recv(1 << 16):
                    self._received.write(received)
                else:
                    self._received.write_eof()


def _of_tls(way: DialSettings, pair: KeyPair, plain: socket.socket, host: str) -> FailureReason | None:
    """Check the outcome of a handshake. In TLS 1.3 the server verifies the client's certificate after the client's part
    of the handshake: a syncer that refuses hangs up instead of sending its HTTP/2 settings."""
    try:
        context = _context(pair)
        tls = _Tls(context, plain, host)
    except ssl.SSLCertVerificationError as error:
        return FailureReason(_distrust(way, pair, host, error), is_refusal=True)
    except ssl.SSLError as error:
        if error.reason == "WRONG_VERSION_NUMBER":
            said = f"the server at {way.address} does not speak TLS, for which {way.where} was given"
            advice = "start the syncer with keys, or give none here if it is meant to have none"
            return FailureReason(f"{said}; {advice}.", is_refusal=True)
        return None
    except OSError:  # hung up
        return None
    try:
        if tls.receive():
            return None
    except TimeoutError:
        return None
    except OSError:  # hung up
        pass
    return FailureReason(
        f"the syncer at {way.address} refused the certificate in {way.where}: another authority signed it, or it is "
        "not valid by the syncer's clock; use the newest keys that `diloco keys` made.",
        is_refusal=True,
    )


def _context(pair: KeyPair) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=pair.ca.decode())
    context.set_alpn_protocols(["h2"])
    held = os.memfd_create("keys")  # the ssl module takes a key from a file only; this one is in memory
    with open(held, "wb") as file:
        file.write(pair.cert + pair.key)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{held}")
    return context


def _distrust(way: DialSettings, pair: KeyPair, host: str, error: ssl.SSLCertVerificationError) -> str:
    """Why the syncer's certificate is not accepted here."""
    shown = _shown_by(way, pair, host)
    head = f"the certificate that the syncer at {way.address} shows is not trusted"
    if error.verify_code in WRONG_HOST:
        names = "" if shown is None else f", but {', '.join(hosts_of(shown))}"
        advice = "use an address that it names, or add this one with `diloco keys rotate syncer --host`"
        return f"{head}: it does not name {host}{names}; {advice}."
    if error.verify_code == EXPIRED:
        ends_at = None if shown is None else x509.load_pem_x509_certificate(shown).not_valid_after_utc
        when = "" if ends_at is None else f" on {ends_at:%Y-%m-%d %H:%M} UTC"
        advice = "replace the syncer's with `diloco keys rotate`, or correct this machine's clock"
        return f"{head}: it expired{when}; {advice}."
    if error.verify_code == NOT_YET_VALID:
        return f"{head}: it is not valid yet ({error.verify_message}); correct this machine's clock."
    return (
        f"{head}: its authority is not that of {way.where} ({error.verify_message}); use the keys of this run, "
        "and the newest ones if its authority was replaced."
    )


def _shown_by(way: DialSettings, pair: KeyPair, host: str) -> bytes | None:
    """The syncer's certificate (PEM), unverified."""
    context = _context(pair)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError, ValueError), socket.create_connection(split_address(way.address), TIMEOUT_S) as plain:
        shown = _Tls(context, plain, host).secure.getpeercert(binary_form=True)
        return None if shown is None else ssl.DER_cert_to_PEM_cert(shown).encode()
    return None
