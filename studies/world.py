"""What every study trains: a byte-level language model of 165 thousand parameters on the Python standard library's
source.

Data order is a function of the seed and the step alone: the global batch of step t is drawn from (seed, t), and learner
m of M takes its m-th part. So data parallel is one run whatever M is, and runs that differ in one thing are compared in
pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diloco.config import DataTable
from diloco.training.data.corpus import load_corpus
from diloco.training.data.reading import DocumentShard

SEQUENCE = 64
BATCH = 16  # sequences in a step of all learners together: 1,024 tokens
STEPS = 600
WARMUP_STEPS = 50
LR = 4e-3
FINAL_FRACTION = 0.05
HELD_OUT_SEQUENCES = 384  # of each split


class Block(nn.Module):
    """Attention and a gated MLP, each behind an RMS norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * 172, bias=False)
        self.down = nn.Linear(172, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, width))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        mixed: Tensor = self.down(F.silu(gate) * value)
        return x + mixed


class Model(nn.Module):
    """A decoder with tied embeddings over bytes."""

    def __init__(self, seed: int, layers: int = 3, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(256, width)
            self.position = nn.Embedding(SEQUENCE, width)
            self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
            self.norm = nn.RMSNorm(width)
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    nn.init.normal_(parameter, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean nats per byte; tokens int64 (B, T + 1)."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@cache
def _text() -> tuple[Tensor, Tensor]:
    """Training bytes and held-out bytes."""
    corpus = load_corpus(DataTable(kind="stdlib"))
    train, held_out = (torch.from_numpy(part.read(0, len(part))) for part in (corpus.train, corpus.held_out))
    return train, held_out


@cache
def fingerprint() -> str:
    """Of the text: another Python version has another standard library."""
    return load_corpus(DataTable(kind="stdlib")).fingerprint()[:12]


def global_batch(seed: int, step: int) -> Tensor:
    """The sequences of one step of all learners, int64 (BATCH, SEQUENCE + 1)."""
    train, _ = _text()
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    return _windows(train, torch.randint(len(train) - SEQUENCE - 1, (BATCH,), generator=generator))


STRETCH = 4096  # bytes that belong to one topic together


@cache
def topics(count: int) -> tuple[Tensor, ...]:
    """Stretches of the training text in `count` topics, larger first: k-means over byte frequencies, whose square roots
    are compared."""
    train, _ = _text()
    num = len(train) // STRETCH
    stretches = train[: num * STRETCH].view(num, STRETCH)
    counts = torch.zeros(num, 256).scatter_add_(1, stretches, torch.ones(stretches.shape))
    points = F.normalize(counts.sqrt(), dim=1)
    centres = points[torch.randperm(num, generator=torch.Generator().manual_seed(0))[:count]]
    nearest = torch.zeros(num, dtype=torch.long)
    for _ in range(50):
        nearest = torch.cdist(points, centres).argmin(1)
        centres = torch.stack([points[nearest == k].mean(0) for k in range(count)])
    return tuple(sorted((torch.where(nearest == k)[0] for k in range(count)), key=len, reverse=True))


def topic_shares(count: int) -> list[float]:
    """The part of the text that each topic is."""
    sizes = [len(topic) for topic in topics(count)]
    return [size / sum(sizes) for size in sizes]


@cache
def stretches_of(learner: int, learners: int, shared_fraction: float, seed: int) -> Tensor:
    """The stretches that a learner reads: those of its own topic, and the shared ones of every topic, which are chosen
    as the rows of a run's files are (`[data] shared_fraction`)."""
    deal = DocumentShard(learner, learners, by_parts=True, shared_fraction=shared_fraction, seed=seed)
    found = [stretch for k, topic in enumerate(topics(learners)) for row, stretch in enumerate(topic.tolist())
             if deal.contains(k, row)]  # fmt: skip
    return torch.tensor(found)


def topic_batch(
    seed: int, step: int, learner: int, learners: int, sequences: int, shared_fraction: float = 0.0
) -> Tensor:
    """Sequences from this learner's own topic, and from what all learners share."""
    train, _ = _text()
    topic = stretches_of(learner, learners, shared_fraction, seed)
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * learner + step)
    stretches = topic[torch.randint(len(topic), (sequences,), generator=generator)]
    starts = stretches * STRETCH + torch.randint(STRETCH - SEQUENCE, (sequences,), generator=generator)
    return _windows(train, starts)


def part_of(batch: Tensor, learner: int, learners: int) -> Tensor:
    """A learner's share of the global batch."""
    size = len(batch) // learners
    return batch[learner * size : (learner + 1) * size]


def held_out(split: str) -> Tensor:
    """Held-out sequences: "report" for the tables, "select" for choosing hyperparameters; the two share no byte."""
    _, text = _text()
    half = len(text) // 2
    part = text[:half] if split == "report" else text[half:]
    starts = torch.linspace(0, len(part) - SEQUENCE - 2, HELD_OUT_SEQUENCES).long()
    return _windows(part, starts)


def _windows(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts[:, None] + torch.arange(SEQUENCE + 1)]


@torch.no_grad()
def evaluate(state: Mapping[str, Tensor], split: str) -> float:
    """Held-out loss of a model's state in nats per byte."""
    model = Model(0)
    model.load_state_dict(dict(state))
    tokens = held_out(split)
    return sum(float(model.loss(part)) * len(part) for part in tokens.split(96)) / len(tokens)


def lr_factor(done: float, step: int) -> float:
    """Warm-up by steps, then a cosine over the share of the run that is done."""
    if step <= WARMUP_STEPS:
        return step / WARMUP_STEPS
    start = WARMUP_STEPS / STEPS
    x = min(1.0, max(0.0, (done - start) / (1 - start)))
    return FINAL_FRACTION + (1 - FINAL_FRACTION) * (1 + math.cos(math.pi * x)) / 2
