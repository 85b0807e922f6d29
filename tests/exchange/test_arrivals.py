"""Delayed Nesterov takes outer gradients one at a time: each push is an arrival of its own, however quickly it follows
the one before."""

from __future__ import annotations

from pathlib import Path

import torch
from benchmarks.processes import until
from tests.syncer.runs import RUN, Raw, versions_of
from torch import Tensor, nn

import diloco
from diloco.core.fragments import make_layout
from diloco.exchange.base import Exchange
from diloco.following.follower import newest_model
from diloco.syncer.server import Options, Syncer

LEARNERS = 8
LR = 0.125
"""A power of two, as the gradients are: an outer gradient measured by a learner is LR times the gradient, exactly."""

METHOD = diloco.AsyncDiLoCo(
    learners=LEARNERS, sync_every=1, dynamic_steps=False, fragments=diloco.Whole(),
    outer=diloco.DelayedNesterov(lr=0.7, momentum=0.9, buffer=LEARNERS // 2, c=0.1),
)  # fmt: skip


def model() -> nn.Linear:
    """All ones, a thousand parameters."""
    it = nn.Linear(1000, 1, bias=False)
    nn.init.ones_(it.weight)
    return it


def gradient(index: int) -> float:
    """Of a learner: not like any other's."""
    return 2.0**-index


def in_one_process() -> Tensor:
    """Every learner takes one step from version 0 and pushes, in the order of the indices."""

    def life(index: int, exchange: Exchange) -> Tensor:
        it = model()
        optimizer = torch.optim.SGD(it.parameters(), lr=LR)
        with diloco.Learner(it, optimizer, method=METHOD, exchange=exchange) as learner:
            it.weight.grad = torch.full_like(it.weight, gradient(index))
            optimizer.step()
            learner.step(tokens=10)
            return learner.global_state_dict()["weight"]

    step_s = [1.0 + 0.01 * index for index in range(LEARNERS)]
    return diloco.run_local(life, learners=LEARNERS, step_s=step_s)[-1]


def over_grpc(directory: Path) -> Tensor:
    """The same pushes, each as soon as the one before is acknowledged: the versions before it are still merged and
    stored."""
    layout = make_layout(model(), METHOD.fragments)
    with Syncer(RUN, METHOD, Options("127.0.0.1:0", directory)) as syncer:
        raws = [Raw(syncer.address, f"learner-{index:03d}", held=layout) for index in range(LEARNERS)]
        raws[0].initialise()
        for raw in raws:
            raw.join()
        for index, raw in enumerate(raws):
            outer_gradient = torch.full((layout.fragments[0].numel,), LR * gradient(index))
            assert raw.push(diloco.FP32().encode(outer_gradient), tokens=10, trained=10, step=1)
        until(lambda: versions_of(syncer) == [LEARNERS], "there is not a version for each push")
        for raw in raws:
            raw.connection.close()
        return newest_model(syncer.address, run=RUN).state_dict()["weight"]


def test_each_push_is_an_arrival_of_its_own(tmp_path: Path) -> None:
    """The same bits in one process and over gRPC: the order of arrival and the bases are the same."""
    assert torch.equal(over_grpc(tmp_path), in_one_process())
