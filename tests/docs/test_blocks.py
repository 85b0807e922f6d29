"""Every code block of every page is executed or checked: `register.py` says how, and which cannot be executed here.

The commands find a run that was served and trained by the commands of docs/two-sites.md, with a smaller model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TextIO, TypeVar

import pytest
import yaml
from tests.docs import register
from tests.docs.blocks import ROOT, Block, blocks_of, blocks_of_pages
from tests.docs.commands import CHECKS, Command, UsageError, check_files, commands_of, own_words, parse
from tests.docs.preparing import Session, session
from tests.processes import start_module

import diloco.training.loop  # noqa: F401 - what `diloco train` imports, once for all tests
from diloco.cli import main
from diloco.config import parse_config
from diloco.core.presets import method_from_table
from diloco.planning.site import parse_site
from diloco.planning.workload import load_workload

BLOCKS = blocks_of_pages()
PAGES = {page: [block for block in BLOCKS if block.page == page] for page in dict.fromkeys(b.page for b in BLOCKS)}
RUN_FILE_START = '[run]\nname = "page"\ntokens = 1_000_000\nlearners = 2\n'
SITE_FILE = """
[model]
parameters = 5e4
layers = 1
[budget]
tokens = 24_576
tokens_per_step = 1024
sequence_length = 64
[[site]]
name = "berlin"
step_time = "100 ms"
up = "50 Mbit/s"
down = "50 Mbit/s"
latency = "20 ms"
[[site]]
name = "lab"
step_time = "120 ms"
up = "20 Mbit/s"
down = "20 Mbit/s"
latency = "30 ms"
"""

Call = Callable[..., str]
T = TypeVar("T")


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """A command of `diloco` in this process; what it prints on standard output."""

    def call(*words: str, columns: int = 120) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(words)
        printed, said = capfd.readouterr()
        assert not ended.value.code, f"diloco {' '.join(words)}: {said}"
        return printed

    return call


# --- the run that the commands find -----------------------------------------------------------------------------------

TWO_SITES = [
    command
    for block in PAGES["docs/two-sites.md"]
    if block.language == "commands"
    for command in commands_of(block.text)
    if (own_words(command.words) or ["doctor"])[0] != "doctor"
][:7]
HERE = {
    "two-sites": "demo", "syncer.example.org": "127.0.0.1", "0.0.0.0:7700": "127.0.0.1:0", "/mnt/other": "other-disk",
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in which docs/two-sites.md was gone through, with the syncer still running."""
    directory = tmp_path_factory.mktemp("world")
    text = (ROOT / "examples" / "two-sites" / "run.toml").read_text()
    for old, new in {
        '"two-sites"': '"demo"', "4_000_000": "49_152", "= 256": "= 16", "= 704": "= 24", "layers = 5": "layers = 1",
        "length = 128": "length = 64", "sync_every = 30": "sync_every = 6", "overlap = 5": "overlap = 1",
        "warmup_steps = 20": "warmup_steps = 4", "metrics_port = 9100": "",
        "[syncer]": "[evaluate]\nsequences = 8\n\n[syncer]\nrecord_contributions = true",
    }.items():  # fmt: skip
        assert old in text, old
        text = text.replace(old, new)
    (directory / "run.toml").write_text(text)
    (directory / "site.toml").write_text(SITE_FILE)
    (directory / "slow.toml").write_text(SITE_FILE.replace("50 Mbit/s", "2 Mbit/s"))
    lines = [[_here(word) for word in own_words(command.words) or []] for command in TWO_SITES]
    assert [words[0] for words in lines] == ["keys", "keys", "keys", "syncer", "train", "train", "status"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for words in [*lines[:3], ["keys", "add", "learner", "paris"], ["keys", "add", "admin", "anna", "operator"]]:
            with pytest.raises(SystemExit) as ended:
                main(words)
            assert not ended.value.code
        with _started(directory, *lines[3]) as said:
            address = next(found[1] for line in said if (found := re.search(r"syncer for run 'demo' at (\S+)", line)))
            text = text.replace("syncer.example.org:7700", address)
            (directory / "run.toml").write_text(text)
            with _started(directory, *lines[4]) as said_by_first:
                next(line for line in said if "joined: site-a" in line)  # so that both train: this process is quicker
                with pytest.raises(SystemExit) as ended:
                    main(lines[5])
                assert not ended.value.code
                assert "site-a trained" in said_by_first.read()
            (directory / "run.toml").write_text(text.replace('"keys/syncer"', '"keys/anna"'))
            yield directory


def _here(word: str) -> str:
    for old, new in HERE.items():
        word = word.replace(old, new)
    return word


@contextmanager
def _started(directory: Path, *words: str) -> Iterator[TextIO]:
    """A command of `diloco` as a process, which ends with this; what it says."""
    reading, writing = os.pipe()
    process = start_module("tests.docs.at", str(directory), *words, out=writing, err=writing)
    os.close(writing)
    try:
        with open(reading) as said:
            yield said
    finally:
        process.terminate()
        process.join()


# --- the blocks of a page ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)  # the run that all pages find is made before the first
# Of libraries that pages attach to, as in tests/integrations.
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
@pytest.mark.filterwarnings("ignore:When using ``NO_SHARD``")
@pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # transformers, of peft
@pytest.mark.filterwarnings("ignore:The `srun` command is available")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated")
@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page(
    page: str, world: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "page"
    shutil.copytree(world, directory)
    monkeypatch.chdir(directory)
    with session(directory) as python:
        for block in sorted(PAGES[page], key=lambda block: block.language != "toml"):  # commands name these files
            match "text" if entry(register.TEXTS, block) else block.language:
                case "python":
                    execute(block, python)
                case "diff":
                    execute(replace(block, text=re.sub(r"^-.*\n|^[+ ]", "", block.text, flags=re.MULTILINE)), python)
                case "toml":
                    read_toml(block, directory)
                case "yaml":
                    assert yaml.safe_load(block.text), str(block)
                case "text":
                    check_text(block, call)
                case "commands" | "console" | "sh" | "bash":
                    run_commands(block, call, directory)
                case other:
                    pytest.fail(f"{block}: its language {other!r} is none that this test knows; see tests/docs")
        if page in register.RESULTS:
            register.RESULTS[page](python.names)


def entry(entries: dict[register.Name, T], block: Block) -> T | None:
    return next((found for (page, start), found in entries.items() if is_named(block, page, start)), None)


def is_named(block: Block, page: str, start: str) -> bool:
    return block.page == page and block.text.lstrip().startswith(start)


def execute(block: Block, python: Session) -> None:
    if entry(register.NOT_EXECUTED, block) is not None:
        compile(block.text, str(block), "exec")
        return
    if (prepare := entry(register.PREPARATIONS, block)) is not None:
        prepare(python)
    python.run("\n" * block.line + block.text, f"{block.page}")


def read_toml(block: Block, directory: Path) -> None:
    """By the reader that it is for: of the planner's models, of site files, of run files."""
    tables = tomllib.loads(block.text)
    if "parameters" in tables or "config" in tables:
        (directory / "ours.toml").write_text(block.text)
        load_workload(str(directory / "ours.toml"))
    elif {"site", "budget", "link"} & set(tables):
        parse_site(block.text)
    else:
        text = ("" if "run" in tables else RUN_FILE_START) + block.text
        config = parse_config(text, str(block))
        for learner in config.learner:
            parse_config(text, str(block), learner=learner)
        if "method" in tables:
            method_from_table(config.method)


def check_text(block: Block, call: Call) -> None:
    if (printed := entry(register.PRINTED, block)) is not None:
        columns, command = printed
        words = [str(ROOT / word) if word.startswith("examples/") else word for word in command.split()]
        lines = [line.rstrip() for line in call(*words, columns=columns).splitlines()]
        assert block.text.rstrip("\n") in "\n".join(lines), str(block)
    else:
        assert entry(register.TEXTS, block) is not None, f"{block}: say in tests/docs/register.py what holds this text"


def run_commands(block: Block, call: Call, directory: Path) -> None:
    for command in commands_of(block.text):
        if (words := own_words(command.words)) is not None:
            parse(words)
        check_files(command.words)
        if words is None or command.words[0] != "diloco":
            program = command.words[0]
            if program in CHECKS:
                CHECKS[program](command.words)
            else:
                assert program in register.PROGRAMS, f"{block}: say in tests/docs/register.py how {program} is checked"
        elif parsed_only(words) is None:
            run_diloco(command, words, call, directory)


def parsed_only(words: list[str]) -> str | None:
    line = " ".join(words)
    return next((start for start in register.PARSED if line.startswith(start)), None)


def run_diloco(command: Command, words: list[str], call: Call, directory: Path) -> None:
    """Keys are made in a directory of their own, where a page begins with none."""
    where = directory / "operator" if words[0] == "keys" else directory
    where.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        printed = call(*(_here(word) for word in words if word != "--watch"))
    if command.printed:
        assert command.printed.strip() == printed.strip()


@pytest.mark.slow
def test_the_mixture_of_the_page_about_experts_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [text] = [block.text for block in PAGES["docs/experts.md"] if block.language == "toml"]
    Path("run.toml").write_text(text)
    short = {"run.steps": 42, "warm_start.steps": 2, "method.sync_every": 5, "evaluate.sequences": 32}
    options = [word for key, value in short.items() for word in ("--set", f"{key}={value}")]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "run.toml", "--json", *options])
    assert not ended.value.code
    done = json.loads(capsys.readouterr().out)
    assert done["loss"] < 5.0
    trunk, group = 65_984, 92_544  # parameters; of 40 steps 8 sends of the trunk, 2 of the own group and of each group
    assert {it["num_bytes"]["contributions"] for it in done["learners"].values()} == {4 * (8 * trunk + 2 * group)}
    assert {it["num_bytes"]["updates"] for it in done["learners"].values()} == {4 * (8 * trunk + 2 * 4 * group)}


