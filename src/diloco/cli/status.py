"""`diloco status`: the learners of a run, its rounds, and the fate of every token."""

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

from diloco.cli._options import Json, Store
from diloco.cli._run_address import RunAddress, takes_run_address
from diloco.cli._status_view import view
from diloco.errors import StoreError, UnreachableError

EVERY_S = 2.0
"""Refresh interval of `--watch`."""

WIDE = 10_000
"""Columns without a terminal: one line for each learner, however long its name."""


@takes_run_address
def command(
    at: RunAddress | None,
    store: Store = None,
    as_json: Json = False,
    fragments: Annotated[
        bool, typer.Option("--fragments", help="More columns and all fragments; over 80 columns.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every two seconds until interrupted.")] = False,
) -> None:
    """Show a live run: learners, rounds and the learners they wait for, tokens, bytes.

    With --store, of a run without its syncer: the versions, members and tokens that its store has."""
    from diloco.exchange.dialling import fetch_status

    def fetch() -> dict[str, Any]:
        if at is None:
            from diloco.following.stored_status import stored_status

            return stored_status(str(store))
        return fetch_status(at.address, run=at.run, keys=at.keys, insecure=at.insecure)

    if not watch:
        _print(Console(highlight=False, markup=False), fetch(), fragments, as_json)
        return
    with suppress(KeyboardInterrupt):
        _watch(fetch, fragments, as_json)


def _watch(fetch: Callable[[], dict[str, Any]], fragments: bool, as_json: bool) -> None:
    """Redraw a terminal; otherwise print every status. In a terminal, wait for a syncer or store that does not answer:
    it may be restarting."""
    console = Console(highlight=False, markup=False)
    redraws = console.is_terminal and not as_json
    with Live(console=console, screen=True, auto_refresh=False) if redraws else nullcontext() as live:
        while True:
            try:
                status = fetch()
            except (StoreError, UnreachableError) as error:
                if live is None:
                    raise
                live.update(Text(f"{datetime.now().astimezone():%H:%M:%S}  {error}"), refresh=True)
            else:
                if live is None:
                    _print(console, status, fragments, as_json)
                else:
                    live.update(view(status, wide=fragments), refresh=True)
            time.sleep(EVERY_S)


def _print(console: Console, status: dict[str, Any], fragments: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(status))
    elif console.is_terminal:
        console.print(view(status, wide=fragments))
    else:
        Console(highlight=False, markup=False, width=WIDE).print(view(status, wide=fragments, whole_names=True))
