"""The keys of one run, with its operator: `diloco keys` makes and changes this directory.

ca.pem, ca.key        the authority and its secret key       stay with the operator; next-ca.key: of the next one
certificates.toml     list of signed certificates            stays with the operator
syncer/               the syncer's keys, and revoked.toml    copy to the syncer
<name>/               keys of a learner, viewer or admin     copy to its owner
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from diloco.errors import ConfigError, StoreError, translated
from diloco.exchange.key_pair import CA, CERT, KEY
from diloco.run.validation import NAME
from diloco.syncer.keys.auth import REVOKED, Revoked, write_revoked
from diloco.syncer.keys.certificates import ROLES, Authority, Role, Signed, general_name, now
from diloco.tables import Table, read_text, read_toml, validate, write_toml
from diloco.whole_files import replace_secret, write_secret

# The authority of a run, in the operator's directory, and its successor while it is being replaced.
#
# ca.pem         certificates that every holder trusts: the authority's, and its successor's
# ca.key         the authority's secret key
# next-ca.key    the successor's secret key
#
# Each change replaces one file, so that the same command continues after a crash.

CA_KEY, NEXT_KEY = "ca.key", "next-ca.key"


class Authorities:
    """The authority in a directory, and its successor.

    Attributes:
        current: signs the certificates of syncers, since learners may not trust the successor yet.
        next: the successor, if the authority is being replaced; signs all other certificates.

    Raises:
        ConfigError: there is no authority, or other users of this machine may read its key.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        current = Authority.read(directory / CA, directory / CA_KEY)
        if current is None:
            raise ConfigError(f"{directory / CA_KEY} is not the key of the {CA} beside it; restore the matching key.")
        self.current = current
        next_key = directory / NEXT_KEY
        self.next = Authority.read(directory / CA, next_key) if next_key.exists() else None

    @classmethod
    def new(cls, directory: Path, run: str) -> Authorities:
        """Make the first authority of a run. Raises FileExistsError: there is one."""
        made = Authority.new(run)
        write_secret(directory / CA, made.cert)
        write_secret(directory / CA_KEY, made.key)
        return cls(directory)

    @property
    def newest(self) -> Authority:
        """Signs certificates of clients, since a syncer trusts both authorities."""
        return self.next or self.current

    @property
    def bundle(self) -> bytes:
        """The certificates that every holder trusts, as PEM."""
        return self.current.cert + (self.next.cert if self.next is not None else b"")

    def replace(self, run: str) -> None:
        """Make the successor, unless there is one: from now on both are trusted."""
        if self.next is None:
            made = Authority.new(run)
            replace_secret(self._directory / NEXT_KEY, made.key)
            self.next = made
        replace_secret(self._directory / CA, self.bundle)

    def retire(self) -> None:
        """Finish the replacement: drop the old authority and delete its key."""
        if self.next is not None:
            (self._directory / NEXT_KEY).replace(self._directory / CA_KEY)
            self.current, self.next = self.next, None
        replace_secret(self._directory / CA, self.bundle)


CERTIFICATES, SYNCER, AUTHORITY = "certificates.toml", "syncer", "ca"
"""SYNCER is also the name of the syncer's own certificate; AUTHORITY is the name by which the authority is rotated."""


class Issued(Table):
    """A certificate that the authority has signed. `revoked`: the time from which it is refused, maybe in the
    future."""

    name: str
    role: Role
    serial: str
    expires: dt.datetime
    revoked: dt.datetime | None = None


class RunPart(Table):
    """The run, and the hosts that its learners dial."""

    name: str
    hosts: tuple[str, ...]


class CertificatesFile(Table):
    """`certificates.toml`."""

    run: RunPart
    certificate: tuple[Issued, ...] = ()


