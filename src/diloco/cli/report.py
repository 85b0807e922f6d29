"""`diloco report`: the events of a run as one page."""

from pathlib import Path
from typing import Annotated

import typer

from diloco.cli._output import make_table, print_result
from diloco.escaping import printable


def command(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Directories with events.jsonl files.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: run-report.html in the first folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, and write no page.")] = False,
) -> None:
    """Report on a run, finished or live, real or simulated: presence of learners, merges, losses, bytes."""
    from diloco.report.page import HEADS, numbers, read_run, rows, summary, write_page

    timeline, story = read_run(folders)
    found = numbers(timeline)

    def show_text() -> None:
        from rich.console import Console

        console = Console(highlight=False, markup=False)
        console.print(printable(f"{timeline.run}: {summary(found)}"))
        console.print(make_table(HEADS, rows(found), ruled=False))
        page = out if out is not None else folders[0] / "run-report.html"
        write_page(page, story)
        console.print(f"see {page}")

    print_result(as_json, found, show_text, indent=1)
