"""`diloco syncer restore PLACE DIR`: a state directory from a backup."""

import json
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli._shared import Json


def command(
    place: Annotated[str, typer.Argument(help="Where `diloco syncer backup` or syncer.backup has put snapshots.")],
    state_dir: Annotated[Path, typer.Argument(help="The state directory to make; it must not be there, or be empty.")],
    snapshot: Annotated[str | None, typer.Option(help="The name of a snapshot; default: the newest.")] = None,
    as_json: Json = False,
) -> None:
    """Make a state directory from a snapshot. Learners of the run go on with it, also those that have seen more."""
    from diloco.store.backup import restore
    from diloco.store.targets import open_target

    restored = restore(open_target(place), state_dir, snapshot)
    versions = [each.update.version for each in restored.versions]
    if as_json:
        typer.echo(json.dumps({"state_dir": str(state_dir), "snapshot": restored.name, "versions": versions}))
    else:
        typer.echo(f"{state_dir} is the snapshot {restored.name}: versions {versions} of run {restored.row['run']!r}")
