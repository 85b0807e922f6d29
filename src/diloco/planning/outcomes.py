"""The outcome of a run with one method: utilisation, hours, bytes, money, loss penalty.

Time comes from the learners and the syncer in virtual time (`star.py`): their mean step times, their links and what
they share. Bytes are payload: contributions, updates and gradients; a learner fetches the whole model once more when it
joins. The loss penalty is that of `penalty.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from diloco.core.codecs.formats import wire_format
from diloco.core.members import Deadlines
from diloco.planning.candidates import Candidate
from diloco.planning.penalty import Penalty, Term, expected_penalty
from diloco.planning.site import Site, SiteLearner
from diloco.planning.site_tables import BudgetTable
from diloco.planning.star import Prediction, exchange_of, predict
from diloco.planning.stations import ExchangePlan
from diloco.planning.workload import Workload

DEADLINES = Deadlines()
"""When a syncer gives up a silent learner, by the defaults of a run file's `[syncer]`."""

KEEPS_UP = 0.9
"""Of decoupled learners: merges come at least so often as planned, with so many of the learners in them, or the penalty
is not known."""


@dataclass(frozen=True)
class Outcome:
    """A run with one method.

    Attributes:
        candidate: the method.
        utilization: of each learner: compute ÷ wall clock, without failures.
        steps: inner steps of a learner, in the mean.
        step_s: wall clock of an inner step of the slowest learner, waiting included.
        slowdown: by failures: wall clock with ÷ without them.
        hours: until the tokens are trained.
        up_bytes, down_bytes: of all learners together.
        usd: what the priced parts come to; None where nothing has a price.
        penalty: of the loss.
        prediction: where the times come from; None for data parallel.
    """

    candidate: Candidate
    utilization: tuple[float, ...]
    steps: float
    step_s: float
    slowdown: float
    hours: float
    up_bytes: float
    down_bytes: float
    usd: float | None
    penalty: Penalty
    prediction: Prediction | None

    @property
    def total_bytes(self) -> float:
        """Bytes up and down."""
        return self.up_bytes + self.down_bytes


@dataclass(frozen=True)
class Case:
    """The inputs that all candidates share."""

    site: Site
    workload: Workload
    budget: BudgetTable
    learners: Sequence[SiteLearner]

    @property
    def weights(self) -> list[float]:
        """The accelerators of each learner, as shares of all."""
        total = sum(learner.accelerators for learner in self.learners)
        return [learner.accelerators / total for learner in self.learners]

    def exchange(self, candidate: Candidate) -> ExchangePlan:
        """The exchange between learners and the syncer with a method."""
        return exchange_of(self.workload, candidate.setting, self.site.merging())

    def utilization(self, outcome: Outcome) -> float:
        """Utilisation of all accelerators."""
        return sum(w * u for w, u in zip(self.weights, outcome.utilization, strict=True))

    def bit_per_s(self, learner: SiteLearner, way: Literal["up", "down"]) -> float:
        """A learner's rate, where all use the links that they share at once."""
        rates = [learner.up_bit_per_s if way == "up" else learner.down_bit_per_s]
        for link in self.site.link:
            if link.name in learner.shares:
                users = sum(link.name in other.shares for other in self.learners)
                rates.append((link.up if way == "up" else link.down) / users)
        return min(rates)

    @property
    def slowest_bit_per_s(self) -> float:
        """The slowest learner's rate between sites, up or down, where all use the links that they share at once."""
        return min(min(self.bit_per_s(learner, "up"), self.bit_per_s(learner, "down")) for learner in self.learners)

    def reduced_bytes(self, candidate: Candidate) -> float:
        """Bytes that a learner sends, and receives, in a ring all-reduce."""
        size = wire_format(candidate.setting.up).encoded_bytes(round(self.workload.num_parameters))
        return 2 * (1 - 1 / len(self.learners)) * size

    def reduce_s(self, candidate: Candidate) -> float:
        """Seconds of a ring all-reduce."""
        if len(self.learners) == 1:
            return 0.0
        latency_s = 2 * max(learner.latency_s for learner in self.learners)
        return 8 * self.reduced_bytes(candidate) / self.slowest_bit_per_s + latency_s


