"""The keys of one run, with its operator: `diloco keys` makes and changes this directory.

ca.pem, ca.key        the authority and its secret           stay with the operator
certificates.toml     what it has signed                     stays with the operator
syncer/               the syncer's keys, and revoked.toml    copy to the syncer
<name>/               those of a learner, viewer, admin      copy to its owner
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from diloco.errors import ConfigError, StoreError, translated
from diloco.exchange.key_pair import CA, CERT, KEY
from diloco.run.sense import NAME
from diloco.secret_files import replace_secret, write_secret
from diloco.syncer.callers import ROLES, Role
from diloco.syncer.certificates import Authority, Signed
from diloco.syncer.revocation import REVOKED, Revoked, write_revoked
from diloco.tables import Table, read_text, read_toml, validate, write_toml

CA_KEY, CERTIFICATES, SYNCER = "ca.key", "certificates.toml", "syncer"
"""SYNCER is also the name of the syncer's own certificate."""


class Issued(Table):
    """One certificate that the authority has signed."""

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
    """A directory of keys. Every change is on disk when its method returns.

    Attributes:
        issued: every certificate, in the order in which they were signed.
    """

    def __init__(
        self, directory: Path, run: RunPart, issued: Iterable[Issued], authority: Authority | None = None
    ) -> None:
        self.directory, self.run = directory, run
        self.issued = list(issued)
        self._known = authority

    @classmethod
    def new(
        cls, directory: Path, run: str, hosts: Sequence[str], names: Sequence[tuple[str, Role]], lifetime: dt.timedelta
    ) -> Self:
        """The authority of a run, the keys of its syncer, and those of these names.

        Raises:
            ConfigError: keys are there already, or a name or host that cannot be one. StoreError: they cannot be
                written.
        """
        if not hosts:
            raise ConfigError(
                "a certificate needs a host; name what learners will dial, for example --host syncer.example.org."
            )
        wanted = [(SYNCER, "standby"), *names]
        for name, role in wanted:
            _check(name, role)
        if twice := sorted({name for name, _ in wanted if sum(name == other for other, _ in wanted) > 1}):
            raise ConfigError(f"{twice[0]!r} is named twice; give every certificate a name of its own.")
        if existing := [name for name in (CA, CA_KEY, CERTIFICATES) if (directory / name).exists()]:
            raise ConfigError(
                f"{directory / existing[0]} exists and keys are never overwritten; choose another directory."
            )
        authority = Authority.new(run)
        keyring = cls(directory, RunPart(name=run, hosts=tuple(hosts)), (), authority)
        signed = [keyring._sign(name, role, lifetime) for name, role in wanted]
        with _writing(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_secret(directory / CA, authority.cert)
            write_secret(directory / CA_KEY, authority.key)
        for each in signed:
            keyring._keep(each)
        return keyring

    @classmethod
    def read(cls, directory: Path) -> Self:
        """What is there. The authority's key is needed for new certificates only.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        path = directory / CERTIFICATES
        if not path.exists():
            raise ConfigError(f"{directory} holds no keys; make them with `diloco keys new`.")
        found = validate(CertificatesFile, read_toml(read_text(path, "list of certificates"), str(path)), str(path))
        return cls(directory, found.run, found.certificate)

    @property
    def _authority(self) -> Authority:
        """Raises ConfigError where it is not here, or other users of this machine may read its key."""
        if self._known is None:
            self._known = Authority.read(self.directory / CA, self.directory / CA_KEY)
        return self._known

    def add(self, name: str, role: Role, lifetime: dt.timedelta) -> Issued:
        """Keys for one more name. A syncer that runs accepts them at once.

        Raises:
            ConfigError: the name has a certificate that is valid.
        """
        _check(name, role)
        if any(each.revoked is None for each in self._of(name)):
            raise ConfigError(f"{name!r} has a certificate in {self.directory} already; renew or revoke that.")
        return self._keep(self._sign(name, role, lifetime))

    def renew(self, name: str, lifetime: dt.timedelta, hosts: Sequence[str] = ()) -> Issued:
        """New keys for a name. The old ones are good until they end or are revoked, so that there is time to copy.

        With `hosts`, those that learners dial from now on, which the certificates of syncers name.

        Raises:
            ConfigError: it has none, or `hosts` and it is no syncer's.
        """
        role = self._standing(name)[-1].role
        if hosts and role != "standby":
            raise ConfigError(f"{name!r} is a {role} and serves at no host; drop --host.")
        if hosts:
            self.run = RunPart(name=self.run.name, hosts=tuple(hosts))
        return self._keep(self._sign(name, role, lifetime))

    def revoke(self, name: str, *, but_newest: bool = False) -> list[Issued]:
        """Take a name's certificates back, or all but its newest; returns those. Its keys here are removed with it.

        Raises:
            ConfigError: it has none; or it is the syncer's own newest one, which learners could not be told of.
        """
        standing = self._standing(name)
        taken = standing[:-1] if but_newest else standing
        if not taken:
            raise ConfigError(
                f"{name!r} has one certificate only, its newest; revoke it without --old, or renew first."
            )
        if name == SYNCER and not but_newest:
            raise ConfigError(
                "learners cannot be told that the syncer's certificate was revoked; make new keys in another directory "
                "(`diloco keys new`), and copy them to every site."
            )
        now = dt.datetime.now(dt.UTC).replace(microsecond=0)
        serials = {each.serial for each in taken}
        self.issued = [
            each.model_copy(update={"revoked": now}) if each.serial in serials else each for each in self.issued
        ]
        self._write()
        if not but_newest:
            with _writing(self.directory):
                for file in (CA, CERT, KEY, REVOKED):
                    (self.directory / name / file).unlink(missing_ok=True)
        return [each for each in self.issued if each.serial in serials]

    def _of(self, name: str) -> list[Issued]:
        return [each for each in self.issued if each.name == name]

    def _standing(self, name: str) -> list[Issued]:
        found = [each for each in self._of(name) if each.revoked is None]
        if not found:
            raise ConfigError(f"{name!r} has no certificate in {self.directory}; `diloco keys list` shows who has.")
        return found

    def _sign(self, name: str, role: Role, lifetime: dt.timedelta) -> Signed:
        hosts = self.run.hosts if role == "standby" else ()
        return self._authority.sign(self.run.name, role, name, hosts=hosts, lifetime=lifetime)

    def _keep(self, signed: Signed) -> Issued:
        """Write a name's keys, and then that it has them."""
        holder, folder = signed.holder, self.directory / signed.holder.name
        with _writing(self.directory):
            folder.mkdir(mode=0o700, exist_ok=True)
            for file, data in ((CA, self._authority.cert), (CERT, signed.cert), (KEY, signed.key)):
                replace_secret(folder / file, data)
        issued = Issued(name=holder.name, role=holder.role, serial=holder.serial, expires=holder.expires)
        self.issued.append(issued)
        self._write()
        return issued

    def _write(self) -> None:
        """The list of certificates, and for each syncer the list of those that it refuses, which comes first."""
        revoked = [Revoked(serial=each.serial, name=each.name, at=each.revoked) for each in self.issued if each.revoked]
        syncers = {each.name for each in self.issued if each.role == "standby" and each.revoked is None}
        tables = CertificatesFile(run=self.run, certificate=tuple(self.issued)).model_dump(mode="json")
        with _writing(self.directory):
            for name in sorted(syncers):
                (self.directory / name).mkdir(mode=0o700, exist_ok=True)
                write_revoked(self.directory / name / REVOKED, revoked)
            replace_secret(self.directory / CERTIFICATES, write_toml(tables).encode())


def _check(name: str, role: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name here; use up to 64 letters, digits, dots, dashes and underscores.")
    if name in (CA, CA_KEY, CERTIFICATES):
        raise ConfigError(f"{name!r} is a file of the keys; choose another name.")
    if role not in ROLES:
        raise ConfigError(f"{name!r} cannot have the role {role!r}; use one of {', '.join(ROLES)}.")


def _writing(directory: Path) -> AbstractContextManager[None]:
    return translated(OSError, StoreError, f"cannot write the keys in {directory}", "repair that and try again")
