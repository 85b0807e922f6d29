"""Loads exports of `diloco export` or `save_pretrained`, and computes a held-out loss with its standard error."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from diloco.config import RunConfig
from diloco.errors import ConfigError, translated
from diloco.evaluation.scores import Score, TaskResult
from diloco.following.follower import FollowedModel
from diloco.training.pretrained import pretrained_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST = 1024
"""Default limit for the tokens of a window, for models that accept more."""

BLOCKS = 64
"""Maximum number of blocks of neighbouring windows. Their means give the standard error, since the losses of
neighbouring windows are correlated."""


@dataclass(frozen=True)
class Export:
    """An exported model, in evaluation mode.

    Attributes:
        context: maximum number of tokens of an input.
        tokenizer: None for an export without a tokenizer.
    """

    path: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    context: int

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def required_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises ConfigError if there is none."""
        if self.tokenizer is None:
            raise ConfigError(
                f"{self.path} has no tokenizer, which tasks and text need; save the tokenizer of its data into it "
                "(tokenizer.save_pretrained), or evaluate the held-out loss of its run with --run"
            )
        return self.tokenizer


def context_of(path: Path) -> int:
    """Maximum number of tokens of an input of an export. Raises ConfigError for another directory."""
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path} is not an export: it has no config.json; write one with diloco export RUN_FILE {path}"
        )
    with _loading(path):
        return _context(AutoConfig.from_pretrained(path, local_files_only=True))


def _context(config: PretrainedConfig) -> int:
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or LONGEST)


def load_export(path: Path, device: str = "cpu") -> Export:
    """Load a model and its tokenizer from local files only.

    Raises:
        ConfigError: the directory is not an export, or cannot be loaded.
    """
    context = context_of(path)
    logging.disable_progress_bar()  # transformers draws one for every file
    with _loading(path):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, use_safetensors=True)
        has_tokenizer = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True) if has_tokenizer else None
    return Export(path, model.eval().to(torch.device(device)), tokenizer, context)


def followed_export(model: FollowedModel, config: RunConfig, device: str = "cpu") -> Export:
    """A version of a run, as if it had been exported.

    Raises:
        LayoutError: it is not a model of this run file.
    """
    made, tokenizer = pretrained_model(model.state_dict(), config)
    return Export(Path(config.run.name), made.eval().to(torch.device(device)), tokenizer, _context(made.config))


def _loading(path: Path) -> AbstractContextManager[None]:
    causes = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
    return translated(causes, ConfigError, f"cannot load the export {path}", "export the model again")


# --- the held-out loss


@torch.no_grad()
def window_losses(model: nn.Module, batches: Sequence[Tensor]) -> list[float]:
    """The mean loss of each window in nats per token; batches int64 (B, T + 1)."""
    device = next(model.parameters()).device
    losses: list[float] = []
    for batch in batches:
        batch = batch.to(device)
        logits = model(batch[:, :-1]).logits
        each = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none")
        losses += each.view(len(batch), -1).double().mean(1).tolist()
    return losses


def held_out_loss(model: nn.Module, batches: Sequence[Tensor]) -> TaskResult:
    """The loss on windows of equal length in the order of the text: int64 batches (B, T + 1).

    The value is the mean over windows; its standard error is computed from the means of `BLOCKS` blocks of neighbouring
    windows.
    """
    losses = window_losses(model, batches)
    num_blocks = min(BLOCKS, len(losses))
    edges = [len(losses) * k // num_blocks for k in range(num_blocks + 1)]
    blocks = [losses[start:stop] for start, stop in pairwise(edges)]
    means = [statistics.fmean(block) for block in blocks]
    windows = torch.cat([batch.flatten() for batch in batches])
    digest = hashlib.blake2b(windows.numpy().tobytes(), digest_size=8).hexdigest()
    documents = tuple(f"{digest}:{start}-{stop}" for start, stop in pairwise(edges))
    spread = Score.of(means)
    score = Score.with_error(statistics.fmean(losses), spread.error, spread.num)
    return TaskResult("held-out loss", "nats per token", "lower", score, documents, tuple(means))
