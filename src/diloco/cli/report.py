"""`diloco report`: what a run has written down, on one page."""

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Where the run's processes wrote their events.jsonl.")
    ],
    out: Annotated[Path | None, typer.Option(help="The page; default: run-report.html in the first folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, and write no page.")] = False,
) -> None:
    """Show a run that is over or under way, real or simulated: who took part, who was in which merge, losses, bytes."""
    from diloco.report.page import HEADS, numbers, read_run, rows, summary, write_page

    timeline = read_run(folders)
    found = numbers(timeline)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{timeline.run}: {summary(found)}", highlight=False, markup=False)
    table = Table(*HEADS, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows(found):
        table.add_row(*row)
    console.print(table)
    page = out if out is not None else folders[0] / "run-report.html"
    write_page(page, timeline)
    console.print(f"see {page}", highlight=False, markup=False)
