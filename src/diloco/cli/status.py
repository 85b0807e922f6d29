"""`diloco status`: which learners take part, and where every token went."""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from diloco.cli._input import read_token
from diloco.cli._options import Authority, Insecure, Json, Keys, TokenFile
from diloco.cli._status import view
from diloco.config import load_config
from diloco.errors import ConfigError, UnreachableError

EVERY_S = 2.0
"""Between two looks of `--watch`."""

WIDE = 10_000
"""Columns where there is no terminal: a line for each learner, however long its name."""


def command(
    run_file: Annotated[
        Path | None, typer.Argument(help="The run file, for the address, the run's name and the keys.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="host:port of the syncer.")] = None,
    run: Annotated[str | None, typer.Option(help="The run's name.")] = None,
    keys: Keys = None,
    token_file: TokenFile = None,
    ca: Authority = None,
    insecure: Insecure = False,
    as_json: Json = False,
    fragments: Annotated[
        bool, typer.Option("--fragments", help="Each fragment too, and more of each learner: wider than 80 columns.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Redrawn every two seconds, until interrupted.")] = False,
) -> None:
    """Show a live run: learners, rounds and the learners they wait for, tokens, bytes."""
    from diloco.exchange.remote import fetch_status

    if run_file is not None:
        if ":" in run_file.name and not run_file.exists():
            raise ConfigError(f"there is no run file {run_file}; a syncer's address goes with --address.")
        config = load_config(run_file)
        address, run = address or config.syncer.address, run or config.run.name
        keys, token_file = keys or config.syncer.keys, token_file or config.syncer.token_file
        ca = ca or config.syncer.ca
        insecure = insecure or config.syncer.insecure
    if address is None or run is None:
        raise ConfigError("no run is named; pass a run file, or --address and --run.")
    token = read_token(token_file)

    def look() -> dict[str, Any]:
        return fetch_status(address, run=run, keys=keys, token=token, ca=ca, insecure=insecure)

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
