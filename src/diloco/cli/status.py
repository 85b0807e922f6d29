"""`diloco status`: who takes part, and where every token went."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco.errors import ConfigError


def command(
    run_file: Annotated[
        Path | None, typer.Argument(help="The run file, for the address, the run's name, CA and token.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="host:port of the syncer.")] = None,
    run: Annotated[str | None, typer.Option(help="The run's name.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="A file with a token that may view.")] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file of the syncer's authority.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Plain text to another machine.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every two seconds, until interrupted.")] = False,
) -> None:
    """Show a live run: learners, rounds and whom they wait for, tokens, bytes."""
    from diloco.exchange.remote import fetch_status

    if run_file is not None:
        from diloco.config import load_config

        config = load_config(run_file)
        address, run = address or config.syncer.address, run or config.run.name
        token_file, ca = token_file or config.syncer.token_file, ca or config.syncer.ca
        insecure = insecure or config.syncer.insecure
    if address is None or run is None:
        raise ConfigError("no run is named; pass a run file, or --address and --run.")
    token = None if token_file is None else _read_token(token_file)
    while True:
        status = fetch_status(address, run=run, token=token, ca=ca, insecure=insecure)
        if as_json:
            typer.echo(json.dumps(status))
        else:
            _print(status)
        if not watch:
            return
        time.sleep(2.0)


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be read ({error.strerror}).") from error


def _print(status: dict[str, Any]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    console = Console()
    learners, fragments = status["learners"], status["fragments"]
    console.print(
        f"run [bold]{status['run']}[/], {status['method']['name']}, step {status['step']:,}, {status['tokens']:,} tokens"
    )
    if not status["initialised"]:
        console.print("no model yet: start one learner with --initialise")
        return
    num_bytes: dict[str, dict[str, dict[str, int]]] = status["num_bytes"] or {}
    gone = sorted(name for name in num_bytes if name not in learners and name not in ("", "viewers"))
    table = Table("learner", "state", "step", "s/step", "tokens", "heard", "in merges", "in", "out", box=SIMPLE)
    for name in [*learners, *gone]:
        it = learners.get(name, {})
        kinds = num_bytes.get(name, {}).values()
        received, sent = (sum(kind.get(way, 0) for kind in kinds) for way in ("received", "sent"))
        in_merges = sum(name in fragment["last_contributors"] for fragment in fragments)
        state = "gone" if not it else "waiting" if it["waiting"] else "healthy" if it["healthy"] else "starting"
        table.add_row(
            name,
            state,
            f"{it['step']:,}" if it else "",
            f"{it['step_s']:.2g}" if it and it["step_s"] is not None else "",
            _short(it["tokens"]) if it else "",
            f"{it['silent_s']:.1f} s" if it else "",
            f"{in_merges} of {len(fragments)}",
            f"{_short(received)}B" if num_bytes else "?",
            f"{_short(sent)}B" if num_bytes else "?",
        )
    console.print(table)
    table = Table("fragment", "version", "merged", "pending", "discarded", "lost", "newest merge, and now", box=SIMPLE)
    for it in fragments:
        ledger = it["ledger"]
        discarded = sum(ledger["discarded"].values())
        tokens = (_short(count) for count in (ledger["merged"], ledger["pending"], discarded, ledger["lost"]))
        members = ", ".join(it["last_contributors"]) or "none yet"
        table.add_row(str(it["fragment"]), str(it["version"]), *tokens, f"{members}; {it['reason']}")
    console.print(table)
    console.print(
        "in merges: fragments whose newest merge has the learner; in, out: bytes on the syncer's sockets; the rest are tokens"
    )


def _short(count: float) -> str:
    """1,234,567 as 1.23M."""
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"
