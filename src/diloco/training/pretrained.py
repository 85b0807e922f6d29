"""Export a global model as a directory that `from_pretrained` of transformers loads."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from diloco.config import RunConfig
from diloco.core.layout import Layout, named_tensors
from diloco.errors import CheckpointError, LayoutError, StoreError, translated
from diloco.training.checkpoint import load_checkpoint
from diloco.training.data.reading import BYTE_VOCABULARY, byte_tokenizer, load_tokenizer, vocabulary_size
from diloco.training.data.token_shards import read_index
from diloco.training.model import build_model, load_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def export_run(state: Mapping[str, Tensor], config: RunConfig, out_dir: Path) -> int:
    """Write the model of a run and its tokenizer. Returns the number of parameters, tied ones counted once.

    Raises LayoutError as `pretrained_model`, and StoreError when `out_dir` cannot be written; every file in it is then
    unchanged, or complete.
    """
    model, tokenizer = pretrained_model(state, config)
    # The files are written to another directory and then moved, so each file of the export is always complete.
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    failed, advice = f"cannot write the model to {out_dir}", "free disk space or choose another directory"
    try:
        with translated((OSError, SafetensorError), StoreError, failed, advice):
            shutil.rmtree(partial, ignore_errors=True)
            with _without_progress_bar():
                model.save_pretrained(partial)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
            for file in partial.glob("*.safetensors"):
                shutil.copymode(partial / "config.json", file)  # written for this user alone
            out_dir.mkdir(parents=True, exist_ok=True)
            for file in partial.iterdir():
                file.replace(out_dir / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sum(parameter.numel() for parameter in model.parameters())


def pretrained_model(
    state: Mapping[str, Tensor], config: RunConfig
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]":
    """The model of a run, and its tokenizer. A tied weight of `state` may have any of its names.

    Raises:
        LayoutError: `state` is not a model of this run.
    """
    vocab_size, tokenizer = vocabulary(config)
    built = build_model(config.model, vocab_size, config.data.sequence_length, config.run.seed)
    dtype = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(built.config, dtype=dtype)
    failed = "the run's model is not the one of [model]"
    advice = "export it with --raw, which writes the model of any loop as one safetensors file"
    with translated(LayoutError, LayoutError, failed, advice):
        load_state(model, state)
    model.config.use_cache = True  # off in training, on for generation
    return model, tokenizer


def checkpoint_state(path: Path, run: str | None = None) -> dict[str, Tensor]:
    """The global model of a learner's checkpoint. `run`: its run, where that matters.

    Raises:
        CheckpointError: it cannot be read, or is of another run.
    """
    saved = load_checkpoint(path)
    if run not in (None, saved["run"]):
        raise CheckpointError(f"{path} is of the run {saved['run']}, not {run}; name a checkpoint of this run.")
    if saved.get("held") is not None:
        raise CheckpointError(
            f"{path} has only the experts that its learner held; export the run's model from its syncer or its store."
        )
    return global_model(saved)


def global_model(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """The global model of a saved state: the newest that was received, or the learner's own without outer gradients."""
    state: dict[str, Tensor] = saved["model"]
    if saved["layout"] is None:
        return state
    learner = saved["learner"]
    if learner["method"]["exchanged"] == "gradients":
        return {**state, **learner["parameters"]}
    fragments = saved["layout"]["fragments"]  # empty where the learner does not hold one
    layout = Layout.from_dict({**saved["layout"], "fragments": [each for each in fragments if each]})
    thetas = [_newest(learner, index) for index, each in enumerate(fragments) if each]
    return state | named_tensors(layout, thetas)


def _newest(learner: Mapping[str, Any], fragment: int) -> Tensor:
    """A fragment's adopted version, or a later one that the learner has received, as at a run's end."""
    received = [it for it in learner["received"].values() if it["update"]["fragment"] == fragment]
    newest = max(received, key=lambda it: it["update"]["version"], default=None)
    found: Tensor = learner["anchors"][str(fragment)] if newest is None else newest["held"]["theta"]
    return found


def vocabulary(config: RunConfig) -> "tuple[int, PreTrainedTokenizerBase | None]":
    """Vocabulary size and tokenizer of a run, without reading its data; token files have no tokenizer."""
    directory = config.data.directory
    name = config.data.tokenizer if directory is None else read_index(directory).tokenizer_name
    if name != "bytes":
        tokenizer = load_tokenizer(name)
        return vocabulary_size(tokenizer), tokenizer
    if config.data.kind == "tokens" and directory is None:
        return config.data.vocab_size or BYTE_VOCABULARY, None
    return BYTE_VOCABULARY, byte_tokenizer(config.data.sequence_length)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Hide the progress bar that transformers draws for every file that it writes."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