def evaluate(case: Case, candidate: Candidate) -> Outcome:
    """The outcome of a run with this method."""
    method = candidate.setting.method
    if method == "data-parallel":
        return _data_parallel(case, candidate)
    return _decoupled(case, candidate) if method == "decoupled" else _scheduled(case, candidate)


# --- by method -------------------------------------------------------------------------------------------------------


def _scheduled(case: Case, candidate: Candidate) -> Outcome:
    """All learners take the same steps, and wait for the answers that are due."""
    exchange = case.exchange(candidate)
    prediction, counts = _predict(case, exchange, one_each=not _share_something(case.site))
    utilization = tuple(u for u, count in zip(prediction.utilization, counts, strict=True) for _ in range(count))
    step_s = max(learner.step_s / u for learner, u in zip(case.learners, utilization, strict=True))
    steps = case.budget.tokens / case.budget.tokens_per_step
    rounds = steps / candidate.setting.sync_every * len(case.learners)
    up, down = rounds * sum(exchange.up_bytes), rounds * sum(exchange.down_bytes)
    return _outcome(case, candidate, _Run(utilization, steps, step_s, steps * step_s, up, down, prediction))


def _decoupled(case: Case, candidate: Candidate) -> Outcome:
    """Every learner steps at its own pace; a merge takes the learners that are in time."""
    learners, exchange = case.learners, case.exchange(candidate)
    prediction, _ = _predict(case, exchange, one_each=False)
    share = case.budget.tokens_per_step / len(learners)
    seconds = case.budget.tokens / sum(share / learner.step_s for learner in learners)
    steps = sum(seconds / learner.step_s for learner in learners) / len(learners)
    merges = steps / prediction.period_steps
    up = merges * prediction.contributors * sum(exchange.up_bytes)
    down = merges * len(learners) * sum(exchange.down_bytes)
    step_s, utilization = max(learner.step_s for learner in learners), (1.0,) * len(learners)
    return _outcome(case, candidate, _Run(utilization, steps, step_s, seconds, up, down, prediction))


def _data_parallel(case: Case, candidate: Candidate) -> Outcome:
    """A ring all-reduce after every step: 2·(1 − 1/M)·bits over the slowest way, and a round trip.

    Source: arXiv 2503.09799, without overlap.
    """
    steps = case.budget.tokens / case.budget.tokens_per_step
    step_s = max(learner.step_s for learner in case.learners) + case.reduce_s(candidate)
    utilization = tuple(learner.step_s / step_s for learner in case.learners)
    num_bytes = len(case.learners) * steps * case.reduced_bytes(candidate)
    return _outcome(case, candidate, _Run(utilization, steps, step_s, steps * step_s, num_bytes, num_bytes, None))


