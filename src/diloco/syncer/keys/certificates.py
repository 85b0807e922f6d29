"""The certificates of a run: its authority, the certificates that it signs, their holders and their expiry;
and the callers that certificates name, with the rights of each role.

A certificate names its holder as a URI, `diloco:RUN/ROLE/NAME`, among its subject alternative names. The syncer's own,
and that of its standby, also names the hosts that learners dial, and serves as client and server certificate.

role       may
viewer     read status, history and the global model
evaluator  what a viewer may, and report results of the global model
learner    what a viewer may, and join, push and pull as itself (it holds the global model anyway)
rollout    what a viewer may, and generate groups of reinforcement learning as itself
reward     what a viewer may, and score them as itself
standby    what a viewer may, and serve the run: the role of syncers
admin      everything, for any learner: also whatever changes a run
"""

from __future__ import annotations

import datetime as dt
import functools
import ipaddress
import logging
import secrets
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diloco.errors import AuthError, ConfigError, translated
from diloco.exchange.key_pair import SCHEME, has_signed, names_on
from diloco.whole_files import read_secret

AUTHORITY_DAYS = 3650
"""The authority outlives its certificates, so that one of them can be replaced without a change at other sites."""
SOON, AGAIN = dt.timedelta(days=14), dt.timedelta(days=1)
"""How long before its expiry a certificate is named in the syncer's log, and how often."""

_PEM = serialization.Encoding.PEM

log = logging.getLogger("diloco.syncer")

