"""The estimate of a run with one method: utilisation, hours, bytes, money, loss penalty.

Times come from the simulation of learners and syncer (`prediction.py`): their mean step times, their links and what
they share. Bytes are payload: contributions, updates and gradients, without the whole model that a joining learner
fetches. The loss penalty is that of `penalty.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from diloco.core.codecs.formats import wire_format
from diloco.planning.exchange_plan import ExchangePlan, exchange_of
from diloco.planning.penalty import Penalty, PenaltyTerm, expected_penalty
from diloco.planning.prediction import Prediction, predict
from diloco.planning.settings import Setting
from diloco.planning.site import BudgetTable, Site, SiteLearner
from diloco.planning.workload import Workload
from diloco.protocol.members import Deadlines

DEADLINES = Deadlines()
"""The syncer's deadlines for silent learners: the defaults of `[syncer]` in a run file."""

KEEPS_UP = 0.9
"""Least share of the planned merges, and of learners in each, at which the penalty of decoupled learners is known."""


@dataclass(frozen=True)
class RunEstimate:
    """The estimate of a run with one method.

    Attributes:
        setting: the method.
        utilization: compute ÷ wall clock of each learner, without failures.
        step_s: wall clock of an inner step of the slowest learner, waiting included.
        hours: until the tokens are trained, failures included.
        up_bytes, down_bytes: of all learners together.
        usd: cost of the parts that have a price; None where none has.
        penalty: on the loss.
    """

    setting: Setting
    utilization: tuple[float, ...]
    step_s: float
    hours: float
    up_bytes: float
    down_bytes: float
    usd: float | None
    penalty: Penalty

    @property
    def total_bytes(self) -> float:
        """Bytes up and down."""
        return self.up_bytes + self.down_bytes


@dataclass(frozen=True)
class AdviceInputs:
    """The inputs common to all candidates."""

    site: Site
    workload: Workload
    budget: BudgetTable
    learners: Sequence[SiteLearner]

    @property
    def num_steps(self) -> float:
        """Number of full-batch steps that train the tokens."""
        return self.budget.tokens / self.budget.tokens_per_step

    def utilization(self, estimate: RunEstimate) -> float:
        """Mean utilisation of all accelerators."""
        accelerators = [learner.place.accelerators for learner in self.learners]
        total = sum(accelerators)
        return sum(num / total * used for num, used in zip(accelerators, estimate.utilization, strict=True))

    def slowest_bit_per_s(self) -> float:
        """The slowest learner's rate between sites, up or down, while all learners use their shared links."""
        rates = [rate for each in self.learners for rate in (each.place.up, each.place.down)]
        for link in self.site.link:
            if users := sum(link.name in each.place.shares for each in self.learners):
                rates += [link.up / users, link.down / users]
        return min(rates)


def estimate_run(inputs: AdviceInputs, setting: Setting) -> RunEstimate:
    """Estimate a run with this method."""
    run_with = {"data-parallel": _data_parallel, "decoupled": _decoupled}.get(setting.method, _scheduled)
    run = run_with(inputs, setting)
    hours = run.seconds * slowdown_by_failures(inputs, setting, run.step_s) / 3600
    usd = cost_usd(inputs, hours, run.up_bytes, run.down_bytes)
    penalty = _penalty(inputs, setting, run.prediction)
    return RunEstimate(setting, run.utilization, run.step_s, hours, run.up_bytes, run.down_bytes, usd, penalty)


# --- by method -------------------------------------------------------------------------------------------------------


class _UndisturbedRun(NamedTuple):
    """A run without failures: fields as in `RunEstimate`, its wall clock, and the prediction behind its times."""

    utilization: tuple[float, ...]
    step_s: float
    seconds: float
    up_bytes: float
    down_bytes: float
    prediction: Prediction | None = None


def _scheduled(inputs: AdviceInputs, setting: Setting) -> _UndisturbedRun:
    """All learners take the same steps and wait for due answers."""
    exchange = exchange_of(inputs.workload, setting, inputs.site.merging())
    site = inputs.site
    is_shared = site.syncer.up is not None or site.syncer.down is not None or any(place.shares for place in site.site)
    prediction, counts = _predict(inputs, exchange, one_each=not is_shared)
    utilization = tuple(u for u, count in zip(prediction.utilization, counts, strict=True) for _ in range(count))
    step_s = max(learner.step_s / u for learner, u in zip(inputs.learners, utilization, strict=True))
    rounds = inputs.num_steps / setting.sync_every * len(inputs.learners)
    up, down = (rounds * exchange.per_interval(each) for each in (exchange.up_bytes, exchange.down_bytes))
    return _UndisturbedRun(utilization, step_s, inputs.num_steps * step_s, up, down, prediction)


def _decoupled(inputs: AdviceInputs, setting: Setting) -> _UndisturbedRun:
    """Every learner steps at its own pace; a merge contains the contributions that arrive in time."""
    learners, exchange = inputs.learners, exchange_of(inputs.workload, setting, inputs.site.merging())
    prediction, _ = _predict(inputs, exchange, one_each=False)
    share = inputs.budget.tokens_per_step / len(learners)
    seconds = inputs.budget.tokens / sum(share / learner.step_s for learner in learners)
    steps = sum(seconds / learner.step_s for learner in learners) / len(learners)
    merges = steps / prediction.period_steps
    up = merges * prediction.contributors * exchange.per_interval(exchange.up_bytes)
    down = merges * len(learners) * exchange.per_interval(exchange.down_bytes)
    return _UndisturbedRun((1.0,) * len(learners), max(each.step_s for each in learners), seconds, up, down, prediction)


