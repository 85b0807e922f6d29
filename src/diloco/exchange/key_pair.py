"""One holder's keys: its certificate, its private key, and the authorities of the run that it trusts.

`diloco keys` writes them in two forms. A directory is read again for every connection, so that new keys need no
restart:

    ca.pem      the authority that signed the run's certificates; two authorities while one replaces the other
    cert.pem    this holder's certificate
    key.pem     its private key

A line, for an environment variable or a secret store, has the same content and never changes. It is "diloco1." and, in
URL-safe base64 without padding: the length of what follows (2 bytes, big-endian), the key (PKCS #8), the certificate
and the authorities, in DER and each after its length (2 bytes), and the first 8 bytes of the SHA-256 of all that. Equal
keys give equal lines. A line is a secret: no error, log or file of this package contains one.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import hashlib
import os
import re
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from diloco.errors import KEY_LINE, AuthError, ConfigError, translated
from diloco.exchange.wire.address import socket_path
from diloco.whole_files import read_secret

SCHEME = "diloco"
"""A certificate names its holder as `diloco:RUN/ROLE/NAME`, percent-encoded, among its subject alternative names."""

CA, CERT, KEY = "ca.pem", "cert.pem", "key.pem"

VARIABLE = "DILOCO_KEYS"
"""The environment variable with keys, in either form, which are used if no argument gives any."""

_LENGTH_BYTES, _CHECK_BYTES = 2, 8
_PEM, _DER = serialization.Encoding.PEM, serialization.Encoding.DER
_PLAIN = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
_NO_PATH = re.compile(r"[\w.~-]{80,}|[^/]{256,}")
"""A text that is too long for the name of a directory, and may be a part of a line."""


@dataclass(frozen=True)
class KeyPair:
    """Authorities, certificate and private key, as PEM texts."""

    ca: bytes
    cert: bytes
    key: bytes = field(repr=False)


class Keys:
    """The keys of one holder, from a directory or a line.

    Arguments:
        given: the directory, or the line.
        name: the name of the argument or variable, for errors.

    Attributes:
        directory: the directory; None: a line was given.
        where: the keys' source for messages, without a secret: the directory, or the name of the line.

    Raises:
        ConfigError: `given` is neither a directory nor a line, or is a damaged line.
    """

    def __init__(self, given: str | Path, name: str = "keys") -> None:
        text = str(given)
        compact = "".join(text.split())
        self._pair: KeyPair | None = None
        self.directory: Path | None = None
        if not compact:
            raise ConfigError(f"{name} is empty; name the directory or give the line of keys that `diloco keys` made.")
        if (start := compact.find(KEY_LINE)) == 0:
            self.where = f"the line of {name}"
            self._pair = parse_key_line(text, self.where)
            return
        is_there = os.path.exists(text)  # noqa: PTH110 # no error for a long name
        if start > 0 and not is_there:
            raise ConfigError(
                f"{name} has {start} characters before {KEY_LINE}; give the line alone, without a name or quotes."
            )
        if _NO_PATH.search(compact) and not is_there:
            raise ConfigError(
                f"{name} is a text of {len(compact)} characters that names no directory and does not begin with "
                f"{KEY_LINE}; copy the line whole, as `diloco keys add` printed it."
            )
        self.directory, self.where = Path(given), text

    def read(self) -> KeyPair:
        """Read the keys; those of a directory may have changed.

        Raises:
            ConfigError: as `read_key_pair`.
        """
        if self._pair is not None:
            return self._pair
        assert self.directory is not None
        return read_key_pair(self.directory)

    def required_directory(self) -> Path:
        """The directory. Raises ConfigError: a line was given, and a syncer needs a directory."""
        if self.directory is None:
            raise ConfigError(
                f"a syncer cannot serve with {self.where}: it reads its certificate and the list of revoked ones again "
                "whenever they change; name the directory that `diloco keys` made for it."
            )
        return self.directory


AnyKeys = str | Path | Keys
"""A directory of keys, a line of keys, or either as `Keys`."""


def find_keys(given: AnyKeys | None, address: str, *, insecure: bool) -> Keys | None:
    """The keys to use at an address (or several, with commas between them): those given, or else those in the
    environment variable DILOCO_KEYS; None: plain text.

    The variable is not read with `insecure`, nor for a unix socket, which speaks no TLS.

    Raises:
        ConfigError: as `Keys`; or keys are given together with `insecure`.
    """
    if given is not None:
        if insecure:
            raise ConfigError("keys and insecure contradict each other; drop one of them.")
        return given if isinstance(given, Keys) else Keys(given)
    held = os.environ.get(VARIABLE, "")
    if not held or insecure or socket_path(address) is not None:
        return None
    return Keys(held, VARIABLE)


def read_key_pair(directory: Path) -> KeyPair:
    """The keys of a directory.

    Raises:
        ConfigError: a file cannot be read, other users of this machine may read the private key, or the files do not
            belong together.
    """
    key = read_secret(directory / KEY, "key")
    with translated(OSError, ConfigError, f"cannot read the keys in {directory}", "copy all of the directory"):
        ca, cert = (directory / CA).read_bytes(), (directory / CERT).read_bytes()
    try:
        authorities, certificate = x509.load_pem_x509_certificates(ca), x509.load_pem_x509_certificate(cert)
        owner = serialization.load_pem_private_key(key, password=None).public_key()
        public = certificate.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:  # TypeError: it has a password
        raise ConfigError(
            f"the files in {directory} are not PEM certificates and a plain key ({error}); use those of `diloco keys`."
        ) from error
    if owner != public:
        raise ConfigError(f"{directory / KEY} is not the key of {CERT} beside it; copy both again from `diloco keys`.")
    if not any(has_signed(authority, certificate) for authority in authorities):
        raise ConfigError(
            f"{directory / CERT} was not signed by the {CA} beside it; copy both again from `diloco keys`."
        )
    return KeyPair(ca, cert, key)


def key_line(pair: KeyPair) -> str:
    """Keys as a line. `pair`: as `read_key_pair` returns it."""
    key = serialization.load_pem_private_key(pair.key, password=None)
    certificates = [x509.load_pem_x509_certificate(pair.cert), *x509.load_pem_x509_certificates(pair.ca)]
    parts = [key.private_bytes(_DER, *_PLAIN), *(each.public_bytes(_DER) for each in certificates)]
    body = b"".join(_with_length(part) for part in parts)
    data = _with_length(body)
    return KEY_LINE + base64.urlsafe_b64encode(data + _checksum(data)).rstrip(b"=").decode()


def parse_key_line(line: str, where: str = "the line of keys") -> KeyPair:
    """The keys of a line; spaces and line breaks in it are ignored. `where`: names the line in errors.

    Raises:
        ConfigError: the line is truncated, was changed, or its keys do not belong together. The text has no part of it.
    """
    again = "copy it whole, as `diloco keys add` printed it."
    text = "".join(line.split()).removeprefix(KEY_LINE)
    if (wrong := re.search(r"[^A-Za-z0-9_-]", text)) is not None:
        raise ConfigError(f"{where} has {wrong[0]!r} as its character {len(KEY_LINE) + wrong.start() + 1}; {again}")
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error:  # no bytes have so many characters
        data = b""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
    if len(data) != end + _CHECK_BYTES:
        whole = len(KEY_LINE) + (4 * (end + _CHECK_BYTES) + 2) // 3
        raise ConfigError(f"{where} has {len(KEY_LINE) + len(text)} characters, and by its beginning {whole}; {again}")
    if data[end:] != _checksum(data[:end]):
        raise ConfigError(f"{where} was changed in transit (its checksum does not match); {again}")
    parts, at = list[bytes](), _LENGTH_BYTES
    while at < end:
        begins = at + _LENGTH_BYTES
        at = begins + int.from_bytes(data[at:begins], "big")
        parts.append(data[begins:at])
    others = ConfigError(f"{where} holds no keys that belong together; make a new one with `diloco keys`.")
    try:
        key = serialization.load_der_private_key(parts[0], password=None)
        cert, *trusted = [x509.load_der_x509_certificate(each) for each in parts[1:]]
        is_owner = key.public_key() == cert.public_key()
    except (ValueError, TypeError, IndexError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise others from error
    if not is_owner or not any(has_signed(authority, cert) for authority in trusted):
        raise others
    ca = b"".join(each.public_bytes(_PEM) for each in trusted)
    return KeyPair(ca, cert.public_bytes(_PEM), key.private_bytes(_PEM, *_PLAIN))


def _with_length(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECK_BYTES]


def has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Whether an authority has signed a certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return True


def names_on(certificate: x509.Certificate) -> tuple[str, str, str] | None:
    """The run, role and name of the holder of a certificate; None: the certificate has none."""
    for uri in _alternative_names(certificate):
        scheme, _, path = str(uri.value).partition(":")
        parts = [urllib.parse.unquote(part) for part in path.split("/")]
        if isinstance(uri, x509.UniformResourceIdentifier) and scheme == SCHEME and len(parts) == 3:
            run, role, name = parts
            return run, role, name
    return None


def hosts_of(cert: bytes) -> list[str]:
    """The hosts that a syncer's certificate (PEM) is for."""
    names = _alternative_names(x509.load_pem_x509_certificate(cert))
    return [str(name.value) for name in names if not isinstance(name, x509.UniformResourceIdentifier)]


def _alternative_names(certificate: x509.Certificate) -> list[x509.GeneralName]:
    try:
        return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def learner_of(pair: KeyPair) -> str | None:
    """The name of the learner whose keys these are; None: they are for another role."""
    names = names_on(x509.load_pem_x509_certificate(pair.cert))
    return names[2] if names is not None and names[1] == "learner" else None


def check_valid_now(cert: bytes, where: str) -> None:
    """Check a certificate's dates by this machine's clock.

    Raises:
        AuthError: it has expired, or is not valid yet.
    """
    certificate, now = x509.load_pem_x509_certificate(cert), dt.datetime.now(dt.UTC)
    if now >= certificate.not_valid_after_utc:
        raise AuthError(
            f"the certificate in {where} expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; "
            "`diloco keys rotate` makes a new one."
        )
    if now < certificate.not_valid_before_utc:
        raise AuthError(
            f"the certificate in {where} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on; "
            "check this machine's clock."
        )
