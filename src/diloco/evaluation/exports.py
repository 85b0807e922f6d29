"""Load a directory that `diloco export` or `save_pretrained` wrote."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from diloco.errors import ConfigError, translated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST = 1024
"""Tokens of a window where the model takes more and nothing else was asked for."""


@dataclass(frozen=True)
class Export:
    """A model that was exported, in evaluation mode.

    Attributes:
        context: the most tokens that the model takes.
        tokenizer: None: there is none beside the model.
    """

    path: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    context: int

    @property
    def num_parameters(self) -> int:
        """Tied ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def required_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises ConfigError where there is none."""
        if self.tokenizer is None:
            raise ConfigError(
                f"{self.path} has no tokenizer, which tasks and text need; save the tokenizer of its data beside it "
                "(tokenizer.save_pretrained), or evaluate the held-out loss of its run with --run"
            )
        return self.tokenizer


def context_of(path: Path) -> int:
    """The most tokens that an export takes. Raises ConfigError where it is none."""
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} is not an export: it holds no config.json; write one with diloco export RUN_FILE {path}"
        )
    with _loading(path):
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST)


def load_export(path: Path, device: str = "cpu") -> Export:
    """Load a model and its tokenizer; nothing is fetched from elsewhere.

    Raises:
        ConfigError: it is no export, or cannot be loaded.
    """
    context = context_of(path)
    logging.disable_progress_bar()  # it would draw one on standard error for every file
    with _loading(path):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, use_safetensors=True)
        has_tokenizer = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True) if has_tokenizer else None
    return Export(path, model.eval().to(torch.device(device)), tokenizer, context)


def _loading(path: Path) -> AbstractContextManager[None]:
    causes = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
    return translated(causes, ConfigError, f"cannot load the export {path}", "export the model again")
