"""A learner that joins a run under way without a checkpoint: a fresh inner optimizer, and a short re-warm-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.learner.test_learner import make_model, tokens_of, train_step
from torch import Tensor

import diloco
from diloco import Heal, Learner
from diloco.errors import CheckpointError, ConfigError
from diloco.exchange.base import Exchange
from diloco.learner.inner_state import InnerState
from diloco.training.checkpoint import load_checkpoint, save_checkpoint
from diloco.training.optimizers import Chained

torch.optim.AdamW([torch.zeros(1)])  # from now on its step calls hooks, whatever test comes first

STEPS, JOINS_AFTER, REWARM = 20, 8.5, 4
METHOD = diloco.DiLoCo(sync_every=4)


class Recorded(torch.optim.AdamW):
    """Remembers the learning rate that each of its steps had. torch calls the hooks of a step in it twice, once for its
    own and once for its parent's."""

    def __init__(self, parameters: Any, lr: float | Tensor) -> None:
        super().__init__(parameters, lr=lr)
        self.rates: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.rates.append(float(self.param_groups[0]["lr"]))
        return super().step(closure)


def schedule(step: int) -> float:
    return 0.01 * (1 - step / 100)


def train(learner: Learner, index: int, until: int) -> list[float]:
    """Steps by the run's schedule; returns the rates that are seen between them."""
    seen = []
    while learner.steps < until:
        for group in learner.optimizer.param_groups:
            group["lr"] = schedule(learner.steps + 1)
        train_step(learner.model, learner.optimizer, index, learner.steps + 1)
        seen.append(learner.optimizer.param_groups[0]["lr"])
        learner.step(tokens=tokens_of(index))
    return seen


def steps_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """The inner optimizer's own count, of each parameter."""
    return {int(state["step"]) for state in optimizer.state.values()}


def test_a_late_joiner_begins_afresh_at_the_schedules_place() -> None:
    def life(index: int, exchange: Exchange) -> dict[str, Any]:
        model = make_model(index)
        optimizer = Recorded(model.parameters(), lr=0.01)
        train_step(model, optimizer, index, 99)  # of a life before: it is not to survive
        optimizer.rates.clear()
        with Learner(model, optimizer, method=METHOD, exchange=exchange, heal=Heal(rewarm_steps=REWARM)) as learner:
            first, healed = learner.steps + 1, learner.healed
            seen = train(learner, index, STEPS)
            return {"first": first, "healed": healed, "seen": seen, "rates": optimizer.rates, "of": steps_of(optimizer)}

    founder, joiner = diloco.run_local(life, learners=2, starts_s=[0.0, JOINS_AFTER])
    assert (founder["first"], founder["healed"], founder["of"]) == (1, None, {STEPS + 1})
    assert founder["rates"] == founder["seen"] == [schedule(step) for step in range(1, STEPS + 1)]
    first = joiner["first"]
    assert first == 9
    assert joiner["healed"].source == "global"
    assert joiner["healed"].rewarm_steps == REWARM
    assert joiner["of"] == {STEPS - first + 1}  # no moment from before
    assert joiner["seen"] == [schedule(step) for step in range(first, STEPS + 1)]
    factors = [min(1.0, k / REWARM) for k in range(1, STEPS - first + 2)]
    assert joiner["rates"] == pytest.approx([rate * f for rate, f in zip(joiner["seen"], factors, strict=True)])


def life_in_two(index: int, exchange: Exchange, path: Path, stops: int) -> dict[str, Any] | None:
    """The second learner joins late, is saved after `stops` steps, and goes on in a new object."""
    model = make_model(index)
    optimizer = Recorded(model.parameters(), lr=0.01)
    learner = Learner(model, optimizer, method=METHOD, exchange=exchange, heal=Heal(rewarm_steps=REWARM))
    if index == 0:
        train(learner, index, STEPS)
        learner.close()
        return None
    train(learner, index, learner.steps + stops)
    save_checkpoint(path, 1, {"learner": learner.state_dict(), "optimizer": optimizer.state_dict()}, keep=1)
    learner.close()
    return {"factor": learner.lr_factor, "rates": optimizer.rates}


