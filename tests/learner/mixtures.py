"""A small mixture of experts without transformers, with the names of its models: fused experts, a router, a bias."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

EXPERTS, WIDTH, HIDDEN, VOCABULARY = 4, 6, 5, 11


class Router(nn.Module):
    """Chooses two experts for each token."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, WIDTH))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        chosen = (logits + self.e_score_correction_bias).topk(2, dim=-1).indices
        return logits, logits.gather(-1, chosen).softmax(-1), chosen


class FusedExperts(nn.Module):
    """All experts of a block in two tensors."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * HIDDEN, WIDTH) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) * 0.3)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        share = x.new_zeros(*x.shape[:-1], len(self.down_proj)).scatter(-1, chosen, weights)
        gate, up = torch.einsum("...w,ehw->...eh", x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.einsum("...eh,ewh,...e->...w", nn.functional.silu(gate) * up, self.down_proj, share)


class Block(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate, self.experts = Router(experts), FusedExperts(experts)

    def forward(self, x: Tensor) -> Tensor:
        _, weights, chosen = self.gate(x)
        mixed: Tensor = self.experts(x, weights, chosen)
        return x + mixed


class Mixture(nn.Module):
    """Two blocks between an embedding and a head: [batch, tokens] → [batch, tokens, VOCABULARY]."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(experts) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class Uncounted(Mixture):
    """The same in evaluation mode, in which no tokens are counted, so that merges weigh experts as all tensors."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__(experts)
        self.eval()


_SEEDED = threading.Lock()
"""The generator that a model is drawn from is the process's, and learners are threads."""


def mixture(seed: int = 0, kind: type[Mixture] = Mixture, *, experts: int = EXPERTS) -> Mixture:
    with _SEEDED:
        torch.manual_seed(seed)
        return kind(experts)


def backward(model: nn.Module, index: int, step: int) -> None:
    """Gradients of a batch of this learner's own."""
    generator = torch.Generator().manual_seed(1000 * index + step)
    batch = torch.randint(VOCABULARY, (3, 8), generator=generator)
    logits = model(batch[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()


def train_step(model: nn.Module, inner: torch.optim.Optimizer, index: int, step: int) -> None:
    backward(model, index, step)
    inner.step()
    inner.zero_grad()
