"""The scripts and the run file of docs/start.md are those of examples/start, and run.

The start commands of README, docs/start.md and docs/attach.md are read from the pages and executed. Every process is
killed, and started again by the same command, and all learners end with the same model.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.processes import until
from tests.docs.blocks import ROOT, blocks_of
from tests.docs.commands import commands_of

from diloco.config import parse_config
from diloco.demo.plan import free_port
from diloco.event_log import EventTail
from diloco.events import Event, Joined, Merged, SyncerStarted

START = ROOT / "examples" / "start"
PARIS, OSLO = LEARNERS = ("paris", "oslo")


def blocks(page: str) -> list[str]:
    return [block.text for block in blocks_of((ROOT / page).read_text(), page)]


def block(page: str, start: str) -> str:
    """The block of a page that begins so."""
    (found,) = [text for text in blocks(page) if text.startswith(start)]
    return found


def test_the_page_shows_the_files() -> None:
    assert {"first.py", "learner.py", "run.toml"} == {path.name for path in START.iterdir() if path.is_file()}
    assert all((START / name).read_text() in blocks("docs/start.md") for name in ("first.py", "learner.py", "run.toml"))


@pytest.mark.slow
def test_the_ten_lines_train_the_same_model_on_all_learners() -> None:
    done = subprocess.run([sys.executable, START / "first.py"], capture_output=True, text=True, timeout=300, check=True)
    weights, same = done.stdout.splitlines()
    assert all(abs(float(each) - 1) < 0.05 for each in re.findall(r"\d\.\d+", weights))
    assert same == "the same on all learners: True"


# --- the same commands, again -----------------------------------------------------------------------------------------


@dataclass
class Command:
    """A command of a page on one of the machines, and its newest process."""

    words: list[str]
    machine: Path
    log: Path
    process: subprocess.Popen[bytes]


class Machines:
    """The machines of a run, as directories, and the processes on them.

    One rule for what pages say: the syncer's host, and all interfaces of it, are 127.0.0.1, and its port is a free one.

    Arguments:
        directory: the syncer's machine; those of the learners are below it.
        run_file: its path there.
    """

    def __init__(self, directory: Path, run_file: str) -> None:
        self.directory, self.run_file, self._port = directory, directory / run_file, free_port()
        self.commands: dict[str, Command] = {}

    def here(self, text: str) -> str:
        return re.sub(r"syncer\.example\.org|0\.0\.0\.0", "127.0.0.1", text).replace(":7700", f":{self._port}")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.here(text))

    def words(self, line: str) -> list[str]:
        ((program, *words),) = (command.words for command in commands_of(self.here(line)))
        return [sys.executable, *{"diloco": ["-m", "diloco"], "python": []}[program], *words]

    def make_keys(self, commands: str) -> None:
        """Execute a page's `diloco keys …`, and copy its keys to each learner's machine."""
        for line in commands.splitlines():
            subprocess.run(self.words(line), cwd=self.directory, capture_output=True, timeout=300, check=True)
        for name in LEARNERS:
            shutil.copytree(self.directory / "keys" / name, self.directory / name / "keys" / name)

    def start(self, name: str, line: str, machine: str = ".") -> None:
        """Start a command of a page."""
        where = self.directory / machine
        log = self.directory / f"{name}.log"
        self.commands[name] = Command(words := self.words(line), where, log, _process(words, where, log))

    def again(self, name: str) -> None:
        """Execute the same command again."""
        it = self.commands[name]
        it.process = _process(it.words, it.machine, it.log)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait; no process may fail meanwhile."""

        def holds() -> bool:
            failed = [it for it in self.commands.values() if it.process.poll()]
            assert not failed, failed[0].log.read_text()
            return condition()

        until(holds, what)


def _process(words: list[str], machine: Path, log: Path) -> subprocess.Popen[bytes]:
    with open(log, "ab") as out:
        return subprocess.Popen(words, cwd=machine, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=out, stderr=out)


@contextmanager
def machines(directory: Path, run_file: str) -> Iterator[Machines]:
    those = Machines(directory, run_file)
    try:
        yield those
    finally:
        for command in those.commands.values():
            command.process.kill()
            command.process.wait()


