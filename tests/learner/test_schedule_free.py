"""Schedule-free optimizers: which of their two models is the global one, and that evaluating it harms nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import schedulefree
import torch
from tests.learner.test_learner import assert_same, differ, make_model, parameters_of, tokens_of, train_step
from torch import Tensor, nn

import diloco
from diloco import Learner
from diloco.errors import ConfigError
from diloco.exchange.base import Exchange

AVERAGING = diloco.LocalSGD(sync_every=3)
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW": lambda model: schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05),
    "SGD": lambda model: schedulefree.SGDScheduleFree(model.parameters(), lr=0.05),
    "wrapped": lambda model: schedulefree.ScheduleFreeWrapper(
        torch.optim.SGD(model.parameters(), lr=0.05), momentum=0.9
    ),
}


def step(learner: Learner, index: int, number: int, *, averaged: bool) -> None:
    """One inner step. `averaged`: exchange x, by the optimizer's eval mode around the learner's step."""
    optimizer: Any = learner.optimizer
    train_step(learner.model, optimizer, index, number)
    if averaged:
        optimizer.eval()
    learner.step(tokens_of(index))
    if averaged:
        optimizer.train()


def base(optimizer: Any) -> list[Tensor]:
    return [state["z"].clone() for state in optimizer.state.values()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("averaged", [False, True])
def test_the_global_model_is_the_one_in_the_parameters_when_the_learner_steps(name: str, averaged: bool) -> None:
    """With averaging, the mean of all y or of all x. z stays each learner's own, so the other model is not global."""

    def life(index: int, exchange: Exchange) -> dict[str, Any]:
        model = make_model(index)
        optimizer = OPTIMIZERS[name](model)
        with Learner(model, optimizer, method=AVERAGING, exchange=exchange) as learner:
            optimizer.train()
            for number in range(1, 3):
                step(learner, index, number, averaged=averaged)
            train_step(model, optimizer, index, 3)
            if averaged:
                optimizer.eval()
            sent, z = parameters_of(model), base(optimizer)
            learner.step(tokens_of(index))
            adopted = parameters_of(model)
            assert_same(base(optimizer), z)
            assert_same(adopted, learner.global_state_dict())
            optimizer.train() if averaged else optimizer.eval()
            return {"sent": sent, "adopted": adopted, "other": parameters_of(model)}

    first, second = diloco.run_local(life, learners=2)
    assert_same(first["adopted"], second["adopted"])
    for key, value in first["adopted"].items():
        torch.testing.assert_close(value, (first["sent"][key] + second["sent"][key]) / 2, rtol=1e-5, atol=1e-6)
    assert differ(first["other"], second["other"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_evaluating_the_global_model_leaves_the_optimizer_and_the_parameters_as_they_were(name: str) -> None:
    """Evaluation code calls `eval()`, which would turn the global weights into something else in train mode."""

    def life(index: int, exchange: Exchange) -> None:
        model = make_model(index)
        optimizer = OPTIMIZERS[name](model)
        with Learner(model, optimizer, method=AVERAGING, exchange=exchange) as learner:
            optimizer.train()
            for number in range(1, 6):
                step(learner, index, number, averaged=False)
            own, z = parameters_of(model), base(optimizer)
            with learner.global_model():
                optimizer.eval()
                assert_same(parameters_of(model), learner.global_state_dict())
            assert_same(parameters_of(model), own)
            assert_same(base(optimizer), z)
            step(learner, index, 6, averaged=False)  # it is in train mode again

    diloco.run_local(life, learners=2)


def test_stepping_in_another_mode_than_before_is_refused() -> None:
    def life(index: int, exchange: Exchange) -> None:
        model = make_model(index)
        optimizer = OPTIMIZERS["AdamW"](model)
        with Learner(model, optimizer, method=AVERAGING, exchange=exchange) as learner:
            optimizer.train()
            step(learner, index, 1, averaged=False)
            train_step(model, optimizer, index, 2)
            optimizer.eval()
            with pytest.raises(ConfigError, match=r"in eval mode, and was in train mode at earlier calls.*one mode"):
                learner.step()
            optimizer.train()
            learner.step()

    diloco.run_local(life, learners=1)


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("saved_in_eval_mode", [False, True])
def test_a_resumed_run_has_the_bits_of_one_that_went_through(averaged: bool, saved_in_eval_mode: bool) -> None:
    """Model and optimizer are loaded before the learner is attached. The library advises to save in eval mode."""

    def attach(index: int, exchange: Exchange, saved: dict[str, Any] | None) -> Learner:
        model = make_model(index)
        optimizer = OPTIMIZERS["AdamW"](model)
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        resume = None if saved is None else saved["learner"]
        return Learner(model, optimizer, method=AVERAGING, exchange=exchange, resume=resume)

    def train(learner: Learner, index: int, steps: range) -> dict[str, Any]:
        """Ends with saving, in the optimizer's eval mode if wanted."""
        optimizer: Any = learner.optimizer
        optimizer.train()
        for number in steps:
            step(learner, index, number, averaged=averaged)
        if saved_in_eval_mode:
            optimizer.eval()
        model = {name: value.clone() for name, value in learner.model.state_dict().items()}
        state = {"learner": learner.state_dict(), "model": model, "optimizer": optimizer.state_dict()}
        return torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, state)

    def straight(index: int, exchange: Exchange) -> dict[str, Any]:
        with attach(index, exchange, None) as learner:
            train(learner, index, range(1, 5))
            return train(learner, index, range(5, 9))

    def half(index: int, exchange: Exchange) -> dict[str, Any]:
        with attach(index, exchange, halves[index] if halves else None) as learner:
            return train(learner, index, range(5, 9) if halves else range(1, 5))

    halves: list[dict[str, Any]] = []
    whole = diloco.run_local(straight, learners=2)
    halves = diloco.run_local(half, learners=2)
    assert_same(diloco.run_local(half, learners=2), whole)


def test_what_calls_no_hooks_is_stepped_by_hand() -> None:
    def life(index: int, exchange: Exchange) -> None:
        model = make_model(index)
        with pytest.raises(ConfigError, match="ScheduleFreeWrapper calls no hooks"):
            Learner(model, OPTIMIZERS["wrapped"](model), method=diloco.DataParallel(), exchange=exchange)
        with Learner(model, OPTIMIZERS["wrapped"](model), method=AVERAGING, exchange=exchange) as learner:
            with pytest.raises(ConfigError, match="ScheduleFreeWrapper calls no hooks"):
                learner.step_after_optimizer()
            learner.optimizer.train()
            step(learner, index, 1, averaged=False)

    diloco.run_local(life, learners=1)
