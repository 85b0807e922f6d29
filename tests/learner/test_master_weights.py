"""Optimizers that keep master weights of their own are found, under any key and hidden, and others are not accused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco import Learner, Method
from diloco.core.fragments import make_layout
from diloco.errors import ConfigError
from diloco.exchange.base import Exchange
from diloco.learner.master_weights import MasterWeightDetector
from diloco.learner.pieces import Units

MakeInner = Callable[[nn.Module], torch.optim.Optimizer]


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 16)).to(dtype)


def run(
    make_inner: MakeInner, *, dtype: torch.dtype = torch.bfloat16, method: Method | None = None, steps: int = 60,
    learners: int = 2,
) -> list[int]:  # fmt: skip
    """Learners on tasks of their own, so that they part between adoptions. Returns the boundaries that each passed."""
    passed = [0] * learners

    def life(index: int, exchange: Exchange) -> None:
        model = make_model(dtype)
        inner = make_inner(model)
        if hasattr(inner, "train"):
            inner.train()
        target = torch.randn(16, 16, generator=torch.Generator().manual_seed(index))
        with Learner(
            model, inner, method=method or diloco.DiLoCo(sync_every=20, outer=diloco.SGD(lr=1.0)), exchange=exchange
        ) as learner:
            for step in range(1, steps + 1):
                x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
                inner.zero_grad()
                (model(x.to(dtype)) - (x @ target).to(dtype)).square().mean().backward()
                inner.step()
                learner.step(tokens=32)
                passed[index] = step

    try:
        diloco.run_local(life, learners=learners)
    except ConfigError as error:
        error.add_note(str(max(passed)))
        raise
    return passed


class Lazy(torch.optim.Optimizer):
    """SGD on fp32 master weights that the first step makes; `keep` says where.

    "state": under an odd key. "list": in an attribute. "nested": in an optimizer inside, flat. "hidden": in a closure.
    """

    def __init__(self, model: nn.Module, keep: str, lr: float = 0.02) -> None:
        super().__init__(model.parameters(), {"lr": lr})
        self.copies: list[Tensor] = []
        hidden: dict[int, Tensor] = {}

        def master(p: Tensor) -> Tensor:
            match keep:
                case "state":
                    return self.state[p].setdefault("ballast", p.detach().float().clone())
                case "list":
                    index = [id(each) for each in self.param_groups[0]["params"]].index(id(p))
                    if index == len(self.copies):
                        self.copies.append(p.detach().float().clone())
                    return self.copies[index]
                case "nested":
                    if not hasattr(self, "inner"):
                        flat = [each.detach().float().flatten() for each in self.param_groups[0]["params"]]
                        self.inner = torch.optim.SGD([nn.Parameter(each) for each in flat], lr=lr)
                    index = [id(each) for each in self.param_groups[0]["params"]].index(id(p))
                    return self.inner.param_groups[0]["params"][index].detach().view(p.shape)
                case _:
                    return hidden.setdefault(id(p), p.detach().float().clone())

        self._master = master

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self._master(p).sub_(p.grad.float(), alpha=group["lr"]))


@pytest.mark.parametrize(("keep", "key"), [("state", "'ballast'"), ("list", "'copies'"), ("nested", "'params'")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_under_any_key_are_named_at_the_first_send(keep: str, key: str, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"Lazy keeps master weights of '0\.weight' \({key}\)") as refused:
        run(lambda model: Lazy(model, keep), dtype=dtype)
    assert refused.value.__notes__ == ["19"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "method",
    [
        diloco.DiLoCo(sync_every=20),
        diloco.StreamingDiLoCo(sync_every=20, overlap=2, fragments=diloco.Balanced(2)),
        diloco.EagerDiLoCo(sync_every=20),
    ],
    ids=["diloco", "streaming", "eager"],
)
def test_hidden_master_weights_are_found_once_a_value_is_adopted(method: Method, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"one step of Lazy after .*'\d\.weight' is back where it was") as refused:
        run(lambda model: Lazy(model, "hidden"), dtype=dtype, method=method, steps=200)
    assert int(refused.value.__notes__[0]) < 140


def schedule_free(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(model.parameters(), **options)


def eight_bit(model: nn.Module) -> torch.optim.Optimizer:
    pytest.importorskip("bitsandbytes")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=256)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=0.02)


HONEST: dict[str, MakeInner] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "AdamW, a tiny rate": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-7),
    "AdamW, a huge rate": lambda model: torch.optim.AdamW(model.parameters(), lr=3.0),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "SGD, standing still": lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
    "SGD, a huge rate": lambda model: torch.optim.SGD(model.parameters(), lr=2.0),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "Muon": muon,
    "schedule-free": lambda model: schedule_free(model, lr=1e-2),
    "schedule-free, warming up": lambda model: schedule_free(model, lr=1e-2, warmup_steps=30),
    "8-bit AdamW": eight_bit,
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HONEST)
def test_other_optimizers_are_not_accused(name: str, dtype: torch.dtype) -> None:
    assert run(HONEST[name], dtype=dtype, method=diloco.DiLoCo(sync_every=20)) == [60, 60]


@pytest.mark.parametrize("sync_every", [1, 2, 3])
@pytest.mark.parametrize("lr", [0.3, 0.5, 1.0])
def test_a_step_as_long_as_an_adoption_says_nothing(sync_every: int, lr: float) -> None:
    """With a constant gradient and an outer learning rate of 0.5, H = 2 steps from what is adopted lead back to where
    the learner was."""

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(256))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    def life(index: int, exchange: Exchange) -> int:
        model = Slope()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        method = diloco.DiLoCo(sync_every=sync_every, outer=diloco.SGD(lr=lr))
        with Learner(model, inner, method=method, exchange=exchange) as learner:
            for _ in range(20):
                inner.zero_grad()
                model(torch.arange(256.0) + index).backward()
                inner.step()
                learner.step(tokens=1)
            return learner.steps

    assert diloco.run_local(life, learners=2) == [20, 20]


@pytest.mark.parametrize("rejoined", [False, True])
def test_what_joining_overwrites_is_no_adoption(rejoined: bool) -> None:
    """A learner that was evicted takes the run's model: its parameters are not where the last adoption left them."""
    model = nn.Linear(16, 16, bias=False)
    layout = make_layout(model, diloco.Whole())
    parameters = dict(model.named_parameters())
    masters = MasterWeightDetector([torch.optim.SGD(model.parameters())], layout, parameters, Units(layout))
    masters.stepped()
    before = model.weight.data.clone()
    with masters.writing(0):
        model.weight.data.add_(1.0)
    if rejoined:
        masters.begin()
    model.weight.data.copy_(before)
    masters.stepped()
    if rejoined:
        masters.stepped()
    else:
        with pytest.raises(ConfigError, match="'weight' is back where it was"):
            masters.stepped()