# --- the register -----------------------------------------------------------------------------------------------------


def test_every_entry_of_the_register_is_for_a_block() -> None:
    listed = [*register.PREPARATIONS, *register.NOT_EXECUTED, *register.PRINTED, *register.TEXTS]
    assert [name for name in listed if not any(is_named(block, *name) for block in BLOCKS)] == []
    assert set(register.RESULTS) <= set(PAGES)
    commands = [command for block in BLOCKS if block.language == "commands" for command in commands_of(block.text)]
    used = {command.words[0] for command in commands}
    assert sorted(set(register.PROGRAMS) - used) == []
    own = [words for command in commands if (words := own_words(command.words)) is not None]
    assert sorted(set(register.PARSED) - {parsed_only(words) for words in own}) == []


def test_a_command_that_does_not_exist_is_seen() -> None:
    for wrong in (["trains", "run.toml"], ["train", "run.toml", "--supervise"], ["keys", "new", "keys"]):
        with pytest.raises(UsageError):
            parse(wrong)
    for wrong in (["make", "tset"], ["pip", "install", ".[trian]"], ["python", "-m", "benchmarks.gpu", "--pages"]):
        with pytest.raises(AssertionError):
            CHECKS[wrong[0]](wrong)


def test_a_block_that_is_not_in_the_register_is_seen(call: Call, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="say in tests/docs/register.py what holds this text"):
        check_text(Block("docs/new.md", 1, "text", "new\n"), call)
    with pytest.raises(AssertionError, match="say in tests/docs/register.py how terraform is checked"):
        run_commands(Block("docs/new.md", 1, "commands", "terraform apply\n"), call, tmp_path)


def test_blocks_are_found_in_lists_tabs_and_notes() -> None:
    text = "1. a list\n\n    its text\n\n    ```python\n    a\n    ```\n\n!!! note\n\n    text\n\n        b\n"
    assert [(block.language, block.text, block.line) for block in blocks_of(text, "page")] == [
        ("python", "a\n", 5), ("commands", "b\n", 13),
    ]  # fmt: skip
