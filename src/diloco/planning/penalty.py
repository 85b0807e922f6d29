"""The expected loss penalty relative to data parallel, term by term, each with the experiment that measured it.

    penalty = A(N, M) + ΔH + Δτ + Δcodec + Δmethod        percent of the loss of data parallel at equal tokens

    A        DiLoCo with M learners at H = 30, on a model of N parameters
    ΔH       a longer interval
    Δτ       a late answer
    Δcodec   fewer bits
    Δmethod  eager updates, asynchronous merges

Each experiment varied one factor, and the sum assumes that the effects add. Where no experiment applies, the penalty is
None, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from diloco.core.codecs.formats import wire_format
from diloco.planning.settings import Setting
from diloco.planning.workload import PUBLISHED

LEARNERS = (1, 2, 4, 8)
LOSSES: dict[float, list[float]] = {row["parameters"]: row["nats"] for row in PUBLISHED["losses"]}
"""By N: losses of data parallel, then of DiLoCo for each of `LEARNERS`. The smallest model is from this project's
studies."""

BASE_EVERY, LONGEST_EVERY = 30, 1000
PER_E_FOLD_PERCENT = 100 * math.log(1.029) / math.log(15.02) / math.log(1000 / 50)
"""Percent of the loss for each factor e of H: perplexity 15.02 rises by 2.9 % from H = 50 to 1000, arXiv 2311.08105."""

NO_COST_OVERLAP, LONGEST_OVERLAP, OVERLAP_PERCENT = 1, 10, 0.2
"""One inner step of overlap has no penalty, ten have less than 0.2 %: arXiv 2501.18512."""

LEAST_BITS = 4
"""Fewest bits per value without a penalty: arXiv 2501.18512 (its large runs use E3M0), 2604.21428 (int4)."""

EAGER_PERCENT = 100 * (2.69 / 2.67 - 1)
"""Eager updates against no overlap, 500M, M = 2, H = 30: arXiv 2502.12996."""

DECOUPLED_PERCENT = 100 * (1.9407 - 1.8870) / 1.8870
"""Study decoupled, K = 1 + grace (speeds 1 : 1 : 0.6 : 0.4, a quarter fewer tokens), against DiLoCo of study learners,
M = 4: at most."""


@dataclass(frozen=True)
class PenaltyTerm:
    """A summand of a penalty and the experiment that measured it; unmeasured: `percent` is None, `source` the
    reason."""

    what: str
    percent: float | None
    source: str


@dataclass(frozen=True)
class Penalty:
    """The sum of its terms."""

    terms: tuple[PenaltyTerm, ...]

    @property
    def percent(self) -> float | None:
        """Percent of the loss of data parallel; None where a term is unknown."""
        values = [term.percent for term in self.terms]
        return None if None in values else sum(value for value in values if value is not None)

    @property
    def unknown(self) -> str | None:
        """The reason for an unknown penalty; None where it is known."""
        return next((f"{term.what}: {term.source}" for term in self.terms if term.percent is None), None)

    @property
    def sources(self) -> list[str]:
        """The sources of the known terms, each once."""
        return list(dict.fromkeys(term.source for term in self.terms if term.percent is not None))


def expected_penalty(num_parameters: float, num_learners: int, setting: Setting) -> Penalty:
    """Return the penalty of a method for a model of N parameters and M learners.

    For decoupled learners the caller must ensure that merges are as frequent as planned, with nearly all learners.
    """
    if setting.method == "data-parallel":
        return Penalty((PenaltyTerm("data parallel", 0.0, "by definition"),))
    terms = [_base(num_parameters, num_learners), *_interval(setting), *_overlap(setting), *_codec(setting)]
    if setting.method == "eager":
        measured = setting.sync_every <= BASE_EVERY and num_learners <= 2
        terms.append(
            PenaltyTerm("eager updates", EAGER_PERCENT, "arXiv 2502.12996")
            if measured
            else PenaltyTerm("eager updates", None, "measured with 2 learners at H = 30 only (arXiv 2502.12996)")
        )
    if setting.method == "decoupled":
        terms.append(
            PenaltyTerm("asynchronous merges, at most", DECOUPLED_PERCENT, "study decoupled (165k parameters)")
        )
    return Penalty(tuple(terms))


def _base(num_parameters: float, num_learners: int) -> PenaltyTerm:
    import numpy as np

    what = f"{num_learners} learner{'s' * (num_learners > 1)} at H = {BASE_EVERY}"
    sizes = sorted(LOSSES)
    if num_learners > LEARNERS[-1]:
        return PenaltyTerm(what, None, f"measured with up to {LEARNERS[-1]} learners (arXiv 2503.09799)")
    if num_parameters < 0.99 * sizes[0]:
        return PenaltyTerm(what, None, f"measured from {sizes[0]:,} parameters on (study learners)")
    octaves = [math.log2(each) for each in LEARNERS]
    by_size = []
    for size in sizes:
        reference, *losses = LOSSES[size]
        percents = [100 * (loss / reference - 1) for loss in losses]
        by_size.append(float(np.interp(math.log2(num_learners), octaves, percents)))
    percent = float(np.interp(math.log(num_parameters), list(map(math.log, sizes)), by_size))
    source = "arXiv 2503.09799"
    if num_parameters < sizes[1]:
        source = f"between study learners ({sizes[0] / 1e3:.0f}k parameters) and arXiv 2503.09799 (35M)"
    elif num_parameters > sizes[-1]:
        source = f"arXiv 2503.09799 (at {sizes[-1] / 1e9:g}B, its largest model)"
    return PenaltyTerm(what, percent, source)


def _interval(setting: Setting) -> Iterator[PenaltyTerm]:
    every = setting.sync_every
    if every > LONGEST_EVERY:
        yield PenaltyTerm(f"H = {every}", None, f"measured up to H = {LONGEST_EVERY} (arXiv 2311.08105)")
    elif every > BASE_EVERY:
        yield PenaltyTerm(f"H = {every}", PER_E_FOLD_PERCENT * math.log(every / BASE_EVERY), "arXiv 2311.08105")


def _overlap(setting: Setting) -> Iterator[PenaltyTerm]:
    tau = setting.overlap
    if setting.method != "streaming" or tau <= NO_COST_OVERLAP:
        return
    if tau > LONGEST_OVERLAP:
        yield PenaltyTerm(f"τ = {tau}", None, f"measured up to τ = {LONGEST_OVERLAP} (arXiv 2501.18512)")
    else:
        yield PenaltyTerm(f"τ = {tau}, at most", OVERLAP_PERCENT, "arXiv 2501.18512")


def _codec(setting: Setting) -> Iterator[PenaltyTerm]:
    for name in dict.fromkeys((setting.up, setting.down or setting.up)):
        bits = wire_format(name).bits_per_value
        if bits < LEAST_BITS:
            yield PenaltyTerm(name, None, f"4 bits a value were measured, not {bits:.3g} (arXiv 2501.18512)")
        elif bits < 16:
            yield PenaltyTerm(name, 0.0, "arXiv 2501.18512")
