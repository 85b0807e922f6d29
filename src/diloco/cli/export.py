"""`diloco export`: the global model as a directory that transformers can load, or its tensors as one file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._options import Json, Keys, Overrides, RunFile, Store, with_keys
from diloco.cli._output import print_result
from diloco.config import RunConfig, load_config
from diloco.errors import ConfigError, StoreError, UnreachableError

if TYPE_CHECKING:
    from diloco.following.follower import FollowedModel


def command(
    run_file: RunFile,
    out: Annotated[Path, typer.Argument(help="The directory to write, or the file with --raw; created if absent.")],
    raw: Annotated[
        bool, typer.Option("--raw", help="Write one safetensors file, under the names of the loop's state dict.")
    ] = False,
    address: Annotated[str | None, typer.Option(help="host:port of the syncer, instead of syncer.address.")] = None,
    store: Store = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Read this checkpoint directory of a learner.")] = None,
    keys: Keys = None,
    overrides: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
    as_json: Json = False,
) -> None:
    """Write the global model: a directory that transformers can load, or one safetensors file (--raw)."""

    config = load_config(run_file, with_keys(overrides, keys))
    if sum(source is not None for source in (address, store, checkpoint)) > 1:
        raise ConfigError("--address, --store and --checkpoint exclude each other; choose one")
    if raw and out.is_dir():
        raise ConfigError(f"--raw writes one file, and {out} is a directory; name the file, as {out}/model.safetensors")
    if raw and out.exists() and not force:
        raise StoreError(f"{out} exists; choose another file, or overwrite it with --force.")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise StoreError(f"{out} is not empty; choose another directory, or overwrite its files with --force.")

    if checkpoint is not None:
        from diloco.training.pretrained import checkpoint_state

        state = checkpoint_state(checkpoint, config.run.name)
    else:
        state = newest_of(config, store, address).state_dict()
    if raw:
        from diloco.following.copies import write_tensors

        write_tensors(state, config.run.name, out)
        value = {"file": str(out), "num_tensors": len(state)}
        loading = "safetensors.torch.load_model"
    else:
        from diloco.training.pretrained import export_run

        value = {"directory": str(out), "num_parameters": export_run(state, config, out)}
        loading = "from_pretrained"
    print_result(as_json, value, f"wrote the global model of {config.run.name} to {out}; load it with {loading}")


def newest_of(config: RunConfig, store: str | None, address: str | None = None) -> "FollowedModel":
    """The newest model of the run's store, served or not, or else of its syncer."""
    from diloco.following.follower import newest_model

    syncer = config.syncer
    if store is not None:
        return newest_model(store, run=config.run.name)
    try:
        return newest_model(address or syncer.address, run=config.run.name, keys=syncer.keys, insecure=syncer.insecure)
    except UnreachableError as error:
        raise UnreachableError(f"{error} Without a running syncer, read its store: --store STORE.") from error
