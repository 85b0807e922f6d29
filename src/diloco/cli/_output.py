"""How commands show their results: tables in the terminal, and the names of the files they wrote."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from diloco.escaping import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


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
