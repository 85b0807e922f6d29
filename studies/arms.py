"""An arm of a study: one resolved configuration, trained once per seed and kept in `cache/` under the hash of that configuration."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import diloco
from diloco.core.method import Method
from diloco.core.update import Contribution
from diloco.exchange.base import Exchange
from studies import world
from studies.world import BATCH, LR, SEQUENCE, STEPS, Model

CACHE = Path(__file__).parent / "cache"
WARM = Path(__file__).parent / "warm"  # warm starts by seed: not kept in the repository
FORMAT = 1


@dataclass(frozen=True)
class Arm:
    """What is trained. Equal tokens by default; with `budget_s` equal virtual wall-clock instead.

    Attributes:
        kind: "method"; or the controls "data parallel" (one model on the global batch) and "isolated" (learner 0 alone on its share).
        method: `Method.to_dict()` where there is one.
        learners: M.
        warm: share of the steps that one model takes on the global batch before.
        lr, inner: of the inner optimizer, "adamw" or "muon".
        seed: of initial values and data order.
        split: what is evaluated, "report" or "select".
        speeds: relative speed of each learner where they differ; a step takes 1 s ÷ speed of virtual time, ± 10 % at random.
        budget_s: virtual seconds after the warm start, instead of a number of steps.
        starts: when each learner starts, as a share of the common part; default: at its beginning.
        ends: when each learner leaves, likewise.
        topics: every learner has its own stretch of the text.
        attack: what the last learner's outer gradients become: "noise", "flipped", "scaled".
        batch: sequences of a learner's step, where not BATCH ÷ M.
    """

    kind: str = "method"
    method: Mapping[str, Any] | None = None
    learners: int = 4
    warm: float = 0.25
    lr: float = LR
    inner: str = "adamw"
    seed: int = 0
    split: str = "report"
    speeds: tuple[float, ...] | None = None
    budget_s: float | None = None
    starts: tuple[float, ...] | None = None
    ends: tuple[float, ...] | None = None
    topics: bool = False
    attack: str = ""
    batch: int | None = None

    def key(self) -> str:
        """Name of the run: a hash of everything that it depends on."""
        values = {name: value for name, value in asdict(self).items() if value != getattr(Arm(), name)}
        if self.kind == "data parallel" and not self.topics:
            values.pop("learners", None)  # it is the same run whatever M is
        return hashlib.sha256(json.dumps([FORMAT, values], sort_keys=True).encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Outcome:
    """A finished run: held-out loss of the global model in nats per byte, and what it took."""

    loss: float
    seconds: float
    steps: tuple[int, ...] = ()
    merges: int = 0


def outcome(arm: Arm) -> Outcome:
    """Of a run that is in the cache, or is trained now."""
    found = cached(arm)
    if found is not None:
        return found
    started = time.monotonic()
    torch.set_num_threads(1)
    result = replace(_train(arm), seconds=time.monotonic() - started)
    CACHE.mkdir(exist_ok=True)
    text = json.dumps({"arm": asdict(arm), "outcome": asdict(result)}, indent=1)
    temporary = CACHE / f"{arm.key()}.{time.time_ns()}.part"
    temporary.write_text(text + "\n")
    temporary.replace(CACHE / f"{arm.key()}.json")
    return result


def cached(arm: Arm) -> Outcome | None:
    """The outcome of a run that was made before."""
    file = CACHE / f"{arm.key()}.json"
    if not file.exists():
        return None
    values = json.loads(file.read_text())["outcome"]
    return Outcome(**{**values, "steps": tuple(values["steps"])})


# --- training -------------------------------------------------------------------------------------------------------------


def make_optimizer(model: Model, arm: Arm) -> torch.optim.Optimizer:
    """AdamW (0.9, 0.99, decay 0.1), or Muon for the matrices of the layers with AdamW for the rest."""
    if arm.inner == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=arm.lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    from diloco.training.optimizers import Chained

    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("layers.")]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or not name.startswith("layers.")]
    return Chained(
        [
            torch.optim.Muon(matrices, lr=2 * arm.lr, weight_decay=0.1),
            torch.optim.AdamW(others, lr=arm.lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True),
        ]
    )


def inner_step(model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor, factor: float) -> None:
    """One inner step. Denormals are flushed in here and nowhere else: they slow a model of this size down by half."""
    for group in optimizer.param_groups:
        group.setdefault("peak_lr", group["lr"])
        group["lr"] = group["peak_lr"] * factor
    torch.set_flush_denormal(True)
    model.loss(tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.set_flush_denormal(False)


def warm_started(arm: Arm) -> tuple[Model, torch.optim.Optimizer, int]:
    """Model and optimizer after the warm start, and the step reached; made once for all arms of a seed."""
    steps = round(arm.warm * STEPS)
    model = Model(arm.seed)
    optimizer = make_optimizer(model, arm)
    if steps == 0:
        return model, optimizer, 0
    WARM.mkdir(exist_ok=True)
    file = WARM / f"{arm.inner}-{arm.lr:g}-{arm.seed}-{steps}.pt"
    if not file.exists():
        for step in range(1, steps + 1):
            inner_step(model, optimizer, world.global_batch(arm.seed, step), world.lr_factor(step / STEPS, step))
        part = file.with_suffix(f".{time.time_ns()}.part")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
        part.replace(file)
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer, steps


def _train(arm: Arm) -> Outcome:
    if arm.kind == "method":
        return _train_together(arm)
    model, optimizer, start = warm_started(arm)
    for step in range(start + 1, STEPS + 1):
        batch = _batch(arm, step, 0) if arm.kind == "isolated" else _whole_batch(arm, step)
        inner_step(model, optimizer, batch, world.lr_factor(step / STEPS, step))
    return Outcome(world.evaluate(model.state_dict(), arm.split), 0.0, (STEPS - start,))


def _whole_batch(arm: Arm, step: int) -> Tensor:
    if not arm.topics:
        return world.global_batch(arm.seed, step)
    return torch.cat([_batch(arm, step, learner) for learner in range(arm.learners)])


def _batch(arm: Arm, step: int, learner: int) -> Tensor:
    size = arm.batch or BATCH // arm.learners
    if arm.topics:
        return world.topic_batch(arm.seed, step, learner, arm.learners, size)
    return world.part_of(world.global_batch(arm.seed, step), learner, arm.learners)[:size]


def _train_together(arm: Arm) -> Outcome:
    """M learners through `run_local`."""
    assert arm.method is not None
    method = Method.from_dict(arm.method)
    start = round(arm.warm * STEPS)
    common = STEPS - start
    length_s = arm.budget_s or float(common)
    speeds = arm.speeds or (1.0,) * arm.learners
    jitter = torch.Generator().manual_seed(77 + arm.seed)
    factors = 0.9 + 0.2 * torch.rand(arm.learners, 4096, generator=jitter)

    def step_s(index: int, taken: int) -> float:
        return 1.0 / speeds[index] * (float(factors[index, taken % 4096]) if arm.speeds else 1.0)

    def life(index: int, exchange: Exchange) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, optimizer, _ = warm_started(arm)
        if arm.attack and index == arm.learners - 1:
            exchange.offer = _poisoned(arm, method, exchange)  # type: ignore[method-assign]
        ends_s = length_s * (arm.ends[index] if arm.ends else 1.0)
        by_time = arm.budget_s is not None or arm.ends is not None or arm.starts is not None
        with diloco.Learner(model, optimizer, method=method, exchange=exchange) as learner:
            taken = 0
            while exchange.now_s < ends_s if by_time else taken < common:  # type: ignore[attr-defined]
                taken += 1
                done = exchange.now_s / length_s if by_time else taken / common  # type: ignore[attr-defined]
                progress = (start + done * common) / STEPS
                step = start + (taken if not by_time else max(1, round(exchange.now_s * speeds[index])))  # type: ignore[attr-defined]
                inner_step(model, optimizer, _batch(arm, step, index), world.lr_factor(progress, step))
                learner.step(tokens=SEQUENCE * (arm.batch or BATCH // arm.learners))
            learner.state_dict()  # answers that are on their way
            return learner.global_state_dict(), learner.metrics()

    starts_s = None if arm.starts is None else [share * length_s for share in arm.starts]
    ended = diloco.run_local(life, learners=arm.learners, step_s=step_s, starts_s=starts_s)
    last = max(range(arm.learners), key=lambda index: sum(ended[index][1]["versions"]))
    state, metrics = ended[last]
    return Outcome(
        world.evaluate(state, arm.split), 0.0, tuple(each["steps"] for _, each in ended), sum(metrics["versions"])
    )


def _poisoned(arm: Arm, method: Method, exchange: Exchange) -> Callable[[Contribution, Callable[[], Tensor]], None]:
    """What a learner offers becomes: noise of ten times its norm, its negative, or a hundred times itself."""
    generator, honest = torch.Generator().manual_seed(arm.seed), exchange.offer

    def offer(contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        encoded = payload()
        num_elements = encoded.numel() // 4  # fp32 in this study
        x = method.up.decode(encoded, num_elements)
        match arm.attack:
            case "noise":
                noise = torch.randn(num_elements, generator=generator)
                bad = noise * (10 * x.norm() / noise.norm())
            case "flipped":
                bad = -x
            case "scaled":
                bad = 100 * x
            case other:
                raise ValueError(f"attack is {other!r}; use noise, flipped or scaled.")
        honest(contribution, lambda: method.up.encode(bad))

    return offer
