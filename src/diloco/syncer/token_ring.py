"""The tokens of one run, with its operator: what `diloco keys … --token` makes and changes.

syncer/tokens.toml    names, roles and hashes     copy to the syncer (`syncer.tokens_file`)
<name>/token          the secret                  copy to its owner (`syncer.token_file`)
<name>/ca.pem         where there is an authority, to know the syncer by (`syncer.ca`)
"""

from __future__ import annotations

import datetime as dt
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from diloco.errors import ConfigError, StoreError, translated
from diloco.exchange.key_pair import CA
from diloco.secret_files import replace_secret
from diloco.syncer.callers import Role
from diloco.syncer.keyring import SYNCER, check_name
from diloco.syncer.tokens import TokenEntry, new_token, read_tokens, token_sha256, write_tokens

TOKEN, TOKENS = "token", "tokens.toml"


class TokenRing:
    """The tokens of a directory of keys, with or without certificates. Every change is on disk when its method returns.

    Raises:
        ConfigError: the list of tokens cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = directory / SYNCER / TOKENS
        self.entries = read_tokens(self.file) if self.file.exists() else {}

    def add(self, name: str, role: Role, lifetime: dt.timedelta, learner: str | None) -> TokenEntry:
        """A token of `role`; `learner`: the one learner id that it speaks for, None: any.

        Raises:
            ConfigError: the name has one.
        """
        check_name(name, role)
        if name in self.entries:
            raise ConfigError(f"{name!r} has a token in {self.directory} already; rotate or revoke that.")
        secret = self.directory / name / TOKEN
        if secret.exists():  # a crash has kept its hash out of the list, or it is of another syncer
            with _writing(self.directory):
                secret.replace(secret.with_name(f"{TOKEN}.before"))
        return self._keep(TokenEntry(name, role, "0" * 64, learner, _now() + lifetime))

    def rotate(self, name: str, lifetime: dt.timedelta, grace: dt.timedelta) -> TokenEntry:
        """A new token for a name. The one before is taken for `grace`, or until it ends. Raises ConfigError."""
        known, now = self._of(name), _now()
        until = min(now + grace, known.expires or now + grace)
        old = (known.sha256, until) if until > now else (None, None)
        return self._keep(replace(known, expires=now + lifetime, old_sha256=old[0], old_expires=old[1]))

    def revoke(self, name: str) -> TokenEntry:
        """Take a name's tokens back. A syncer that has the new list refuses them at once. Raises ConfigError."""
        known = self._of(name)
        del self.entries[name]
        self._write()
        with _writing(self.directory):
            (self.directory / name / TOKEN).unlink(missing_ok=True)
        return known

    def _of(self, name: str) -> TokenEntry:
        if name not in self.entries:
            raise ConfigError(f"{name!r} has no token in {self.directory}; `diloco keys list` shows who has.")
        return self.entries[name]

    def _keep(self, entry: TokenEntry) -> TokenEntry:
        """Write a new secret for an entry, and then its hash."""
        token, folder = new_token(), self.directory / entry.name
        entry = replace(entry, sha256=token_sha256(token))
        with _writing(self.directory):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            replace_secret(folder / TOKEN, f"{token}\n".encode())
            if (self.directory / CA).exists():
                replace_secret(folder / CA, (self.directory / CA).read_bytes())
        self.entries[entry.name] = entry
        self._write()
        return entry

    def _write(self) -> None:
        with _writing(self.directory):
            self.file.parent.mkdir(mode=0o700, exist_ok=True)
            write_tokens(self.file, self.entries.values())


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC).replace(microsecond=0)


def _writing(directory: Path) -> AbstractContextManager[None]:
    return translated(OSError, StoreError, f"cannot write the tokens in {directory}", "repair that and try again")
