"""What an optimizer keeps of its parameters, learnt from a small copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.errors import ConfigError
from diloco.learner.inner_layout import entries_of, made_by
from diloco.training.optimizers import Chained

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
Params = list[nn.Parameter]


def parameters() -> Params:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in [(5, 3), (7,), (4, 4), (), (2, 3, 2)]]


class Noisy(torch.optim.Optimizer):
    """Its state has entries of its own, it draws numbers, and it counts in an attribute."""

    def __init__(self, params: Any) -> None:
        self.seen: list[int] = []
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.seen.append(1)
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["noise"] = torch.randn_like(each)
                self.state[each]["count"] = self.state[each].get("count", 0) + 1
                self.state[each]["nothing"] = None


MAKES: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "groups": lambda params: torch.optim.SGD(
        [{"params": params[:2], "momentum": 0.0}, {"params": params[2:], "momentum": 0.9}], lr=0.1
    ),
    "chained": lambda params: Chained(
        [torch.optim.Muon([p for p in params if p.dim() == 2]), torch.optim.AdamW([p for p in params if p.dim() != 2])]
    ),
    "noisy": Noisy,
}


def pairs(optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[int, int], Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for each in group["params"]:
            yield (number, each.dim()), each


@pytest.mark.parametrize("kind", MAKES)
def test_a_small_copy_makes_what_the_optimizer_makes(kind: str) -> None:
    params = parameters()
    optimizer = MAKES[kind](list(params))
    made = made_by(optimizer)
    for each in params:
        each.grad = torch.ones_like(each)
    optimizer.step()
    assert made == {key: entries_of(optimizer.state.get(each, {})) for key, each in pairs(optimizer)}


@pytest.mark.parametrize("kind", MAKES)
def test_the_optimizer_stays_as_it_is(kind: str) -> None:
    params = parameters()
    optimizer = MAKES[kind](list(params))
    called: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    optimizer.register_step_post_hook(lambda *_: called.append(2))
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    before, rng = [each.detach().clone() for each in params], torch.random.get_rng_state()
    if kind == "adagrad":
        kept = {name: each.clone() for name, each in optimizer.state[params[0]].items()}
    made_by(optimizer)
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert all(torch.equal(now, then) and now.grad is None for now, then in zip(params, before, strict=True))
    assert not called
    if kind == "adagrad":
        assert all(torch.equal(optimizer.state[params[0]][name], each) for name, each in kept.items())
    else:
        assert not optimizer.state
    assert vars(optimizer).get("seen", []) == []


class Wrapped(torch.optim.Optimizer):
    """Its groups and its state are those of another one, as accelerate's are."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (torch.optim.LBFGS, r"LBFGS.*closure"),
        (lambda params: Wrapped(torch.optim.AdamW(params)), "another optimizer's"),
    ],
)
def test_an_optimizer_of_which_no_copy_steps_is_refused(make: Make, said: str) -> None:
    optimizer = make(list(parameters()))
    with pytest.raises(ConfigError, match=said):
        made_by(optimizer)
    assert not optimizer.state
