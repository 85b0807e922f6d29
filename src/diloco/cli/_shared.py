"""What several commands share: options, inputs, tables."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from diloco.errors import ConfigError
from diloco.escaping import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

N = TypeVar("N", int, float)


def with_keys(overrides: list[str] | None, keys: str | None) -> list[str]:
    """What overrides a run file, the keys of `--keys` among it."""
    return [*(overrides or ()), *([] if keys is None else [f"syncer.keys={json.dumps(keys)}"])]


def parse_list(option: str, text: str, kind: type[N], what: str, example: str) -> tuple[N, ...]:
    """The numbers of `text`, between commas. Raises ConfigError that names the option and `what` it takes."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text!r} is not a list of {what}; write for example {example}") from None


RunFile = Annotated[Path, typer.Argument(help="The run file (TOML).")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="table.key=value, instead of what the run file says; repeatable.")
]
LearnerName = Annotated[str | None, typer.Option(help="Name of this learner; default learner-<shard>.")]
Keys = Annotated[
    str | None,
    typer.Option(
        metavar="KEYS",
        help="The keys to show: a directory that `diloco keys` made. A line diloco1.… is taken too, and other users of "
        "this machine can see it in the list of processes: give it in the environment variable DILOCO_KEYS instead.",
    ),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Plain text to another machine.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonSummary = Annotated[
    bool, typer.Option("--json", help="Print the summary as JSON; progress goes to standard error.")
]

Model = Annotated[
    str | None, typer.Option(help="1b, 10b, 100b, llama-405b, deepseek-v3, a .toml file or a transformers config.json.")
]
Parameters = Annotated[float | None, typer.Option(help="Instead of --model.")]
SyncEvery = Annotated[int, typer.Option(min=1, metavar="H", help="Inner steps between two synchronisations.")]
PicturesPage = Annotated[Path | None, typer.Option(metavar="FILE", help="Write pictures there: one HTML page.")]


def make_table(
    heads: Sequence[str], rows: Iterable[Sequence["str | Text"]], *, num_text: int = 1, ruled: bool = True
) -> "Table":
    """A table for the terminal: `num_text` columns of text, then columns of numbers; `ruled`: a line below the head.
    Strings are shown as they are; a style needs a Text."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(*heads[:num_text], box=SIMPLE_HEAD if ruled else None, pad_edge=False)
    for head in heads[num_text:]:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def cell(text: "str | Text") -> "Text":
    """A cell of a table. A string is shown as it is: no markup, and nothing that the terminal would obey."""
    from rich.text import Text

    return Text(printable(text)) if isinstance(text, str) else text


def say_written(files: Iterable[Path]) -> None:
    """Name every file on standard error."""
    for file in files:
        typer.echo(f"wrote {file}", err=True)
