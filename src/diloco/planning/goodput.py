"""Goodput of a fleet of chips that fail: the share of the accelerators' time that trains the model.

Goodput is the work done, divided by the work of the same chips without any failure or waiting. A chip fails once in its
mean time between interruptions (MTBI), independently of the others. The modes differ in what a failure stops:

    data-parallel   All learners step together. A failure stops all of them until the chip is repaired and restored.
    elastic         All learners step together. A failure stops them while the job scales down, and later up.
    decoupled       Each learner steps alone. A failure stops only its learner: as elastic, or until the repair
                    (`elastic_learners=False`).

Learners that step together wait for the slowest of every step; decoupled ones wait for none. Goodput has a formula
where waiting is not random; elsewhere it is simulated from failure to failure, many steps at a time, with a confidence
interval. The same fleet and seed give the same numbers.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field
from typing import Literal, get_args

from diloco.core.choices import whole_number
from diloco.errors import ConfigError
from diloco.planning.units import YEAR_S, amount

CONFIDENCE = 0.95
RUNS = 64
FAILURES_PER_RUN = 600

Mode = Literal["data-parallel", "elastic", "decoupled"]
MOST_JITTER = 3.0


@dataclass(frozen=True)
class FailureTimes:
    """Failure rate and durations, in seconds.

    The defaults reproduce the published table of Decoupled DiLoCo (arXiv 2604.21428), whose own times are unpublished:
    they are a fit, in which only `repair_s` + `up_s` of about 80 s is well determined. Measure your own.

    Attributes:
        mtbi_s: mean time between interruptions of one chip.
        down_s: scale-down: a job or learner stops before it continues without the failed chips.
        repair_s: from a failure until the failed chips are available; chips that fail meanwhile return with them.
        up_s: scale-up: a job or learner stops while the chips are restored.
        step_s: duration of an inner step, at whose end a failure is detected.
    """

    mtbi_s: float = YEAR_S
    down_s: float = 15.0
    repair_s: float = 65.0
    up_s: float = 15.0
    step_s: float = 4.0


@dataclass(frozen=True)
class LearnerSpeeds:
    """Relative speeds of learners, and the variation of their step times.

    Attributes:
        jitter: coefficient of variation of a learner's step time (standard deviation ÷ mean), independent in each step.
        relative: each learner's speed, in steps per second relative to 1 / `FailureTimes.step_s`; empty: all are 1.
    """

    jitter: float = 0.0
    relative: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= MOST_JITTER:
            raise ConfigError(
                f"step times that vary by {100 * self.jitter:g} % of their mean cannot be simulated; give "
                f"{100 * MOST_JITTER:g} % or less."
            )
        for speed in self.relative:
            amount("a learner's speed", speed)


def check_chips(chips: int, learners: int) -> None:
    """Raise ConfigError where there are fewer chips than learners."""
    if chips < learners:
        raise ConfigError(f"{chips} chips cannot be shared by {learners} learners; give each at least one.")


@dataclass(frozen=True)
class Fleet:
    """Chips, learners and the mode in which they train.

    Attributes:
        chips: of all learners; every learner has the same number.
        learners: M.
        mode: determines what a failed chip stops (module docstring).
        elastic_learners: whether a decoupled learner continues without its failed chips, or stops until the repair.

    Raises:
        ConfigError: fewer chips than learners, or a number of speeds other than that of learners.
    """

    chips: int
    learners: int = 1
    mode: Mode = "decoupled"
    times: FailureTimes = field(default_factory=FailureTimes)
    speeds: LearnerSpeeds = field(default_factory=LearnerSpeeds)
    elastic_learners: bool = True

    def __post_init__(self) -> None:
        whole_number("chips", self.chips, 1)
        whole_number("learners", self.learners, 1)
        if self.mode not in get_args(Mode):
            raise ConfigError(f"there is no mode {self.mode!r}; choose {', '.join(get_args(Mode))}.")
        check_chips(self.chips, self.learners)
        if len(self.speeds.relative) not in (0, self.learners):
            given = len(self.speeds.relative)
            raise ConfigError(f"{given} speeds for {self.learners} learners; give one for each learner, or none.")

    @property
    def relative_speeds(self) -> tuple[float, ...]:
        return self.speeds.relative or (1.0,) * self.learners

    @property
    def is_elastic(self) -> bool:
        """Whether a job or learner continues without its failed chips."""
        return self.mode == "elastic" or (self.mode == "decoupled" and self.elastic_learners)


# --- by formula -------------------------------------------------------------------------------------------------------


def availability(failures_per_s: float, step_s: float, times: FailureTimes, *, elastic: bool) -> float:
    """Uptime fraction of a unit that fails as a whole.

    With u = h / (1 − e^(−λh)), the mean time from the end of a stop to the end of the step in which the next failure
    falls,

        not elastic   u / (u + T + t_up)
        elastic       u / (u + t_down + t_up / K)

    where K failures share one repair: the first starts it, and the scale-up follows at the end of the step or stop in
    which T expires. By renewal theory, with μ = u + t_down from one failure to the next and σ² = u² − u·h its
    variance,

        K = 1 where T ≤ t_down, else max(1, T/μ + (σ² + μ²) / 2μ² + h/μ)

    which is exact where T is many μ, and within a point of goodput elsewhere. A step in which chips fail still counts,
    several failures in one step count as one, failures during a stop have no effect, and no work is lost.

    Arguments:
        failures_per_s: λ, of all chips of the unit.
        step_s: h.
        times: t_down, T = `repair_s` and t_up.
        elastic: whether the unit continues without its failed chips.
    """
    run_s = step_s / -math.expm1(-failures_per_s * step_s)
    if not elastic:
        return run_s / (run_s + times.repair_s + times.up_s)
    apart_s, variance = run_s + times.down_s, run_s * (run_s - step_s)
    per_repair = 1.0
    if times.repair_s > times.down_s:
        per_repair = max(1.0, (times.repair_s + step_s) / apart_s + (variance / apart_s**2 + 1) / 2)
    return run_s / (run_s + times.down_s + times.up_s / per_repair)


def closed_form(fleet: Fleet) -> float | None:
    """Goodput from 0 to 1 by formula; None where waiting is random."""
    speeds, times = fleet.relative_speeds, fleet.times
    if fleet.mode != "decoupled":
        if fleet.speeds.jitter and fleet.learners > 1:
            return None
        rate, slowest = fleet.chips / times.mtbi_s, min(speeds)
        share = availability(rate, times.step_s / slowest, times, elastic=fleet.is_elastic)
        return share * slowest * fleet.learners / sum(speeds)
    return sum(speed * share for speed, share in zip(speeds, running_shares(fleet), strict=True)) / sum(speeds)


def running_shares(fleet: Fleet) -> list[float]:
    """Uptime fraction of each decoupled learner."""
    rate, times = fleet.chips / fleet.learners / fleet.times.mtbi_s, fleet.times
    return [
        availability(rate, times.step_s / speed, times, elastic=fleet.elastic_learners)
        for speed in fleet.relative_speeds
    ]


def all_stopped(fleet: Fleet) -> float:
    """Probability that no learner runs at a given time: 1 − G for learners that step together, Π(1 − G_m) for decoupled
    ones.

    The syncer is assumed never to fail. Uptime is one minus this.
    """
    if fleet.mode == "decoupled":
        return math.prod(1 - share for share in running_shares(fleet))
    slowest_s = fleet.times.step_s / min(fleet.relative_speeds)
    return 1 - availability(fleet.chips / fleet.times.mtbi_s, slowest_s, fleet.times, elastic=fleet.is_elastic)


# --- by simulation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goodput:
    """The result of a simulation. All but `num_runs` in percent.

    Attributes:
        goodput: work done, relative to the same chips without failures and waiting.
        interval: 95 % confidence interval of the simulated goodput.
        waiting, stopped: the rest: waiting for other learners, stopped by a failure.
        closed_form: goodput by formula; None where there is none.
        all_stopped: probability that no learner runs at a given time; uptime is 100 minus this.
    """

    goodput: float
    interval: tuple[float, float]
    waiting: float
    stopped: float
    closed_form: float | None
    all_stopped: float
    num_runs: int


def simulate(fleet: Fleet, seed: int = 0) -> Goodput:
    """Simulate a fleet with random numbers of this seed."""
    runs = _simulated_runs(fleet, seed)
    goodput, error = _mean([goodput for goodput, _ in runs])
    half = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
    waiting, _ = _mean([waiting for _, waiting in runs])
    formula = closed_form(fleet)
    return Goodput(
        goodput=100 * min(1.0, goodput),
        interval=(100 * min(1.0, max(0.0, goodput - half)), 100 * min(1.0, goodput + half)),
        waiting=100 * waiting,
        stopped=100 * max(0.0, 1 - goodput - waiting),
        closed_form=None if formula is None else 100 * formula,
        all_stopped=100 * all_stopped(fleet),
        num_runs=len(runs),
    )


def _mean(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class _Step:
    """Distribution of a step's duration: a gamma distribution with this mean and coefficient of variation."""

    mean_s: float
    variation: float

    def total_s(self, rng: random.Random, number: int) -> float:
        """Draw the total duration of `number` steps."""
        if self.variation == 0 or number == 0:
            return number * self.mean_s
        shape = 1 / self.variation**2
        return rng.gammavariate(number * shape, self.mean_s / shape)

    def chance_of_failure(self, failures_per_s: float) -> float:
        """Probability of at least one failure in a step: 1 − E[e^(−λD)]."""
        if self.variation == 0:
            return -math.expm1(-failures_per_s * self.mean_s)
        shape = 1 / self.variation**2
        return -math.expm1(-shape * math.log1p(failures_per_s * self.mean_s / shape))


