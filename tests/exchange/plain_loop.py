"""The scenarios of the contract in one plain loop (`diloco.core.reference`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tests.exchange.scenarios import LEARNERS, Result, Scenario, inner_gradient, make_model, make_optimizer
from torch import Tensor

from diloco import Method
from diloco.core.fragments import Experts
from diloco.core.layout import Layout, named_tensors
from diloco.core.reference import Reference, scheduled
from diloco.learner.pieces import read_dtensor
from diloco.learner.roles import described
from diloco.learner.tensors import trained_tensors


class Trainee:
    """One learner of a scenario: a `core.reference.Model`."""

    def __init__(self, scenario: Scenario, index: int, layout: Layout) -> None:
        held = scenario.held(index)
        layout = layout if held is None else held.part(layout)
        self._scenario, self._index, self.layout, self._steps = scenario, index, layout, 0
        self.model = make_model(scenario, index)
        first = make_model(scenario, 0).state_dict()
        self.model.load_state_dict({spec.name: first[spec.name] for spec in layout.static}, strict=False)
        self._optimizer = make_optimizer(scenario, self.model)
        self._trained = trained_tensors(layout, scenario.trains.get(index), None, Method.from_dict(scenario.method))
        text = (scenario.experts or {}).get(index)
        self._experts = None if text is None else {e for part in text.split(",") for e in _span(part)}

    def gradient(self) -> None:
        self._steps += 1
        self._optimizer.zero_grad()
        inner_gradient(self.model, self._index, self._steps)
        for _, gradient in self._kept_rows(self.gradients()):
            gradient.zero_()

    def step(self) -> int:
        values = {name: each.detach() for name, each in self.model.named_parameters()}
        kept = [row.clone() for _, row in self._kept_rows(values)]
        self._optimizer.step()
        for (_, row), before in zip(self._kept_rows(values), kept, strict=True):
            row.copy_(before)
        return self._scenario.tokens_of(self._index)

    def _kept_rows(self, values: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """The rows of experts that this learner does not train, in tensors of the model by name."""
        return [
            (spec.name, values[parameter][Experts.expert_of(spec) :][:1])
            for parameter, specs in self.layout.units().items()
            for spec in specs
            if parameter in values and self._experts is not None and Experts.expert_of(spec) not in self._experts
        ]

    def tensors(self) -> Mapping[str, Tensor]:
        whole = {name: each.detach() for name, each in self.model.state_dict(keep_vars=True).items()}
        units = {spec.name: whole[p][spec.origin.first :][:1] for p, of in self.layout.units().items() for spec in of}
        return {**whole, **units}

    def gradients(self) -> Mapping[str, Tensor]:
        found = {name: each.grad for name, each in self.model.named_parameters()}
        return {name: each for name, each in found.items() if each is not None}

    def holds(self, fragment: int) -> bool:
        """Whether its model has the fragment's tensors."""
        return bool(self.layout.fragments[fragment].tensors)

    def trained(self, fragment: int) -> frozenset[int] | None:
        places, indices = self.layout.fragments[fragment].tensors, self._trained[fragment]
        if self._experts is not None:
            own = {None, *self._experts}
            return frozenset(i for i, place in enumerate(places) if Experts.expert_of(place.spec) in own)
        return None if indices is None else frozenset(indices)

    def routed(self, fragment: int) -> Sequence[int] | None:
        experts = [Experts.expert_of(place.spec) for place in self.layout.fragments[fragment].tensors]
        if self.model.moe is None or None in experts:
            return None
        return [self.model.moe.gate.counts[each] for each in experts if each is not None]


def _span(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def in_a_plain_loop(scenario: Scenario) -> list[Result]:
    """Each learner's parameters and global model at the end. Only what is the same whatever carries a run out."""
    method = Method.from_dict(scenario.method)
    model = make_model(scenario, 0, whole=True)
    layout = described(model, method, scenario.buffers or "refuse", scenario.static, read_dtensor).layout(method)  # type: ignore[arg-type]
    trainees = [Trainee(scenario, index, layout) for index in range(LEARNERS)]
    whole = replace(scenario, holds={})
    reference = Reference(method, layout, trainees, Trainee(whole, 0, layout).tensors())
    holders = [[m for m in range(LEARNERS) if trainees[m].holds(p)] for p in range(len(layout.fragments))]
    reference.run(scheduled(method, LEARNERS, len(layout.fragments), scenario.steps, scenario.overlaps, holders))
    results = []
    for trainee, learner in zip(trainees, reference.learners, strict=True):
        own = {name: value.detach().clone() for name, value in trainee.model.state_dict().items()}
        global_ = dict(own)
        if method.exchanged != "gradients":
            newest = zip(reference.versions, (copy.version for copy in learner), strict=True)
            thetas = [of_fragment[version].theta for of_fragment, version in newest]
            held = [theta if trainee.holds(p) else theta[:0] for p, theta in enumerate(thetas)]
            global_ |= named_tensors(trainee.layout, held)
        if scenario.static == "digest":
            for each in layout.base:
                del global_[each.spec.name]
        tensors = {f"parameters.{name}": value for name, value in own.items()}
        tensors |= {f"global.{name}": value for name, value in global_.items()}
        versions = [copy.version if trainee.holds(p) else -1 for p, copy in enumerate(learner)]
        results.append(Result(tensors, {"versions": versions}))
    return results
