"""What `diloco keys` prints: whose keys, until when, and which file belongs on which machine."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import typer

from diloco.cli._output import make_table
from diloco.exchange.wire.address import is_local
from diloco.syncer.authorities import CA_KEY, NEXT_KEY
from diloco.syncer.ends_soon import SOON, left
from diloco.syncer.keyring import CERTIFICATES, SYNCER, Issued, Keyring
from diloco.syncer.revocation import REVOKED
from diloco.syncer.token_ring import TOKENS
from diloco.syncer.tokens import TokenEntry

THERE = "run/keys/"
"""Where the lines copy to, from the other machine's home directory."""


@dataclass(frozen=True)
class Shown:
    """What a command did.

    Attributes:
        new: names whose directory is new and has to be copied.
        replaced: those whose directory is to be copied over the one before.
        changed: syncers whose lists have changed, which have to be copied.
        revoked: tokens that were.
        grace: for which old keys stay good; None: none were replaced.
        stale: syncers whose certificate does not name the hosts that another's does.
        authority: "begin" or "finish", where it is being replaced.
    """

    issued: Sequence[Issued] = ()
    tokens: Sequence[TokenEntry] = ()
    new: Sequence[str] = ()
    replaced: Sequence[str] = ()
    changed: Sequence[str] = ()
    revoked: Sequence[TokenEntry] = ()
    grace: timedelta | None = None
    stale: Sequence[str] = ()
    authority: str | None = None
    is_list: bool = False


def show(directory: Path, shown: Shown, as_json: bool) -> None:
    """Print it, as a table and sentences or as JSON. No secret is printed."""
    now = datetime.now(UTC)
    rows = [*(_certificate(each, now) for each in shown.issued), *(_token(each, now) for each in shown.tokens),
            *({**_token(each, now), "state": "revoked"} for each in shown.revoked)]  # fmt: skip
    soon = [row for row in rows if row["state"] == "ends soon"]
    copies = [] if shown.is_list else _copies(directory, shown)
    never = [] if shown.is_list else [str(directory / name) for name in _secrets(directory)]
    if as_json:
        plain = {"directory": str(directory), "keys": rows, "copy": copies, "never_copy": never,
                 "ends_soon": [row["name"] for row in soon]}  # fmt: skip
        typer.echo(json.dumps(plain, indent=2))
        return
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    cells = [(row["name"], row["role"], row["kind"], _ends(row, now), _state(row)) for row in rows]
    console.print(make_table(("name", "role", "keys", "ends (UTC)", "state"), cells, num_text=5))
    for line in _said(shown, soon, copies, never, _is_local(directory)):
        console.print(line, soft_wrap=True)


def _said(
    shown: Shown, soon: Sequence[dict[str, Any]], copies: Sequence[str], never: Sequence[str], here: bool
) -> list[str]:
    """The lines below the table."""
    lines = [f"{row['name']}: its {row['kind']} ends soon; `diloco keys rotate {row['name']}` makes a new one."
             for row in soon]  # fmt: skip
    if shown.grace is not None:
        days = shown.grace / timedelta(days=1)
        lines += [f"The old keys are refused {f'in {days:g} days' if days else 'at once'}; copy these before they are."]
    if shown.authority == "begin":
        lines += ["Both authorities are trusted from here on. Copy the syncers' first, then all others."]
        lines += ["When every machine has its own: diloco keys rotate ca --finish"]
    if shown.authority == "finish":
        lines += ["The old authority is trusted no more. Copy the syncers' first: what the old one signed is refused."]
    lines += [f"{name} does not name these hosts yet: diloco keys rotate {name}" for name in shown.stale]
    if copies and here:
        lines += ["The run's only host is this machine, so nothing has to be copied. To other machines it would be:"]
    elif copies:
        lines += ["Copy, over a channel that you trust; the name before the colon stands for that machine's address:"]
    lines += [f"  {line}" for line in copies]
    if copies and never:
        lines += [f"Never copy {' or '.join(never)}: its holder can make keys of this run. It stays here."]
    return lines


def _copies(directory: Path, shown: Shown) -> list[str]:
    """A command a line, in the order in which they are to be done."""
    lines = []
    for name in shown.new:
        machine = _machine(directory, name)
        lines += [f"ssh {machine} mkdir -p {THERE}", f"scp -r {directory / name} {_remote(machine)}{THERE}"]
    for name in shown.replaced:
        lines += [f"scp -r {directory / name} {_remote(_machine(directory, name))}{THERE}"]
    for name in shown.changed:
        lists = [file for file, it in ((REVOKED, shown.issued), (TOKENS, [*shown.tokens, *shown.revoked]))
                 if it and (directory / name / file).exists()]  # fmt: skip
        machine = _remote(_machine(directory, name))
        lines += [f"scp {directory / name / file} {machine}{THERE}{name}/" for file in lists]
    return lines


def _machine(directory: Path, name: str) -> str:
    """The syncer's first host, or a name."""
    if name == SYNCER and (directory / CERTIFICATES).exists():
        return Keyring.read(directory).run.hosts[0]
    return name


def _remote(machine: str) -> str:
    return f"[{machine}]:" if ":" in machine else f"{machine}:"


def _is_local(directory: Path) -> bool:
    if not (directory / CERTIFICATES).exists():
        return False
    return all(is_local(f"[{host}]:1" if ":" in host else f"{host}:1") for host in Keyring.read(directory).run.hosts)


def _secrets(directory: Path) -> list[str]:
    return [name for name in (CA_KEY, NEXT_KEY) if (directory / name).exists()]


def _certificate(it: Issued, now: datetime) -> dict[str, Any]:
    state = "valid"
    if it.revoked is not None and it.revoked <= now:
        state = "revoked"
    elif it.expires <= now:
        state = "expired"
    elif it.revoked is not None:
        state = "replaced"
    elif it.expires - now <= SOON:
        state = "ends soon"
    return {"kind": "certificate", **it.model_dump(mode="json"), "state": state}


def _token(it: TokenEntry, now: datetime) -> dict[str, Any]:
    state = "valid"
    if it.expires is not None and it.expires - now <= SOON:
        state = "ends soon" if it.expires > now else "expired"
    return {
        "kind": "token", "name": it.name, "role": it.role, "sha256": it.sha256[:12], "learner": it.learner,
        "expires": None if it.expires is None else it.expires.isoformat(), "state": state,
        "old_expires": None if it.old_expires is None else it.old_expires.isoformat(),
    }  # fmt: skip


def _ends(row: dict[str, Any], now: datetime) -> str:
    if row["expires"] is None:
        return "never"
    expires = datetime.fromisoformat(row["expires"])
    rest = f" ({left(now, expires)})" if row["state"] in ("valid", "ends soon") else ""
    return f"{expires.astimezone(UTC):%Y-%m-%d}{rest}"


def _state(row: dict[str, Any]) -> str:
    if row["kind"] == "token" and row["learner"] not in (None, row["name"]):
        return f"{row['state']}, speaks for {row['learner']}"
    if row["kind"] == "token" and row["role"] == "learner" and row["learner"] is None:
        return f"{row['state']}, speaks for any learner"
    if row["state"] in ("revoked", "replaced") and row.get("revoked"):
        at = datetime.fromisoformat(row["revoked"])
        return f"revoked {at:%Y-%m-%d}" if row["state"] == "revoked" else f"replaced, refused from {at:%Y-%m-%d} on"
    return str(row["state"])
