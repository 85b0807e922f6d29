"""`diloco methods`: the presets with all fields resolved, and the papers."""

from typing import TYPE_CHECKING

from diloco.cli._options import Json
from diloco.cli._output import make_table, print_result

if TYPE_CHECKING:
    from diloco.core.method import Method

FIELD_COLUMNS, METHOD_COLUMNS = 18, 31
"""Readable widths of the fields' names and of one method's values."""

UNSET = {"offsets": "(p+1)·H/P", "screen": "none"}
"""Meaning of None, by field."""


def command(as_json: Json = False) -> None:
    """List the methods with their resolved values and the papers they come from."""
    from diloco.core.presets import PRESETS

    methods = [preset() for preset in PRESETS.values()]
    print_result(as_json, [method.to_dict() for method in methods], lambda: _show(methods), indent=2)


def _show(methods: "list[Method]") -> None:
    """Print a column for each method and a row for each field, in as many tables as the terminal's width requires."""
    from dataclasses import fields

    from rich.console import Console

    console = Console(markup=False)
    abreast = max(1, (console.width - FIELD_COLUMNS) // METHOD_COLUMNS)
    names = [field.name for field in fields(methods[0]) if field.name != "name"]
    for first in range(0, len(methods), abreast):
        part = methods[first : first + abreast]
        rows = [(name, *(_value(name, getattr(method, name)) for method in part)) for name in names]
        table = make_table(("", *(method.name for method in part)), rows, num_text=1 + len(part))
        for column in table.columns[1:]:
            column.overflow = "fold"
        console.print(table)


def _value(field: str, value: object) -> str:
    """A value in the notation of its constructor; codecs by name."""
    from diloco.core.codecs import Codec

    if value is None:
        return UNSET[field]
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value.name if isinstance(value, Codec) else str(value)