def five_minutes(those: Machines) -> None:
    """The two processes and the syncer of docs/start.md, on one machine."""
    for path in START.iterdir():
        those.write(those.directory / "examples" / "start" / path.name, path.read_text())
    commands = block("docs/start.md", "diloco syncer examples/start/run.toml\n").splitlines()
    for name, line in zip(("syncer", *LEARNERS), commands, strict=True):
        those.start(name, line)


# A program around the lines of a page: a model without a list of layers on random tokens, which differ by machine.
PROGRAM = """
import itertools, pathlib, types
import torch
from torch import nn

class build_model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(64, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 64)

    def forward(self, input_ids):
        logits = self.head(self.rnn(self.embed(input_ids[:, :-1]))[0])
        return types.SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten()))

name = pathlib.Path.cwd().name
torch.manual_seed(sum(name.encode()))
model = build_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = batches = ({"input_ids": torch.randint(64, (8, 17))} for _ in itertools.count())
"""


def own_loop(those: Machines, page: str, lines: str) -> None:
    """The commands and the run file of README, which docs/attach.md shares, and a loop of one's own."""
    keys, syncer = re.match(r"((?:diloco keys .*\n)+)(diloco syncer .*)?", block(page, "diloco keys init")).groups()
    those.make_keys(keys)
    those.write(those.run_file, block("README.md", "[run]"))
    those.start("syncer", syncer or block(page, "diloco syncer"))
    for name in LEARNERS:
        those.write(those.directory / name / "train.py", PROGRAM + lines.replace(PARIS, name))
        those.start(name, "python train.py", name)


def readme(those: Machines) -> None:
    lines = block("README.md", "import diloco")
    own_loop(those, "README.md", lines + 'torch.save(weights, "model.pt")\n')


def attach(those: Machines) -> None:
    lines = re.sub(r"^-.*\n|^[+ ]", "", block("docs/attach.md", "+import diloco"), flags=re.MULTILINE)
    own_loop(those, "docs/attach.md", lines)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("page", "run_file"),
    [
        pytest.param(five_minutes, "examples/start/run.toml", marks=pytest.mark.slow),
        pytest.param(readme, "run.toml", marks=pytest.mark.slow),
        pytest.param(attach, "run.toml", marks=pytest.mark.slow),
    ],
)
def test_the_same_command_serves_every_start(page: Callable[[Machines], None], run_file: str, tmp_path: Path) -> None:
    """The number of tokens stays the page's until all were killed. Then it becomes less than was trained, in the run
    file alone, so that the run ends however quick this machine is."""
    with machines(tmp_path, run_file) as those:
        page(those)
        text = those.run_file.read_text()
        events = EventTail(tmp_path / "runs" / parse_config(text).run.name / "syncer" / "events.jsonl")
        those.until(merged_after(lambda event: True, events), "no merge of both learners")
        for killed in (OSLO, PARIS, "syncer"):
            process = those.commands[killed].process
            process.kill()
            process.wait()
            events.read()
            those.again(killed)
            those.until(merged_after(partial(is_start, killed), events), f"no merge of both after the kill of {killed}")
        those.commands["syncer"].process.kill()
        those.commands["syncer"].process.wait()
        those.run_file.write_text(re.sub(r"(?m)^tokens = .*", "tokens = 1", text))
        those.again("syncer")
        learners = [those.commands[name].process for name in LEARNERS]
        those.until(lambda: all(learner.poll() == 0 for learner in learners), "the learners do not end")
        one, other = (torch.load(path) for path in tmp_path.rglob("*.pt"))
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def is_start(name: str, event: Event) -> bool:
    return isinstance(event, SyncerStarted) if name == "syncer" else isinstance(event, Joined) and event.learner == name


def merged_after(is_start: Callable[[Event], bool], events: EventTail) -> Callable[[], bool]:
    """Whether both learners were in a merge after an event, as far as its syncer has written it down."""
    has_started = False

    def is_merged() -> bool:
        nonlocal has_started
        for event in events.read():
            if has_started and isinstance(event, Merged) and set(event.contributors) == set(LEARNERS):
                return True
            has_started = has_started or is_start(event)
        return False

    return is_merged
