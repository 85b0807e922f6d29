"""`diloco keys`: the keys of a run. `syncer.keys.keyring` has the files."""

import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from diloco.cli._shared import Json
from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.syncer.keys.callers import Role

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

LASTS, GRACE = "365d", "7d"

Directory = Annotated[Path, typer.Option("--dir", metavar="DIR", help="The directory of the run's keys.")]
RoleArgument = Annotated[str, typer.Argument(metavar="ROLE", help="learner, viewer, admin or standby.")]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="One or more, each with keys of its own.")]
Name = Annotated[str, typer.Argument(metavar="NAME")]
Expires = Annotated[str, typer.Option(metavar="TIME", help="Valid for 90d, 12h, 2w …")]


@app.callback()
def keys() -> None:
    """Make and manage the keys of a run: certificates, as directories and as lines."""


@app.command()
def init(
    run: Annotated[str, typer.Option(help="The run's name; the certificates are good for this run only.")],
    host: Annotated[list[str], typer.Option(help="A host name or IP address that learners dial; repeat for more.")],
    directory: Directory = Path("keys"),
    expires: Expires = LASTS,
    as_json: Json = False,
) -> None:
    """Make the authority of a run and its syncer's keys. Nothing that exists is overwritten."""
    from diloco.cli._keys_shown import KeysReport, show
    from diloco.syncer.keys.keyring import SYNCER, Keyring

    keyring = Keyring.new(directory, run, host, (), _span(expires))
    show(directory, KeysReport(keyring.issued, new=[SYNCER]), as_json)


@app.command()
def add(
    role: RoleArgument,
    names: Names,
    directory: Directory = Path("keys"),
    expires: Expires = LASTS,
    as_json: Json = False,
) -> None:
    """Make keys of ROLE for each NAME. A running syncer accepts them at once.

    Each name gets a directory of its own, which is all that its machine needs. The same keys are printed as one line,
    for DILOCO_KEYS or a secret store: whoever reads the line can act in that name. A learner's certificate speaks for
    the learner id of the same name only.
    """
    from diloco.cli._keys_shown import KeysReport, show
    from diloco.syncer.keys.keyring import Keyring

    keyring, lifetime = Keyring.read(directory), _span(expires)
    issued = [keyring.add(name, cast("Role", role), lifetime) for name in names]
    show(directory, KeysReport(issued, new=names), as_json)


@app.command("list")
def list_(directory: Directory = Path("keys"), as_json: Json = False) -> None:
    """List who has keys of a run: names, roles, when they end, and which were revoked."""
    from diloco.cli._keys_shown import KeysReport, show
    from diloco.syncer.keys.keyring import Keyring

    show(directory, KeysReport(Keyring.read(directory).issued, is_list=True), as_json)


@app.command()
def revoke(name: Name, directory: Directory = Path("keys"), as_json: Json = False) -> None:
    """Take all keys of NAME back. A syncer that has the new list refuses them at once."""
    from diloco.cli._keys_shown import KeysReport, show
    from diloco.syncer.keys.keyring import SYNCER, Keyring

    keyring = Keyring.read(directory)
    issued = keyring.revoke(name)
    if any(it.role == "standby" for it in issued):
        typer.echo(
            f"{name}: the first syncer refuses it from now on, but learners cannot be told, and would follow a syncer "
            "that shows its certificate; where its key was stolen, replace the authority (`diloco keys rotate ca`)",
            err=True,
        )
    show(directory, KeysReport(issued, changed=list(dict.fromkeys([SYNCER, *keyring.syncers]))), as_json)


@app.command()
def rotate(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose keys; `ca`: the authority's, in two steps.")],
    directory: Directory = Path("keys"),
    expires: Expires = LASTS,
    grace: Annotated[
        str | None,
        typer.Option(metavar="TIME", help=f"How long the old keys stay good; 0: not at all. Default {GRACE}."),
    ] = None,
    host: Annotated[list[str] | None, typer.Option(help="Of a syncer: one more host that learners dial.")] = None,
    drop_host: Annotated[list[str] | None, typer.Option(help="Of a syncer: one that they dial no more.")] = None,
    finish: Annotated[bool, typer.Option("--finish", help="Of `ca`: trust the old one no more.")] = False,
    as_json: Json = False,
) -> None:
    """Make new keys for NAME; the old ones are refused after a while in which to copy.

    A process that reads a directory takes them up with its next connection. One that was given a line is started again
    with the new line, which is printed.
    """
    from diloco.cli._keys_shown import KeysReport, show
    from diloco.syncer.keys.keyring import AUTHORITY, SYNCER, Keyring

    if name == AUTHORITY:
        if given := [option for option, it in (("--grace", grace), ("--host", host), ("--drop-host", drop_host)) if it]:
            raise ConfigError(f"{given[0]} has no effect on the authority; drop it.")
        return _rotate_authority(directory, expires, finish=finish, as_json=as_json)
    if finish:
        raise ConfigError(f"--finish is for the authority (`diloco keys rotate ca`), not for {name!r}; drop it.")
    keyring, left = Keyring.read(directory), _span(grace or GRACE, least=0)
    issued = [keyring.rotate(name, _span(expires), left, host or (), drop_host or ())]
    others = keyring.syncers
    changed = [each for each in dict.fromkeys([SYNCER, *others]) if each != name]
    stale = [each for each in others if each != name] if host or drop_host else []
    show(directory, KeysReport(issued, replaced=[name], changed=changed, grace=left, stale=stale), as_json)
    return None


def _rotate_authority(directory: Path, expires: str, *, finish: bool, as_json: bool) -> None:
    from diloco.cli._keys_shown import KeysReport, show
    from diloco.syncer.keys.keyring import Keyring

    keyring, lifetime = Keyring.read(directory), _span(expires)
    names = keyring.retire_authority(lifetime) if finish else keyring.replace_authority(lifetime)
    issued = list({each.name: each for each in keyring.issued if each.revoked is None}.values())  # the newest ones
    step = "finish" if finish else "begin"
    show(directory, KeysReport(issued, replaced=names, authority=step), as_json)


def _span(text: str, *, least: int = 1) -> timedelta:
    """A time such as 90d, 12h or 2w. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,5})([hdwy]?)", text)
    if found is None or (found[2] == "" and found[1] != "0") or int(found[1]) < least:
        raise ConfigError(f"{text!r} is no time here; write hours, days, weeks or years, such as 12h, 90d, 2w or 1y.")
    hours = {"": 0, "h": 1, "d": 24, "w": 7 * 24, "y": 365 * 24}[found[2]]
    span = timedelta(hours=int(found[1]) * hours)
    if span > timedelta(days=3650):
        raise ConfigError(f"{text!r} is more than ten years, which is as long as the run's authority is valid.")
    return span
