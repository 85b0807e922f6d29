"""The methods for the sites of a site file: all candidates, ranked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from diloco.errors import ConfigError
from diloco.planning.candidates import candidates
from diloco.planning.outcomes import Case, Outcome, cost_usd, evaluate
from diloco.planning.site import Site
from diloco.planning.units import SIZE

TRAINING_BYTES = 16
"""A parameter takes so many on every accelerator: fp32 weight, gradient and AdamW's two moments. A learner's ranks hold
the same model."""

ALIKE, ROUNDING = 0.01, 1e-9
"""Hours, money or bytes that differ by less than this share count as the same."""

Standing = Literal["allowed", "not allowed", "not known"]
STANDINGS: tuple[Standing, ...] = get_args(Standing)
"""Of a loss penalty, the best first."""

By = Literal["hours", "usd", "bytes"]


def case_of(site: Site) -> Case:
    """Check that a site file says what advice needs.

    Raises:
        ConfigError: no `[model]` or `[budget]`, a batch that does not divide, or a model that does not fit an
            accelerator.
    """
    workload = site.workload()
    if site.budget is None:
        raise ConfigError("the site file does not say how long to train; add [budget] with tokens and tokens_per_step")
    needed = TRAINING_BYTES * workload.num_parameters
    for place in site.site:
        if place.memory is not None and place.memory < needed:
            raise ConfigError(
                f"the model does not fit site {place.name}: its {workload.num_parameters:.4g} parameters take "
                f"{SIZE.show(needed)} on every accelerator ({TRAINING_BYTES} bytes each to train) and there are "
                f"{SIZE.show(place.memory)}; take a smaller model, or larger accelerators"
            )
    learners = site.learners()
    sequences = site.budget.tokens_per_step / site.budget.sequence_length
    if sequences % len(learners):
        share = site.budget.sequence_length * len(learners)
        good = max(1, round(site.budget.tokens_per_step / share)) * share
        raise ConfigError(
            f"budget.tokens_per_step = {site.budget.tokens_per_step:.12g} is not the same number of whole sequences of "
            f"{site.budget.sequence_length} tokens for each of {len(learners)} learners; write {good}"
        )
    return Case(site, workload, site.budget, learners)


def advise(case: Case, by: By = "hours") -> list[Outcome]:
    """The outcomes of all candidates, the best first.

    First those whose penalty is known and allowed, then those whose penalty is known, then the others; in each group
    `by` the hours, the money or the bytes, where values within one percent are the same, then by the penalty, then by
    the bytes.

    Raises:
        ConfigError: by money, and nothing has a price.
    """
    if by == "usd" and cost_usd(case, 1.0, 0.0, 0.0) is None:
        raise ConfigError("the site file has no prices to rank by; add price_per_accelerator_hour to a site")
    outcomes = [evaluate(case, candidate) for candidate in candidates(case.workload)]
    groups = ([each for each in outcomes if standing(case, each) == wanted] for wanted in STANDINGS)
    return [outcome for group in groups for outcome in _ordered(group, by)]


def standing(case: Case, outcome: Outcome) -> Standing:
    """Whether the loss penalty is known and within the budget."""
    if outcome.penalty.percent is None:
        return "not known"
    return "allowed" if outcome.penalty.percent <= case.budget.loss_penalty_percent else "not allowed"


def _ordered(group: Sequence[Outcome], by: By) -> list[Outcome]:
    def cost(outcome: Outcome) -> float:
        return {"hours": outcome.hours, "usd": outcome.usd or 0.0, "bytes": outcome.total_bytes}[by]

    least = min(map(cost, group), default=0.0)

    def key(outcome: Outcome) -> tuple[float, ...]:
        more = cost(outcome) / least if least > 0 else 1.0
        return (
            math.floor(math.log(more) / math.log1p(ALIKE) + ROUNDING),
            round(outcome.penalty.percent or 0.0, 2),
            outcome.total_bytes,
            outcome.hours,
        )

    return sorted(group, key=key)