def _simulated_runs(fleet: Fleet, seed: int) -> list[tuple[float, float]]:
    """Goodput and waiting of independent runs.

    A run simulates one unit for each distinct behaviour: the whole fleet, or a decoupled learner of each speed. A
    unit is (share of the work, goodput while it runs, step)."""
    rng = random.Random(f"{seed}/failures")
    speeds, step_s = fleet.relative_speeds, fleet.times.step_s
    if fleet.mode == "decoupled":
        rate = fleet.chips / fleet.learners / fleet.times.mtbi_s
        units = [
            (speed * speeds.count(speed) / sum(speeds), 1.0, _Step(step_s / speed, fleet.speeds.jitter))
            for speed in sorted(set(speeds))
        ]
    else:
        rate, step = fleet.chips / fleet.times.mtbi_s, _synchronous_step(fleet, seed)
        units = [(1.0, step_s / step.mean_s / statistics.fmean(speeds), step)]
    failures = max(4, FAILURES_PER_RUN // len(units))
    runs = []
    for _ in range(RUNS):
        shares = [_uptime(rng, rate, step, fleet.times, fleet.is_elastic, failures) for _, _, step in units]
        running = sum(weight * share for (weight, _, _), share in zip(units, shares, strict=True))
        goodput = sum(weight * pace * share for (weight, pace, _), share in zip(units, shares, strict=True))
        runs.append((goodput, running - goodput))
    return runs


def _synchronous_step(fleet: Fleet, seed: int) -> _Step:
    """The step of learners that wait for the slowest: mean and variation of the maximum of their step times."""
    speeds, step_s, jitter = fleet.relative_speeds, fleet.times.step_s, fleet.speeds.jitter
    if jitter == 0 or len(speeds) == 1:
        return _Step(step_s / min(speeds), jitter)
    import numpy as np

    rng = np.random.default_rng([seed, 1])
    slowest = np.zeros(20_000)
    for speed in speeds:
        np.maximum(slowest, rng.gamma(jitter**-2, step_s / speed * jitter**2, slowest.size), out=slowest)
    return _Step(float(slowest.mean()), float(slowest.std() / slowest.mean()))


def _uptime(rng: random.Random, rate: float, step: _Step, times: FailureTimes, elastic: bool, failures: int) -> float:
    """Simulated uptime fraction of a unit, over whole cycles that begin with all chips available."""
    chance = step.chance_of_failure(rate)
    run_s = stopped_s = 0.0
    while failures > 0:
        repaired_s = math.inf  # the failed chips are available again
        while True:
            steps = 1 + int(math.log1p(-rng.random()) / math.log1p(-chance)) if chance < 1 else 1
            now_s = run_s + stopped_s
            needed = (
                max(0, math.ceil((repaired_s - now_s) / step.mean_s)) if elastic and repaired_s < math.inf else steps
            )
            if needed < steps:  # the repair ends before the next failure
                run_s += step.total_s(rng, needed)
                stopped_s += times.up_s
                break
            run_s += step.total_s(rng, steps)
            failures -= 1
            if not elastic:
                stopped_s += times.repair_s + times.up_s
                break
            repaired_s = min(repaired_s, run_s + stopped_s + times.repair_s)
            stopped_s += times.down_s
    return run_s / (run_s + stopped_s)