@pytest.mark.parametrize("stops", [1, REWARM, REWARM + 1])
def test_a_re_warm_up_is_part_of_the_checkpoint(stops: int, tmp_path: Path) -> None:
    diloco.run_local(
        lambda index, exchange: life_in_two(index, exchange, tmp_path, stops), learners=2, starts_s=[0.0, JOINS_AFTER]
    )
    saved = load_checkpoint(tmp_path / "step-0000000001")

    def second(index: int, exchange: Exchange) -> list[float]:
        model = make_model(7)
        optimizer = Recorded(model.parameters(), lr=0.01)
        optimizer.load_state_dict(saved["optimizer"])
        resume, heal = saved["learner"], Heal(rewarm_steps=9)  # which has no effect beside a checkpoint
        with Learner(model, optimizer, method=METHOD, exchange=exchange, resume=resume, heal=heal) as learner:
            assert learner.healed is None
            first = learner.steps + 1
            train(learner, index, STEPS)
            rates = [rate / schedule(first + k) for k, rate in enumerate(optimizer.rates)]
        assert steps_of(optimizer) == {stops + len(rates)}  # the moments of the checkpoint
        return rates

    (factors,) = diloco.run_local(second, learners=1)
    assert factors == pytest.approx([min(1.0, k / REWARM) for k in range(stops + 1, stops + 1 + len(factors))])
    assert len(factors) > REWARM


def test_a_damaged_re_warm_up_is_refused() -> None:
    def life(_: int, exchange: Exchange) -> None:
        model = make_model()
        with Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), method=METHOD, exchange=exchange) as learner:
            state = learner.state_dict() | {"rewarm": {"num_steps": 3, "num_taken": -1}}
            with pytest.raises(CheckpointError, match="re-warm-up"):
                learner.load_state_dict(state)

    diloco.run_local(life, learners=1)


def test_optimizers_of_every_kind_are_re_warmed() -> None:
    """Chained optimizers, several of them, and rates that are tensors."""
    rates: list[float] = []

    def life(index: int, exchange: Exchange) -> list[Any]:
        model = make_model(index)
        first, second = model[0].parameters(), [*model[1].parameters(), *model[2].parameters()]
        chained = Chained([Recorded(first, lr=torch.tensor(0.01)), torch.optim.SGD(second[:2], lr=0.1)])
        last = torch.optim.SGD(second[2:], lr=0.5)
        optimizers = [chained, last]
        with Learner(model, optimizers, method=METHOD, exchange=exchange, heal=Heal(rewarm_steps=2)) as learner:
            while learner.steps < STEPS:
                before = [parameter.detach().clone() for parameter in second]
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                chained.step()
                last.step()
                if index == 1:
                    rates.extend(float((was - now.detach()).mean()) for was, now in zip(before, second, strict=True))
                learner.step(tokens=1)
        return [group["lr"] for each in optimizers for group in each.param_groups]

    _, joiner = diloco.run_local(life, learners=2, starts_s=[0.0, JOINS_AFTER])
    assert [float(rate) for rate in joiner] == pytest.approx([0.01, 0.1, 0.5])
    assert rates[:12] == pytest.approx([0.05, 0.05, 0.25, 0.25, 0.1, 0.1, 0.5, 0.5, 0.1, 0.1, 0.5, 0.5], rel=1e-4)


@pytest.mark.parametrize(
    ("values", "named"),
    [({"source": "disk"}, "'disk'"), ({"rewarm_steps": -1}, "rewarm_steps"), ({"timeout_s": 0.0}, "timeout_s")],
)
def test_impossible_values_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Heal(**values)


def test_a_peers_state_goes_into_every_kind_of_optimizer() -> None:
    """Fused and chained ones, and momentum that is not there yet; the state of another kind is told by its digest."""

    def made(kind: str) -> tuple[torch.optim.Optimizer, InnerState, torch.nn.Module]:
        model = make_model(1)
        matrices = [each for each in model.parameters() if each.dim() == 2]
        others = [each for each in model.parameters() if each.dim() != 2]
        optimizer: torch.optim.Optimizer
        match kind:
            case "fused":
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            case "muon":
                optimizer = Chained([torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)])
            case "chained":
                optimizer = Chained([torch.optim.AdamW(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)])
            case _:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        return optimizer, InnerState([optimizer], dict(model.named_parameters())), model

    kinds = ("fused", "muon", "chained", "sgd")
    assert len({made(kind)[1].digest for kind in kinds}) == len(kinds)
    for kind in kinds:
        optimizer, state, model = made(kind)
        for step in range(3):
            train_step(model, optimizer, 0, step)
        joiner, theirs, other = made(kind)
        other.load_state_dict(model.state_dict())
        assert theirs.digest == state.digest
        theirs.take(theirs.read(state.snapshot()()))
        for each in (optimizer, joiner):
            train_step(model if each is optimizer else other, each, 0, 3)
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, its), kind
