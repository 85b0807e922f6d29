"""`diloco follow`: keep a copy of a run's newest model in a folder."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._options import Every, Insecure, Json, Keys, Source
from diloco.cli._output import print_result
from diloco.cli._signals import ending_by_signals
from diloco.config import RunConfig, load_config

if TYPE_CHECKING:
    from diloco.following.copies import Writer
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
    from diloco.following.copies import FollowedFolder
    from diloco.following.follower import follow, newest_model
    from diloco.following.sources import is_address

    config = load_config(Path(run)) if run.endswith(".toml") else None
    name = run if config is None else config.run.name
    if config is not None and is_address(source):
        keys, insecure = keys or config.syncer.keys, insecure or config.syncer.insecure
    folder = FollowedFolder(into, name, "tensors" if config is None else "a checkpoint", _writer(name, config))

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


def _writer(name: str, config: RunConfig | None) -> "Writer":
    if config is None:
        from diloco.following.copies import write_tensors

        return lambda state, out: write_tensors(state, name, out / "model.safetensors")
    from diloco.training.pretrained import export_run

    return lambda state, out: export_run(state, config, out)