def _predict(case: Case, exchange: ExchangePlan, *, one_each: bool) -> tuple[Prediction, list[int]]:
    """The prediction for each learner that is simulated, and how many equal learners it stands for.

    With g the greatest number that divides the numbers of learners of all sites, 1/g of the learners have 1/g of what
    is shared: the same by symmetry. Where nothing is shared and all learners wait for all, one of each site is enough.
    """
    numbers = [place.learners for place in case.site.site]
    copies = math.gcd(*numbers)
    kept = [1 if one_each else number // copies for number in numbers]
    network = _part_of(case.site, kept, copies).network()
    by_site = {learner.site: learner for learner in case.learners}
    learners = [by_site[place.name] for place, number in zip(case.site.site, kept, strict=True) for _ in range(number)]
    merging = exchange.merging  # has all contributions of a round to work through
    share = len(learners) * copies / len(case.learners)
    exchange = replace(exchange, merging=replace(merging, bytes_per_s=merging.bytes_per_s * share))
    step_s = [each.step_s for each in learners]
    counts = [number // few for number, few in zip(numbers, kept, strict=True) for _ in range(few)]
    return predict(network, step_s, exchange, copies=copies), counts


def _part_of(site: Site, kept: Sequence[int], copies: int) -> Site:
    """A site with `kept` learners of each place and one of `copies` parts of what they share."""

    def part(rate: float | None) -> float | None:
        return None if rate is None else rate / copies

    places = zip(site.site, kept, strict=True)
    shared = {"up": part(site.syncer.up), "down": part(site.syncer.down)}
    return site.model_copy(update={
        "site": tuple(place.model_copy(update={"learners": number}) for place, number in places),
        "link": tuple(link.model_copy(update={"up": part(link.up), "down": part(link.down)}) for link in site.link),
        "syncer": site.syncer.model_copy(update=shared),
    })  # fmt: skip


def _share_something(site: Site) -> bool:
    return site.syncer.up is not None or site.syncer.down is not None or any(place.shares for place in site.site)


# --- what they share -------------------------------------------------------------------------------------------------


class _Run(NamedTuple):
    """A run without failures; fields as in `Outcome`, and its wall clock."""

    utilization: tuple[float, ...]
    steps: float
    step_s: float
    seconds: float
    up_bytes: float
    down_bytes: float
    prediction: Prediction | None


def _outcome(case: Case, candidate: Candidate, run: _Run) -> Outcome:
    slowdown = slowdown_by_failures(case, candidate, run.step_s)
    hours = run.seconds * slowdown / 3600
    return Outcome(
        candidate=candidate,
        utilization=run.utilization,
        steps=run.steps,
        step_s=run.step_s,
        slowdown=slowdown,
        hours=hours,
        up_bytes=run.up_bytes,
        down_bytes=run.down_bytes,
        usd=cost_usd(case, hours, run.up_bytes, run.down_bytes),
        penalty=_penalty(case, candidate, run.prediction),
        prediction=run.prediction,
    )


def slowdown_by_failures(case: Case, candidate: Candidate, step_s: float) -> float:
    """Wall clock with failures ÷ without.

    With M learners, each failing after `mtbf` in the mean and gone for `repair`:

        data parallel    1 + M·repair/mtbf: all learners stop
        decoupled        (mtbf + repair) / mtbf: only its own work is missing
        else             that, times 1 + M·d/mtbf: the others wait d, until the syncer gives it up
    """
    faults = case.site.faults
    if faults is None:
        return 1.0
    num = len(case.learners)
    if candidate.setting.method == "data-parallel":
        return 1 + num * faults.repair / faults.mtbf
    absent = 1 + faults.repair / faults.mtbf
    if candidate.setting.method == "decoupled" or num == 1:
        return absent
    return absent * (1 + num * DEADLINES.lost_after_s(step_s) / faults.mtbf)


def cost_usd(case: Case, hours: float, up_bytes: float, down_bytes: float) -> float | None:
    """Accelerators by the hour, traffic by the byte at both ends; None where the site file names no price.

    What is up for learners is down for the syncer. All learners move about the same.
    """
    syncer, places = case.site.syncer, case.site.places
    num, seconds = len(places), 3600 * hours
    prices = [
        (syncer.price_up, down_bytes),
        (syncer.price_down, up_bytes),
        (syncer.price_per_hour, syncer.shards * seconds),
    ]
    for place in places:
        prices += [(place.price_up, up_bytes / num), (place.price_down, down_bytes / num)]
        prices.append((place.price_per_accelerator_hour, place.accelerators * seconds))
    known = [price * amount for price, amount in prices if price is not None]
    return math.fsum(known) if known else None


def _penalty(case: Case, candidate: Candidate, prediction: Prediction | None) -> Penalty:
    penalty = expected_penalty(case.workload.num_parameters, len(case.learners), candidate.setting)
    if candidate.setting.method != "decoupled" or prediction is None:
        return penalty
    every, num = candidate.setting.sync_every, len(case.learners)
    if every < KEEPS_UP * prediction.period_steps or prediction.contributors < KEEPS_UP * num:
        reason = (
            f"a fragment is merged every {prediction.period_steps:.3g} steps with {prediction.contributors:.2g} of "
            f"{num} learners in it, and measured every {every} steps with nearly all"
        )
        return Penalty((*penalty.terms, Term("merges on these links", None, reason)))
    return penalty
