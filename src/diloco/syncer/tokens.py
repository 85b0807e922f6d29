"""Bearer tokens, for a loopback port and for proxies that end TLS.

The syncer's tokens file holds names, roles and the SHA-256 of each token; the tokens themselves are random 256-bit
secrets that only their owners hold, so a plain hash is as strong as they are.

    ["site-a"]
    role = "learner"
    sha256 = "9f86d0…"
    learner = "site-a"                 # optional: the one learner id this token may speak for
    expires = 2027-03-01T12:00:00Z     # optional: refused from then on
    old_sha256 = "…"                   # optional: the token before this one
    old_expires = …                    # and until when it is taken, too
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from diloco.errors import AuthError, ConfigError
from diloco.run.sense import NAME
from diloco.secret_files import replace_secret
from diloco.syncer.callers import ROLES, Caller, Role
from diloco.syncer.ends_soon import EndsSoon
from diloco.syncer.rereading import Reread
from diloco.tables import read_toml

KINDS = {
    "role": str, "sha256": str, "learner": str, "expires": datetime, "old_sha256": str, "old_expires": datetime,
}  # fmt: skip
"""The keys of a token's table, and what each holds."""


@dataclass(frozen=True)
class TokenEntry:
    """One table of the tokens file. `learner` binds the token to one learner id; times have a time zone. While a new
    token is on its way to its owner, the one before it is taken, too.

    Raises:
        ConfigError: a name, role, hash or time that cannot be one.
    """

    name: str
    role: Role
    sha256: str
    learner: str | None = None
    expires: datetime | None = None
    old_sha256: str | None = None
    old_expires: datetime | None = None

    @property
    def taken(self) -> dict[str, datetime | None]:
        """Until when each hash is taken; None: without an end."""
        old = {} if self.old_sha256 is None else {self.old_sha256: self.old_expires}
        return {**old, self.sha256: self.expires}

    def __post_init__(self) -> None:
        for name in (self.name, self.learner):
            if name is not None and not NAME.fullmatch(name):
                raise ConfigError(
                    f"{name!r} is no name here; use up to 64 letters, digits, dots, dashes and underscores."
                )
        if self.role not in ROLES:
            raise ConfigError(f"token {self.name!r} has the role {self.role!r}; use one of {', '.join(ROLES)}.")
        if (self.old_sha256 is None) != (self.old_expires is None):
            raise ConfigError(f"token {self.name!r} has one of old_sha256 and old_expires; give both or neither.")
        for sha256, expires in self.taken.items():
            if not re.fullmatch(r"[0-9a-f]{64}", sha256):
                raise ConfigError(
                    f"a sha256 of token {self.name!r} is not 64 hexadecimal digits; make it with `diloco keys`."
                )
            if expires is not None and expires.tzinfo is None:
                raise ConfigError(f"token {self.name!r} expires at {expires} of no time zone; add Z for UTC.")


def new_token() -> str:
    """A random 256-bit secret."""
    return f"diloco_{secrets.token_urlsafe(32)}"


def token_sha256(token: str) -> str:
    """What the syncer keeps of a token."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


def read_tokens(path: str | os.PathLike[str]) -> dict[str, TokenEntry]:
    """The entries of a tokens file, by name.

    Raises:
        ConfigError: unreadable, not TOML, or an entry that is not one.
    """
    try:
        tables = read_toml(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError) as error:  # also ConfigError, and text that is not UTF-8
        raise ConfigError(
            f"the tokens file {path} cannot be read ({error}); make one with `diloco keys add … --token`."
        ) from error
    return {name: _entry(name, table, path) for name, table in tables.items()}


def _entry(name: str, table: object, path: str | os.PathLike[str]) -> TokenEntry:
    if not isinstance(table, Mapping) or not all(
        key in KINDS and isinstance(value, KINDS[key]) for key, value in table.items()
    ):
        raise ConfigError(
            f"[{name!r}] in {path} is not a token; it holds role, sha256 and optionally learner and old_sha256, all "
            "text, and expires and old_expires."
        )
    if missing := [key for key in ("role", "sha256") if key not in table]:
        raise ConfigError(f"token {name!r} in {path} has no {missing[0]}; make it with `diloco keys add … --token`.")
    return TokenEntry(name=name, **table)


def write_tokens(path: str | os.PathLike[str], entries: Iterable[TokenEntry]) -> None:
    """Replace a tokens file in one step, so that a syncer reading it sees the old one or the new one."""
    lines = []
    for entry in entries:
        lines += [f'["{entry.name}"]', f'role = "{entry.role}"', f'sha256 = "{entry.sha256}"']
        lines += [f'learner = "{entry.learner}"'] if entry.learner is not None else []
        lines += [f"expires = {entry.expires.isoformat()}"] if entry.expires is not None else []
        if entry.old_sha256 is not None and entry.old_expires is not None:
            lines += [f'old_sha256 = "{entry.old_sha256}"', f"old_expires = {entry.old_expires.isoformat()}"]
        lines += [""]
    replace_secret(Path(path), "\n".join(lines).encode())


class BearerTokens:
    """The owners of tokens, by a tokens file that is read again whenever it changes. Any thread may call it.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._ends = EndsSoon()
        self._entries = Reread(Path(path), "tokens file", read_tokens)
        if not self._entries.get():
            raise ConfigError(f"the tokens file {path} holds no token; add one with `diloco keys add … --token`.")

    def owner(self, token: str) -> Caller:
        """The owner of a token; `check` says whether it holds. Every entry is compared in constant time, found or not.

        Raises:
            AuthError: no token, or an unknown one. The text never holds the token.
        """
        if not token:
            raise AuthError(
                "no token was sent and this syncer wants one; give the one of this caller, which `diloco keys add … "
                "--token` made."
            )
        sha256 = token_sha256(token)
        found: TokenEntry | None = None
        for entry in self._entries.admitting().values():
            for taken in entry.taken:
                if hmac.compare_digest(taken, sha256):
                    found = entry
        if found is None:
            raise AuthError(
                "the token is not one of this syncer's; ask its operator for one (`diloco keys add … --token`)."
            )
        return Caller(found.name, found.role, found.learner, sha256, found.taken[sha256])

    def check(self, caller: Caller) -> None:
        """Check that the token of a caller is one of the file's, and has not expired by what the file says now.

        Raises:
            AuthError: it was revoked or has expired.
        """
        takers = [entry.taken for entry in self._entries.admitting().values() if caller.key in entry.taken]
        if not takers:
            raise AuthError(f"the token of {caller.name!r} was revoked; ask the syncer's operator for a new one.")
        now, expires = datetime.now(UTC), takers[-1][caller.key]  # a rotation ends the token before sooner
        if expires is not None and now >= expires:
            ended = f"{expires.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
            raise AuthError(
                f"the token of {caller.name!r} expired at {ended}; ask the syncer's operator for a new one."
            )
        self._ends.look(now, f"the token of {caller.name!r}", expires)
