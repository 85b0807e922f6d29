"""Runs of a few steps in virtual time, drawn: what the learners, their links and the syncer do when.

    python -m studies.protocols      writes docs/pictures/*.svg

The learners, the syncer and the times are those of `run_virtual`; nothing is placed by hand, but in `takeover.svg`,
which `studies.sequence` draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import diloco
from diloco.exchange.local import Local, run_virtual
from diloco.exchange.virtual.delivery import Fault
from diloco.exchange.virtual.run import VirtualRun
from diloco.planning.network import Network, Route
from diloco.protocol.actions import Evict
from diloco.protocol.contribution import Contribution
from diloco.protocol.units import Ranges
from diloco.run.ports import MergedRound, NullObserver
from studies.drawing import Trace, picture
from studies.sequence import takeover

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
WIDTH = 32


@dataclass(frozen=True)
class Case:
    """A short run, in seconds.

    Attributes:
        layers: of the model; each is as large as the others.
        step_s: of an inner step, by learner.
        transfer_s: of a layer, one way, by learner.
        starts_s: when each learner starts; none: all at 0.
        until_s: what is drawn, from the first step on.
    """

    name: str
    title: str
    method: diloco.Method
    until_s: float
    step_s: Sequence[float]
    transfer_s: Sequence[float]
    layers: int = 1
    starts_s: Sequence[float] = ()
    faults: Sequence[Fault] = ()


THREE_LAYERS = diloco.Named([["layers.0.*"], ["layers.1.*"], ["layers.2.*"]])
CASES = (
    Case("diloco", "DiLoCo, H = 4", diloco.DiLoCo(sync_every=4), 14.0, (1.0, 1.2), (0.8, 0.8)),
    Case(
        "streaming", "Streaming DiLoCo, H = 6, τ = 2, three fragments",
        diloco.StreamingDiLoCo(sync_every=6, overlap=2, mix=0.0, codec="fp32", fragments=THREE_LAYERS),
        14.0, (1.0, 1.0), (0.7, 0.7), layers=3,
    ),
    Case(
        "decoupled", "Decoupled DiLoCo, H = 5, quorum of 2 of 3",
        diloco.DecoupledDiLoCo(
            sync_every=5, overlap=2, codec="fp32", fragments=diloco.Whole(),
            quorum=diloco.Called(at_least=2, grace_cap_s=1.0),
        ),
        22.0, (1.0, 1.1, 5.3), (0.5, 0.5, 0.5),
    ),
    Case(
        "async", "Asynchronous DiLoCo, a push every 4 steps", diloco.AsyncDiLoCo(learners=2, sync_every=4),
        14.0, (1.0, 1.7), (0.5, 0.5),
    ),
    Case(
        "rejoin", "One joins; one is killed and comes back",
        diloco.StreamingDiLoCo(
            sync_every=3, overlap=1, mix=0.0, codec="fp32", fragments=diloco.Whole(),
            quorum=diloco.AllLive(at_least=1),
        ),
        24.0, (1.0, 1.0, 1.0), (0.4, 0.4, 0.4), starts_s=(0.0, 0.0, 5.0), faults=(Fault(1, 8.4, 17.3),),
    ),
)  # fmt: skip


class Body(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))


@dataclass
class Recording(NullObserver):
    """Writes down what the syncer does."""

    found: Trace
    names: Sequence[str]
    quorum: int | None
    """Answers that the grace window begins with, where the syncer calls."""
    at_s: dict[tuple[str, int, int], float] = field(default_factory=dict)
    run: Any = field(default=None)

    def contributed(self, c: Contribution, num_bytes: int) -> None:
        newest = max([version for _, fragment, version in self.found.merged if fragment == c.fragment], default=0)
        is_late = self.quorum is not None and c.base < newest
        self.at_s[c.learner, c.fragment, c.number] = self.run.time.now
        self.found.arrived.append((self.run.time.now, self.names.index(c.learner), c.fragment, is_late))

    def merged(self, merged: MergedRound[Any, Any], experts: object) -> None:
        now_s, action = self.run.time.now, merged.action
        self.found.merged.append((now_s, action.fragment, merged.held.version))
        if self.quorum is not None:
            in_time = [c for c in action.contributions if c.base == merged.held.version - 1]
            answered_s = sorted(self.at_s[c.learner, c.fragment, c.number] for c in in_time)
            self.found.graces.append((answered_s[self.quorum - 1], now_s))

    def joined(self, learner: str, incarnation: int, step: int, experts: Ranges | None) -> None:
        self.found.joined.append((self.run.time.now, self.names.index(learner), incarnation))

    def evicted(self, action: Evict) -> None:
        self.found.evicted.append((self.run.time.now, self.names.index(action.learner)))


def play(case: Case) -> Trace:
    """Run the case and say what happened when."""
    num_learners = len(case.step_s)
    names = [f"learner-{index}" for index in range(num_learners)]
    found = Trace(num_learners, case.until_s, killed=[(fault.at_s, fault.learner) for fault in case.faults])
    layer_bits = WIDTH**2 * 32
    rates = {f"{way}-{i}": layer_bits / s for i, s in enumerate(case.transfer_s) for way in ("up", "down")}
    network = Network(rates, [Route((f"up-{index}",), (f"down-{index}",)) for index in range(num_learners)])

    def watch(kind: str, index: int, began_s: float, ended_s: float) -> None:
        found.spans.append((kind, index, began_s, ended_s))

    starts_s = case.starts_s or [0.0] * num_learners
    quorum = case.method.quorum
    observer = Recording(found, names, quorum.at_least if isinstance(quorum, diloco.Called) else None)
    run = observer.run = VirtualRun(
        names, lambda index, _: case.step_s[index], starts_s, network, case.faults, observer, watch
    )

    def life(index: int, exchange: Local) -> None:
        torch.manual_seed(index)
        model = Body(case.layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with diloco.Learner(model, optimizer, method=case.method, exchange=exchange) as learner:
            versions = learner.versions
            while exchange.now_s < case.until_s + 5:
                torch.stack([layer.weight.square().sum() for layer in model.layers]).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=1)
                for fragment, version in enumerate(learner.versions):
                    if version != versions[fragment]:
                        found.adopted.append((exchange.now_s, index, fragment, version))
                versions = learner.versions

    run_virtual(life, run)
    return found


def drawings() -> dict[str, str]:
    """Each picture by the name of its file."""
    drawn = {f"{case.name}.svg": picture(case.title, play(case)) for case in CASES}
    return drawn | {"takeover.svg": takeover()}


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, text in drawings().items():
        (PICTURES / name).write_text(text, encoding="utf-8")
        print(PICTURES / name)
