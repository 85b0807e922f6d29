"""Wrong situations that users get into: one sentence with what to do, an exit code, and no more.

The commands are processes, started as users start them. docs/troubleshooting.md quotes what they say, word for word.
"""

from __future__ import annotations

import datetime as dt
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.processes import ROOT
from tests.syncer.runs import RUN, Raw, method, start
from tests.training.conftest import TINY

import diloco
from diloco.config import dump_config, parse_config
from diloco.exchange.key_pair import key_line, read_key_pair
from diloco.protocol.members import Deadlines
from diloco.syncer.keys.keyring import Keyring

DAY, NAMES = dt.timedelta(days=1), [("site-a", "learner"), ("site-b", "learner"), ("site-c", "learner")]
PYTHON_WORDS = re.compile(r"Traceback|\w+=(…|True|False|None)|Errno|grpc|E\d{4} |I\d{4} ")
pytestmark = pytest.mark.slow  # each command imports what a user's does
PAGE = ROOT / "docs" / "troubleshooting.md"


@dataclass(frozen=True)
class World:
    """Syncers of one run that differ in what they ask for, by name: their addresses; and files."""

    tmp: Path
    addresses: dict[str, str]

    def run_file(self, name: str, syncer: str, *overrides: str) -> Path:
        """A run file for one of the syncers, with a directory of its own."""
        path = self.tmp / f"{name}.toml"
        places = [
            f"data.paths=['{self.tmp / 'text.txt'}']", f"run.dir={self.tmp / name}",
            f"syncer.address={self.addresses.get(syncer, syncer)}",
        ]  # fmt: skip
        path.write_text(dump_config(parse_config(TINY, overrides=[*places, *overrides])))
        return path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    tmp = tmp_path_factory.mktemp("w")
    (tmp / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(3000)))
    keyring = Keyring.new(tmp / "keys", RUN, ["127.0.0.1"], NAMES, DAY)
    keyring.rotate("site-b", dt.timedelta(seconds=-1), dt.timedelta())
    Keyring.new(tmp / "others", RUN, ["127.0.0.1"], NAMES, DAY)
    Keyring.new(tmp / "elsewhere", RUN, ["syncer.example.org"], NAMES, DAY)
    with ExitStack() as stack:

        def serve(name: str, given: diloco.Method | None = None, **options: Any) -> str:
            (tmp / name).mkdir()
            return stack.enter_context(start(tmp / name, given or method(), **options)).address

        addresses = {
            "plain": serve("plain"),
            "24 fragments": serve("24", diloco.DecoupledDiLoCo()),
            "running": serve("running", deadlines=Deadlines(lost_floor_s=600.0, lost_cap_s=600.0)),
            "done": serve("done"),
            "tls": serve("tls", keys=tmp / "keys" / "syncer"),
            "another host": serve("another", keys=tmp / "elsewhere" / "syncer"),
        }
        live, ended = (Raw(addresses[name], "site-a") for name in ("running", "done"))
        for raw in (live, ended):
            stack.callback(raw.connection.close)
            raw.initialise()
            raw.join()
        ended.leave(tokens=5_120)
        shutil.copytree(tmp / "keys" / "site-c", tmp / "copied" / "site-c")
        Keyring.read(tmp / "keys").revoke("site-c")
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        addresses["taken"] = f"127.0.0.1:{taken.getsockname()[1]}"
        yield World(tmp, addresses)


def say(world: World, *command: object) -> tuple[int, str]:
    """The exit code of a command, and what it says, with names in the place of addresses and folders."""
    done = subprocess.run(
        [sys.executable, "-m", "diloco", *map(str, command)], capture_output=True, text=True, timeout=300, check=False
    )
    said = re.sub(r"by its beginning \d+", "by its beginning 1729", done.stderr.replace(str(world.tmp), "DIR"))
    said = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "TIME", re.sub(r"127\.0\.0\.1:\d+", "HOST:PORT", said))
    return done.returncode, re.sub(r"heard \d+\.\d s", "heard 0.3 s", said)


def status(world: World, syncer: str, *more: object) -> tuple[int, str]:
    return say(world, "status", "--address", world.addresses.get(syncer, syncer), "--run", RUN, *more)


def train(world: World, name: str, syncer: str, *more: str) -> tuple[int, str]:
    return say(world, "train", world.run_file(name, syncer), "--shard", "0", *more)


def check(said: tuple[int, str], code: int, *, lines: int = 1) -> None:
    """One sentence, which the page has."""
    assert said[0] == code, said
    text = said[1].strip().split("\n")
    assert len(text) == lines, said
    assert not PYTHON_WORDS.search(said[1]), said
    page = " ".join(PAGE.read_text().replace("`` ", "").replace(" ``", "").split())
    assert text[-1].removeprefix("diloco: ") in page, said


