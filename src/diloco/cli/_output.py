"""Results as commands print them: JSON, tables, names of written files."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from diloco.escaping import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def print_result(as_json: bool, value: Any, text: str | Callable[[], object], indent: int | None = None) -> None:
    """Print `value` as JSON, or `text` for people: a string, or a function that prints."""
    if as_json:
        typer.echo(json.dumps(value, indent=indent))
    elif isinstance(text, str):
        typer.echo(text)
    else:
        text()


def make_table(
    heads: Sequence[str], rows: Iterable[Sequence["str | Text"]], *, num_text: int = 1, ruled: bool = True
) -> "Table":
    """A table for the terminal: `num_text` columns of text, then columns of numbers; `ruled`: a line below the heads.

    Strings are shown literally, without markup and terminal escapes; pass a Text to style a cell.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(*heads[:num_text], box=SIMPLE_HEAD if ruled else None, pad_edge=False)
    for head in heads[num_text:]:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def cell(text: "str | Text") -> "Text":
    """A table cell; a string is shown literally, without markup and terminal escapes."""
    from rich.text import Text

    return Text(printable(text)) if isinstance(text, str) else text


def say_written(*files: Path) -> None:
    """Name written files on standard error."""
    for file in files:
        typer.echo(f"wrote {file}", err=True)
