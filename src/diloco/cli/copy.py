"""`diloco copy`: a copy of a run, in another store."""

import time
from typing import Annotated

import typer

from diloco.cli._options import Json
from diloco.cli._output import print_result

PROGRESS_EVERY_S = 2.0
"""Interval of progress messages."""


def command(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A state directory or the URL of a bucket.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="The same; created, or an earlier state of the run.")],
    as_json: Json = False,
) -> None:
    """Copy a run, served or not, to another store: each object verified, in one consistent state.

    The way back is the same command: a syncer that starts on the copy continues the run, also for learners that have
    seen later versions.
    """
    from diloco.store.copying import copy
    from diloco.store.objects import open_store, opened, read_manifest

    began_s = told_s = time.monotonic()

    def progress(number: int, of: int, num_bytes: int) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= PROGRESS_EVERY_S:
            told_s = now_s
            text = f"copied {number} of {of} objects, {num_bytes / 1e6:.0f} MB, in {now_s - began_s:.0f} s"
            typer.echo(text, err=True)

    objects = open_store(source)
    read_manifest(objects)  # before the target is made
    with opened(target, lock=True) as other:
        done = copy(objects, other, progress)
    value = {
        "from": source, "to": target, "run": done.run, "versions": list(done.versions),
        "num_objects": done.num_objects, "num_bytes": done.num_bytes, "seconds": time.monotonic() - began_s,
    }  # fmt: skip
    text = f"{target} has versions {list(done.versions)} of run {done.run!r} ({done.num_bytes / 1e6:.1f} MB copied)"
    print_result(as_json, value, text)