def test_another_authority(world: World) -> None:
    check(status(world, "tls", "--keys", world.tmp / "others" / "site-a"), 1)


def test_another_host_name(world: World) -> None:
    check(status(world, "another host", "--keys", world.tmp / "elsewhere" / "site-a"), 1)


def test_tls_at_the_syncer_only(world: World) -> None:
    check(status(world, "tls"), 1)


def test_tls_at_the_caller_only(world: World) -> None:
    check(status(world, "plain", "--keys", world.tmp / "keys" / "site-a"), 1)


def test_an_expired_certificate(world: World) -> None:
    check(status(world, "tls", "--keys", world.tmp / "keys" / "site-b"), 1)


def test_a_revoked_certificate(world: World) -> None:
    check(status(world, "tls", "--keys", world.tmp / "copied" / "site-c"), 1)


def test_no_keys_for_another_machine(world: World) -> None:
    check(status(world, "syncer.invalid:7700"), 2)


def test_a_line_of_keys_that_was_cut(world: World) -> None:
    line = key_line(read_key_pair(world.tmp / "keys" / "site-a"))
    check(status(world, "tls", "--keys", f"{line[:200]}{'A' * 50}"), 2)
    check(status(world, "tls", "--keys", line.removeprefix("diloco1.")[:300]), 2)


def test_a_port_in_use(world: World) -> None:
    run_file = world.run_file("port", "taken")
    check(say(world, "syncer", run_file), 1)
    check(say(world, "syncer", run_file, "--address", "127.0.0.1:0", "--page-port", world.addresses["taken"][10:]), 1)


def test_no_syncer(world: World) -> None:
    check(status(world, "127.0.0.1:1"), 1)
    check(say(world, "export", world.run_file("nobody", "127.0.0.1:1"), world.tmp / "out"), 1)


def test_no_syncer_for_a_learner(world: World) -> None:
    check(train(world, "lonely", "127.0.0.1:1"), 1, lines=2)


def test_no_such_host(world: World) -> None:
    check(status(world, "syncer.invalid:7700", "--insecure"), 1)


def test_another_run(world: World) -> None:
    check(say(world, "status", "--address", world.addresses["plain"], "--run", "large"), 1)


def test_a_run_with_a_model_is_not_initialised_again(world: World) -> None:
    check(train(world, "again", "running", "--initialise", "once"), 1)


def test_a_name_that_is_live(world: World) -> None:
    check(train(world, "twice", "running", "--name", "site-a"), 1)


def test_a_finished_run(world: World) -> None:
    (world.tmp / "over" / "learner-0").mkdir(parents=True)  # where this learner has trained it
    (world.tmp / "over" / "learner-0" / "events.jsonl").write_text("{}\n")
    check(train(world, "over", "done"), 0)
    code, said = train(world, "over", "done", "--set", "run.tokens=7_000")  # learners end by an estimate
    assert (code, "is finished: 5,120 of its 7,000 tokens" in said) == (0, True), said
    code, said = train(world, "over", "done", "--set", "run.tokens=10_000")
    assert (code, "holds an earlier start of learner-0" in said) == (1, True), said


def test_a_used_directory(world: World) -> None:
    used = world.tmp / "used" / "isolated"
    used.mkdir(parents=True)
    (used / "events.jsonl").write_text("{}\n")
    run_file = world.run_file("used", "plain")
    check(say(world, "train", run_file, "--isolated", "--shard", 0), 1)
    code, said = say(world, "train", run_file, "--isolated", "--shard", 0, "--force")
    assert code == 0, said
    assert "the earlier start is kept as DIR/used-before-1/isolated" in said
    assert (world.tmp / "used-before-1" / "isolated" / "events.jsonl").read_text() == "{}\n"
    check(say(world, "train", run_file, "--isolated", "--shard", 0), 1)  # which has checkpoints now
    code, said = say(world, "train", run_file, "--isolated", "--shard", 0, "--supervised")
    assert code == 0, said  # it goes on there


def test_an_export_onto_another(world: World) -> None:
    out = world.tmp / "exported"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    check(say(world, "export", world.run_file("export", "plain"), out), 1)


def test_a_warm_up_longer_than_the_run(world: World) -> None:
    run_file = world.run_file("short", "plain")
    check(say(world, "syncer", run_file, "--set", "schedule.warmup_steps=50"), 2)


def test_a_model_with_fewer_tensors_than_fragments(world: World) -> None:
    check(train(world, "few", "24 fragments", "--initialise", "if-empty"), 2)


def test_a_method_that_no_syncer_takes(world: World) -> None:
    run_file = world.run_file("method", "plain")
    isolated = say(world, "train", run_file, "--isolated", "--shard", 0, "--set", "method.sync_every=0")
    assert say(world, "syncer", run_file, "--set", "method.sync_every=0") == isolated
    check(isolated, 2)
