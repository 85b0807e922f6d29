"""Options that several commands take."""

import json
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from diloco.errors import ConfigError

N = TypeVar("N", int, float)

RunFile = Annotated[Path, typer.Argument(help="The run file (TOML).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="table.key=value: overrides a key of the run file; repeatable.")
]
LearnerName = Annotated[str | None, typer.Option(help="Name of this learner; default learner-<shard>.")]
Keys = Annotated[
    str | None,
    typer.Option(
        metavar="KEYS",
        help="The caller's keys: a directory made by `diloco keys`. A line diloco1.… is accepted too, but users of the "
        "machine can see it in the process list: pass a line in the environment variable DILOCO_KEYS instead.",
    ),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow plain text to another machine.")]
Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE", help="host:port of the run's syncer; or its store: a state directory, or the URL of a bucket."
    ),
]
Store = Annotated[
    str | None, typer.Option(help="Read the run's store, served or not: a state directory, or the URL of a bucket.")
]
Every = Annotated[
    int, typer.Option(min=1, metavar="N", help="Take each N-th version; with P fragments, P are a whole new model.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonSummary = Annotated[
    bool, typer.Option("--json", help="Print the summary as JSON; progress goes to standard error.")
]

Model = Annotated[
    str | None, typer.Option(help="1b, 10b, 100b, llama-405b, deepseek-v3, a .toml file or a transformers config.json.")
]
Parameters = Annotated[float | None, typer.Option(help="Number of parameters, instead of --model.")]
SyncEvery = Annotated[int, typer.Option(min=1, metavar="H", help="Inner steps between two synchronisations.")]
PicturesPage = Annotated[Path | None, typer.Option(metavar="FILE", help="Write pictures to this HTML page.")]


def with_keys(overrides: list[str] | None, keys: str | None) -> list[str]:
    """The overrides of a run file, followed by the keys of `--keys`."""
    return [*(overrides or ()), *([] if keys is None else [f"syncer.keys={json.dumps(keys)}"])]


def parse_list(option: str, text: str, kind: type[N], what: str, example: str) -> tuple[N, ...]:
    """Parse comma-separated numbers. Raises ConfigError that names the option and `what` it takes."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a list of {what}; write for example {example}") from None
