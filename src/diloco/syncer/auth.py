"""Access to a syncer: bearer tokens with roles, and which addresses it may bind without protection.

    role      may
    viewer    read status, history and the global model
    learner   what a viewer may, and join, push and pull (it holds the global model anyway)
    admin     everything: also evict, stop, and whatever changes a run

The syncer's tokens file holds names, roles and the SHA-256 of each token; the tokens themselves are random 256-bit
secrets that only their owners hold, so a plain hash is as strong as they are.

    ["site-a"]
    role = "learner"
    sha256 = "9f86d0…"
    learner = "site-a"      # optional: the one learner id this token may speak for
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import threading
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from diloco.errors import AuthError, ConfigError
from diloco.exchange.wire.address import is_loopback, split_address

if TYPE_CHECKING:
    import grpc

Role = Literal["viewer", "learner", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)  # each may do what those before it may
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class TokenEntry:
    """One line of the tokens file. `learner` binds the token to one learner id.

    Raises:
        ConfigError: a name, role or hash that cannot be one.
    """

    name: str
    role: Role
    sha256: str
    learner: str | None = None

    def __post_init__(self) -> None:
        for name in (self.name, self.learner):
            if name is not None and not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{name!r} is no name here; use up to 64 letters, digits, dots, dashes and underscores."
                )
        if self.role not in ROLES:
            raise ConfigError(f"token {self.name!r} has the role {self.role!r}; use one of {', '.join(ROLES)}.")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ConfigError(
                f"the sha256 of token {self.name!r} is not 64 hexadecimal digits; make it with `diloco keys add`."
            )


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
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"the tokens file {path} cannot be read ({error}); make one with `diloco keys new`."
        ) from error
    return {name: _entry(name, table, path) for name, table in tables.items()}


def _entry(name: str, table: object, path: str | os.PathLike[str]) -> TokenEntry:
    keys = {"role", "sha256", "learner"}
    if not isinstance(table, Mapping) or not all(key in keys and isinstance(table[key], str) for key in table):
        raise ConfigError(
            f"[{name!r}] in {path} is not a token; it holds role, sha256 and optionally learner, all text."
        )
    if missing := [key for key in ("role", "sha256") if key not in table]:
        raise ConfigError(f"token {name!r} in {path} has no {missing[0]}; make it with `diloco keys add`.")
    return TokenEntry(name, table["role"], table["sha256"], table.get("learner"))


def write_tokens(path: str | os.PathLike[str], entries: Iterable[TokenEntry]) -> None:
    """Replace a tokens file in one step, so that a syncer reading it sees the old one or the new one."""
    lines = []
    for entry in entries:
        lines += [f'["{entry.name}"]', f'role = "{entry.role}"', f'sha256 = "{entry.sha256}"']
        lines += [f'learner = "{entry.learner}"'] if entry.learner is not None else []
        lines += [""]
    path = Path(path)
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.unlink(missing_ok=True)
    write_secret(temporary, "\n".join(lines).encode())
    temporary.replace(path)


def write_secret(path: Path, data: bytes) -> None:
    """Write a new file that only its owner can read, from its first byte on.

    Raises:
        FileExistsError: there is one.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Caller:
    """The sender of a call, as its credentials say.

    Attributes:
        name: of the token or certificate.
        learner: the one learner id that it may speak for; None: any.
    """

    name: str
    role: Role
    learner: str | None = None

    def may(self, needed: Role, learner: str | None = None) -> None:
        """Check that the caller may do what `needed` may, and speak for `learner` where one is named.

        Raises:
            AuthError: it may not.
        """
        if ROLES.index(self.role) < ROLES.index(needed):
            raise AuthError(f"{self.name!r} has the role {self.role!r} and this needs {needed!r}; use other keys.")
        if learner is not None and self.learner not in (None, learner):
            raise AuthError(
                f"{self.name!r} may speak for learner {self.learner!r} only, not for {learner!r}; use that learner's "
                "own keys."
            )


UNKNOWN = Caller("anyone", "admin")
"""The caller where a syncer asks for no credentials: it may do everything."""


class Authenticator:
    """Says who calls, from a call's metadata; the request itself is not needed. Any thread may call it.

    The tokens file is read again whenever it changes: revoking needs no restart. A file that has become unreadable
    admits no caller.

    Arguments:
        tokens_file: the tokens and what they may do; None: every caller is `UNKNOWN`.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """

    def __init__(self, tokens_file: str | os.PathLike[str] | None) -> None:
        self._path = None if tokens_file is None else Path(tokens_file)
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._entries: dict[str, TokenEntry] = {}
        if self._path is not None and not self._current(self._path):
            raise ConfigError(f"the tokens file {self._path} holds no token; add one with `diloco keys add`.")

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """The sender of a call.

        Raises:
            AuthError: it cannot be known. The text never holds a token.
        """
        if self._path is None:
            return UNKNOWN
        authorization = str(dict(context.invocation_metadata()).get("authorization", ""))
        return self.bearer(authorization.removeprefix("Bearer "))

    def bearer(self, token: str) -> Caller:
        """The owner of a token; every entry is compared in constant time, found or not. Raises as `caller`."""
        if not token:
            raise AuthError("no token was sent and this syncer wants one; pass token=… (see `diloco keys`).")
        sha256 = token_sha256(token)
        found: TokenEntry | None = None
        try:
            entries = {} if self._path is None else self._current(self._path)
        except ConfigError as error:
            raise AuthError(f"no caller can be admitted: {error}") from error
        for entry in entries.values():
            if hmac.compare_digest(entry.sha256, sha256):
                found = entry
        if found is None:
            raise AuthError("the token is not one of this syncer's; ask its operator for one (`diloco keys add`).")
        return Caller(found.name, found.role, found.learner)

    def _current(self, path: Path) -> dict[str, TokenEntry]:
        with self._lock:
            try:
                stat = path.stat()
            except OSError as error:
                raise ConfigError(f"the tokens file {path} cannot be read ({error.strerror}); put it back.") from error
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen != self._seen:
                self._entries = read_tokens(path)
                self._seen = seen
            return self._entries


def check_binding(address: str, *, has_tls: bool, has_tokens: bool, insecure: bool) -> None:
    """Refuse a port that strangers could reach unprotected: anything but loopback and unix sockets needs both TLS and
    tokens.

    Raises:
        ConfigError: it would be open, and `insecure` does not accept that; or the address is none.
    """
    if address.startswith("unix:"):
        return
    host, _ = split_address(address)
    if is_loopback(host) or (has_tls and has_tokens) or insecure:
        return
    missing = " and ".join(name for name, there in (("TLS", has_tls), ("tokens", has_tokens)) if not there)
    raise ConfigError(
        f"{address} can be reached from other machines and has no {missing}; make both with `diloco keys new`, bind "
        "127.0.0.1, or accept the risk with --insecure."
    )