def _data_parallel(inputs: AdviceInputs, setting: Setting) -> _UndisturbedRun:
    """A ring all-reduce after every step: 2·(1 − 1/M)·bits over the slowest link, and a round trip.

    Source: arXiv 2503.09799, without overlap.
    """
    num = len(inputs.learners)
    sent = 2 * (1 - 1 / num) * wire_format(setting.up).encoded_bytes(round(inputs.workload.num_parameters))
    latency_s = 2 * max(learner.place.latency for learner in inputs.learners)
    reduce_s = 0.0 if num == 1 else 8 * sent / inputs.slowest_bit_per_s() + latency_s
    step_s = max(learner.step_s for learner in inputs.learners) + reduce_s
    utilization = tuple(learner.step_s / step_s for learner in inputs.learners)
    num_bytes = num * inputs.num_steps * sent
    return _UndisturbedRun(utilization, step_s, inputs.num_steps * step_s, num_bytes, num_bytes)


def _predict(inputs: AdviceInputs, exchange: ExchangePlan, *, one_each: bool) -> tuple[Prediction, list[int]]:
    """Predict the run of a subset of the learners; return it, and how many equal learners each simulated one
    represents.

    With g the greatest common divisor of the sites' numbers of learners, 1/g of the learners on 1/g of each shared
    capacity is equivalent by symmetry. Where nothing is shared and every learner waits for all others, one learner of
    each site is sufficient (`one_each`).
    """
    numbers = [place.learners for place in inputs.site.site]
    copies = math.gcd(*numbers)
    kept = [1 if one_each else number // copies for number in numbers]
    network = _part_of(inputs.site, kept, copies).network()
    by_site = {learner.place.name: learner for learner in inputs.learners}
    learners = [
        by_site[place.name] for place, number in zip(inputs.site.site, kept, strict=True) for _ in range(number)
    ]
    merging = exchange.merging  # it processes the contributions of all learners
    share = len(learners) * copies / len(inputs.learners)
    exchange = replace(exchange, merging=replace(merging, bytes_per_s=merging.bytes_per_s * share))
    step_s = [each.step_s for each in learners]
    counts = [number // few for number, few in zip(numbers, kept, strict=True) for _ in range(few)]
    return predict(network, step_s, exchange, copies=copies), counts


def _part_of(site: Site, kept: Sequence[int], copies: int) -> Site:
    """Return a site with `kept` learners at each place and 1/`copies` of every shared capacity."""

    def part(rate: float | None) -> float | None:
        return None if rate is None else rate / copies

    places = zip(site.site, kept, strict=True)
    shared = {"up": part(site.syncer.up), "down": part(site.syncer.down)}
    return site.model_copy(update={
        "site": tuple(place.model_copy(update={"learners": number}) for place, number in places),
        "link": tuple(link.model_copy(update={"up": part(link.up), "down": part(link.down)}) for link in site.link),
        "syncer": site.syncer.model_copy(update=shared),
    })  # fmt: skip


# --- failures, money and loss ----------------------------------------------------------------------------------------


def slowdown_by_failures(inputs: AdviceInputs, setting: Setting, step_s: float) -> float:
    """Wall clock with failures ÷ without.

    With M learners, each failing after `mtbf` in the mean and absent for `repair`:

        data parallel    1 + M·repair/mtbf: all learners stop
        decoupled        (mtbf + repair) / mtbf: only its own work is missing
        otherwise        that, times 1 + M·d/mtbf: the others wait d, until the syncer evicts it
    """
    faults = inputs.site.faults
    if faults is None:
        return 1.0
    num = len(inputs.learners)
    if setting.method == "data-parallel":
        return 1 + num * faults.repair / faults.mtbf
    absent = 1 + faults.repair / faults.mtbf
    if setting.method == "decoupled" or num == 1:
        return absent
    return absent * (1 + num * DEADLINES.lost_after_s(step_s) / faults.mtbf)


def cost_usd(inputs: AdviceInputs, hours: float, up_bytes: float, down_bytes: float) -> float | None:
    """The cost of accelerators by the hour and of traffic by the byte at both ends; None where nothing has a price.

    The learners' upload is the syncer's download. All learners transfer about the same amount.
    """
    syncer, places = inputs.site.syncer, [learner.place for learner in inputs.learners]
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


def _penalty(inputs: AdviceInputs, setting: Setting, prediction: Prediction | None) -> Penalty:
    penalty = expected_penalty(inputs.workload.num_parameters, len(inputs.learners), setting)
    if setting.method != "decoupled" or prediction is None:
        return penalty
    every, num = setting.sync_every, len(inputs.learners)
    if every < KEEPS_UP * prediction.period_steps or prediction.contributors < KEEPS_UP * num:
        reason = (
            f"a fragment is merged every {prediction.period_steps:.3g} steps with {prediction.contributors:.2g} of "
            f"{num} learners in it, and measured every {every} steps with nearly all"
        )
        return Penalty((*penalty.terms, PenaltyTerm("merges on these links", None, reason)))
    return penalty
