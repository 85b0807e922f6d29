"""`diloco methods`: the presets, every answer resolved, with the paper it comes from."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from diloco.core.method import Method

FIELD_COLUMNS, METHOD_COLUMNS = 18, 31  # what a field's name and a method's values need to stay readable

UNSET = {"offsets": "(p+1)·H/P", "screen": "none"}
"""What None stands for, by field."""


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per method.")] = False,
) -> None:
    """List the methods with their resolved values and the papers they come from."""
    from rich.console import Console

    from diloco.core.presets import PRESETS

    methods = [preset() for preset in PRESETS.values()]
    if as_json:
        typer.echo(json.dumps([method.to_dict() for method in methods], indent=2))
        return
    console = Console(markup=False)
    abreast = max(1, (console.width - FIELD_COLUMNS) // METHOD_COLUMNS)
    for first in range(0, len(methods), abreast):
        _print_table(console, methods[first : first + abreast])


def _print_table(console: "Console", methods: "list[Method]") -> None:
    """Print one column per method and one row per field."""
    from dataclasses import fields

    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("", box=SIMPLE_HEAD)
    for method in methods:
        table.add_column(method.name, overflow="fold")
    for field in fields(methods[0]):
        if field.name != "name":
            table.add_row(field.name, *(_shown(field.name, getattr(method, field.name)) for method in methods))
    console.print(table)


def _shown(field: str, value: object) -> str:
    """A value as one would write it; codecs by their names."""
    from diloco.core.codecs import Codec

    if value is None:
        return UNSET[field]
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value.name if isinstance(value, Codec) else str(value)
