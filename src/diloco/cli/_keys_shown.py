"""What `diloco keys` prints: whose keys, until when, which file belongs on which machine, and new keys as lines."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import typer

from diloco.cli._shared import make_table
from diloco.exchange.key_pair import CERT, key_line, read_key_pair
from diloco.exchange.wire.address import is_local
from diloco.syncer.keys.auth import REVOKED
from diloco.syncer.keys.certificates import SOON, left
from diloco.syncer.keys.keyring import CA_KEY, NEXT_KEY, SYNCER, Issued, Keyring

THERE = "run/keys/"
"""Where the lines copy to, from the other machine's home directory."""


@dataclass(frozen=True)
class KeysReport:
    """What a command did.

    Attributes:
        new: names whose directory is new and has to be copied.
        replaced: those whose directory is to be copied over the one before.
        changed: syncers whose lists have changed, which have to be copied.
        grace: for which old keys stay good; None: none were replaced.
        stale: syncers whose certificate does not name the hosts that another's does.
        authority: "begin" or "finish", where it is being replaced.
    """

    issued: Sequence[Issued] = ()
    new: Sequence[str] = ()
    replaced: Sequence[str] = ()
    changed: Sequence[str] = ()
    grace: timedelta | None = None
    stale: Sequence[str] = ()
    authority: str | None = None
    is_list: bool = False


def show(directory: Path, shown: KeysReport, as_json: bool) -> None:
    """Print it, as a table and sentences or as JSON. The only secrets are the lines of new keys."""
    now = datetime.now(UTC)
    rows = [_row(each, now) for each in shown.issued]
    soon = [row for row in rows if row["state"] == "ends soon"]
    copies = [] if shown.is_list else _copies(directory, shown)
    lines = _lines(directory, shown)
    never = [] if shown.is_list else [str(directory / name) for name in _secrets(directory)]
    if as_json:
        plain = {"directory": str(directory), "keys": rows, "copy": copies, "never_copy": never,
                 "ends_soon": [row["name"] for row in soon], "lines": lines}  # fmt: skip
        typer.echo(json.dumps(plain, indent=2))
        return
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    cells = [(row["name"], row["role"], _ends(row, now), _state(row)) for row in rows]
    console.print(make_table(("name", "role", "ends (UTC)", "state"), cells, num_text=4))
    for line in _said(shown, soon, copies, never, lines, _is_local(directory)):
        console.print(line, soft_wrap=True)


def _said(
    shown: KeysReport, soon: Sequence[dict[str, Any]], copies: Sequence[str], never: Sequence[str],
    key_lines: Mapping[str, str], here: bool,
) -> list[str]:  # fmt: skip
    """The lines below the table."""
    lines = [f"{row['name']}: its certificate ends soon; `diloco keys rotate {row['name']}` makes a new one."
             for row in soon]  # fmt: skip
    if shown.grace is not None:
        days = shown.grace / timedelta(days=1)
        lines += [f"The old keys are refused {f'in {days:g} days' if days else 'at once'}; copy these before they are."]
    if shown.authority == "begin":
        lines += ["Both authorities are trusted from here on. Copy the syncers' first, then all others."]
        lines += ["Give each process that was started with a line its new line, and start it again."]
        lines += ["When every machine and process has its own: diloco keys rotate ca --finish"]
    if shown.authority == "finish":
        lines += ["The old authority is trusted no more. Copy the syncers' first: what the old one signed is refused."]
    lines += [f"{name} does not name these hosts yet: diloco keys rotate {name}" for name in shown.stale]
    if copies and here:
        lines += ["The run's only host is this machine, so nothing has to be copied. To other machines it would be:"]
    elif copies:
        lines += ["Copy, over a channel that you trust; the name before the colon stands for that machine's address:"]
    lines += [f"  {line}" for line in copies]
    if key_lines:
        lines += ["The same keys as lines, for DILOCO_KEYS or a secret store; a line is as secret as its directory:"]
    lines += [f"  {name}  {line}" for name, line in key_lines.items()]
    if copies and never:
        lines += [f"Never copy {' or '.join(never)}: its holder can make keys of this run. It stays here."]
    return lines


def _copies(directory: Path, shown: KeysReport) -> list[str]:
    """A command a line, in the order in which they are to be done."""
    lines = []
    for name in shown.new:
        machine = _machine(directory, name)
        lines += [f"ssh {machine} mkdir -p {THERE}", f"scp -r {directory / name} {_remote(machine)}{THERE}"]
    for name in shown.replaced:
        lines += [f"scp -r {directory / name} {_remote(_machine(directory, name))}{THERE}"]
    for name in shown.changed:
        if (directory / name / REVOKED).exists():
            lines += [f"scp {directory / name / REVOKED} {_remote(_machine(directory, name))}{THERE}{name}/"]
    return lines


def _lines(directory: Path, shown: KeysReport) -> dict[str, str]:
    """New keys as a line each, by name. A syncer needs its directory, so its keys are not among them."""
    syncers = Keyring.read(directory).syncers
    names = [name for name in (*shown.new, *shown.replaced) if name not in syncers]
    return {name: key_line(read_key_pair(directory / name)) for name in names if (directory / name / CERT).exists()}


def _machine(directory: Path, name: str) -> str:
    """The syncer's first host, or a name."""
    if name == SYNCER:
        return Keyring.read(directory).run.hosts[0]
    return name


def _remote(machine: str) -> str:
    return f"[{machine}]:" if ":" in machine else f"{machine}:"


def _is_local(directory: Path) -> bool:
    return all(is_local(f"[{host}]:1" if ":" in host else f"{host}:1") for host in Keyring.read(directory).run.hosts)


def _secrets(directory: Path) -> list[str]:
    return [name for name in (CA_KEY, NEXT_KEY) if (directory / name).exists()]


def _row(it: Issued, now: datetime) -> dict[str, Any]:
    state = "valid"
    if it.revoked is not None and it.revoked <= now:
        state = "revoked"
    elif it.expires <= now:
        state = "expired"
    elif it.revoked is not None:
        state = "replaced"
    elif it.expires - now <= SOON:
        state = "ends soon"
    return {**it.model_dump(mode="json"), "state": state}


def _ends(row: dict[str, Any], now: datetime) -> str:
    expires = datetime.fromisoformat(row["expires"])
    rest = f" ({left(now, expires)})" if row["state"] in ("valid", "ends soon") else ""
    return f"{expires.astimezone(UTC):%Y-%m-%d}{rest}"


def _state(row: dict[str, Any]) -> str:
    if row["state"] in ("revoked", "replaced") and row.get("revoked"):
        at = datetime.fromisoformat(row["revoked"])
        return f"revoked {at:%Y-%m-%d}" if row["state"] == "revoked" else f"replaced, refused from {at:%Y-%m-%d} on"
    return str(row["state"])
