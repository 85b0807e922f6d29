"""Commands of the pages: read by the command line that they are for, and executed where that is cheap."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import typer
from tests.docs.blocks import ROOT
from typer.core import TyperGroup

from diloco.cli import COMMANDS, _load

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""click's, which typer may bring along under a name of its own."""


@dataclass(frozen=True)
class Command:
    """A line of a block, and what the page says that it prints (empty: nothing is said)."""

    words: list[str]
    printed: str = ""

    def __str__(self) -> str:
        return shlex.join(self.words)


def commands_of(text: str) -> Iterator[Command]:
    """Of a block of commands. What is right of three spaces or a "#" explains it. Where commands follow a prompt, "$ ",
    the lines between are what they print."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    prompted = any(line.startswith("$ ") for line in lines)
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if prompted and not line.startswith("$ "):
            found[-1][1].append(line)
        elif line.strip():
            found.append((line.removeprefix("$ "), []))
    for line, printed in found:
        if words := shlex.split(re.split(r"(?<=\S) {3,}", line)[0], comments=True):
            yield Command(words, "\n".join(printed))


def own_words(words: list[str]) -> list[str] | None:
    """What follows `diloco` or `python -m diloco`; None: it is another command."""
    for place, word in enumerate(words):
        if word == "diloco" and (place == 0 or words[place - 1] == "-m"):
            return words[place + 1 :]
    return None


def parse(arguments: list[str]) -> None:
    """Let the command line read a command, without running it. Raises UsageError where it does not fit."""
    if {"--help", "--version"} & set(arguments):
        return
    name, *rest = arguments
    if name not in COMMANDS:
        raise UsageError(f"no command {name}")
    command = _load(name)
    context = command.make_context(name, rest)
    if isinstance(command, TyperGroup) and context._protected_args:  # `diloco syncer RUN_FILE` names none
        child, inner, left = command.resolve_command(context, [*context._protected_args, *context.args])
        assert inner is not None
        inner.make_context(str(child), left, parent=context)


# --- programs of others -----------------------------------------------------------------------------------------------


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split())
    for word in words[1:]:
        name, is_variable, _ = word.partition("=")
        assert f"$({name})" in makefile if is_variable else word in targets, f"make has no {word}"


def check_pip(words: list[str]) -> None:
    """An extra that is named is one of the project's, a file is there, and what else is installed is pinned."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {re.split("==", line)[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    words = words[words.index("install") + 1 :]
    for before, word in zip(["", *words], words, strict=False):
        if before in ("-c", "-r"):
            assert (ROOT / word).is_file(), f"there is no {word}"
        elif own := re.fullmatch(r"(?:diloco|\.)(?:\[(.*)\])?", word):
            assert set((own[1] or "").split(",")) <= {"", *project["optional-dependencies"]}, f"no such extra: {word}"
        elif not word.startswith("-"):
            assert re.sub(r"\W.*", "", word.replace("-", "_")) in {pin.replace("-", "_") for pin in pins}, word


def check_python(words: list[str]) -> None:
    """The file or module is there, and knows the options."""
    options = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
    if words[1] == "-m":
        spec = importlib.util.find_spec(words[2])
        assert spec is not None, f"there is no module {words[2]}"
        if words[2].split(".")[0] not in ("benchmarks", "tests", "studies"):
            return
        assert spec.origin is not None
        source = ROOT / spec.origin
        source = source.with_name("__main__.py") if source.name == "__init__.py" else source
    else:
        source = ROOT / words[1]
        assert source.is_file(), f"there is no {words[1]}"
    for option in options:
        assert option in source.read_text(), f"{words[1]} has no {option}"


def check_torchrun(words: list[str]) -> None:
    """torchrun takes the options before what it starts."""
    from torch.distributed.run import get_args_parser

    assert get_args_parser().parse_args(words[1:]).training_script, words


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
    "torchrun": check_torchrun,
}


def check_files(words: list[str]) -> None:
    """Files of the repository that a command names are there."""
    for word in words:
        for path in re.findall(r"(?<![\w/])(?:templates|examples|docs|studies|benchmarks)/[\w./@-]+", word):
            assert (ROOT / path).exists(), f"there is no {path}"
