"""`diloco methods`: the presets, every answer resolved, with the paper it comes from."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from diloco.core.method import Method

METHODS_PER_TABLE = 4  # as many as stay readable side by side


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per method.")] = False,
) -> None:
    """List the methods with their resolved values and the papers they come from."""
    from diloco.core.method import PRESETS

    methods = [preset() for preset in PRESETS.values()]
    if as_json:
        typer.echo(json.dumps([method.to_dict() for method in methods], indent=2))
        return
    for first in range(0, len(methods), METHODS_PER_TABLE):
        _print_table(methods[first : first + METHODS_PER_TABLE])


def _print_table(methods: "list[Method]") -> None:
    """One column per method, one row per question."""
    from dataclasses import fields

    from rich.console import Console
    from rich.table import Table

    table = Table("", *(method.name for method in methods), show_lines=True)
    for field in fields(methods[0]):
        if field.name != "name":
            table.add_row(field.name, *(str(getattr(method, field.name)) for method in methods))
    Console().print(table, markup=False)
