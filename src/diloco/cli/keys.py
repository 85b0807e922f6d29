"""`diloco keys`: the certificates of a run, and tokens for ports that take them. `syncer.keyring` has the files."""

import json
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from diloco.cli._options import Json
from diloco.cli._output import make_table
from diloco.errors import ConfigError, StoreError, translated

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from diloco.syncer.callers import Role
    from diloco.syncer.keyring import Issued
    from diloco.syncer.tokens import TokenEntry

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
token_app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(token_app, name="token")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the run's keys.")]
Name = Annotated[str, typer.Argument(metavar="NAME")]
Names = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Make a certificate of this role for NAME; repeat for more.")
]
RoleOption = Annotated[str, typer.Option(help="learner, viewer, standby or admin.")]
Days = Annotated[int, typer.Option(min=1, max=3600, help="How long the certificates are valid.")]


@app.callback()
def keys() -> None:
    """Make and manage the certificates and tokens of a run."""


@app.command()
def new(
    directory: Directory,
    run: Annotated[str, typer.Option(help="The run's name; the certificates are good for this run only.")],
    host: Annotated[list[str], typer.Option(help="A host name or IP address that learners dial; repeat for more.")],
    learner: Names = None,
    viewer: Names = None,
    admin: Names = None,
    standby: Names = None,
    days: Days = 365,
    as_json: Json = False,
) -> None:
    """Make the authority of a run, its syncer's keys and those of every NAME. Nothing that exists is overwritten.

    Each name gets a directory of its own, which is all that its machine needs. A learner's certificate speaks for the
    learner id of the same name only.
    """
    from diloco.syncer.keyring import Keyring

    by_role: dict[Role, list[str] | None] = {
        "learner": learner,
        "viewer": viewer,
        "admin": admin,
        "standby": standby,
    }
    names = [(name, role) for role, given in by_role.items() for name in given or ()]
    if not any(role == "learner" for _, role in names):
        raise ConfigError("these keys would have no learner; name at least one, for example --learner site-a.")
    keyring = Keyring.new(directory, run, host, names, timedelta(days=days))
    foot = f"Copy {directory}/<name>/ to its machine, and {directory}/syncer/ to the syncer's; ca.key stays here."
    _print(directory, keyring.issued, foot, as_json)


@app.command()
def add(directory: Directory, name: Name, role: RoleOption, days: Days = 365, as_json: Json = False) -> None:
    """Make the keys of one more NAME. A running syncer accepts them at once."""
    from diloco.syncer.keyring import Keyring

    issued = Keyring.read(directory).add(name, cast("Role", role), timedelta(days=days))  # which checks the role
    _print(directory, [issued], _copy(directory, name), as_json)


@app.command()
def renew(
    directory: Directory,
    name: Name,
    host: Annotated[
        list[str] | None, typer.Option(help="With a syncer's NAME, what learners dial from now on; repeat for more.")
    ] = None,
    days: Days = 365,
    as_json: Json = False,
) -> None:
    """Make new keys for NAME. The old ones are good until they end, or `revoke --old` takes them back.

    Copy the directory over the old one: running processes take it up with their next connection.
    """
    from diloco.syncer.keyring import Keyring

    issued = Keyring.read(directory).renew(name, timedelta(days=days), host or ())
    _print(directory, [issued], _copy(directory, name), as_json)


@app.command()
def revoke(
    directory: Directory,
    name: Name,
    old: Annotated[bool, typer.Option("--old", help="All certificates of NAME but its newest.")] = False,
    as_json: Json = False,
) -> None:
    """Take the certificates of NAME back. A syncer that has the new syncer/revoked.toml refuses them at once."""
    from diloco.syncer.keyring import Keyring

    revoked = Keyring.read(directory).revoke(name, but_newest=old)
    foot = f"Copy {directory}/syncer/revoked.toml to the syncer's machine, and a standby's to that one's."
    _print(directory, revoked, foot, as_json)


@app.command("list")
def list_(directory: Directory, as_json: Json = False) -> None:
    """List the certificates of a run: names, roles, when they end, and which were revoked."""
    from diloco.syncer.keyring import Keyring

    _print(directory, Keyring.read(directory).issued, None, as_json)


# --- tokens


@token_app.callback()
def tokens() -> None:
    """Tokens, for a syncer's loopback port and for proxies that end TLS."""


