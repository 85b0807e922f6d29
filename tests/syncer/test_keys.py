"""`diloco keys` from the command line."""

from __future__ import annotations

import datetime as dt
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
from diloco.exchange.key_pair import read_key_pair
from diloco.syncer.certificates import Holder, holder_of, hosts_of
from diloco.syncer.revocation import read_revoked
from diloco.syncer.tls import read_syncer_keys
from diloco.syncer.tokens import BearerTokens

NEW = (
    "--run", "demo", "--host", "syncer.example.org", "--host", "10.0.0.7", "--learner", "site-a", "--learner", "site-b",
    "--viewer", "grafana", "--admin", "me",
)  # fmt: skip


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


def holder(directory: Path) -> Holder:
    """The holder of a directory's keys, which belong together."""
    return holder_of(read_key_pair(directory).cert)


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_new_writes_a_directory_for_the_syncer_and_for_every_name(keys: Path) -> None:
    names = {"syncer": "standby", "site-a": "learner", "site-b": "learner", "grafana": "viewer", "me": "admin"}
    assert {path.name for path in keys.iterdir()} == {"ca.pem", "ca.key", "certificates.toml", *names}
    for name, role in names.items():
        files = {"ca.pem", "cert.pem", "key.pem"} | ({"revoked.toml"} if name == "syncer" else set())
        assert {path.name for path in (keys / name).iterdir()} == files
        assert (holder(keys / name).run, holder(keys / name).name, holder(keys / name).role) == ("demo", name, role)
    assert {stat.S_IMODE(path.stat().st_mode) for path in contents(keys)} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (keys, *(keys / name for name in names))} == {0o700}
    assert hosts_of(read_syncer_keys(keys / "syncer").cert) == ["syncer.example.org", "10.0.0.7"]


def test_only_the_syncers_keys_serve(keys: Path) -> None:
    with pytest.raises(ConfigError, match="names no host"):
        read_syncer_keys(keys / "site-a")


def test_new_never_overwrites(keys: Path) -> None:
    before = contents(keys)
    with pytest.raises(ConfigError, match="never overwritten"):
        run("new", keys, *NEW)
    assert contents(keys) == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--host", "h"), "name at least one"),
        (("--host", "h", "--viewer", "a"), "name at least one"),
        (("--host", "h", "--learner", "a", "--admin", "a"), "'a' is named twice"),
        (("--host", "h", "--learner", "syncer"), "'syncer' is named twice"),
        (("--host", "h:1", "--learner", "a"), "without a port"),
        (("--host", "h", "--learner", "../a"), "is no name"),
        (("--host", "h", "--learner", "[/x]"), "is no name"),
        (("--host", "h", "--learner", "ca.key"), "is a file of the keys"),
    ],
)
def test_new_refuses_what_cannot_be_meant_and_writes_nothing(
    tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        run("new", tmp_path / "keys", "--run", "demo", *arguments)
    assert not (tmp_path / "keys").exists()


def states(keys: Path) -> dict[str, list[str]]:
    """By name, "revoked" or the role of each of its certificates."""
    found: dict[str, list[str]] = {}
    for row in run_json("list", keys)["certificates"]:
        found.setdefault(row["name"], []).append("revoked" if row["revoked"] else row["role"])
    return found


def refused(keys: Path) -> frozenset[str]:
    return read_revoked(keys / "syncer" / "revoked.toml")


def test_add_renew_and_revoke(keys: Path) -> None:
    (added,) = run_json("add", keys, "site-c", "--role", "learner", "--days", 10)["certificates"]
    first = holder(keys / "site-c")
    assert (added["name"], added["serial"], added["directory"]) == ("site-c", first.serial, str(keys / "site-c"))
    assert first.expires - first.begins == dt.timedelta(days=10, hours=1)
    run("renew", keys, "site-c")
    second = holder(keys / "site-c")
    assert second.serial != first.serial
    assert (second.name, second.role) == (first.name, first.role)
    assert refused(keys) == set()
    run("revoke", keys, "site-c", "--old")
    assert refused(keys) == {first.serial}
    run("revoke", keys, "site-c")
    assert refused(keys) == {first.serial, second.serial}
    assert not any((keys / "site-c").iterdir())
    assert states(keys)["site-c"] == ["revoked", "revoked"]
    run("add", keys, "site-c", "--role", "viewer")
    assert states(keys)["site-c"] == ["revoked", "revoked", "viewer"]
    assert holder(keys / "site-c").serial not in refused(keys)


def test_the_syncers_own_certificate_is_renewed_for_the_same_hosts(keys: Path) -> None:
    first = holder(keys / "syncer")
    run("renew", keys, "syncer")
    assert hosts_of(read_syncer_keys(keys / "syncer").cert) == ["syncer.example.org", "10.0.0.7"]
    run("revoke", keys, "syncer", "--old")
    assert refused(keys) == {first.serial}


def test_a_second_syncer_hears_of_what_is_revoked(keys: Path) -> None:
    run("add", keys, "syncer-2", "--role", "standby")
    assert hosts_of(read_syncer_keys(keys / "syncer-2").cert) == ["syncer.example.org", "10.0.0.7"]
    run("revoke", keys, "site-a")
    assert refused(keys) == read_revoked(keys / "syncer-2" / "revoked.toml")
    assert len(refused(keys)) == 1


def test_no_command_prints_a_secret(keys: Path) -> None:
    commands = [("list", keys), ("list", keys, "--json"), ("add", keys, "site-c", "--role", "viewer"),
                ("renew", keys, "site-a"), ("revoke", keys, "me")]  # fmt: skip
    printed = "".join(run(*command) for command in commands)
    assert "site-a" in printed
    assert "PRIVATE" not in printed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("add", "site-a", "--role", "viewer"), "has a certificate"),
        (("add", "x", "--role", "boss"), "role 'boss'"),
        (("add", "[/x]", "--role", "learner"), "is no name"),
        (("revoke", "site-z"), "has no certificate"),
        (("renew", "site-z"), "has no certificate"),
        (("renew", "site-a", "--host", "h"), "serves at no host"),
        (("revoke", "site-a", "--old"), "one certificate only"),
        (("revoke", "syncer"), "learners cannot be told"),
    ],
)
def test_wrong_use_changes_nothing(keys: Path, arguments: tuple[str, ...], reason: str) -> None:
    before = contents(keys)
    with pytest.raises(ConfigError, match=reason):
        run(arguments[0], keys, *arguments[1:])
    assert contents(keys) == before


