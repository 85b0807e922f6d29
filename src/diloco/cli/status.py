"""`diloco status`: who takes part, and where every token went."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table


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
    from rich.console import Console

    console = Console()
    console.print(
        f"run [bold]{status['run']}[/], {status['method']['name']}, step {status['step']:,}, {status['tokens']:,} tokens"
    )
    if not status["initialised"]:
        console.print("no model yet: start one learner with --initialise")
        return
    console.print(_participation(status))
    console.print(_learners(status))
    console.print(_fragments(status["fragments"]))
    console.print(
        "merges: fragments whose newest merge has the learner; behind: versions of the fragment where it is most behind; "
        "stale: versions between what its last contribution was measured from and the merge it went into; up, down: bytes on the "
        "syncer's sockets from and to it. Tokens of a fragment: merged + pending + discarded + lost = trained.",
        style="dim",
    )


def _participation(status: dict[str, Any]) -> str:
    """Who is there, and who was in the newest merge: a run with everybody alive and half of them taking part is half a run."""
    learners = status["learners"].values()
    line = f"{sum(it['live'] for it in learners)} live, {sum(it['healthy'] for it in learners)} healthy"
    merge = status["newest_merge"]
    if merge is None:
        return line
    scale = "" if merge["scale"] == 1 else f", scaled by {merge['scale']:.2f}"
    names = ", ".join(merge["contributors"])
    return f"{line}; newest merge: {names} into version {merge['version']} of fragment {merge['fragment']}{scale}"


def _learners(status: dict[str, Any]) -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table

    learners, num_fragments = status["learners"], len(status["fragments"])
    num_bytes: dict[str, dict[str, dict[str, int]]] = status["num_bytes"] or {}
    gone = sorted(name for name in num_bytes if name not in learners and name not in ("", "viewers"))
    table = Table("learner", "state", box=SIMPLE, padding=(0, 1))
    for title in ("step", "s/step", "tokens", "merges", "behind", "stale", "heard", "up", "down"):
        table.add_column(title, justify="right")
    for name, it in learners.items():
        table.add_row(
            name,
            _state(it),
            f"{it['step']:,}",
            _or_unknown(it["step_s"], lambda seconds: f"{seconds:.2g}"),
            _short(it["tokens"]),
            f"{it['merged']} of {num_fragments}",
            _or_unknown(it["versions_behind"], str),
            _or_unknown(it["staleness"], str),
            f"{it['silent_s']:.1f} s",
            *_traffic(num_bytes, name),
        )
    for name in gone:
        merged = sum(name in fragment["last_contributors"] for fragment in status["fragments"])
        table.add_row(name, "gone", "", "", "", f"{merged} of {num_fragments}", "", "", "", *_traffic(num_bytes, name))
    return table


def _state(it: dict[str, Any]) -> str:
    """One word; only a healthy learner is expected in a merge."""
    if not it["live"]:
        return f"lost, {it['given_up_in_s']:.0f} s left"
    return "waiting" if it["waiting"] else "healthy" if it["healthy"] else "starting"


def _traffic(num_bytes: dict[str, dict[str, dict[str, int]]], name: str) -> tuple[str, str]:
    """Bytes from and to a learner; "?" where the system cannot count them."""
    if not num_bytes:
        return "?", "?"
    kinds = num_bytes.get(name, {}).values()
    up, down = (sum(kind.get(way, 0) for kind in kinds) for way in ("received", "sent"))
    return f"{_short(up)}B", f"{_short(down)}B"


def _fragments(fragments: list[dict[str, Any]]) -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, padding=(0, 1))
    for title in ("fragment", "version", "trained", "merged", "pending", "discarded", "lost"):
        table.add_column(title, justify="right")
    table.add_column("newest merge, and now")
    for it in fragments:
        ledger = it["ledger"]
        discarded = sum(ledger["discarded"].values())
        counts = (ledger["trained"], ledger["merged"], ledger["pending"], discarded, ledger["lost"])
        members = ", ".join(it["last_contributors"]) or "none yet"
        table.add_row(str(it["fragment"]), str(it["version"]), *map(_short, counts), f"{members}; {it['reason']}")
    return table


def _or_unknown(value: Any, show: Callable[[Any], str]) -> str:
    return "" if value is None else show(value)


def _short(count: float) -> str:
    """1,234,567 as 1.23M."""
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"
