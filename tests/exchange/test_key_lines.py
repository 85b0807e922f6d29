"""Keys as a line: what it holds, how a damaged one is refused, and which keys a caller shows to a real syncer."""

from __future__ import annotations

import datetime as dt
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.syncer.runs import RUN, method, start, train
from tests.training.conftest import TINY

import diloco
from diloco.cli import main
from diloco.config import dump_config, parse_config
from diloco.core.presets import method_from_table
from diloco.errors import AuthError, ConfigError, translated
from diloco.event_log import read_events
from diloco.events import Joined
from diloco.exchange.dialling import fetch_status
from diloco.exchange.key_pair import VARIABLE, Keys, find_keys, key_line, parse_key_line, read_key_pair
from diloco.syncer.keys.keyring import Keyring
from diloco.syncer.server import Syncer

DAY = dt.timedelta(days=1)
NAMES: list[tuple[str, Any]] = [("site-a", "learner"), ("site-b", "learner"), ("eye", "viewer")]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(VARIABLE, raising=False)
    Keyring.new(tmp_path / "keys", RUN, ["127.0.0.1"], NAMES, DAY)
    return tmp_path / "keys"


@pytest.fixture
def syncer(tmp_path: Path, keys: Path) -> Iterator[Syncer]:
    with start(tmp_path, method(at_least=1), keys=keys / "syncer") as it:
        yield it


def line_of(keys: Path, name: str) -> str:
    return key_line(read_key_pair(keys / name))


# --- the line


def test_a_line_holds_the_keys_and_equal_keys_give_equal_lines(keys: Path) -> None:
    Keyring.read(keys).replace_authority(DAY)  # so that two authorities are in it
    pair = read_key_pair(keys / "site-a")
    line = key_line(pair)
    assert pair.ca.count(b"BEGIN CERTIFICATE") == 2
    assert parse_key_line(line) == pair
    assert key_line(parse_key_line(line)) == line
    wrapped = "\n  ".join(line[at : at + 70] for at in range(0, len(line), 70))
    assert parse_key_line(f" {wrapped}\n") == pair
    assert line.split("diloco1.")[1].replace("-", "").replace("_", "").isalnum()  # a double click takes all of it
    assert str(pair.key) not in repr(pair)


def test_a_damaged_line_is_one_sentence_without_the_secret(keys: Path) -> None:
    line = line_of(keys, "site-a")
    body = line.removeprefix("diloco1.")
    other = "A" if body[99] != "A" else "B"
    for damaged, words in (
        (line[:-1], "characters, and by its beginning"),
        (line[:300], "has 300 characters, and by its beginning"),
        (line[:9], "has 9 characters"),
        ("diloco1.", "has 8 characters"),
        (line + "AAAA", "characters, and by its beginning"),
        (f"diloco1.{body[:99]}{other}{body[100:]}", "was changed in transit"),
        (f"diloco1.{body[:99]}%{body[100:]}", "has '%' as its character 108"),
        (body, "names no directory and does not begin with diloco1"),
        (f'"{line[300:]}"', "names no directory and does not begin with diloco1"),
        (f"a/{'x y' * 100}", "names no directory and does not begin with diloco1"),
        (line[300:], "names no directory and does not begin with diloco1"),
        (line.replace("diloco1.", "diloco2."), "names no directory and does not begin with diloco1"),
        ("", "keys is empty"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            diloco.connect("127.0.0.1:1", run=RUN, keys=damaged)
        said = str(caught.value)
        assert "\n" not in said
        assert not any(body[at : at + 12] in said for at in range(len(body) - 12))


@pytest.mark.parametrize("given", ["argument", pytest.param("environment", marks=pytest.mark.slow), "run file"])
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"', '"', "has 1 characters before diloco1.; give the line alone"),
        ("  paris  ", "", "has 5 characters before diloco1.; give the line alone"),
        ("DILOCO_KEYS=", "\n", "has 12 characters before diloco1.; give the line alone"),
        ("/keys/", "", "has 6 characters before diloco1.; give the line alone"),
        ("", '"', "has '\"' as its character"),
    ],
)
def test_a_line_that_was_copied_with_more_is_in_no_message(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    given: str, before: str, after: str, words: str,
) -> None:  # fmt: skip
    line = line_of(keys, "site-a")
    text, run_file = f"{before}{line}{after}", tmp_path / "run.toml"
    run_file.write_text(f"run = {{name = '{RUN}', tokens = 1_000_000, dir = '{tmp_path / 'run'}'}}\n[syncer]\n")
    if given == "run file":
        run_file.write_text(run_file.read_text() + f"keys = {json.dumps(text)}\n")
        assert line[:40] not in dump_config(parse_config(run_file.read_text()))
    if given == "environment":
        monkeypatch.setenv(VARIABLE, text)
    address = ["--address", "127.0.0.1:1"]
    for command in (["status", str(run_file)], ["syncer", str(run_file)], ["doctor", str(run_file)]):
        with pytest.raises(SystemExit) as ended:
            main([*command, *address, *(["--keys", text] if given == "argument" and command[0] != "doctor" else [])])
        shown = "".join(capsys.readouterr()) + "".join(traceback.format_exception(ended.value))
        assert ended.value.code
        assert words in shown or (given, command[0]) == ("argument", "doctor")
        assert line[:40] not in shown
        assert line[100:140] not in shown
    with pytest.raises(ConfigError, match=words) as caught:
        diloco.connect("127.0.0.1:1", run=RUN, keys=None if given == "environment" else text)
    assert line[:40] not in "".join(traceback.format_exception(caught.value))


