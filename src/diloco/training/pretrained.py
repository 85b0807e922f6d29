"""Write a global model as a directory that `transformers` loads with `from_pretrained`."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from diloco.config import RunConfig
from diloco.core.fragments import Layout, scatter
from diloco.errors import StoreError, translated
from diloco.training.checkpoint import load_checkpoint
from diloco.training.data.reading import BYTE_VOCABULARY, byte_tokenizer, load_tokenizer, vocabulary_size
from diloco.training.data.token_shards import read_index
from diloco.training.model import build_model, load_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTES_NOTE = """# Tokens

This model reads and writes bytes: token i is the byte i of UTF-8 text, and there are no other tokens. Byte 0 ends a
text. `AutoTokenizer` loads a tokenizer that does this; without it:

    ids = torch.tensor([list("def ".encode())])
    text = bytes(model.generate(ids, max_new_tokens=100, do_sample=True)[0].tolist()).decode(errors="replace")
"""


def save_pretrained(
    state: Mapping[str, Tensor], model_config: PreTrainedConfig, out_dir: Path, beside: Callable[[Path], None]
) -> None:
    """Write `config.json` and `model.safetensors` of the model that `state` holds; a tied weight may bear either name.

    Arguments:
        beside: writes what belongs to it into a directory, such as its tokenizer.

    Raises LayoutError when `state` is not a model of this configuration, StoreError when `out_dir` cannot be written:
    every file in it is as before then, or whole.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config, dtype=_dtype(state))
    load_state(model, state)
    model.config.use_cache = True  # off in training, wanted for generation
    # Written beside its place and then moved, so that a directory of that name is always whole.
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    failed, advice = f"cannot write the model to {out_dir}", "free disk space or choose another directory"
    try:
        with translated((OSError, SafetensorError), StoreError, failed, advice):
            shutil.rmtree(partial, ignore_errors=True)
            with _without_progress_bar():
                model.save_pretrained(partial)
            beside(partial)
            out_dir.mkdir(parents=True, exist_ok=True)
            for file in partial.iterdir():
                file.replace(out_dir / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def export_run(state: Mapping[str, Tensor], config: RunConfig, out_dir: Path) -> int:
    """Write the model of a run, as `save_pretrained`, with its tokenizer or a note on its tokens beside it.

    Returns the number of parameters, tied ones counted once.
    """
    vocab_size, tokenizer = vocabulary(config)
    model = build_model(config.model, vocab_size, config.data.sequence_length, config.run.seed)

    def write_tokenizer(directory: Path) -> None:
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        if tokenizer is not None and _tokenizer_name(config) == "bytes":
            (directory / "TOKENS.md").write_text(_BYTES_NOTE, encoding="utf-8")

    save_pretrained(state, model.config, out_dir, write_tokenizer)
    return sum(parameter.numel() for parameter in model.parameters())


def checkpoint_state(path: Path) -> dict[str, Tensor]:
    """The global model in a learner's checkpoint. Raises CheckpointError when it cannot be read."""
    return global_model(load_checkpoint(path))


def global_model(saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """The global model of a saved state: the newest adopted one, or the own model without outer gradients."""
    state: dict[str, Tensor] = saved["model"]
    if saved["layout"] is None:
        return state
    ranks = saved["learners"]
    if ranks[0]["method"]["exchanged"] == "gradients":
        return {**state, **ranks[0]["parameters"]}
    layout = Layout.from_dict(saved["layout"])
    thetas = [torch.cat([rank["anchors"][str(fragment.index)] for rank in ranks]) for fragment in layout.fragments]
    return merge_fragments(layout, thetas, state)


def merge_fragments(layout: Layout, thetas: Sequence[Tensor], static: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors in their own dtypes from the flat fp32 fragments, and the static ones, which are not trained."""
    state = dict(static)
    for fragment, theta in zip(layout.fragments, thetas, strict=True):
        dtypes = {placement.spec.name: placement.spec.dtype for placement in fragment.tensors}
        state |= {name: value.to(getattr(torch, dtypes[name])) for name, value in scatter(fragment, theta).items()}
    return state


def vocabulary(config: RunConfig) -> "tuple[int, PreTrainedTokenizerBase | None]":
    """Vocabulary size and tokenizer of a run, without reading its data; files of tokens have no tokenizer."""
    name = _tokenizer_name(config)
    if name != "bytes":
        tokenizer = load_tokenizer(name)
        return vocabulary_size(tokenizer), tokenizer
    if config.data.kind == "tokens" and config.data.directory is None:
        return config.data.vocab_size or BYTE_VOCABULARY, None
    return BYTE_VOCABULARY, byte_tokenizer(config.data.sequence_length)


def _tokenizer_name(config: RunConfig) -> str:
    """`bytes`, or what `load_tokenizer` takes."""
    directory = config.data.directory
    return config.data.tokenizer if directory is None else read_index(directory).tokenizer_name


def _dtype(state: Mapping[str, Tensor]) -> torch.dtype:
    return next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """transformers draws one on standard error for every file it writes."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