class Keyring:
    """The operator's directory of keys. Every change is on disk when its method returns.

    Attributes:
        issued: all certificates, in the order of signing.
    """

    def __init__(self, directory: Path, run: RunPart, issued: Iterable[Issued]) -> None:
        self.directory, self.run = directory, run
        self.issued = list(issued)
        self._known: Authorities | None = None

    @classmethod
    def new(
        cls, directory: Path, run: str, hosts: Sequence[str], names: Sequence[tuple[str, Role]], lifetime: dt.timedelta
    ) -> Self:
        """Make the authority of a run, the keys of its syncer, and the keys of these names.

        Raises:
            ConfigError: the directory has keys already, or a name or host is invalid. StoreError: the keys cannot be
                written.
        """
        if not hosts:
            raise ConfigError(
                "a certificate needs a host; name what learners will dial, for example --host syncer.example.org."
            )
        for host in hosts:
            general_name(host)
        wanted = [(SYNCER, "standby"), *names]
        for name, role in wanted:
            check_name(name, role)
        if twice := sorted({name for name, _ in wanted if sum(name == other for other, _ in wanted) > 1}):
            raise ConfigError(f"{twice[0]!r} is named twice; give every certificate a name of its own.")
        if existing := [name for name in (CA, CA_KEY, CERTIFICATES) if (directory / name).exists()]:
            raise ConfigError(
                f"{directory / existing[0]} exists and keys are never overwritten; choose another directory, or add to "
                "these with `diloco keys add`."
            )
        keyring = cls(directory, RunPart(name=run, hosts=tuple(hosts)), ())
        with _writing(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            keyring._known = Authorities.new(directory, run)
        for name, role in wanted:
            keyring._keep(keyring._sign(name, role, lifetime))
        return keyring

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read a directory. The authority's key is needed for new certificates only.

        Raises:
            ConfigError: there are no keys, or the list of certificates cannot be read.
        """
        path = directory / CERTIFICATES
        if not path.exists():
            raise ConfigError(f"{directory} holds no keys; make them with `diloco keys init`.")
        found = validate(CertificatesFile, read_toml(read_text(path, "list of certificates"), str(path)), str(path))
        return cls(directory, found.run, found.certificate)

    @property
    def _authorities(self) -> Authorities:
        """Raises ConfigError: there are none, or other users of this machine may read a key."""
        if self._known is None:
            self._known = Authorities(self.directory)
        return self._known

    @property
    def syncers(self) -> list[str]:
        """The names of the run's syncers with a valid certificate."""
        return sorted({each.name for each in self.issued if each.role == "standby" and each.revoked is None})

    def has(self, name: str) -> bool:
        """Whether a name has a certificate that is not revoked."""
        return any(each.name == name and each.revoked is None for each in self.issued)

    def add(self, name: str, role: Role, lifetime: dt.timedelta) -> Issued:
        """Make keys for one more name. A running syncer accepts them at once.

        Raises:
            ConfigError: the name has a valid certificate.
        """
        check_name(name, role)
        if self.has(name):
            raise ConfigError(f"{name!r} has a certificate in {self.directory} already; rotate or revoke that.")
        return self._keep(self._sign(name, role, lifetime))

    def rotate(
        self, name: str, lifetime: dt.timedelta, grace: dt.timedelta,
        add_hosts: Sequence[str] = (), drop_hosts: Sequence[str] = (),
    ) -> Issued:  # fmt: skip
        """Make a new key and certificate for a name. The earlier one is refused after `grace`, the time to copy.

        `add_hosts` and `drop_hosts` change the hosts that learners dial, which the certificates of syncers name.

        Raises:
            ConfigError: the name has no certificate, or hosts are given for a name that is not a syncer's, or no host
                would remain.
        """
        role = self._valid(name)[-1].role
        if (add_hosts or drop_hosts) and role != "standby":
            raise ConfigError(f"{name!r} is a {role} and serves at no host; drop --host and --drop-host.")
        self._change_hosts(add_hosts, drop_hosts)
        signed = self._sign(name, role, lifetime)
        self._refuse(self._valid(name), now() + grace)
        return self._keep(signed)

    def revoke(self, name: str) -> list[Issued]:
        """Revoke a name's certificates, and remove its keys here; returns the certificates.

        Raises:
            ConfigError: it has none; or it is the syncer's own, since learners would not learn of the revocation.
        """
        valid = self._valid(name)
        if name == SYNCER:
            raise ConfigError(
                "learners would not learn that the syncer's certificate was revoked; if its key was stolen, replace "
                "the authority (`diloco keys rotate ca`), otherwise rotate the certificate."
            )
        refused = self._refuse(valid, now())
        self._write()
        with _writing(self.directory):
            for file in (CA, CERT, KEY, REVOKED):
                (self.directory / name / file).unlink(missing_ok=True)
        return refused

    def replace_authority(self, lifetime: dt.timedelta) -> list[str]:
        """Begin or continue to replace the authority: both are trusted, and all names but the syncers get keys of
        the new one. Returns all names in the order in which to copy the keys, the syncers first."""
        with _writing(self.directory):
            self._authorities.replace(self.run.name)
        return self._sign_all(lifetime, is_last=False)

    def retire_authority(self, lifetime: dt.timedelta) -> list[str]:
        """Finish the replacement: the syncers get keys of the new authority, and the old one is no longer trusted.
        Returns as `replace_authority`.

        Raises:
            ConfigError: no replacement has begun.
        """
        if self._authorities.next is None and self._authorities.bundle == (self.directory / CA).read_bytes():
            raise ConfigError("the authority is not being replaced; begin with `diloco keys rotate ca`.")
        names = self._sign_all(lifetime, is_last=True)
        with _writing(self.directory):
            self._authorities.retire()
        return names

    def _sign_all(self, lifetime: dt.timedelta, *, is_last: bool) -> list[str]:
        """Sign every name's certificate by the authority that it needs now, and write the trusted certificates."""
        signers, syncers = self._authorities, self.syncers
        roles = {each.name: each.role for each in self.issued if each.revoked is None}
        for name, role in roles.items():
            if is_last or role != "standby":
                cert = self.directory / name / CERT
                if not cert.exists() or not signers.newest.has_signed(cert.read_bytes()):
                    self._keep(self._sign(name, role, lifetime, is_last=is_last))
            if is_last:
                self._refuse(self._valid(name)[:-1], now())
        self._write()
        trusted = signers.newest.cert if is_last else signers.bundle
        with _writing(self.directory):
            folders = sorted(path for path in self.directory.iterdir() if (path / CA).exists())
            for folder in folders:
                replace_secret(folder / CA, trusted)
        return [*syncers, *(folder.name for folder in folders if folder.name not in syncers)]

    def _valid(self, name: str) -> list[Issued]:
        """The valid certificates of a name, the newest last."""
        at = now()
        found = [each for each in self.issued if each.name == name and (each.revoked is None or each.revoked > at)]
        if not found:
            if any(each.name == name for each in self.issued):
                raise ConfigError(f"{name!r} is revoked already; `diloco keys add` makes new keys for it.")
            raise ConfigError(
                f"{name!r} has no certificate in {self.directory}; `diloco keys list` lists the issued certificates."
            )
        return found

    def _refuse(self, certificates: Iterable[Issued], at: dt.datetime) -> list[Issued]:
        """Mark certificates as refused from `at` on, unless they are refused earlier; returns the changed ones."""
        serials = {each.serial for each in certificates if each.revoked is None or each.revoked > at}
        self.issued = [
            each.model_copy(update={"revoked": at}) if each.serial in serials else each for each in self.issued
        ]
        return [each for each in self.issued if each.serial in serials]

    def _change_hosts(self, added: Sequence[str], dropped: Sequence[str]) -> None:
        for host in added:
            general_name(host)
        if unknown := [host for host in dropped if host not in self.run.hosts]:
            raise ConfigError(f"{unknown[0]!r} is none of the hosts of these keys ({', '.join(self.run.hosts)}).")
        hosts = tuple(dict.fromkeys(host for host in (*self.run.hosts, *added) if host not in dropped))
        if not hosts:
            raise ConfigError("no host would be left that learners could dial; give the new one too, with --host.")
        self.run = RunPart(name=self.run.name, hosts=hosts)

    def _sign(self, name: str, role: Role, lifetime: dt.timedelta, *, is_last: bool = False) -> Signed:
        """Sign a new key. The successor signs for a syncer only at last, since learners may not trust it before."""
        serves = role == "standby"
        signer = self._authorities.current if serves and not is_last else self._authorities.newest
        return signer.sign(self.run.name, role, name, hosts=self.run.hosts if serves else (), lifetime=lifetime)

    def _keep(self, signed: Signed) -> Issued:
        """Write a name's keys, then the list of certificates."""
        holder, folder = signed.holder, self.directory / signed.holder.name
        with _writing(self.directory):
            folder.mkdir(mode=0o700, exist_ok=True)
            for file, data in ((CA, self._authorities.bundle), (CERT, signed.cert), (KEY, signed.key)):
                replace_secret(folder / file, data)
        issued = Issued(name=holder.name, role=holder.role, serial=holder.serial, expires=holder.expires)
        self.issued.append(issued)
        self._write()
        return issued

    def _write(self) -> None:
        """Write each syncer's list of revoked certificates, then the list of certificates."""
        revoked = [Revoked(serial=each.serial, name=each.name, at=each.revoked) for each in self.issued if each.revoked]
        tables = CertificatesFile(run=self.run, certificate=tuple(self.issued)).model_dump(mode="json")
        with _writing(self.directory):
            for name in self.syncers:
                (self.directory / name).mkdir(mode=0o700, exist_ok=True)
                write_revoked(self.directory / name / REVOKED, revoked)
            replace_secret(self.directory / CERTIFICATES, write_toml(tables).encode())


def check_name(name: str, role: str) -> None:
    """Check a name and a role of keys. Raises ConfigError."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a valid name; use up to 64 letters, digits, dots, dashes and underscores.")
    if name in (AUTHORITY, CA, CA_KEY, NEXT_KEY, CERTIFICATES):
        raise ConfigError(f"{name!r} is the name of one of the authority's files; choose another name.")
    if role not in ROLES:
        raise ConfigError(f"{name!r} cannot have the role {role!r}; use one of {', '.join(ROLES)}.")


def _writing(directory: Path) -> AbstractContextManager[None]:
    return translated(OSError, StoreError, f"cannot write the keys in {directory}", "repair that and try again")
