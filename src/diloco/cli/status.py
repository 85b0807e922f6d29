"""`diloco status`: which learners take part, and where every token went."""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from diloco.cli._reach import Address, OptionalRunFile, RunName, reach
from diloco.cli._shared import Insecure, Json, Keys
from diloco.cli._status import view
from diloco.errors import UnreachableError

EVERY_S = 2.0
"""Between two looks of `--watch`."""

WIDE = 10_000
"""Columns where there is no terminal: a line for each learner, however long its name."""


def command(
    run_file: OptionalRunFile = None,
    address: Address = None,
    run: RunName = None,
    keys: Keys = None,
    insecure: Insecure = False,
    as_json: Json = False,
    fragments: Annotated[
        bool, typer.Option("--fragments", help="Each fragment too, and more of each learner: wider than 80 columns.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Redrawn every two seconds, until interrupted.")] = False,
) -> None:
    """Show a live run: learners, rounds and the learners they wait for, tokens, bytes."""
    from diloco.exchange.remote import fetch_status

    at = reach(run_file, address, run, keys, insecure)

    def look() -> dict[str, Any]:
        return fetch_status(at.address, run=at.run, keys=at.keys, insecure=at.insecure)

    if not watch:
        _show(Console(highlight=False, markup=False), look(), fragments, as_json)
        return
    with suppress(KeyboardInterrupt):
        _watch(look, fragments, as_json)


def _watch(look: Callable[[], dict[str, Any]], fragments: bool, as_json: bool) -> None:
    """Redraw the screen of a terminal; elsewhere print one after the other. A syncer that does not answer for a while
    is being started again."""
    console = Console(highlight=False, markup=False)
    redraws = console.is_terminal and not as_json
    with Live(console=console, screen=True, auto_refresh=False) if redraws else nullcontext() as live:
        while True:
            try:
                status = look()
            except UnreachableError as error:
                if live is None:
                    raise
                live.update(Text(f"{datetime.now().astimezone():%H:%M:%S}  {error}"), refresh=True)
            else:
                if live is None:
                    _show(console, status, fragments, as_json)
                else:
                    live.update(view(status, wide=fragments), refresh=True)
            time.sleep(EVERY_S)


def _show(console: Console, status: dict[str, Any], fragments: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(status))
    elif console.is_terminal:
        console.print(view(status, wide=fragments))
    else:
        Console(highlight=False, markup=False, width=WIDE).print(view(status, wide=fragments, whole_names=True))