def test_no_error_has_a_line_whatever_it_quotes(keys: Path) -> None:
    line = line_of(keys, "site-a")
    wrapped = "\n  ".join(line[at : at + 70] for at in range(0, len(line), 70))
    for text in (line, wrapped, repr(wrapped)):
        with pytest.raises(ConfigError) as caught, translated(OSError, ConfigError, f"cannot read {text}", "look"):
            raise FileNotFoundError(2, "no such file", text)
        said = str(caught.value) + repr(caught.value)
        assert "cannot read" in str(caught.value)
        assert str(caught.value).endswith("; look")
        assert not any(line[at : at + 40] in said for at in range(len(line) - 40))


def test_a_directory_may_have_the_name_of_a_line(keys: Path, tmp_path: Path) -> None:
    directory = tmp_path / "diloco1.example.org"
    keys.rename(directory)
    assert read_key_pair(directory / "site-a") == Keys(directory / "site-a").read()
    config = parse_config(TINY, overrides=["data.paths=['x']", f"syncer.keys='{directory / 'site-a'}'"])
    assert parse_config(dump_config(config)).syncer.keys == str(directory / "site-a")


def test_parts_of_other_keys_are_refused(keys: Path, tmp_path: Path) -> None:
    Keyring.new(tmp_path / "other", RUN, ["127.0.0.1"], NAMES, DAY)
    own, other = read_key_pair(keys / "site-a"), read_key_pair(tmp_path / "other" / "site-a")
    for mixed in (type(own)(other.ca, own.cert, own.key), type(own)(own.ca, own.cert, other.key)):
        with pytest.raises(ConfigError, match="holds no keys that belong together"):
            parse_key_line(key_line(mixed))


# --- which keys a caller shows


