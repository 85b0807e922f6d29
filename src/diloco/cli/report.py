"""`diloco report`: what a run has written down, on one page."""

import json
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli._shared import make_table
from diloco.escaping import printable


def command(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="Where the run's processes wrote their events.jsonl.")
    ],
    out: Annotated[Path | None, typer.Option(help="The page; default: run-report.html in the first folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, and write no page.")] = False,
) -> None:
    """Show a run that is over or under way, real or simulated: who took part, who was in which merge, losses, bytes."""
    from diloco.report.page import HEADS, numbers, read_run, rows, summary, write_page

    timeline, story = read_run(folders)
    found = numbers(timeline)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(printable(f"{timeline.run}: {summary(found)}"))
    console.print(make_table(HEADS, rows(found), ruled=False))
    page = out if out is not None else folders[0] / "run-report.html"
    write_page(page, story)
    console.print(f"see {page}")
