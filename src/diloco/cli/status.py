"""`diloco status`: which learners take part, and where every token went."""

import json
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diloco.cli._input import read_token
from diloco.cli._options import Authority, Insecure, Json, Keys, TokenFile
from diloco.cli._output import cell
from diloco.config import load_config
from diloco.errors import ConfigError
from diloco.escaping import printable

MAX_NAMES = 6

LEGEND = (
    "in newest merges: fragments whose newest merge has the learner; versions behind: of the fragment where that is "
    "most; work stale: versions between what its last contribution was measured from and the merge it went into; "
    "silent: since it was last heard; drained: the run's pool has no place for it any more; sent, received: since this "
    "syncer started. Tokens trained = merged + pending + discarded + lost with their learners."
)

DISCARDED = {
    "overlap": "trained between a send and the answer that replaced it",
    "missed": "for a round that was closed without it",
    "late": "came after its round, and the method drops what is late",
    "outlier": "refused by the screen for its norm",
    "not finite": "its round gave numbers that are not finite",
    "twice in one round": "an earlier incarnation of its learner is in the round",
    "version": "of a version that no learner and no syncer holds",
}
"""What the reasons in the ledger mean."""

LEARNER_HEADS = (
    "step", "s/step", "tokens", "in\nnewest\nmerges", "versions\nbehind", "work\nstale", "silent", "sent", "received",
)  # fmt: skip
FRAGMENT_HEADS = ("fragment", "version", "trained", "merged", "pending", "discarded", "lost", "newest\nmerge of")


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
    watch: Annotated[bool, typer.Option("--watch", help="Again every two seconds, until interrupted.")] = False,
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
    while True:
        status = fetch_status(address, run=run, keys=keys, token=token, ca=ca, insecure=insecure)
        if as_json:
            typer.echo(json.dumps(status))
        else:
            _print(status)
        if not watch:
            return
        time.sleep(2.0)


def _print(status: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False)
    uptime_s = round(status["uptime_s"])
    _say(
        console, status["run"],
        f"{status['method']['name']}, step {status['step']:,}, {status['tokens']:,} tokens; "
        f"epoch {status['epoch']}, this syncer started {timedelta(seconds=uptime_s)} ago",
    )  # fmt: skip
    if reason := status.get("waits_for"):
        _say(console, "contributions wait with their learners", reason)
    if missing := status.get("missing_events"):
        _say(console, f"{missing} events could not be written", "free disk space on the syncer's machine")
    if (pair := status.get("standby")) is not None:
        _say(console, "one of two syncers", _pair(pair))
    if not status["initialised"] and pair is not None and pair["standing"] != "alone":
        return
    if not status["initialised"]:
        console.print("no model yet: start one learner with --initialise")
        return
    console.print(printable(_participation(status)))
    if status["data"] is not None:
        console.print(printable(_data(status["data"])))
    console.print(_learners(status))
    console.print(_fragments(status))
    console.print(printable(_legend(status)), style="dim")


def _say(console: Console, head: str, text: str) -> None:
    console.print(Text.assemble((printable(head), "bold"), ": ", printable(text)))


def _pair(pair: dict[str, Any]) -> str:
    """How this syncer stands beside the other one."""
    other = "" if pair["follows"] is None else f", the other one is {pair['follows']}"
    behind = f"the standby is {pair['versions_behind']} versions and {pair['seconds_behind']:.1f} s behind"
    link = behind if pair["connected"] else "not connected to the other one"
    return f"{pair['standing']} in epoch {pair['epoch']}{other}; {link}; {len(pair['electorate'])} learners decide"


def _participation(status: dict[str, Any]) -> str:
    """Live learners beside those of the newest merge: all alive while half of them merge is a fault."""
    learners = status["learners"].values()
    line = f"{sum(it['live'] for it in learners)} live, {sum(it['healthy'] for it in learners)} healthy"
    merge = status["newest_merge"]
    if merge is None:
        return f"{line}; nothing merged yet"
    names = merge["contributors"]
    who = ", ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} learners"
    part = "" if merge["scale"] == 1 else f", with {merge['scale']:.2f} of the live weight"
    return f"{line}; newest merge: version {merge['version']} of fragment {merge['fragment']} by {who}{part}"


