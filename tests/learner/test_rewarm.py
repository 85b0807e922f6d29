"""A learner that joins a run under way without a checkpoint re-warms its learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.learner.test_learner import make_model, tokens_of, train_step
from torch import Tensor

import diloco
from diloco import Learner
from diloco.config import TrainTable
from diloco.errors import CheckpointError, ConfigError
from diloco.exchange.base import Exchange
from diloco.learner.rewarm import REWARM_STEPS
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


def test_a_late_joiner_re_warms_at_the_schedules_place(caplog: pytest.LogCaptureFixture) -> None:
    """By default over 5 steps; the learners that begin the run do not."""

    def life(index: int, exchange: Exchange) -> dict[str, Any]:
        model = make_model(index)
        optimizer = Recorded(model.parameters(), lr=0.01)
        with Learner(model, optimizer, method=METHOD, exchange=exchange) as learner:
            first = learner.steps + 1
            seen = train(learner, index, STEPS)
            return {"first": first, "seen": seen, "rates": optimizer.rates, "of": steps_of(optimizer)}

    founder, second, joiner = diloco.run_local(life, learners=3, starts_s=[0.0, 0.0, JOINS_AFTER])
    for each in (founder, second):
        assert (each["first"], each["of"]) == (1, {STEPS})
        assert each["rates"] == each["seen"] == [schedule(step) for step in range(1, STEPS + 1)]
    first = joiner["first"]
    assert first == 9
    assert joiner["of"] == {STEPS - first + 1}
    assert joiner["seen"] == [schedule(step) for step in range(first, STEPS + 1)]
    golden = [0.00182, 0.0036, 0.00534, 0.00704, 0.0087, 0.0086, 0.0085, 0.0084, 0.0083, 0.0082, 0.0081, 0.008]
    assert joiner["rates"] == pytest.approx(golden)
    told = [record.getMessage() for record in caplog.records if "re-warms" in record.getMessage()]
    assert len(told) == 1
    assert "re-warms its learning rate over 5 steps from step 9 on" in told[0]


def test_the_run_file_has_the_learners_default() -> None:
    assert TrainTable().rewarm_steps == REWARM_STEPS == 5


def test_a_learner_with_a_checkpoint_does_not_re_warm_where_the_run_has_gone_on() -> None:
    saved: dict[str, Any] = {}

    def life(index: int, exchange: Exchange) -> Any:
        model = make_model(index)
        optimizer = Recorded(model.parameters(), lr=0.01)
        resume = None
        if index == 2:
            optimizer.load_state_dict(saved["optimizer"])
            resume = saved["learner"]
        with Learner(model, optimizer, method=METHOD, exchange=exchange, resume=resume) as learner:
            first = learner.steps + 1
            train(learner, index, 6 if index == 1 else STEPS)
            if index == 1:
                saved.update(learner=learner.state_dict(), optimizer=optimizer.state_dict())
        return learner.resumed, first, optimizer.rates

    _, _, (resumed, first, rates) = diloco.run_local(life, learners=3, starts_s=[0.0, 0.0, JOINS_AFTER])
    assert (resumed, first) == (False, 9)
    assert rates == [schedule(step) for step in range(first, STEPS + 1)]


class Rateless(torch.optim.Optimizer):
    """It has no learning rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.param_groups[0]["params"]:
            each.sub_(0.01 * each.grad.sign())


class Unhooked:
    """A wrapper around an optimizer that calls no hooks of its own."""

    def __init__(self, parameters: Any) -> None:
        self._inner = Rateless(parameters)
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self.step, self.zero_grad = self._inner.step, self._inner.zero_grad


@pytest.mark.parametrize(
    ("make", "why"), [(Rateless, "Rateless has parameters without a learning rate"), (Unhooked, "Unhooked calls no")]
)
def test_what_cannot_be_re_warmed_is_refused_or_said(make: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """Refused at construction where a re-warm-up was asked for, though none is due yet; else a joiner says that it has
    none."""

    def life(index: int, exchange: Exchange) -> list[float]:
        model = make_model(index)
        optimizer = make(model.parameters())
        if index == 0:
            with pytest.raises(ConfigError, match=rf"{why}.*pass rewarm_steps=0"):
                Learner(model, optimizer, method=METHOD, exchange=exchange, rewarm_steps=3)
        factors = []
        with Learner(model, optimizer, method=METHOD, exchange=exchange) as learner:
            while learner.steps < STEPS:
                factors.append(learner.lr_factor)
                train_step(model, optimizer, index, learner.steps + 1)
                learner.step(tokens=1)
        return factors

    _, factors = diloco.run_local(life, learners=2, starts_s=[0.0, JOINS_AFTER])
    assert set(factors) == {1.0}
    (told,) = [record.getMessage() for record in caplog.records if "re-warm" in record.getMessage()]
    assert "joins a run under way without a re-warm-up" in told
    assert why in told


def life_in_two(index: int, exchange: Exchange, path: Path, stops: int) -> dict[str, Any] | None:
    """The second learner joins late, is saved after `stops` steps, and goes on in a new object."""
    model = make_model(index)
    optimizer = Recorded(model.parameters(), lr=0.01)
    learner = Learner(model, optimizer, method=METHOD, exchange=exchange, rewarm_steps=REWARM)
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
        resume = saved["learner"]  # beside which rewarm_steps have no effect
        with Learner(model, optimizer, method=METHOD, exchange=exchange, resume=resume, rewarm_steps=9) as learner:
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
            with pytest.raises(CheckpointError, match=r"state in the checkpoint is damaged \(.*-1"):
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
        with Learner(model, optimizers, method=METHOD, exchange=exchange, rewarm_steps=2) as learner:
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


def test_impossible_values_are_refused() -> None:
    def life(_: int, exchange: Exchange) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for value in (-1, 2.5, "5"):
            with pytest.raises(ConfigError, match="rewarm_steps"):
                Learner(model, optimizer, method=METHOD, exchange=exchange, rewarm_steps=value)  # type: ignore[arg-type]
        Learner(model, optimizer, method=METHOD, exchange=exchange).close()

    diloco.run_local(life, learners=1)
