"""`diloco keys` from the command line."""

from __future__ import annotations

import datetime as dt
import json
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.docs.commands import parse
from typer.testing import CliRunner

from diloco.cli.keys import app
from diloco.errors import ConfigError
from diloco.exchange.key_pair import hosts_of, key_line, parse_key_line, read_key_pair
from diloco.syncer.keys.auth import read_revoked
from diloco.syncer.keys.certificates import Holder, holder_of
from diloco.syncer.keys.tls import read_syncer_keys

INIT = ("--run", "demo", "--host", "syncer.example.org", "--host", "10.0.0.7")


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def run_json(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `keys/` is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    run("init", *INIT)
    run("add", "learner", "site-a", "site-b")
    run("add", "viewer", "grafana")
    run("add", "admin", "me")
    return tmp_path / "keys"


def holder(directory: Path) -> Holder:
    """The holder of a directory's keys, which belong together."""
    return holder_of(read_key_pair(directory).cert)


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_every_name_has_a_directory(keys: Path) -> None:
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


def test_init_never_overwrites(keys: Path) -> None:
    before = contents(keys)
    with pytest.raises(ConfigError, match="never overwritten"):
        run("init", *INIT)
    assert contents(keys) == before


@pytest.mark.parametrize(
    ("name", "host", "reason"),
    [("demo", "h:1", "without a port"), ("demo", "", "not a host name"), ("../x", "h", "'../x' is not a valid name")],
)
def test_init_refuses_what_no_run_can_use_and_writes_nothing(tmp_path: Path, name: str, host: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run("init", "--run", name, "--host", host)
    assert not (tmp_path / "keys").exists()


def states(*arguments: object) -> dict[str, list[str]]:
    """By name, the states of each of its keys."""
    found: dict[str, list[str]] = {}
    for row in run_json("list", *arguments)["keys"]:
        found.setdefault(row["name"], []).append(row["state"])
    return found


def refused(keys: Path, syncer: str = "syncer") -> dict[str, dt.datetime]:
    return dict(read_revoked(keys / syncer / "revoked.toml"))


def test_add_rotate_and_revoke(keys: Path) -> None:
    (added,) = run_json("add", "learner", "site-c", "--expires", "30d")["keys"]
    first = holder(keys / "site-c")
    assert (added["name"], added["serial"], added["state"]) == ("site-c", first.serial, "valid")
    assert first.expires - first.begins == dt.timedelta(days=30, hours=1)
    run("rotate", "site-c", "--grace", "2d")
    second, now = holder(keys / "site-c"), dt.datetime.now(dt.UTC)
    assert second.serial != first.serial
    assert (second.name, second.role) == (first.name, first.role)
    assert dt.timedelta(days=1, hours=23) < refused(keys)[first.serial] - now <= dt.timedelta(days=2)
    run("rotate", "site-c", "--grace", "0")
    third = holder(keys / "site-c")
    assert refused(keys).keys() == {first.serial, second.serial}
    assert all(at <= dt.datetime.now(dt.UTC) for at in refused(keys).values())  # the first one too, now
    run("revoke", "site-c")
    assert refused(keys).keys() == {first.serial, second.serial, third.serial}
    assert not any((keys / "site-c").iterdir())
    assert states()["site-c"] == ["revoked", "revoked", "revoked"]
    run("add", "viewer", "site-c")
    assert states()["site-c"] == ["revoked", "revoked", "revoked", "valid"]
    assert holder(keys / "site-c").serial not in refused(keys)


def test_the_syncers_own_certificate_gets_further_hosts(keys: Path) -> None:
    first = holder(keys / "syncer")
    run("rotate", "syncer", "--host", "new.example.org")
    assert hosts_of(read_syncer_keys(keys / "syncer").cert) == ["syncer.example.org", "10.0.0.7", "new.example.org"]
    assert refused(keys).keys() == {first.serial}
    run("add", "standby", "syncer-2")
    said = run("rotate", "syncer", "--drop-host", "10.0.0.7", "--drop-host", "syncer.example.org")
    assert "syncer-2 does not name these hosts yet: diloco keys rotate syncer-2" in said
    assert hosts_of(read_syncer_keys(keys / "syncer").cert) == ["new.example.org"]
    run("rotate", "syncer-2")
    assert hosts_of(read_syncer_keys(keys / "syncer-2").cert) == ["new.example.org"]


def test_a_second_syncer_hears_of_what_is_revoked(keys: Path) -> None:
    run("add", "standby", "syncer-2")
    assert hosts_of(read_syncer_keys(keys / "syncer-2").cert) == ["syncer.example.org", "10.0.0.7"]
    told = run_json("revoke", "site-a")
    assert refused(keys) == refused(keys, "syncer-2")
    assert len(refused(keys)) == 1
    assert told["copy"] == [
        "scp keys/syncer/revoked.toml syncer.example.org:run/keys/syncer/",
        "scp keys/syncer-2/revoked.toml syncer-2:run/keys/syncer-2/",
    ]


def test_learners_go_on_trusting_a_second_syncer_whose_keys_are_revoked(keys: Path) -> None:
    run("add", "standby", "syncer-2")
    assert "learners cannot be told" in run("revoke", "syncer-2")
    assert "learners cannot be told" not in run("revoke", "site-a")


def test_what_is_to_be_copied_is_printed_and_what_never_is(keys: Path) -> None:
    told = run_json("add", "learner", "site-c")
    assert told["copy"] == ["ssh site-c mkdir -p run/keys/", "scp -r keys/site-c site-c:run/keys/"]
    assert told["never_copy"] == ["keys/ca.key"]
    said = run("rotate", "site-c")
    assert "  scp -r keys/site-c site-c:run/keys/\n" in said
    assert "  scp keys/syncer/revoked.toml syncer.example.org:run/keys/syncer/\n" in said
    assert "Never copy keys/ca.key: its holder can make keys of this run." in said
    assert "refused in 7 days" in said


def test_what_keys_are_for_is_printed_in_commands_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run("init", "--run", "demo", "--host", "syncer.example.org")
    assert re.search(r"^ syncer +syncer +", said, re.MULTILINE)
    for role, name in (("viewer", "me"), ("learner", "paris"), ("admin", "anna"), ("standby", "second")):
        said += run("add", role, name)
    for name, use in {
        "syncer": "the syncer: diloco syncer run.toml --keys keys/syncer, or",
        "me": "watching: diloco status run.toml --keys keys/me; likewise diloco page",
        "paris": 'the learner paris: diloco.connect(…, keys="keys/paris"), or diloco train run.toml --shard N',
        "anna": "steering: diloco admin pause run.toml --keys keys/anna",
        "second": "a second syncer: diloco syncer run.toml --keys keys/second",
    }.items():
        assert f"\nkeys/{name} is for {use}" in said
    commands = [command.split() for command in re.findall(r"diloco ((?:[\w./-]+ )+--[^;,.\n]*)", said)]
    assert len(commands) == 5
    for words in commands:
        parse(["0" if word == "N" else word for word in words])


def test_the_authority_is_replaced_in_two_steps(keys: Path) -> None:
    """Both are trusted between them, and what a crash leaves is gone on from."""
    first, syncer = holder(keys / "site-a").serial, holder(keys / "syncer").serial
    old = (keys / "ca.pem").read_bytes()
    begun = run_json("rotate", "ca")
    assert begun["never_copy"] == ["keys/ca.key", "keys/next-ca.key"]
    assert begun["copy"][0] == "scp -r keys/syncer syncer.example.org:run/keys/"  # which must trust both first
    both = (keys / "ca.pem").read_bytes()
    assert both.startswith(old)
    names = ["syncer", "site-a", "site-b", "grafana", "me"]
    assert {(keys / name / "ca.pem").read_bytes() for name in names} == {both}
    assert holder(keys / "syncer").serial == syncer  # which learners that have not copied yet can trust
    second = holder(keys / "site-a").serial
    assert second != first
    assert refused(keys) == {}
    run("rotate", "ca")  # once more
    assert holder(keys / "site-a").serial == second
    (keys / "site-b" / "cert.pem").unlink()  # as a crash may leave it
    run("rotate", "ca")
    assert holder(keys / "site-b").role == "learner"
    run("add", "learner", "late")
    run("rotate", "ca", "--finish")
    new = (keys / "ca.pem").read_bytes()
    assert both == old + new
    assert {(keys / name / "ca.pem").read_bytes() for name in [*names, "late"]} == {new}
    assert {path.name for path in keys.glob("*.key")} == {"ca.key"}
    for name in ("syncer", "site-a", "late"):
        holder(keys / name)  # signed by what lies beside it
    assert holder(keys / "syncer").serial != syncer
    assert refused(keys).keys() >= {first, syncer}
    with pytest.raises(ConfigError, match="not being replaced; begin with"):
        run("rotate", "ca", "--finish")


def test_finishing_goes_on_after_a_crash(keys: Path) -> None:
    """Between the two files of the authority."""
    run("rotate", "ca")
    both = (keys / "ca.pem").read_bytes()
    run("rotate", "ca", "--finish")
    (keys / "ca.pem").write_bytes(both)
    run("rotate", "ca", "--finish")
    assert both.endswith((keys / "ca.pem").read_bytes())
    assert (keys / "ca.pem").read_bytes() == (keys / "site-a" / "ca.pem").read_bytes()


def test_beginning_goes_on_after_a_crash(keys: Path) -> None:
    """A key that has no certificate yet."""
    (keys / "next-ca.key").write_bytes((keys / "site-a" / "key.pem").read_bytes())
    (keys / "next-ca.key").chmod(0o600)
    run("rotate", "ca")
    run("rotate", "ca", "--finish")
    holder(keys / "syncer")


def test_what_ends_soon_is_named(keys: Path) -> None:
    assert run_json("list")["ends_soon"] == []
    run("add", "learner", "site-c", "--expires", "13d")
    run("add", "viewer", "eye", "--expires", "12h")
    assert run_json("list")["ends_soon"] == ["site-c", "eye"]
    assert states()["site-c"] == ["ends soon"]
    said = run("list")
    assert "site-c: its certificate ends soon; `diloco keys rotate site-c` makes a new one." in said
    assert "(11 hours)" in said
    run("rotate", "site-c")
    assert states()["site-c"] == ["replaced", "valid"]
    assert run_json("list")["ends_soon"] == ["eye"]


def test_new_keys_are_printed_as_lines_too(keys: Path) -> None:
    """Those of a syncer are not: it needs its directory."""
    printed = run("add", "viewer", "site-c", "site-d")
    for name in ("site-c", "site-d"):
        line = key_line(read_key_pair(keys / name))
        assert f"  {name}  {line}\n" in printed
        assert parse_key_line(line) == read_key_pair(keys / name)
    lines = run_json("rotate", "site-a")["lines"]
    assert lines == {"site-a": key_line(read_key_pair(keys / "site-a"))}
    assert run_json("add", "standby", "second")["lines"] == run_json("rotate", "syncer")["lines"] == {}
    trusting_both = run_json("rotate", "ca")["lines"]
    assert trusting_both.keys() == {"site-a", "site-b", "grafana", "me", "site-c", "site-d"}
    assert parse_key_line(trusting_both["site-b"]).ca == (keys / "ca.pem").read_bytes()


def test_no_other_command_prints_a_secret(keys: Path) -> None:
    commands = [("init", "--dir", "more", *INIT), ("list",), ("list", "--json"), ("revoke", "me"),
                ("rotate", "syncer", "--json")]  # fmt: skip
    printed = "".join(run(*command) for command in commands)
    assert "site-a" in printed
    assert "PRIVATE" not in printed
    assert "diloco1." not in printed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("add", "viewer", "site-a"), "has a certificate"),
        (("add", "boss", "x"), "role 'boss'"),
        (("add", "learner", "[/x]"), "is not a valid name"),
        (("add", "learner", "../a"), "is not a valid name"),
        (("add", "learner", "ca.key"), "one of the authority's files"),
        (("add", "learner", "ca"), "one of the authority's files"),
        (("add", "learner", "syncer"), "'syncer' has a certificate"),
        (("add", "learner", "x", "--expires", "soon"), "'soon' is not a duration"),
        (("add", "learner", "x", "--expires", "0"), "'0' is not a duration"),
        (("add", "learner", "x", "--expires", "11y"), "exceeds ten years"),
        (("revoke", "site-z"), "has no certificate"),
        (("revoke", "syncer"), "learners would not learn"),
        (("rotate", "site-z"), "has no certificate"),
        (("revoke", "gone"), "'gone' is revoked already"),
        (("rotate", "site-a", "--host", "h"), "serves at no host"),
        (("rotate", "syncer", "--drop-host", "h"), "none of the hosts"),
        (("rotate", "syncer", "--host", "h:1"), "without a port"),
        (("rotate", "syncer", "--drop-host", "10.0.0.7", "--drop-host", "syncer.example.org"), "no host would be left"),
        (("rotate", "site-a", "--finish"), "--finish is for the authority"),
        (("rotate", "ca", "--grace", "2d"), "--grace has no effect"),
        (("rotate", "ca", "--finish"), "not being replaced"),
    ],
)
def test_wrong_use_changes_nothing(keys: Path, arguments: tuple[str, ...], reason: str) -> None:
    run("add", "viewer", "gone")
    run("revoke", "gone")
    before = contents(keys)
    with pytest.raises(ConfigError, match=reason):
        run(*arguments)
    assert contents(keys) == before


def test_a_directory_without_keys_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="diloco keys init"):
        run("list", "--dir", tmp_path)


@pytest.mark.parametrize("arguments", [("add", "learner", "site-c"), ("rotate", "site-a")])
def test_an_authoritys_key_that_others_may_read_is_refused(keys: Path, arguments: tuple[str, ...]) -> None:
    (keys / "ca.key").chmod(0o644)
    with pytest.raises(ConfigError, match="authority's key .* is open to every user"):
        run(*arguments)


def test_an_authoritys_key_of_another_one_is_refused(keys: Path) -> None:
    (keys / "ca.key").write_bytes((keys / "me" / "key.pem").read_bytes())
    with pytest.raises(ConfigError, match="is not the key of the ca.pem beside it"):
        run("rotate", "site-a")


def test_a_certificate_is_revoked_without_the_authoritys_key(keys: Path) -> None:
    (keys / "ca.key").unlink()
    run("revoke", "site-a")
    assert states()["site-a"] == ["revoked"]


def test_importing_the_command_is_light() -> None:
    script = (
        "import sys, diloco.cli.keys; print([m for m in ('torch', 'cryptography', 'grpc', 'rich.table') if m in "
        "sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