Role = Literal["viewer", "evaluator", "learner", "rollout", "reward", "standby", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
MAY: Mapping[Role, frozenset[Role]] = {
    "viewer": frozenset({"viewer"}),
    "evaluator": frozenset({"viewer", "evaluator"}),
    "learner": frozenset({"viewer", "learner"}),
    "rollout": frozenset({"viewer", "rollout"}),
    "reward": frozenset({"viewer", "reward"}),
    "standby": frozenset({"viewer"}),
    "admin": frozenset(ROLES),
}
"""The roles in which a caller of each role may act."""

BOUND: frozenset[Role] = frozenset({"learner", "rollout", "reward"})
"""Roles whose holder speaks for itself alone."""


@dataclass(frozen=True)
class Caller:
    """The sender of a call, as its certificate names it.

    Attributes:
        name: in the certificate.
        learner: the only learner id that it may speak for; None: any.
        key: the serial number of the certificate.
        expires: end of the certificate; None: never.
    """

    name: str
    role: Role
    learner: str | None = None
    key: str = ""
    expires: dt.datetime | None = None

    def may(self, needed: Role, learner: str | None = None) -> None:
        """Check that the caller may act as `needed`, and speak for `learner` if it is given.

        Raises:
            AuthError: it may not.
        """
        if needed not in MAY[self.role]:
            raise AuthError(f"{self.name!r} has the role {self.role!r} and this needs {needed!r}; use other keys.")
        if learner is not None and self.learner not in (None, learner):
            raise AuthError(
                f"{self.name!r} may speak for {self.role} {self.learner!r} only, not for {learner!r}; use that one's "
                "own keys."
            )


UNKNOWN = Caller("anyone", "admin")
"""The caller of every call of a syncer without keys; it may do everything."""


@dataclass(frozen=True)
class Holder:
    """The holder of a certificate, its serial number and its validity.

    Attributes:
        serial: hexadecimal.
    """

    run: str
    role: Role
    name: str
    serial: str
    begins: dt.datetime
    expires: dt.datetime


@dataclass(frozen=True)
class Signed:
    """A certificate and its key, as PEM texts."""

    holder: Holder
    cert: bytes
    key: bytes


class Authority:
    """Signs the certificates of one run.

    Attributes:
        cert, key: PEM texts.
    """

    def __init__(self, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.cert, self.key = cert.public_bytes(_PEM), _plain(key)
        self._cert, self._key = cert, key

    @classmethod
    def new(cls, run: str) -> Authority:
        """Make a new authority: ECDSA P-256, with a unique name, since two are trusted while one replaces the other."""
        key, name = ec.generate_private_key(ec.SECP256R1()), _subject(f"diloco {run}"[:55] + f" {secrets.token_hex(4)}")
        begins = now() - dt.timedelta(hours=1)
        ends = begins + dt.timedelta(days=AUTHORITY_DAYS)
        cert = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), begins, ends)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(authority=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(cert, key)

    @classmethod
    def read(cls, certs: Path, key: Path) -> Authority | None:
        """The authority of a key, with its certificate from the file `certs`; None: the file does not have it.

        Raises:
            ConfigError: a file cannot be read or is invalid, or other users may read the key.
        """
        secret = read_secret(key, "authority's key")
        with translated(OSError, ConfigError, f"cannot read {certs}", "make it with `diloco keys init`"):
            public = certs.read_bytes()
        with translated(
            (ValueError, TypeError, AssertionError, UnsupportedAlgorithm), ConfigError,
            f"{certs} and {key} are not an authority's", "use those that `diloco keys` made",
        ):  # fmt: skip
            loaded = serialization.load_pem_private_key(secret, password=None)
            assert isinstance(loaded, ec.EllipticCurvePrivateKey)
            for cert in x509.load_pem_x509_certificates(public):
                if cert.public_key() == loaded.public_key():
                    return cls(cert, loaded)
        return None

    def has_signed(self, cert: bytes) -> bool:
        """Whether this authority has signed a certificate (PEM)."""
        return has_signed(self._cert, x509.load_pem_x509_certificate(cert))

    def sign(self, run: str, role: Role, name: str, *, hosts: Sequence[str] = (), lifetime: dt.timedelta) -> Signed:
        """Make a key and sign a certificate for it, valid from an hour ago. With `hosts`, it is a server's certificate.

        Raises:
            ConfigError: a host is neither a name nor an address.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        uri = f"{SCHEME}:{urllib.parse.quote(run, safe='')}/{role}/{name}"
        names = [x509.UniformResourceIdentifier(uri), *(general_name(host) for host in dict.fromkeys(hosts))]
        serial, begins = x509.random_serial_number(), now() - dt.timedelta(hours=1)
        ends = min(now() + lifetime, self._cert.not_valid_after_utc)
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        authority = self._cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        cert = (
            x509.CertificateBuilder(self._cert.subject, _subject(name), key.public_key(), serial, begins, ends)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Signed(_holder(cert), cert.public_bytes(_PEM), _plain(key))


@functools.lru_cache(maxsize=1024)
def holder_of(cert: bytes) -> Holder:
    """The holder that a certificate (PEM) names.

    Raises:
        AuthError: it names no holder.
    """
    try:
        return _holder(x509.load_pem_x509_certificate(cert))
    except (ValueError, x509.InvalidVersion, x509.DuplicateExtension) as error:
        raise AuthError(f"the certificate cannot be read ({error}); make one with `diloco keys`.") from error


def _holder(cert: x509.Certificate) -> Holder:
    begins, ends = cert.not_valid_before_utc, cert.not_valid_after_utc
    if (names := names_on(cert)) is not None:
        run, role, name = names
        for known in ROLES:
            if role == known:
                return Holder(run, known, name, f"{cert.serial_number:x}", begins, ends)
    raise AuthError(
        f"the certificate names no run, role and name; make it with `diloco keys` ({SCHEME}:RUN/ROLE/NAME)."
    )


def general_name(host: str) -> x509.GeneralName:
    """A host name or IP address in the form of a certificate.

    Raises:
        ConfigError: it is neither.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass  # not an address
    try:
        if not host or set(host) & set(" :/[]"):
            raise ValueError("such a name cannot be dialled")
        return x509.DNSName(host.encode("idna").decode())
    except ValueError as error:
        raise ConfigError(
            f"{host!r} is not a host name or IP address ({error}); give it without a port, as in --host "
            "syncer.example.org."
        ) from error


class ExpiryWarnings:
    """Logs certificates that expire soon, each at most once in `AGAIN`. Any thread may call it."""

    def __init__(self) -> None:
        self._named_at: dict[str, dt.datetime] = {}

    def warn(self, now: dt.datetime, what: str, expires: dt.datetime | None) -> None:
        """Log a certificate that expires within `SOON`; None: it does not expire."""
        if expires is None or expires - now > SOON:
            return
        named_at = self._named_at.get(what)
        if named_at is None or now - named_at >= AGAIN:
            self._named_at[what] = now
            when = f"{expires.astimezone(dt.UTC):%Y-%m-%d %H:%M} UTC"
            said = f"ended at {when}" if expires <= now else f"ends in {left(now, expires)}, at {when}"
            log.warning("%s %s; `diloco keys rotate` makes a new one", what, said)


def left(now: dt.datetime, expires: dt.datetime) -> str:
    """The time from `now` to `expires`, which is later, in words: whole hours, or rounded days."""
    rest = expires - now
    hours = rest // dt.timedelta(hours=1)
    return f"{hours} hours" if hours < 48 else f"{round(rest / dt.timedelta(days=1))} days"


def now() -> dt.datetime:
    """The time, in the whole seconds of a certificate."""
    return dt.datetime.now(dt.UTC).replace(microsecond=0)


def _plain(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
