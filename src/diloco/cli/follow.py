"""`diloco follow`: keep a copy of a run's newest model in a folder."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._options import Every, Insecure, Json, Keys, Source
from diloco.cli._output import print_result
from diloco.cli._signals import ending_by_signals
from diloco.config import load_config

if TYPE_CHECKING:
    from diloco.following.follower import FollowedModel


def command(
    source: Source,
    run: Annotated[
        str,
        typer.Option(metavar="RUN", help="The run's name, or its run file: then the folder is one for transformers."),
    ],
    into: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder: absent, empty, or one kept before.")],
    every: Every = 1,
    once: Annotated[bool, typer.Option("--once", help="Write the newest version and end.")] = False,
    keys: Keys = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    """Keep a copy of a run's newest model in a folder, from its syncer or its store.

    The copy is whole at every moment. Prints a line for each version."""
    from diloco.following.copies import FollowedFolder, write_tensors
    from diloco.following.follower import follow, newest_model
    from diloco.following.sources import is_address

    name = run
    if run.endswith(".toml"):
        from diloco.training.pretrained import export_run

        config = load_config(Path(run))
        name = config.run.name
        if is_address(source):
            keys, insecure = keys or config.syncer.keys, insecure or config.syncer.insecure
        folder = FollowedFolder(into, name, "a checkpoint", lambda state, out: export_run(state, config, out))
    else:
        file = "model.safetensors"
        folder = FollowedFolder(into, name, "tensors", lambda state, out: write_tensors(state, run, out / file))

    def show(model: "FollowedModel") -> None:
        is_new = folder.update(model)
        value = {**model.describe(), "folder": str(into), "written": is_new}
        print_result(as_json, value, f"{model}: {'written to' if is_new else 'was already in'} {into}")

    if once:
        show(newest_model(source, run=name, keys=keys, insecure=insecure))
        return
    follower = follow(source, run=name, keys=keys, insecure=insecure, every=every)
    with closing(follower), ending_by_signals(follower.close, "the copy stays as it is"):
        for model in follower:
            show(model)
