"""The directory of one holder's keys: the authority that it trusts, its certificate, and the key of that.

    ca.pem      who signed the certificates of the run; two authorities while one replaces the other
    cert.pem    this holder's
    key.pem     its secret

A site, a viewer or a syncer gets such a directory from `diloco keys`, and reads nothing else.
"""

from __future__ import annotations

import datetime as dt
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from diloco.errors import AuthError, ConfigError, translated
from diloco.secret_files import read_secret

SCHEME = "diloco"
"""A certificate names its holder as `diloco:RUN/ROLE/NAME`, percent-encoded, among its subject alternative names."""

CA, CERT, KEY = "ca.pem", "cert.pem", "key.pem"


@dataclass(frozen=True)
class KeyPair:
    """PEM texts."""

    ca: bytes
    cert: bytes
    key: bytes


def read_key_pair(directory: Path) -> KeyPair:
    """The keys of a directory.

    Raises:
        ConfigError: one cannot be read, other users of this machine may read the secret, or they do not belong
            together.
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
            f"the files in {directory} are no certificates and plain key in PEM ({error}); use those of `diloco keys`."
        ) from error
    if owner != public:
        raise ConfigError(f"{directory / KEY} is not the key of {CERT} beside it; copy both again from `diloco keys`.")
    if not any(has_signed(authority, certificate) for authority in authorities):
        raise ConfigError(
            f"{directory / CERT} was not signed by the {CA} beside it; copy both again from `diloco keys`."
        )
    return KeyPair(ca, cert, key)


def has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Whether an authority has signed a certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return True


def names_on(certificate: x509.Certificate) -> tuple[str, str, str] | None:
    """The run, role and name of the holder of a certificate; None: it says none."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    for uri in names.get_values_for_type(x509.UniformResourceIdentifier):
        scheme, _, path = uri.partition(":")
        parts = [urllib.parse.unquote(part) for part in path.split("/")]
        if scheme == SCHEME and len(parts) == 3:
            run, role, name = parts
            return run, role, name
    return None


def hosts_of(cert: bytes) -> list[str]:
    """The hosts for which a syncer may show a certificate (PEM)."""
    try:
        found = (
            x509.load_pem_x509_certificate(cert).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        )
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in found if not isinstance(name, x509.UniformResourceIdentifier)]


def learner_of(directory: Path) -> str | None:
    """The learner that the keys of a directory are for; None: they are for another role. Raises as `read_key_pair`."""
    names = names_on(x509.load_pem_x509_certificate(read_key_pair(directory).cert))
    return names[2] if names is not None and names[1] == "learner" else None


def check_valid_now(cert: bytes, where: Path) -> None:
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