def _data(data: dict[str, Any]) -> str:
    """Leased data: passes done, and where the units of those begun are."""
    of = "" if data["num_passes"] is None else f" of {data['num_passes']}"
    line = f"data: {data['passes_done']}{of} passes of {data['num_units']:,} units done"
    for it in data["passes"]:
        line += f"; pass {it['pass'] + 1}: {it['done']:,} done, {it['leased']:,} leased, {it['free']:,} free"
    repeated = sum(it["repeated"] for it in data["fragments"])
    lost = f" ({data['lost']:,} of them with versions that a repair lost)" if data["lost"] else ""
    return f"{line}; {data['returned']:,} came back{lost}, {repeated:,} were merged in a fragment once more"


def _learners(status: dict[str, Any]) -> Table:
    learners, num_fragments = status["learners"], len(status["fragments"])
    num_bytes: dict[str, dict[str, dict[str, int]]] = status["num_bytes"] or {}
    table = _table(("learner", "state"), LEARNER_HEADS)
    for name, it in learners.items():
        step_s = "" if it["step_s"] is None else f"{it['step_s']:.2g}"
        behind, stale = ("" if it[key] is None else str(it[key]) for key in ("versions_behind", "staleness"))
        table.add_row(
            cell(name), _state(it), f"{it['step']:,}", step_s, _short(it["tokens"]),
            f"{it['merged']} of {num_fragments}", behind, stale, f"{it['silent_s']:.1f} s", *_traffic(num_bytes, name),
        )  # fmt: skip
    for name in sorted(name for name in num_bytes if name not in learners and name not in ("", "viewers")):
        merged = sum(name in fragment["last_contributors"] for fragment in status["fragments"])
        table.add_row(
            cell(name), "gone", "", "", "", f"{merged} of {num_fragments}", "", "", "", *_traffic(num_bytes, name)
        )
    return table


def _state(it: dict[str, Any]) -> str:
    """The state of a learner in a word; only a healthy one is expected in a merge."""
    if not it["live"]:
        return f"lost, {it['given_up_in_s']:.0f} s left"
    if it["drained"]:
        return "drained"
    return "waiting" if it["waiting"] else "healthy" if it["healthy"] else "starting"


def _traffic(num_bytes: dict[str, dict[str, dict[str, int]]], name: str) -> tuple[str, str]:
    """Bytes that a learner sent and received; "?" where the system cannot count them."""
    if not num_bytes:
        return "?", "?"
    kinds = num_bytes.get(name, {}).values()  # as the syncer counts them: what it received, the learner sent
    sent, received = (sum(kind.get(way, 0) for kind in kinds) for way in ("received", "sent"))
    return _short(sent, "B"), _short(received, "B")


def _fragments(status: dict[str, Any]) -> Table:
    table = _table((), FRAGMENT_HEADS)
    table.add_column("now", overflow="fold")
    for it in status["fragments"]:
        ledger = it["ledger"]
        counts = (*(ledger[key] for key in ("trained", "merged", "pending")), sum(ledger["discarded"].values()))
        merge = str(len(it["last_contributors"])) if it["version"] else ""
        numbers = map(_short, (*counts, ledger["lost"]))
        table.add_row(str(it["fragment"]), str(it["version"]), *numbers, merge, cell(it["reason"]))
    return table


def _table(text_heads: tuple[str, ...], heads: tuple[str, ...]) -> Table:
    """A narrow terminal gets longer rows: nothing is left out, and names are the last to be broken."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for head in text_heads:
        table.add_column(head, no_wrap=True, overflow="fold")
    for head in heads:
        table.add_column(head, justify="right", overflow="fold")
    return table


def _legend(status: dict[str, Any]) -> str:
    """The meaning of the columns, and the reasons for which tokens were discarded in this run."""
    reasons: Counter[str] = Counter()
    for fragment in status["fragments"]:
        reasons.update(fragment["ledger"]["discarded"])
    said = [f"{_short(tokens)} {reason}{_explained(reason)}" for reason, tokens in reasons.most_common()]
    discarded = f" Discarded, all fragments together: {'; '.join(said)}." if said else ""
    return f"{LEGEND}{discarded}"


def _explained(reason: str) -> str:
    """Empty for a reason that this version does not know."""
    return f" ({DISCARDED[reason]})" if reason in DISCARDED else ""


def _short(count: float, unit: str = "") -> str:
    """1,234,567 as 1.23M, or 1.23 MB."""
    prefixes = ["", "k", "M", "G", "T"]
    while count >= 999.5 and len(prefixes) > 1:
        count /= 1000
        del prefixes[0]
    digits = str(count) if isinstance(count, int) else f"{count:#.3g}".rstrip(".")
    return f"{digits} {prefixes[0]}{unit}" if unit else f"{digits}{prefixes[0]}"
