"""A certificate for the syncer's port and the authority that vouches for it, made in one go, and read again.

The authority's private key is used once and never written, so a second certificate that learners would trust cannot be
made.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diloco.errors import ConfigError


@dataclass(frozen=True)
class Certificates:
    """PEM texts: what learners trust, what the syncer shows, and its secret key."""

    ca: bytes
    server: bytes
    server_key: bytes


def make_certificates(hosts: Sequence[str], *, days: int = 825) -> Certificates:
    """An authority and a server certificate for these host names and IP addresses; ECDSA P-256, valid from an hour ago.

    Raises:
        ConfigError: no host, or one that is neither a name nor an address.
    """
    if not hosts:
        raise ConfigError(
            "a certificate needs a host; name what learners will dial, for example --host syncer.example.org."
        )
    names = x509.SubjectAlternativeName([_name(host) for host in dict.fromkeys(hosts)])
    now = dt.datetime.now(dt.UTC)
    start, end = now - dt.timedelta(hours=1), now + dt.timedelta(days=days)

    ca_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name, server_name = _subject("diloco run authority"), _subject("diloco syncer")
    ca_key_id = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())

    def builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        public = key.public_key()
        return (
            x509.CertificateBuilder(ca_name, subject, public, x509.random_serial_number(), start, end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_key_id), critical=False)
        )

    ca = (
        builder(ca_name, ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    server = (
        builder(server_name, server_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(names, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Certificates(ca.public_bytes(pem), server.public_bytes(pem), secret)


def read_certificate(cert: Path, key: Path) -> tuple[x509.Certificate, bytes, bytes]:
    """A syncer's certificate, and the bytes of both PEM files, the key's first.

    Raises:
        ConfigError: a file cannot be read, or the key is not that of the certificate.
    """
    try:
        secret, public = key.read_bytes(), cert.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read ({error.strerror}); make it with `diloco keys new`."
        ) from error
    try:
        certificate = x509.load_pem_x509_certificate(public)
        owner = serialization.load_pem_private_key(secret, password=None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: the key has a password
        raise ConfigError(
            f"{cert} and {key} are no certificate and plain key in PEM ({error}); make them with `diloco keys new`."
        ) from error
    if owner != certificate.public_key():
        raise ConfigError(f"{key} is not the key of {cert}; use the two that `diloco keys new` made together.")
    return certificate, secret, public


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass  # a name, then
    try:
        if not host or set(host) & set(" :/[]"):
            raise ValueError("such a name cannot be dialled")
        return x509.DNSName(host.encode("idna").decode())
    except ValueError as error:
        raise ConfigError(
            f"{host!r} is no host name or IP address ({error}); give it without a port, as in --host "
            "syncer.example.org."
        ) from error


def _subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
