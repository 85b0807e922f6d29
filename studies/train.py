"""Training an arm: the real `diloco.Learner` over the real exchange, all learners in one process and in virtual
time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import diloco
from diloco.core.fragments import scatter
from diloco.core.method import Method
from diloco.core.quorum import AllLive
from diloco.errors import CorruptPayloadError, NonFiniteError
from diloco.exchange.base import Exchange
from diloco.protocol.contribution import Contribution
from diloco.training.optimizers import Chained
from studies import world
from studies.arms import DIVERGED, Arm, Outcome, in_flight_at_the_end
from studies.world import BATCH, SEQUENCE, STEPS, Model

WARM = Path(__file__).parent / "warm"  # warm starts by seed: not kept in the repository


def make_optimizer(model: Model, arm: Arm) -> torch.optim.Optimizer:
    """AdamW (0.9, 0.99, decay 0.1), or Muon for the matrices of the layers with AdamW for the rest."""
    if arm.inner == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=arm.lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
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
    """Model and optimizer after the warm start, and the step reached; made once for all arms of a seed.

    Every learner starts with the inner optimizer's state of the warm start, as if that had been made in data parallel.
    """
    steps = round(arm.warm * STEPS)
    model = Model(arm.seed)
    optimizer = make_optimizer(model, arm)
    if steps == 0:
        return model, optimizer, 0
    WARM.mkdir(exist_ok=True)
    file = WARM / f"{world.fingerprint()}-{arm.inner}-{arm.lr:g}-{arm.seed}-{steps}.safetensors"
    if not file.exists():
        for step in range(1, steps + 1):
            inner_step(model, optimizer, world.global_batch(arm.seed, step), world.lr_factor(step / STEPS, step))
        part = file.with_suffix(f".{time.time_ns()}.part")
        save_file(_state(model, optimizer), part)
        part.replace(file)
    _load(model, optimizer, load_file(file))
    return model, optimizer, steps


def _state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    saved = {f"model/{name}": value.contiguous() for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        saved |= {f"inner/{index}/{name}": torch.as_tensor(value) for name, value in state.items()}
    return saved


def _load(model: Model, optimizer: torch.optim.Optimizer, saved: Mapping[str, Tensor]) -> None:
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in saved.items():
        kind, _, rest = key.partition("/")
        if kind == "inner":
            index, _, name = rest.partition("/")
            states.setdefault(int(index), {})[name] = value
    model.load_state_dict(
        {key.removeprefix("model/"): value for key, value in saved.items() if key.startswith("model/")}
    )
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


def train(arm: Arm) -> Outcome:
    """Train and evaluate; `seconds` is for the caller to fill in."""
    torch.set_num_threads(1)
    if arm.kind == "method":
        try:
            return _train_together(arm)
        except (NonFiniteError, CorruptPayloadError):
            if not arm.attack:
                raise
            return Outcome(DIVERGED, 0.0)
    model, optimizer, start = warm_started(arm)
    common = arm.common or STEPS - start
    for step in range(start + 1, start + common + 1):
        batch = _batch(arm, step, 0) if arm.kind == "isolated" else world.global_batch(arm.seed, step)
        progress = (start + (step - start) * (STEPS - start) / common) / STEPS
        inner_step(model, optimizer, batch, world.lr_factor(progress, step))
    return Outcome(world.evaluate(model.state_dict(), arm.split), 0.0, (common,))


def _batch(arm: Arm, step: int, learner: int) -> Tensor:
    size = arm.batch or BATCH // arm.learners
    if arm.topics:
        return world.topic_batch(arm.seed, step, learner, arm.learners, size, arm.shared_fraction)
    return world.part_of(world.global_batch(arm.seed, step), learner, arm.learners)[:size]


def _train_together(arm: Arm) -> Outcome:
    """M learners through `run_local`."""
    assert arm.method is not None
    method = Method.from_dict(arm.method)
    if isinstance(method.quorum, AllLive) and method.quorum.drop:
        method = replace(method, quorum=replace(method.quorum, drop_seed=arm.seed))
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
            exchange.offer = _poisoned(arm, method, exchange)  # type: ignore[method-assign,assignment]
        ends_s = length_s * (arm.ends[index] if arm.ends else 1.0)
        tokens = SEQUENCE * (arm.batch or BATCH // arm.learners)
        if arm.examples:
            tokens = round(tokens * world.topic_shares(arm.learners)[index] * arm.learners)
        by_time = arm.budget_s is not None or arm.ends is not None or arm.starts is not None
        # A learner that starts late has the state of the warm start, which needs no re-warm-up.
        with diloco.Learner(model, optimizer, method=method, exchange=exchange, rewarm_steps=0) as learner:
            taken = 0
            while (over_s := exchange.now_s + step_s(index, taken)) <= ends_s + 1e-6 if by_time else taken < common:
                taken += 1
                done = over_s / length_s if by_time else taken / common
                progress = (start + done * common) / STEPS
                step = start + (taken if not by_time else max(1, round(over_s * speeds[index])))
                inner_step(model, optimizer, _batch(arm, step, index), world.lr_factor(progress, step))
                learner.step(tokens=tokens)
            exchange.stepped()  # a learner leaves only when the step after its last one would be over
            learner.state_dict()  # answers that are on their way
            state = learner.global_state_dict()
            if in_flight_at_the_end(method):  # what the run has published, whether or not it has been adopted
                published = exchange.state_dict()["fragments"]
                for index_, fragment in enumerate(learner.layout.fragments):
                    state.update(scatter(fragment, published[str(index_)]["theta"]))
            return state, learner.metrics()

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