def test_a_directory_without_keys_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="diloco keys new"):
        run("list", tmp_path)


@pytest.mark.parametrize("arguments", [("add", "site-c", "--role", "learner"), ("renew", "site-a")])
def test_an_authoritys_key_that_others_may_read_is_refused(keys: Path, arguments: tuple[str, ...]) -> None:
    (keys / "ca.key").chmod(0o644)
    with pytest.raises(ConfigError, match="authority's key .* is open to every user"):
        run(arguments[0], keys, *arguments[1:])


def test_a_certificate_is_revoked_without_the_authoritys_key(keys: Path) -> None:
    (keys / "ca.key").unlink()
    run("revoke", keys, "site-a")
    assert states(keys)["site-a"] == ["revoked"]


def test_a_syncer_moves_to_another_host(keys: Path) -> None:
    run("renew", keys, "syncer", "--host", "new.example.org")
    assert hosts_of(read_syncer_keys(keys / "syncer").cert) == ["new.example.org"]
    run("add", keys, "syncer-2", "--role", "standby")
    assert hosts_of(read_syncer_keys(keys / "syncer-2").cert) == ["new.example.org"]


# tokens


def secret(keys: Path, name: str) -> str:
    return (keys / f"{name}.token").read_text().strip()


def test_tokens_are_added_listed_and_revoked(tmp_path: Path) -> None:
    def add(name: str, *options: str) -> Any:
        (added,) = run_json("token", "add", tmp_path, name, "--role", "learner", *options)["tokens"]
        return added

    assert add("site-c")["learner"] == "site-c"
    tokens = BearerTokens(tmp_path / "tokens.toml")
    caller = tokens.owner(secret(tmp_path, "site-c"))
    caller.may("learner", "site-c")
    assert caller.expires is not None
    assert dt.timedelta(days=89) < caller.expires - dt.datetime.now(dt.UTC) <= dt.timedelta(days=90)
    add("spare", "--any-learner", "--days", "1")
    tokens.owner(secret(tmp_path, "spare")).may("learner", "site-z")
    add("site-d2", "--speaks-for", "site-d")
    tokens.owner(secret(tmp_path, "site-d2")).may("learner", "site-d")
    listed = run_json("token", "list", tmp_path)["tokens"]
    assert [row["name"] for row in listed] == ["site-c", "spare", "site-d2"]
    assert stat.S_IMODE((tmp_path / "spare.token").stat().st_mode) == 0o600
    token = secret(tmp_path, "site-c")
    printed = run("token", "revoke", tmp_path, "site-c") + run("token", "list", tmp_path)
    assert not any(secret(tmp_path, path.stem) in printed for path in tmp_path.glob("*.token"))
    with pytest.raises(AuthError, match="not one of"):
        tokens.owner(token)
    assert not (tmp_path / "site-c.token").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("add", "site-a", "--role", "viewer"), "has a token"),
        (("add", "x", "--role", "boss"), "role 'boss'"),
        (("add", "x", "--role", "learner", "--any-learner", "--speaks-for", "y"), "contradict"),
        (("revoke", "site-z"), "has no token"),
    ],
)
def test_wrong_use_of_tokens_changes_nothing(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    run("token", "add", tmp_path, "site-a", "--role", "learner")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        run("token", arguments[0], tmp_path, *arguments[1:])
    assert contents(tmp_path) == before


def test_importing_the_command_is_light() -> None:
    script = (
        "import sys, diloco.cli.keys; print([m for m in ('torch', 'cryptography', 'grpc', 'rich.table') if m in "
        "sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