def test_an_argument_beats_the_environment_and_is_beaten_by_nothing(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(given: Any, address: str = "127.0.0.1:1", *, insecure: bool = False) -> str | None:
        found = find_keys(given, address, insecure=insecure)
        return None if found is None else found.where

    assert shown(None) is None
    monkeypatch.setenv(VARIABLE, line_of(keys, "site-b"))
    assert shown(None) == "the line of DILOCO_KEYS"
    assert shown(keys / "site-a") == str(keys / "site-a")
    assert shown(line_of(keys, "site-a")) == "the line of keys"
    assert shown(None, insecure=True) is None
    assert shown(None, "unix:/run/s") is None
    monkeypatch.setenv(VARIABLE, str(keys / "site-b"))
    assert shown(None) == str(keys / "site-b")
    monkeypatch.setenv(VARIABLE, "")
    assert shown(None) is None
    monkeypatch.setenv(VARIABLE, line_of(keys, "site-b")[:200])
    with pytest.raises(ConfigError, match="the line of DILOCO_KEYS has 200 characters"):
        diloco.connect("127.0.0.1:1", run=RUN)


def test_a_learner_trains_with_a_line_and_another_with_that_of_the_environment(
    syncer: Syncer, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is the learner that its keys are for."""
    line = line_of(keys, "site-a")
    train(0, diloco.connect(syncer.address, run=RUN, keys=line, initialise=True), None, 8)
    monkeypatch.setenv(VARIABLE, line_of(keys, "site-b"))
    train(1, diloco.connect(syncer.address, run=RUN), None, 8)
    events = read_events(syncer._options.state_dir / "events.jsonl")
    assert [event.learner for event in events if isinstance(event, Joined)] == ["site-a", "site-b"]
    monkeypatch.setenv(VARIABLE, line_of(keys, "eye"))
    assert fetch_status(syncer.address, run=RUN)["tokens"] == 80
    with pytest.raises(AuthError, match="'site-a' may speak for learner 'site-a' only"):
        train(1, diloco.connect(syncer.address, run=RUN, learner="site-b", keys=line), None, 1)
    written = b"".join(path.read_bytes() for path in syncer._options.state_dir.rglob("*") if path.is_file())
    assert b"site-a" in written
    assert b"diloco1." not in written


def test_why_a_syncer_refuses_a_line_is_said_by_the_name_of_the_line(
    syncer: Syncer, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look at TLS shows the line's certificate, too, and writes no file for it."""
    Keyring.new(tmp_path / "other", RUN, ["127.0.0.1"], NAMES, DAY)
    before = set(tmp_path.rglob("*"))
    monkeypatch.setenv(VARIABLE, line_of(tmp_path / "other", "eye"))
    with pytest.raises(AuthError, match="its authority is not that of the line of DILOCO_KEYS"):
        fetch_status(syncer.address, run=RUN)
    new = set(tmp_path.rglob("*")) - before
    assert not [path for path in new if syncer._options.state_dir not in path.parents]
    monkeypatch.setenv(VARIABLE, line_of(keys, "eye"))
    with start(tmp_path / "plain", method()) as plain:
        with pytest.raises(AuthError, match="does not speak TLS, for which the line of DILOCO_KEYS was given"):
            fetch_status(plain.address, run=RUN)


# --- the command line, the run file, and what is saved


def test_commands_take_a_line_and_a_run_file_may_hold_one(
    syncer: Syncer, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.toml"
    line = line_of(keys, "eye")
    run_file.write_text(f"run = {{name = '{RUN}', tokens = 1_000_000}}\n[syncer]\naddress = '{syncer.address}'\n")

    def status(*more: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["status", str(run_file), "--json", *more])
        return int(ended.value.code or 0)

    assert status("--keys", line) == 0
    run_file.write_text(run_file.read_text() + f"keys = '{line}'\n")
    assert status() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["run"] == RUN


def test_a_syncer_needs_the_directory(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(f"run = {{name = '{RUN}', tokens = 1_000_000, dir = '{tmp_path / 'run'}'}}\n")
    line = line_of(keys, "syncer")
    for given, environment, words in (
        (["--keys", line], {}, "cannot serve with the line of keys: it reads"),
        ([], {VARIABLE: line}, "cannot serve with the line of DILOCO_KEYS: it reads"),
    ):  # fmt: skip
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit, match="2"):
            main(["syncer", str(run_file), "--address", "127.0.0.1:0", *given])
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert words in said
        assert line[:40] not in said


def test_a_line_is_in_no_text_that_is_shown_or_saved(keys: Path) -> None:
    line = line_of(keys, "site-a")
    config = parse_config(TINY, overrides=["data.paths=['x']", f'syncer.keys="{line}"'])
    assert config.syncer.keys == line
    assert line[:40] not in repr(config)
    assert line[:40] not in dump_config(config)
    assert parse_config(dump_config(config)).syncer.keys is None
    for wrong in (f'syncer.keys=["{line}"]', f"{line}", f'run.tokens="{line}"', f"run.name.{line}.x=1"):
        with pytest.raises(ConfigError) as caught:
            parse_config(TINY, overrides=["data.paths=['x']", wrong])
        assert line[:40] not in str(caught.value)
        assert "diloco1." in str(caught.value)


def test_a_learner_with_a_line_in_its_run_file_saves_no_secret(
    keys: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The configuration that is saved with the run, events, checkpoints, output."""
    line, text = line_of(keys, "site-a"), tmp_path / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(300)))
    config = parse_config(TINY, overrides=["data.paths=['x']", "method.quorum={type='AllLive',at_least=1}"])
    with start(tmp_path, method_from_table(config.method), keys=keys / "syncer") as syncer:
        run_file = tmp_path / "run.toml"
        run_file.write_text(
            TINY.replace("learners = 2", f"learners = 1\ndir = '{tmp_path / 'run'}'")
            + f"quorum = {{type = 'AllLive', at_least = 1}}\n[syncer]\naddress = '{syncer.address}'\n"
            + f"keys = '{line}'\n[checkpoint]\nevery_steps = 4\n"
        )
        with pytest.raises(SystemExit) as ended:
            main([
                "train", str(run_file), "--name", "site-a", "--initialise", "if-empty",
                "--set", f"data.paths=['{text}']", "--set", "run.tokens=2048", "--set", "train.threads=1",
            ])  # fmt: skip
        assert not ended.value.code, capfd.readouterr().err
    saved = [path for path in tmp_path.rglob("*") if path.is_file() and path != run_file and keys not in path.parents]
    assert {"run.toml", "events.jsonl"} <= {path.name for path in saved}
    assert not [path for path in saved if b"diloco1." in path.read_bytes()]
    assert "diloco1." not in "".join(capfd.readouterr())
