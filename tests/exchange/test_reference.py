"""Runs whose order the network decides, carried out again from a list of their events by `core.reference`: the same
bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.exchange.plain_loop import Trainee
from tests.exchange.scenarios import LEARNERS, SCENARIOS, Scenario, inner_gradient, make_model, make_optimizer
from torch import Tensor

import diloco
from diloco import Learner, Method
from diloco.core.presets import PRESETS
from diloco.core.reference import Event, Reference, scheduled
from diloco.errors import ConfigError
from diloco.exchange.local import Local, run_virtual
from diloco.exchange.virtual.run import VirtualRun
from diloco.learner.pieces import read_dtensor
from diloco.learner.roles import described
from diloco.planning.network import Network, Route
from diloco.protocol.contribution import Contribution
from diloco.run.ports import MergedRound, NullObserver

STEPS = 30
SPEEDS = (0.1, 0.17, 0.4)
"""Seconds of an inner step, by learner."""


class Told(NullObserver):
    """The merges of a run, into the list of its events."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events

    def merged(self, merged: MergedRound[Any, Any], experts: object) -> None:
        senders = tuple(int(c.learner.removeprefix("learner-")) for c in merged.action.contributions)
        self._events.append(("merge", merged.action.fragment, senders, merged.action.scale))


def lived(scenario: Scenario) -> tuple[list[Event], list[dict[str, Tensor]]]:
    """A run over links, by learners of unequal speed: its events, and what each learner ends with."""
    events: list[Event] = []

    def life(m: int, exchange: Local) -> dict[str, Tensor]:
        model = make_model(scenario, m)
        optimizer = make_optimizer(scenario, model)
        whole = make_model(scenario, m, whole=True) if m == 0 and scenario.holds else None
        held: list[int] = []

        def adopted(fragment: int, version: int) -> None:
            if version > held[fragment]:
                held[fragment] = version
                events.append(("adopt", m, fragment, version))

        offer = exchange.offer

        def recorded(contribution: Contribution, payload: Any) -> None:
            adopted(contribution.fragment, contribution.base)
            events.append(("send", m, contribution.fragment))
            offer(contribution, payload)

        exchange.offer = recorded  # type: ignore[method-assign]
        buffers: Any = scenario.buffers or "refuse"
        with Learner(
            model, optimizer, method=Method.from_dict(scenario.method), exchange=exchange, buffers=buffers,
            trains_experts=(scenario.experts or {}).get(m), holds_experts=scenario.holds.get(m), whole=whole,
        ) as learner:  # fmt: skip
            held.extend(learner.versions)
            for step in range(1, STEPS + 1):
                events.extend((("gradient", m), ("step", m)))
                inner_gradient(model, m, step)
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=scenario.tokens_of(m))
                for fragment, version in enumerate(learner.versions):
                    adopted(fragment, version)
            return {name: value.detach().clone() for name, value in model.state_dict().items()}

    network = Network({"line": 1e7}, [Route(("line",), ("line",), 0.05)] * LEARNERS)
    names = [f"learner-{m}" for m in range(LEARNERS)]
    run = VirtualRun(names, lambda m, _: SPEEDS[m], [0.0] * LEARNERS, network, observer=Told(events))
    return events, [result for result in run_virtual(life, run) if isinstance(result, dict)]


METHODS = {
    "decoupled": diloco.DecoupledDiLoCo(sync_every=6, fragments=diloco.Balanced(4)),
    "decoupled, e3m0": diloco.DecoupledDiLoCo(
        sync_every=5, fragments=diloco.Balanced(3), codec="e3m0", error_feedback=True, merge=diloco.Mean(),
        quorum=diloco.Called(at_least=2, grace=0.0), adopt=diloco.Mix(0.5),
    ),
    "async": diloco.AsyncDiLoCo(sync_every=5, learners=LEARNERS),
    "async, heloco": diloco.AsyncDiLoCo(
        sync_every=4, learners=LEARNERS, codec="int8", merge=diloco.HeLoCo(), dynamic_steps=False
    ),
    "decoupled, experts": diloco.DecoupledDiLoCo(
        sync_every=4, codec="int8", error_feedback=True,
        fragments=diloco.Experts(groups=3, trunk=diloco.Balanced(2), every=2, up="fp32"),
    ),
    "async, experts": diloco.AsyncDiLoCo(
        sync_every=4, learners=LEARNERS, dynamic_steps=False,
        fragments=diloco.Experts(groups=2, trunk=diloco.Whole(), every=2, up="bf16"),
    ),
}  # fmt: skip
HELD = {
    "decoupled, experts": {0: "0-3 of 6", 1: "2-5 of 6", 2: "0-1,4-5 of 6"},
    "async, experts": {0: "0-2 of 6", 1: "3-5 of 6"},
}
"""The experts that learners hold, beside runs in which all hold all of them."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in HELD else []) for name in METHODS]
    + [f"{name}, held" for name in HELD],
)
def test_what_the_network_decides_gives_the_same_bits_in_a_plain_loop(name: str) -> None:
    method = METHODS[name.removesuffix(", held")]
    scenario = Scenario("", method.to_dict())
    if name not in METHODS:
        scenario = replace(scenario, experts={}, buffers="average", holds=HELD[name.removesuffix(", held")])
    elif isinstance(method.fragments, diloco.Experts):
        scenario = replace(scenario, experts={0: "0-3", 2: "3,4-5"}, buffers="average")
    events, results = lived(scenario)
    assert len(results) == LEARNERS
    merges = [event for event in events if event[0] == "merge"]
    assert len(merges) > 4
    assert any(len(set(event[2])) < LEARNERS for event in merges)  # learners are in different rounds
    buffers: Any = scenario.buffers or "refuse"
    whole = make_model(scenario, 0, whole=True)
    layout = described(whole, method, buffers, "exchange", read_dtensor).layout(method)
    trainees = [Trainee(scenario, m, layout) for m in range(LEARNERS)]
    start = Trainee(replace(scenario, holds={}), 0, layout).tensors()
    Reference(method, layout, trainees, start).run(events)
    for trainee, result in zip(trainees, results, strict=True):
        for name, value in trainee.model.state_dict().items():
            assert torch.equal(value, result[name]), name


def test_a_method_whose_rounds_are_not_scheduled_has_no_list_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"order of events under Called.* is not known beforehand; list them"):
        next(scheduled(diloco.DecoupledDiLoCo(), 2, 1, 3))


def test_every_preset_is_compared_with_the_reference() -> None:
    compared = {scenario.method["name"] for scenario in SCENARIOS.values() if not scenario.fault}
    assert compared | {method.name for method in METHODS.values()} == PRESETS.keys()
