"""Wall clock of a training, by phase: computing, reducing within a learner, reducing across sites.

The idealised model of "Scaling Laws for DiLoCo" (arXiv 2503.09799, its section on wall-clock time): a chip computes at
a constant rate, an all-reduce is bound by bandwidth and latency, and nothing overlaps. For overlap, codecs per
direction and a syncer, see `diloco.planning.graph` and `diloco.planning.prediction`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.core.choices import whole_number
from diloco.errors import ConfigError
from diloco.planning.goodput import check_chips
from diloco.planning.units import amount
from diloco.planning.workload import PUBLISHED


@dataclass(frozen=True)
class Link:
    """A network: bits per second between any two chips, and the least duration of an all-reduce."""

    bit_per_s: float
    latency_s: float

    def all_reduce_s(self, num_bits: float, num_chips: float) -> float:
        """2·bits/W·(1 − 1/R) + ε: a bandwidth-bound all-reduce over R chips; 0 for a single chip."""
        return 0.0 if num_chips <= 1 else 2 * num_bits / self.bit_per_s * (1 - 1 / num_chips) + self.latency_s


NETWORKS: Mapping[str, Link] = {name: Link(**it) for name, it in PUBLISHED["networks"].items()}
"""The three networks of the paper."""

FLOP_PER_S = 300e12
"""Throughput of a chip in the paper: Q."""

BITS = 16.0
"""Bits per value by default: bf16, as in the utilisation tables of the same paper."""


WORDS = {
    "num_parameters": "the number of parameters",
    "tokens": "the number of tokens",
    "batch_tokens": "the tokens of a step",
}


@dataclass(frozen=True)
class TrainingPlan:
    """A training, its chips and its networks.

    Attributes:
        num_parameters: N.
        tokens: D.
        batch_tokens: tokens of a step over all learners.
        chips: R, over all learners, which have equal shares.
        learners: M; 1 is data parallel, over the network across sites.
        sync_every: H.
        within: the network of the chips of one learner.
        across: the network between learners.
        flop_per_s: throughput of a chip.
        outer_bits: bits per value of an outer gradient; gradients within a learner have `BITS`.

    Raises:
        ConfigError: a number out of range, fewer chips than learners, or a batch larger than all tokens.
    """

    num_parameters: float
    tokens: float
    batch_tokens: float
    chips: int
    learners: int = 1
    sync_every: int = 30
    within: Link = NETWORKS["high"]
    across: Link = NETWORKS["medium"]
    flop_per_s: float = FLOP_PER_S
    outer_bits: float = BITS

    def __post_init__(self) -> None:
        for name in ("num_parameters", "tokens", "batch_tokens", "flop_per_s", "outer_bits"):
            amount(WORDS.get(name, f"TrainingPlan({name}=…)"), getattr(self, name))
        for name in ("chips", "learners", "sync_every"):
            whole_number(f"TrainingPlan({name}=…)", getattr(self, name), minimum=1)
        check_chips(self.chips, self.learners)
        if self.batch_tokens > self.tokens:
            batch, tokens = f"{self.batch_tokens:,.0f}", f"{self.tokens:,.0f}"
            raise ConfigError(f"a batch of {batch} tokens is more than all {tokens}; lower it.")


@dataclass(frozen=True)
class WallClock:
    """Seconds of a whole training by phase, and bits on the link between sites.

    Attributes:
        steps: inner steps, each of one batch over all learners.
        compute_s, within_s, across_s: computing, reducing gradients within each learner, reducing across learners.
        across_bits: bits that each chip sends and receives over the network across sites.
    """

    steps: int
    compute_s: float
    within_s: float
    across_s: float
    across_bits: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.within_s + self.across_s

    @property
    def utilization(self) -> float:
        """Share of time spent computing, 0 to 1."""
        return self.compute_s / self.total_s


def wall_clock(plan: TrainingPlan) -> WallClock:
    """Return the time of a training by phase.

        compute         6·N·D / (R·Q)
        data parallel   [2·N·b/W1·(1 − 1/R) + ε1] every step
        M ≥ 2           [2·N·b/W0·(1 − M/R) + ε0] every step within a learner,
                        [2·N·b/W1·(1 − 1/R) + ε1] every H steps across learners

    with N·b bits in a reduction. The paper's formulas count values; b is `BITS` within a learner and for data parallel,
    `outer_bits` across learners. Steps are rounded up, rounds down: an incomplete last period has no round. A learner
    of one chip reduces nothing within it.

    Source: arXiv 2503.09799, appendix on wall-clock time.
    """
    steps = math.ceil(plan.tokens / plan.batch_tokens)
    compute_s = 6 * plan.num_parameters * plan.tokens / (plan.chips * plan.flop_per_s)
    if plan.learners == 1:
        bits, times = plan.num_parameters * BITS, steps
        within_s = 0.0
    else:
        bits, times = plan.num_parameters * plan.outer_bits, steps // plan.sync_every
        within_s = steps * plan.within.all_reduce_s(plan.num_parameters * BITS, plan.chips / plan.learners)
    across_s = times * plan.across.all_reduce_s(bits, plan.chips)
    across_bits = 2 * bits * (1 - 1 / plan.chips) * times
    return WallClock(steps, compute_s, within_s, across_s, across_bits)
