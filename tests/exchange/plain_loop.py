"""The scenarios of the contract in one plain loop (`diloco.core.reference`)."""

from __future__ import annotations

from collections.abc import Mapping

from tests.exchange.scenarios import LEARNERS, Result, Scenario, inner_gradient, make_model, make_optimizer
from torch import Tensor

from diloco import Method
from diloco.core.layout import Layout
from diloco.core.reference import Reference, scheduled
from diloco.learner.frozen import exchanged_tensors
from diloco.learner.pieces import read_dtensor
from diloco.learner.roles import described
from diloco.learner.tensors import trained_tensors


class Trainee:
    """One learner of a scenario: a `core.reference.Model`."""

    def __init__(self, scenario: Scenario, index: int, layout: Layout) -> None:
        self._scenario, self._index, self._layout, self._steps = scenario, index, layout, 0
        self.model = make_model(scenario, index)
        first = make_model(scenario, 0).state_dict()
        self.model.load_state_dict({spec.name: first[spec.name] for spec in layout.static}, strict=False)
        self._optimizer = make_optimizer(scenario, self.model)
        self._trained = trained_tensors(layout, scenario.trains.get(index), Method.from_dict(scenario.method))

    def gradient(self) -> None:
        self._steps += 1
        self._optimizer.zero_grad()
        inner_gradient(self.model, self._index, self._steps)

    def step(self) -> int:
        self._optimizer.step()
        return self._scenario.tokens_of(self._index)

    def tensors(self) -> Mapping[str, Tensor]:
        return exchanged_tensors(self.model, self._layout)

    def gradients(self) -> Mapping[str, Tensor]:
        found = {name: each.grad for name, each in self.tensors().items()}
        return {name: each for name, each in found.items() if each is not None}

    def trained(self, fragment: int) -> frozenset[int] | None:
        indices = self._trained[fragment]
        return None if indices is None else frozenset(indices)

    def routed(self, fragment: int) -> None:
        return None


def in_a_plain_loop(scenario: Scenario) -> list[Result]:
    """Each learner's parameters and global model at the end. Only what is the same whatever carries a run out."""
    method = Method.from_dict(scenario.method)
    model = make_model(scenario, 0)
    layout = described(model, method, scenario.buffers or "refuse", scenario.static, read_dtensor).layout(method)  # type: ignore[arg-type]
    trainees = [Trainee(scenario, index, layout) for index in range(LEARNERS)]
    reference = Reference(method, layout, trainees)
    reference.run(scheduled(method, LEARNERS, len(layout.fragments), scenario.steps, scenario.overlaps))
    results = []
    for trainee, learner in zip(trainees, reference.learners, strict=True):
        own = {name: value.detach().clone() for name, value in trainee.model.state_dict().items()}
        global_ = dict(own)
        if method.exchanged != "gradients":
            for fragment, copy in zip(layout.fragments, learner, strict=True):
                theta = reference.versions[fragment.index][copy.version].theta
                for place in fragment.tensors:
                    like = own[place.spec.name]
                    global_[place.spec.name] = theta[place.elements].view(like.shape).to(like.dtype)
        if scenario.static == "digest":
            for each in layout.base:
                del global_[each.spec.name]
        tensors = {f"parameters.{name}": value for name, value in own.items()}
        tensors |= {f"global.{name}": value for name, value in global_.items()}
        results.append(Result(tensors, {"versions": [copy.version for copy in learner]}))
    return results
