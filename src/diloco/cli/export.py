"""`diloco export`: the global model as a directory that transformers can load."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli._options import Json, Keys, Overrides, RunFile, with_keys
from diloco.cli._output import print_result
from diloco.errors import ConfigError, NotInitialisedError, StoreError, UnreachableError

if TYPE_CHECKING:
    from torch import Tensor

    from diloco.config import RunConfig


def command(
    run_file: RunFile,
    out_dir: Annotated[Path, typer.Argument(help="The directory to write; created if absent.")],
    address: Annotated[str | None, typer.Option(help="host:port of the syncer, instead of syncer.address.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Read the state directory of a stopped syncer.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Read this checkpoint directory of a learner.")] = None,
    keys: Keys = None,
    overrides: Overrides = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files in OUT_DIR.")] = False,
    as_json: Json = False,
) -> None:
    """Write the global model to a directory that transformers can load."""
    from diloco.config import load_config

    config = load_config(run_file, with_keys(overrides, keys))
    if sum(source is not None for source in (address, state_dir, checkpoint)) > 1:
        raise ConfigError("--address, --state-dir and --checkpoint exclude each other; choose one")
    if out_dir.is_dir() and any(out_dir.iterdir()) and not force:
        raise StoreError(f"{out_dir} is not empty; choose another directory, or overwrite its files with --force.")

    from diloco.training.pretrained import checkpoint_state, export_run

    if checkpoint is not None:
        state = checkpoint_state(checkpoint)
    elif state_dir is not None:
        state = _stored(state_dir, config)
    else:
        state = _fetched(address or config.syncer.address, config)
    num_parameters = export_run(state, config, out_dir)
    text = f"wrote the global model of {config.run.name} to {out_dir}; load it with from_pretrained"
    print_result(as_json, {"directory": str(out_dir), "num_parameters": num_parameters}, text)


def _fetched(address: str, config: "RunConfig") -> "dict[str, Tensor]":
    """Fetch the model from a running syncer."""
    from diloco.exchange.remote import fetch_model

    syncer = config.syncer
    try:
        return fetch_model(address, run=config.run.name, keys=syncer.keys, insecure=syncer.insecure)
    except UnreachableError as error:
        raise UnreachableError(f"{error} Without a running syncer, export from its files: --state-dir DIR.") from error


def _stored(state_dir: Path, config: "RunConfig") -> "dict[str, Tensor]":
    """Read the model from the state directory of a stopped syncer."""
    from safetensors.torch import load

    from diloco.core.fragments import Layout
    from diloco.store.store import Store
    from diloco.training.pretrained import merge_fragments

    if not (state_dir / "store.sqlite").exists():
        raise ConfigError(f"{state_dir} is not the state directory of a syncer; check --state-dir")
    with Store(state_dir) as store:
        saved = store.load()
    if saved is None:
        raise NotInitialisedError(
            f"the run in {state_dir} has no model yet; start a learner with --initialise if-empty"
        )
    if saved.run != config.run.name:
        raise ConfigError(f"{state_dir} holds the run {saved.run}, not {config.run.name}; check --state-dir")
    layout = Layout.from_dict(saved.layout.to_dict())
    return merge_fragments(layout, [saved.fragments[f.index].theta for f in layout.fragments], load(saved.static))
