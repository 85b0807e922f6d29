"""What is run, and what the planner says of it: the same few numbers make the run file and the prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from diloco.core.quorum import Called
from diloco.planning.exchange_plan import ExchangePlan, Merging, exchange_of
from diloco.planning.network import Network, Route
from diloco.planning.prediction import Prediction, predict
from diloco.planning.settings import setting_for
from diloco.planning.workload import Workload
from studies.shaped_links.links import LEARNERS

STEP_S = 0.05
SYNC_EVERY = 40
LAYERS, WIDTH = 4, 1000
"""Square layers without a bias: 4M parameters."""

FRAGMENTS = 4
MODEL = Workload("4M", LAYERS * WIDTH**2, LAYERS, STEP_S)
RUN = "shaped"


@dataclass(frozen=True)
class Span:
    """How long runs are: so many periods of H steps and so many seconds, whichever is longer."""

    periods: int
    seconds: float


LONG, QUICK = Span(3, 20.0), Span(2, 4.0)


@dataclass(frozen=True)
class Case:
    """One method with its numbers.

    Attributes:
        name: for tables and `--method`.
        preset: this project's.
        planned: what the planner calls it.
        num_fragments, overlap, codec: P, τ, and the codec both ways.
        at_least: K, learners without which there is no merge.
    """

    name: str
    preset: Literal["DiLoCo", "StreamingDiLoCo", "DecoupledDiLoCo"]
    planned: str
    num_fragments: int
    overlap: int
    codec: str
    at_least: int = LEARNERS

    @property
    def is_called(self) -> bool:
        """Whether the syncer calls the rounds, so that learners never wait and the pace is what a link costs."""
        return self.planned == "decoupled"

    def run_file(self, host: str) -> str:
        """The run file of the syncer."""
        overlap = "" if self.num_fragments == 1 else f"overlap = {self.overlap}\n"
        quorum = "Called" if self.is_called else "AllLive"
        mix = "mix = 0.0\n" if self.preset == "StreamingDiLoCo" else ""
        return f"""
[run]
name = "{RUN}"
tokens = 1_000_000
[method]
preset = "{self.preset}"
sync_every = {SYNC_EVERY}
codec = "{self.codec}"
fragments = {{ type = "Balanced", num_fragments = {self.num_fragments} }}
quorum = {{ type = "{quorum}", at_least = {self.at_least} }}
{overlap}{mix}
[syncer]
address = "{host}:7700"
keys = "keys/syncer"
"""


DILOCO = Case("DiLoCo, fp32", "DiLoCo", "diloco", 1, 0, "fp32")
STREAMING = Case("Streaming, fp32", "StreamingDiLoCo", "streaming", FRAGMENTS, 5, "fp32")
FOUR_BIT = Case("Streaming, int4", "StreamingDiLoCo", "streaming", FRAGMENTS, 5, "int4")
DECOUPLED = Case("Decoupled, fp32", "DecoupledDiLoCo", "decoupled", FRAGMENTS, 5, "fp32")
CASES = (DILOCO, STREAMING, FOUR_BIT, DECOUPLED)

IN_TURNS = replace(DECOUPLED, name="Decoupled, fp32, K = 1", at_least=1)
"""On a narrow link, where there is no time for grace, it depends on chance whether two equal learners are merged
together or in turns."""


def exchange_for(case: Case, merging: Merging | None = None) -> ExchangePlan:
    """What the planner takes to be exchanged: sizes, schedule, and what the syncer takes for a round."""
    setting = setting_for(
        MODEL, case.planned, sync_every=SYNC_EVERY, overlap=case.overlap, num_fragments=case.num_fragments,
        up=case.codec, down=case.codec,
    )  # fmt: skip
    return exchange_of(MODEL, setting, merging, Called(at_least=case.at_least) if case.is_called else None)


def prediction(
    case: Case,
    payload_bit_per_s: float,
    latency_s: float,
    merging: Merging,
    num_steps: int | None = None,
    *,
    narrower: float = 0.0,
) -> Prediction:
    """What the planner says, which is told no more than this: sizes, the rate that TCP carries, step time, latency, and
    the syncer's seconds for a round. `narrower`: the part by which each learner's link is narrower than the one
    before."""
    links = {f"{i} {way}": payload_bit_per_s * (1 - narrower) ** i for i in range(LEARNERS) for way in ("up", "down")}
    network = Network(links, [Route((f"{i} up",), (f"{i} down",), latency_s) for i in range(LEARNERS)])
    each_s = [STEP_S] * LEARNERS
    return predict(network, each_s, exchange_for(case, merging), num_steps=num_steps)


def length_of(found: Prediction, case: Case, span: Span) -> int:
    """Inner steps of a run that is predicted to go like this; of scheduled rounds whole periods, of called ones three
    times as many."""
    if case.is_called:
        return math.ceil(max(span.seconds / STEP_S, 3 * span.periods * found.period_steps))
    period_s = SYNC_EVERY * STEP_S / found.mean_utilization
    return SYNC_EVERY * max(span.periods, math.ceil(span.seconds / period_s))
