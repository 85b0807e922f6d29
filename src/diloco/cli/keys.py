"""`diloco keys`: the keys of a run. `syncer.keys.keyring` describes the files."""

import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from diloco.cli._options import Json
from diloco.errors import ConfigError

if TYPE_CHECKING:
    from diloco.syncer.keys.certificates import Role

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

LASTS, GRACE = "365d", "7d"

Directory = Annotated[Path, typer.Option("--dir", metavar="DIR", help="The directory of the run's keys.")]
RoleArgument = Annotated[
    str, typer.Argument(metavar="ROLE", help="learner, viewer, evaluator, rollout, reward, standby or admin.")
]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="One or more names; each gets its own keys.")]
Expires = Annotated[str, typer.Option(metavar="TIME", help="Lifetime of the certificate, such as 90d, 12h or 2w.")]


@app.callback()
def keys() -> None:
    """Make and manage the keys of a run: certificates, as directories and as lines."""


@app.command()
def init(
    run: Annotated[str, typer.Option(help="The run's name; the certificates are valid for this run only.")],
    host: Annotated[list[str], typer.Option(help="A host name or IP address that learners dial; repeatable.")],
    directory: Directory = Path("keys"),
    expires: Expires = LASTS,
    as_json: Json = False,
) -> None:
    """Make the authority of a run and its syncer's keys. Existing keys are never overwritten."""
    from diloco.cli._keys_report import KeysReport
    from diloco.config import NAME
    from diloco.syncer.keys.keyring import SYNCER, Keyring

    if not re.fullmatch(NAME, run):
        raise ConfigError(f"{run!r} is not a valid name of a run; use letters, digits, dots, dashes and underscores.")
    keyring = Keyring.new(directory, run, host, (), _duration(expires))
    KeysReport(keyring, keyring.issued, new=[SYNCER]).show(as_json)


@app.command()
def add(
    role: RoleArgument,
    names: Names,
    directory: Directory = Path("keys"),
    expires: Expires = LASTS,
    as_json: Json = False,
) -> None:
    """Make keys of ROLE for each NAME. A running syncer accepts them at once.

    Each name gets its own directory, which is all that its machine needs. The same keys are also printed as one line,
    for DILOCO_KEYS or a secret store; a reader of the line can act under that name. A learner's certificate is valid
    for the learner of the same name only.
    """
    from diloco.cli._keys_report import KeysReport
    from diloco.syncer.keys.keyring import Keyring

    keyring, lifetime = Keyring.read(directory), _duration(expires)
    issued = [keyring.add(name, cast("Role", role), lifetime) for name in names]
    KeysReport(keyring, issued, new=names).show(as_json)


@app.command("list")
def list_(directory: Directory = Path("keys"), as_json: Json = False) -> None:
    """List the keys of a run: names, roles, ends of validity, revocations."""
    from diloco.cli._keys_report import KeysReport
    from diloco.syncer.keys.keyring import Keyring

    keyring = Keyring.read(directory)
    KeysReport(keyring, keyring.issued).show(as_json)


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The owner of the keys.")],
    directory: Directory = Path("keys"),
    as_json: Json = False,
) -> None:
    """Revoke all keys of NAME. A syncer with the new list refuses them at once."""
    from diloco.cli._keys_report import KeysReport
    from diloco.syncer.keys.keyring import SYNCER, Keyring

    keyring = Keyring.read(directory)
    issued = keyring.revoke(name)
    if any(it.role == "standby" for it in issued):
        typer.echo(
            f"{name}: the other syncer refuses these keys from now on, but learners cannot be told, and would still "
            "trust a syncer with this certificate; if its key was stolen, replace the authority (`diloco keys rotate "
            "ca`)",
            err=True,
        )
    KeysReport(keyring, issued, changed=list(dict.fromkeys([SYNCER, *keyring.syncers]))).show(as_json)


@app.command()
def rotate(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The owner; `ca`: the authority, in two steps.")],
    directory: Directory = Path("keys"),
    expires: Expires = LASTS,
    grace: Annotated[
        str | None, typer.Option(metavar="TIME", help=f"Validity of the old keys; default {GRACE}.")
    ] = None,
    host: Annotated[list[str] | None, typer.Option(help="For a syncer: add a host that learners dial.")] = None,
    drop_host: Annotated[list[str] | None, typer.Option(help="For a syncer: remove such a host.")] = None,
    finish: Annotated[bool, typer.Option("--finish", help="For `ca`: stop trusting the old authority.")] = False,
    as_json: Json = False,
) -> None:
    """Make new keys for NAME. The old keys stay valid for a grace period, in which to copy the new ones.

    A process with a directory uses the new keys from its next connection on. Restart a process with a line, with the
    new line that is printed.
    """
    from diloco.cli._keys_report import KeysReport
    from diloco.syncer.keys.keyring import AUTHORITY, SYNCER, Keyring

    if name == AUTHORITY:
        if given := [option for option, it in (("--grace", grace), ("--host", host), ("--drop-host", drop_host)) if it]:
            raise ConfigError(f"{given[0]} has no effect on the authority; drop it.")
        return _rotate_authority(directory, expires, finish=finish, as_json=as_json)
    if finish:
        raise ConfigError(f"--finish is for the authority (`diloco keys rotate ca`), not for {name!r}; drop it.")
    keyring, left = Keyring.read(directory), _duration(grace or GRACE, least=0)
    issued = [keyring.rotate(name, _duration(expires), left, host or (), drop_host or ())]
    changed = [each for each in dict.fromkeys([SYNCER, *keyring.syncers]) if each != name]
    stale = [each for each in keyring.syncers if each != name] if host or drop_host else []
    return KeysReport(keyring, issued, replaced=[name], changed=changed, grace=left, stale=stale).show(as_json)


def _rotate_authority(directory: Path, expires: str, *, finish: bool, as_json: bool) -> None:
    from diloco.cli._keys_report import KeysReport
    from diloco.syncer.keys.keyring import Keyring

    keyring, lifetime = Keyring.read(directory), _duration(expires)
    names = keyring.retire_authority(lifetime) if finish else keyring.replace_authority(lifetime)
    issued = list({each.name: each for each in keyring.issued if each.revoked is None}.values())  # the newest ones
    KeysReport(keyring, issued, replaced=names, authority="finish" if finish else "begin").show(as_json)


def _duration(text: str, *, least: int = 1) -> timedelta:
    """Parse a duration such as 90d, 12h or 2w. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,5})([hdwy]?)", text)
    if found is None or (found[2] == "" and found[1] != "0") or int(found[1]) < least:
        raise ConfigError(f"{text!r} is not a duration; write hours, days, weeks or years, such as 12h, 90d, 2w or 1y.")
    hours = {"": 0, "h": 1, "d": 24, "w": 7 * 24, "y": 365 * 24}[found[2]]
    duration = timedelta(hours=int(found[1]) * hours)
    if duration > timedelta(days=3650):
        raise ConfigError(f"{text!r} exceeds ten years, the lifetime of the run's authority; write 10y or less.")
    return duration
