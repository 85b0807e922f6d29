"""`diloco keys`: the certificates and tokens of a run, in one directory.

ca.pem               learners and viewers trust it              copy to every site
server.pem, .key     the syncer's certificate and secret key    stay with the syncer
tokens.toml          names, roles, hashes of tokens             stays with the syncer
<name>.token         one secret each                            copy to its owner, then remove here
"""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, cast

import typer

from diloco.cli._options import Json
from diloco.cli._output import make_table
from diloco.errors import ConfigError, StoreError, translated
from diloco.syncer.auth import Role, TokenEntry, new_token, read_tokens, token_sha256, write_secret, write_tokens

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the run's keys.")]
Names = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Give NAME a token of this role; repeat for more.")
]


@app.callback()
def keys() -> None:
    """Make and manage the certificates and tokens of a run."""


@app.command()
def new(
    directory: Directory,
    host: Annotated[list[str], typer.Option(help="A host name or IP address that learners dial; repeat for more.")],
    learner: Names = None,
    viewer: Names = None,
    admin: Names = None,
    days: Annotated[int, typer.Option(min=1, help="How long the certificate is valid.")] = 825,
    as_json: Json = False,
) -> None:
    """Make certificates and tokens for a new run. Nothing that exists is overwritten.

    A learner's token speaks for the learner id of the same name only.
    """
    from diloco.syncer.certificates import make_certificates

    by_role: dict[Role, list[str] | None] = {"learner": learner, "viewer": viewer, "admin": admin}
    roles = [(name, role) for role, names in by_role.items() for name in names or ()]
    if not roles:
        raise ConfigError("these keys would have no token; name at least one, for example --learner site-a.")
    tokens = {name: new_token() for name, _ in roles}
    if len(tokens) < len(roles):
        twice = min(name for name in tokens if sum(name == other for other, _ in roles) > 1)
        raise ConfigError(f"{twice!r} is named twice; give every token a name of its own.")
    entries = [
        TokenEntry(name, role, token_sha256(tokens[name]), name if role == "learner" else None) for name, role in roles
    ]
    certificates = make_certificates(host, days=days)
    files = {
        "ca.pem": certificates.ca,
        "server.pem": certificates.server,
        "server.key": certificates.server_key,
        **{_token_file(name): f"{token}\n".encode() for name, token in tokens.items()},
    }
    if existing := [name for name in (*files, "tokens.toml") if (directory / name).exists()]:
        raise ConfigError(f"{directory / existing[0]} exists and keys are never overwritten; choose another directory.")
    with _writing(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in files.items():
            write_secret(directory / name, data)
        write_tokens(directory / "tokens.toml", entries)
    _print(directory, entries, as_json)


@app.command()
def add(
    directory: Directory,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    role: Annotated[str, typer.Option(help="learner, viewer or admin.")],
    speaks_for: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The learner id the token may speak for; a learner's own name by default."),
    ] = None,
    any_learner: Annotated[bool, typer.Option("--any-learner", help="Let it speak for any learner id.")] = False,
    as_json: Json = False,
) -> None:
    """Add a token. A running syncer takes it at once."""
    if any_learner and speaks_for is not None:
        raise ConfigError(f"--speaks-for {speaks_for} and --any-learner contradict each other; give one of them.")
    entries = read_tokens(directory / "tokens.toml")
    if name in entries or (directory / _token_file(name)).exists():
        raise ConfigError(f"{name!r} has a token in {directory} already; revoke it first, or choose another name.")
    token = new_token()
    bound = None if any_learner else speaks_for or (name if role == "learner" else None)
    entry = TokenEntry(name, cast("Role", role), token_sha256(token), bound)  # which checks the role
    with _writing(directory):
        write_secret(directory / _token_file(name), f"{token}\n".encode())
        write_tokens(directory / "tokens.toml", [*entries.values(), entry])
    _print(directory, [entry], as_json)


@app.command("list")
def list_(directory: Directory, as_json: Json = False) -> None:
    """List the tokens a syncer accepts: names, roles and the start of each hash."""
    _print(directory, list(read_tokens(directory / "tokens.toml").values()), as_json)


@app.command()
def revoke(directory: Directory, name: Annotated[str, typer.Argument(metavar="NAME")], as_json: Json = False) -> None:
    """Take a token back. A running syncer refuses it at once."""
    entries = read_tokens(directory / "tokens.toml")
    if name not in entries:
        raise ConfigError(f"{name!r} has no token in {directory}; `diloco keys list` shows who has.")
    del entries[name]
    with _writing(directory):
        write_tokens(directory / "tokens.toml", entries.values())
        (directory / _token_file(name)).unlink(missing_ok=True)
    _print(directory, list(entries.values()), as_json)


def _writing(directory: Path) -> AbstractContextManager[None]:
    return translated(OSError, StoreError, f"cannot write the keys in {directory}", "repair that and try again")


def _token_file(name: str) -> str:
    return f"{name}.token"


def _print(directory: Path, entries: list[TokenEntry], as_json: bool) -> None:
    plain, rows = [], []
    for it in entries:
        file = directory / _token_file(it.name)
        path, sha256 = str(file) if file.exists() else None, it.sha256[:12]
        plain.append({"name": it.name, "role": it.role, "learner": it.learner, "sha256": sha256, "token_file": path})
        rows.append((it.name, it.role, it.learner or "any", f"{sha256}…", path or "not here"))
    if as_json:
        typer.echo(json.dumps({"directory": str(directory), "tokens": plain}, indent=2))
        return
    heads = ("name", "role", "speaks for", "sha256", "secret")
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    console.print(make_table(heads, rows, num_text=len(heads)))
    console.print(
        f"The syncer needs {directory}/server.pem, server.key and tokens.toml; a site needs ca.pem and its own .token "
        "file.",
        soft_wrap=True,
    )