@token_app.command("add")
def add_token(
    directory: Directory,
    name: Name,
    role: RoleOption,
    speaks_for: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The learner id the token may speak for; a learner's own name by default."),
    ] = None,
    any_learner: Annotated[bool, typer.Option("--any-learner", help="Let it speak for any learner id.")] = False,
    days: Annotated[int, typer.Option(min=1, help="How long the token is valid.")] = 90,
    as_json: Json = False,
) -> None:
    """Make a token: its hash goes into DIR/tokens.toml, the secret into DIR/NAME.token. A running syncer takes it at
    once."""
    from diloco.secret_files import replace_secret
    from diloco.syncer.tokens import TokenEntry, new_token, read_tokens, token_sha256, write_tokens

    if any_learner and speaks_for is not None:
        raise ConfigError(f"--speaks-for {speaks_for} and --any-learner contradict each other; give one of them.")
    file = directory / "tokens.toml"
    entries = read_tokens(file) if file.exists() else {}
    if name in entries:
        raise ConfigError(f"{name!r} has a token in {directory} already; revoke it first, or choose another name.")
    token = new_token()
    bound = None if any_learner else speaks_for or (name if role == "learner" else None)
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
    entry = TokenEntry(name, cast("Role", role), token_sha256(token), bound, expires)  # which checks the role
    with _writing(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        secret = directory / _token_file(name)
        if secret.exists():  # a crash has kept its hash out of the list, or it is of another syncer
            secret.replace(secret.with_name(f"{secret.name}.before"))
        replace_secret(secret, f"{token}\n".encode())
        write_tokens(file, [*entries.values(), entry])
    _print_tokens(directory, [entry], as_json)


@token_app.command("list")
def list_tokens(directory: Directory, as_json: Json = False) -> None:
    """List the tokens a syncer accepts: names, roles, when they end and the start of each hash."""
    from diloco.syncer.tokens import read_tokens

    _print_tokens(directory, list(read_tokens(directory / "tokens.toml").values()), as_json)


@token_app.command("revoke")
def revoke_token(directory: Directory, name: Name, as_json: Json = False) -> None:
    """Take a token back. A running syncer refuses it at once."""
    from diloco.syncer.tokens import read_tokens, write_tokens

    entries = read_tokens(directory / "tokens.toml")
    if name not in entries:
        raise ConfigError(f"{name!r} has no token in {directory}; `diloco keys token list` shows who has.")
    del entries[name]
    with _writing(directory):
        write_tokens(directory / "tokens.toml", entries.values())
        (directory / _token_file(name)).unlink(missing_ok=True)
    _print_tokens(directory, list(entries.values()), as_json)


# --- output


def _writing(directory: Path) -> AbstractContextManager[None]:
    return translated(OSError, StoreError, f"cannot write the tokens in {directory}", "repair that and try again")


def _token_file(name: str) -> str:
    return f"{name}.token"


def _copy(directory: Path, name: str) -> str:
    return f"Copy {directory}/{name}/ to its machine; ca.key stays here."


def _print(directory: Path, issued: "Sequence[Issued]", foot: str | None, as_json: bool) -> None:
    """Certificates: a row each."""
    now = datetime.now(UTC)
    rows = [
        (it.name, it.role, f"{it.expires:%Y-%m-%d %H:%M}", f"{it.serial[:12]}…", _state(it.revoked, it.expires, now))
        for it in issued
    ]
    plain = [{**it.model_dump(mode="json"), "directory": str(directory / it.name)} for it in issued]
    _show(directory, "certificates", plain, ("name", "role", "ends (UTC)", "serial", "state"), rows, foot, as_json)


def _print_tokens(directory: Path, entries: "Sequence[TokenEntry]", as_json: bool) -> None:
    """Tokens: a row each."""
    now = datetime.now(UTC)
    plain, rows = [], []
    for it in entries:
        file = directory / _token_file(it.name)
        path, sha256 = str(file) if file.exists() else None, it.sha256[:12]
        ends = None if it.expires is None else it.expires.isoformat()
        plain.append({
            "name": it.name, "role": it.role, "learner": it.learner, "expires": ends, "sha256": sha256,
            "token_file": path,
        })  # fmt: skip
        rows.append((it.name, it.role, it.learner or "any", ends or "never", f"{sha256}…", path or "not here",
                     _state(None, it.expires, now)))  # fmt: skip
    heads = ("name", "role", "speaks for", "ends", "sha256", "secret", "state")
    foot = f"The syncer needs {directory}/tokens.toml; the owner of a token needs its .token file."
    _show(directory, "tokens", plain, heads, rows, foot, as_json)


def _state(revoked: datetime | None, expires: datetime | None, now: datetime) -> str:
    if revoked is not None:
        return f"revoked {revoked:%Y-%m-%d}"
    return "expired" if expires is not None and expires <= now else "valid"


def _show(
    directory: Path, what: str, plain: "Sequence[dict[str, Any]]", heads: "Sequence[str]",
    rows: "Iterable[Sequence[str]]", foot: str | None, as_json: bool,
) -> None:  # fmt: skip
    if as_json:
        typer.echo(json.dumps({"directory": str(directory), what: plain}, indent=2))
        return
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    console.print(make_table(heads, rows, num_text=len(heads)))
    if foot is not None:
        console.print(foot, soft_wrap=True)
