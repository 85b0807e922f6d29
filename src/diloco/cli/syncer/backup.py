"""`diloco syncer backup DIR PLACE`: a snapshot of a run now, whether a syncer serves it or not."""

import json
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli._shared import Json


def command(
    state_dir: Annotated[Path, typer.Argument(help="The state directory of a syncer, running or not.")],
    place: Annotated[
        str, typer.Argument(help="A directory, or a URL that fsspec understands, such as s3://bucket/run.")
    ],
    keep: Annotated[int, typer.Option(min=1, help="Snapshots to keep there, this one included.")] = 3,
    as_json: Json = False,
) -> None:
    """Take a snapshot of a run: one record and the versions that belong to it, verified and read back."""
    from diloco.store.backup import back_up
    from diloco.store.targets import open_target

    snapshot = back_up(state_dir, open_target(place), keep)
    versions = [each.update.version for each in snapshot.versions]
    if as_json:
        typer.echo(json.dumps({"place": place, "snapshot": snapshot.name, "versions": versions}))
    else:
        typer.echo(f"{place} has the snapshot {snapshot.name}: versions {versions} of run {snapshot.row['run']!r}")
