"""A small mixture-of-experts language model, trained by four learners; in a second part each of them trains a quarter
of the experts.

    python examples/moe/train.py              all arms, one seed; about a minute
    python examples/moe/train.py --seeds 3

Text is the source of the Python standard library, as bytes, so nothing is downloaded.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import mean, stdev

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import diloco
from diloco.config import DataTable
from diloco.exchange.base import Exchange
from diloco.training.data.corpus import Corpus, load_corpus
from diloco.training.data.reading import BYTE_VOCABULARY
from diloco.training.data.streams import Stream, held_out_batches

LEARNERS = 4
EXPERTS = 8  # in each layer
CHOSEN = 2  # experts that a token goes through
WIDTH, LAYERS, HEADS, LENGTH = 64, 2, 4, 64
BATCH = 4  # sequences per learner and step
SYNC_EVERY = 20  # steps
PEAK_LR = 4e-3
BALANCE = 0.01  # weight of the loss that keeps experts in use

DENSE = ("embed*", "norm*", "head*", "layers.*.attention.*", "layers.*.norm*", "layers.*.router.*")
METHOD = diloco.DiLoCo(
    sync_every=SYNC_EVERY,
    outer=diloco.Nesterov(lr=0.7, momentum=0.9),
    codec="e3m0",  # 4 bits each way
    # Everything dense in a fragment, and one for every two experts: fragments go out one after the other.
    fragments=diloco.Named([list(DENSE), *([f"layers.*.experts.[{2 * i}{2 * i + 1}].*"] for i in range(EXPERTS // 2))]),
)


def experts_of(index: int) -> tuple[str, ...]:
    """What learner `index` trains where the experts are divided: all that is dense, and its own two experts of every
    layer."""
    return (*DENSE, f"layers.*.experts.[{2 * index}{2 * index + 1}].*")


# --- the model


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.inputs(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return output


class Layer(nn.Module):
    """Attention, then experts: every expert has parameters of its own, `layers.0.experts.3.0.weight`, so a run can
    treat it by name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Also: how uneven the routing is (1 for even), and the share of the places that each expert takes."""
        x = x + self.attention(self.norm1(x))
        tokens = self.norm2(x).flatten(0, 1)
        chances = self.router(tokens).softmax(dim=-1)
        weights, chosen = chances.topk(CHOSEN)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            mixed = mixed.index_add(0, token, expert(tokens[token]) * weights[token, place].unsqueeze(1))
        load = F.one_hot(chosen.flatten(), EXPERTS).float().mean(dim=0)
        # Fedus et al. 2021, Switch Transformers, equation 4: pushes chances down where the load is high.
        uneven = EXPERTS * (load * chances.mean(dim=0)).sum()
        return x + mixed.view_as(x), uneven, load


class Mixture(nn.Module):
    """A decoder with mixtures of experts in the place of its feed-forward layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTE_VOCABULARY, WIDTH)
        self.embed_position = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTE_VOCABULARY, bias=False)
        for table in (self.embed, self.embed_position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Loss in nats per byte of int64 `tokens` (B, T + 1), the mean unevenness of the layers, and their loads."""
        x = self.embed(tokens[:, :-1]) + self.embed_position.weight[: tokens.shape[1] - 1]
        uneven, loads = torch.zeros(()), []
        for layer in self.layers:
            x, layer_uneven, load = layer(x)
            uneven = uneven + layer_uneven / LAYERS
            loads.append(load)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), uneven, loads


# --- training


@dataclass(frozen=True)
class Plan:
    """One run, the same for every arm: its seed, its data, and how long it is."""

    corpus: Corpus
    seed: int
    steps: int
    warm_steps: int  # on one model at the full batch, before the learners part

    def lr(self, step: int) -> float:
        """Warm-up over a twentieth of the steps, then a cosine down to a tenth."""
        warmup = max(1, self.steps // 20)
        done = min(1.0, max(0.0, (step - warmup) / (self.steps - warmup)))
        return PEAK_LR * min(1.0, step / warmup) * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)

    def stream(self, shards: Sequence[int]) -> Stream:
        """Batches of these shards; every learner has its own, and no two share a sequence."""
        return Stream(self.corpus, LENGTH, LEARNERS, shards, BATCH, self.seed)


@dataclass
class Worker:
    """A model being trained, with its optimizer and its data."""

    model: Mixture
    optimizer: torch.optim.Optimizer
    stream: Stream
    step: int = 0

    @classmethod
    def new(cls, plan: Plan, shards: Sequence[int]) -> "Worker":
        torch.manual_seed(plan.seed)
        model = Mixture()
        return cls(model, torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95)), plan.stream(shards))

    def go_on_from(self, other: "Worker") -> "Worker":
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(other.optimizer.state_dict())
        self.stream.position, self.step = other.stream.position, other.step
        return self

    def train_only(self, patterns: Sequence[str]) -> None:
        """The optimizer passes over parameters without a gradient, and their state goes."""
        for name, parameter in self.model.named_parameters():
            if not any(fnmatchcase(name, pattern) for pattern in patterns):
                parameter.requires_grad_(False)
                self.optimizer.state.pop(parameter, None)

    def train(self, plan: Plan, until: int, after_step: Callable[[int], None] = lambda _: None) -> "Worker":
        while self.step < until:
            self.step += 1
            for group in self.optimizer.param_groups:
                group["lr"] = plan.lr(self.step)
            batch = self.stream.next()
            torch.set_flush_denormal(True)  # they slow a model of this size down by half; in the inner step only
            loss, uneven, _ = self.model(batch)
            (loss + BALANCE * uneven).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            torch.set_flush_denormal(False)
            after_step(batch[:, 1:].numel())
        return self


@dataclass(frozen=True)
class Result:
    """What an arm comes to."""

    state: dict[str, Tensor]
    num_trained: int  # parameters that one learner keeps optimizer state for


def together(plan: Plan, warm: Worker, trains: Callable[[int], tuple[str, ...] | None]) -> Result:
    """Four learners go on from the warm start; `trains` says which parameters each of them trains, None: all."""

    def life(index: int, exchange: Exchange) -> Result:
        worker = Worker.new(plan, [index]).go_on_from(warm)
        patterns = trains(index)
        learner = diloco.Learner(worker.model, worker.optimizer, method=METHOD, exchange=exchange, trains=patterns)
        if patterns is not None:
            worker.train_only(patterns)
        worker.train(plan, plan.steps, lambda tokens: learner.step(tokens=tokens))
        learner.close()
        return Result(learner.global_state_dict(), _num_trained(worker))

    return diloco.run_local(life, learners=LEARNERS)[0]


def apart(plan: Plan, warm: Worker, shards: Sequence[int]) -> Result:
    """One model goes on by itself: on one shard alone, or on all of them at the full batch."""
    worker = Worker.new(plan, shards).go_on_from(warm).train(plan, plan.steps)
    return Result(dict(worker.model.state_dict()), _num_trained(worker))


def _num_trained(worker: Worker) -> int:
    return sum(parameter.numel() for parameter in worker.optimizer.state)


def judge(state: dict[str, Tensor], batches: Sequence[Tensor]) -> tuple[float, Tensor]:
    """Held-out loss in nats per byte, and the share of the places that each expert takes, (layers, experts)."""
    model = Mixture()
    model.load_state_dict(state)
    with torch.no_grad():
        seen = [model(batch) for batch in batches]
    loads = torch.stack([torch.stack(loads) for _, _, loads in seen]).mean(dim=0)
    return mean(float(loss) for loss, _, _ in seen), loads


# --- the table


def arms(plan: Plan) -> dict[str, Result]:
    all_shards = range(LEARNERS)
    warm = Worker.new(plan, all_shards).train(plan, plan.warm_steps)
    return {
        "DiLoCo, the global model": together(plan, warm, lambda _: None),
        "DiLoCo, experts divided": together(plan, warm, experts_of),
        "a learner on its own": apart(plan, warm, [0]),
        "data parallel": apart(plan, warm, all_shards),
    }


def compare(seeds: range, steps: int) -> dict[str, list[float]]:
    """Every arm for every seed, on the same data in the same order; prints the table and returns the losses."""
    corpus = load_corpus(DataTable())
    held_out = held_out_batches(corpus, LENGTH, num_sequences=256, batch=64)
    losses: dict[str, list[float]] = {}
    results: dict[str, Result] = {}
    for seed in seeds:
        results = arms(Plan(corpus, seed, steps, warm_steps=steps // 4))
        for name, result in results.items():
            losses.setdefault(name, []).append(judge(result.state, held_out)[0])
    num_parameters = sum(p.numel() for p in Mixture().parameters())
    print(
        f"{num_parameters:,} parameters; {LEARNERS} learners, {steps} steps, {steps // 4} of them before they part; "
        f"{len(seeds)} seed(s)"
    )
    print(f"  {'':<28}held-out loss   parameters trained by a learner")
    for name, values in losses.items():
        spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
        print(f"  {name:<28}{mean(values):.3f}{spread:<9}  {results[name].num_trained:>9,}")
    print("\nshare of the places that each expert takes, in percent (even: 12.5)")
    for name in ("DiLoCo, the global model", "DiLoCo, experts divided"):
        for layer, load in enumerate(judge(results[name].state, held_out)[1]):
            print(f"  {name:<28}layer {layer}: " + " ".join(f"{100 * share:5.1f}" for share in load.tolist()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="how many runs of each arm")
    parser.add_argument("--steps", type=int, default=320)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # such small tensors gain nothing from more
    compare(range(arguments.seeds), arguments.steps)


if __name__ == "__main__":
    main()
