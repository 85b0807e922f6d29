"""The held-out loss of a model with its standard error."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diloco.evaluation.scores import Result, Score

BLOCKS = 64
"""At most so many blocks of neighbouring windows: what is close in a text is alike, and one window says little that the
next one does not."""


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


def held_out_loss(model: nn.Module, batches: Sequence[Tensor]) -> Result:
    """The loss on windows of equal length, in the order of the text: int64 batches (B, T + 1).

    The value is the mean over windows; its error is that of the means of up to `BLOCKS` blocks of neighbouring windows.
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
    return Result("held-out loss", "nats per token", "lower", score, documents, tuple(means))


def text_batches(tokens: Sequence[int], length: int, num_windows: int, batch: int = 32) -> list[Tensor]:
    """At most `num_windows` windows of `length` + 1 tokens, spread evenly over a text: int64 (B, length + 1)."""
    available = (len(tokens) - 1) // length
    count = min(num_windows, available)
    starts = [available * k // count * length for k in range(count)] if count else []
    windows = [torch.tensor(tokens[start : start + length + 1]) for start in starts]
    return [torch.stack(windows[start : start + batch]) for start in range(0, count, batch)]
