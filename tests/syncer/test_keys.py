"""`diloco keys` from the command line."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco.cli.keys import app
from diloco.errors import AuthError, ConfigError
from diloco.syncer.auth import Authenticator

NEW = (
    "--host",
    "syncer.example.org",
    "--host",
    "10.0.0.7",
    "--learner",
    "site-a",
    "--learner",
    "site-b",
    "--viewer",
    "grafana",
    "--admin",
    "me",
)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def run_json(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json"))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    run("new", tmp_path / "keys", *NEW)
    return tmp_path / "keys"


def secret(keys: Path, name: str) -> str:
    return (keys / f"{name}.token").read_text().strip()


def test_new_writes_what_a_run_needs(keys: Path) -> None:
    names = {
        "ca.pem",
        "server.pem",
        "server.key",
        "tokens.toml",
        "site-a.token",
        "site-b.token",
        "grafana.token",
        "me.token",
    }
    assert {path.name for path in keys.iterdir()} == names
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.iterdir()} == {0o600}
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    authenticator = Authenticator(keys / "tokens.toml")
    authenticator.bearer(secret(keys, "site-a")).may("learner", "site-a")
    authenticator.bearer(secret(keys, "grafana")).may("viewer")
    authenticator.bearer(secret(keys, "me")).may("admin", "site-b")
    with pytest.raises(AuthError):
        authenticator.bearer(secret(keys, "site-a")).may("learner", "site-b")


def test_new_never_overwrites(keys: Path) -> None:
    before = {path: path.read_bytes() for path in keys.iterdir()}
    with pytest.raises(ConfigError, match="never overwritten"):
        run("new", keys, *NEW)
    assert {path: path.read_bytes() for path in keys.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--host", "h"), "name at least one"),
        (("--host", "h", "--learner", "a", "--admin", "a"), "'a' is named twice"),
        (("--host", "h:1", "--learner", "a"), "without a port"),
        (("--host", "h", "--learner", "../a"), "is no name"),
    ],
)
def test_new_refuses_what_cannot_be_meant_and_writes_nothing(
    tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        run("new", tmp_path / "keys", *arguments)
    assert not (tmp_path / "keys").exists()


def test_add_list_and_revoke(keys: Path) -> None:
    authenticator = Authenticator(keys / "tokens.toml")
    (added,) = run_json("add", keys, "site-c", "--role", "learner")["tokens"]
    assert added["learner"] == "site-c"
    authenticator.bearer(secret(keys, "site-c")).may("learner", "site-c")
    run("add", keys, "spare", "--role", "learner", "--any-learner")
    authenticator.bearer(secret(keys, "spare")).may("learner", "site-z")
    run("add", keys, "site-d2", "--role", "learner", "--speaks-for", "site-d")
    authenticator.bearer(secret(keys, "site-d2")).may("learner", "site-d")
    listed = {row["name"]: row["role"] for row in run_json("list", keys)["tokens"]}
    assert listed == {"site-a": "learner", "site-b": "learner", "grafana": "viewer", "me": "admin"} | dict.fromkeys(
        ("site-c", "spare", "site-d2"), "learner"
    )
    token = secret(keys, "site-c")
    run("revoke", keys, "site-c")
    with pytest.raises(AuthError, match="not one of"):
        authenticator.bearer(token).may("viewer")
    assert not (keys / "site-c.token").exists()


def test_no_command_prints_a_secret(keys: Path) -> None:
    printed = (
        run("list", keys)
        + run("list", keys, "--json")
        + run("add", keys, "site-c", "--role", "viewer")
        + run("revoke", keys, "me")
    )
    assert "site-a" in printed
    assert not any(secret(keys, path.stem) in printed for path in keys.glob("*.token"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("add", "site-a", "--role", "viewer"), "has a token"),
        (("add", "x", "--role", "boss"), "role 'boss'"),
        (("add", "x", "--role", "learner", "--any-learner", "--speaks-for", "y"), "contradict"),
        (("revoke", "site-z"), "has no token"),
    ],
)
def test_wrong_use_changes_nothing(keys: Path, arguments: tuple[str, ...], reason: str) -> None:
    before = {path: path.read_bytes() for path in keys.iterdir()}
    with pytest.raises(ConfigError, match=reason):
        run(arguments[0], keys, *arguments[1:])
    assert {path: path.read_bytes() for path in keys.iterdir()} == before


def test_a_directory_without_keys_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="diloco keys new"):
        run("list", tmp_path)


def test_importing_the_command_is_light() -> None:
    script = (
        "import sys, diloco.cli.keys; print([m for m in ('torch', 'cryptography', 'grpc', 'rich.table') if m in "
        "sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
