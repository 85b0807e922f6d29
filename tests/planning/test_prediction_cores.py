"""The plan of learners around a syncer, against the learners and the syncer's state machine themselves in virtual time.

Without latency the two know the same links; a notice and a request, which only a plan counts, take no time.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import diloco
from diloco.core.method import Method
from diloco.core.quorum import Called
from diloco.exchange.local import Local, run_virtual
from diloco.exchange.virtual.run import VirtualRun
from diloco.planning.exchange_plan import ExchangePlan
from diloco.planning.prediction import predict, star_network
from diloco.planning.simulated_rounds import SimulatedRounds

WIDTH, LAYERS = 10, 4
BYTES = 4.0 * WIDTH * WIDTH
STEPS = 60
BEGIN_S = 1000.0
"""When all learners have the model and begin together."""

FRAGMENTS = diloco.ByLayer(layers=1)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


def seen(method: Method, step_s: Sequence[float], bit_per_s: float, syncer_bit_per_s: float) -> list[tuple[float, int]]:
    """Of each learner: seconds from its first step to its last boundary, and how many versions it has adopted."""

    def live(_index: int, exchange: Local) -> tuple[float, int]:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco.Learner(model, optimizer, method=method, exchange=exchange) as learner:
            exchange.sleep(BEGIN_S - exchange.now_s)
            for _ in range(STEPS):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                learner.step(tokens=10)
            return exchange.now_s - BEGIN_S, sum(learner.versions)

    names = [f"learner-{i}" for i in range(len(step_s))]
    network = star_network(len(names), bit_per_s, bit_per_s, syncer_bit_per_s=syncer_bit_per_s)
    run = VirtualRun(names, lambda index, _: step_s[index], [0.0] * len(names), network)
    results: list[Any] = run_virtual(live, run)
    return results


def exchange_of(method: Method) -> ExchangePlan:
    num_fragments = 1 if isinstance(method.fragments, diloco.Whole) else LAYERS
    size = [BYTES * LAYERS / num_fragments] * num_fragments
    return ExchangePlan(
        method.schedule(num_fragments), size, size, called=method.quorum if isinstance(method.quorum, Called) else None
    )


SCHEDULED = {
    "DiLoCo": diloco.DiLoCo(sync_every=7),
    "DiLoCo, overlapped": diloco.DiLoCo(sync_every=7, overlap=3),
    "Streaming": diloco.StreamingDiLoCo(sync_every=8, overlap=0, fragments=FRAGMENTS, codec="fp32"),
    "Streaming, overlapped": diloco.StreamingDiLoCo(sync_every=8, overlap=3, fragments=FRAGMENTS, codec="fp32"),
    "Streaming, more in flight": diloco.StreamingDiLoCo(sync_every=8, overlap=8, fragments=FRAGMENTS, codec="fp32"),
    "Streaming, more fragments than steps": diloco.StreamingDiLoCo(
        sync_every=3, overlap=2, fragments=FRAGMENTS, codec="fp32"
    ),
    "eager": diloco.EagerDiLoCo(sync_every=8, fragments=FRAGMENTS),
    "eager, two intervals": diloco.EagerDiLoCo(sync_every=8, intervals=2),
}


@pytest.mark.parametrize("name", SCHEDULED)
@pytest.mark.parametrize("step_s", [pytest.param((0.31, 0.31, 0.31), marks=pytest.mark.slow), (0.31, 0.43)], ids=str)
@pytest.mark.parametrize("bit_per_s", [2e3, pytest.param(3e4, marks=pytest.mark.slow)])
def test_scheduled_rounds_take_the_time_of_the_real_ones(
    name: str, step_s: tuple[float, ...], bit_per_s: float
) -> None:
    method, num = SCHEDULED[name], len(step_s)
    syncer = 2.5 * bit_per_s
    plan = predict(
        star_network(num, bit_per_s, bit_per_s, syncer_bit_per_s=syncer),
        step_s,
        exchange_of(method),
        num_steps=STEPS,
    )
    planned_s = [STEPS * seconds / used for seconds, used in zip(step_s, plan.utilization, strict=True)]
    assert planned_s == pytest.approx([each[0] for each in seen(method, step_s, bit_per_s, syncer)], rel=1e-9)


@pytest.mark.parametrize("at_least", [1, 2])
@pytest.mark.parametrize("step_s", [(0.31, 0.31), (0.31, 0.43, 1.9)], ids=str)
@pytest.mark.parametrize("bit_per_s", [2.1e3, pytest.param(9.1e3, marks=pytest.mark.slow), 9.1e4])
def test_called_rounds_come_as_often_as_the_real_ones(
    at_least: int, step_s: tuple[float, ...], bit_per_s: float
) -> None:
    quorum = Called(at_least=at_least, grace=0.8)
    method = diloco.DecoupledDiLoCo(sync_every=8, fragments=FRAGMENTS, codec="fp32", quorum=quorum)
    num, syncer = len(step_s), 2.5 * bit_per_s
    star = SimulatedRounds(
        star_network(num, bit_per_s, bit_per_s, syncer_bit_per_s=syncer), step_s, exchange_of(method)
    )
    star.run(lambda: star.learners[0].core.step == STEPS)
    took_s, versions = seen(method, step_s, bit_per_s, syncer)[0]
    assert took_s == pytest.approx(STEPS * step_s[0], rel=1e-9)  # learners never wait
    assert sum(star.learners[0].core.versions) == versions
