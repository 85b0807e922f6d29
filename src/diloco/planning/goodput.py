"""A fleet of chips that fail, and its goodput: the part of the accelerators' time that trains the model.

Goodput is the work done, divided by the work of the same chips without any failure or waiting. A chip fails once in its
mean time between interruptions (MTBI), independently of the others. The modes differ in what stops with it:

    data-parallel   All learners step together. A failure stops all of them until the chip is repaired and taken in.
    elastic         All learners step together. A failure stops them while the job is scaled down, and later scaled up.
    decoupled       Each learner steps alone. A failure stops only its learner: as elastic, or until the repair
                    (`elastic_learners=False`).

Learners that step together wait for the slowest of every step; decoupled ones wait for none. By formula where no
learner waits at random, and by simulation from failure to failure, a whole stretch of steps at a time, with its
confidence interval. Everything is seeded: the same fleet and seed, the same numbers.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field
from typing import Literal, get_args

from diloco.core.choices import positive, whole_number
from diloco.errors import ConfigError
from diloco.planning.units import amount, not_negative

CONFIDENCE = 0.95
RUNS = 64
FAILURES_PER_RUN = 600

Mode = Literal["data-parallel", "elastic", "decoupled"]
MOST_JITTER = 3.0
YEAR_S = 365.25 * 86400.0


@dataclass(frozen=True)
class FailureTimes:
    """How often chips fail and what a failure takes, in seconds.

    The defaults reproduce the published table of Decoupled DiLoCo (arXiv 2604.21428), whose own times are not known:
    they are a fit, in which only `repair_s` + `up_s` of about 80 s is well determined. Measure yours.

    Attributes:
        mtbi_s: mean time between interruptions of one chip.
        down_s: stop of a job or learner before it goes on without the failed chips.
        repair_s: from a failure until the missing chips are back; chips that fail meanwhile come back with them.
        up_s: stop while the chips are taken in again.
        step_s: an inner step, at whose end a failure is noticed.
    """

    mtbi_s: float = YEAR_S
    down_s: float = 15.0
    repair_s: float = 65.0
    up_s: float = 15.0
    step_s: float = 4.0

    def __post_init__(self) -> None:
        for name in ("mtbi_s", "step_s"):
            positive(f"FailureTimes({name}=…)", getattr(self, name))
        for name in ("down_s", "repair_s", "up_s"):
            not_negative(f"FailureTimes({name}=…)", getattr(self, name))


@dataclass(frozen=True)
class LearnerSpeeds:
    """How learners differ from each other, and from themselves.

    Attributes:
        jitter: coefficient of variation of a learner's step time: standard deviation divided by mean, drawn anew every
            step.
        relative: each learner's speed, in steps per second compared with 1 / `FailureTimes.step_s`; empty: all are 1.
    """

    jitter: float = 0.0
    relative: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        not_negative("LearnerSpeeds(jitter=…)", self.jitter)
        if self.jitter > MOST_JITTER:
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
    """Chips and how they work together.

    Attributes:
        chips: of all learners; every learner has the same number.
        learners: M.
        mode: what a failed chip stops, see above.
        elastic_learners: whether a decoupled learner goes on without its failed chips, or stops until the repair.

    Raises:
        ConfigError: numbers that cannot be: fewer chips than learners, speeds of another number of learners.
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
        """Whether what fails goes on without the chips that failed."""
        return self.mode == "elastic" or (self.mode == "decoupled" and self.elastic_learners)


# --- by formula -------------------------------------------------------------------------------------------------------


def availability(failures_per_s: float, step_s: float, times: FailureTimes, *, elastic: bool) -> float:
    """Share of time in which something that stops as a whole does not stand still.

    With u = h / (1 − e^(−λh)), the mean time from the end of a stop to the end of the step in which the next failure
    falls,

        not elastic   u / (u + T + t_up)
        elastic       u / (u + t_down + t_up / K)

    where K failures share one repair: the first opens it, and up-scaling follows at the end of the step or stop in
    which T has passed. By renewal theory, with μ = u + t_down from one failure to the next and σ² = u² − u·h its
    variance,

        K = 1 where T ≤ t_down, else max(1, T/μ + (σ² + μ²) / 2μ² + h/μ)

    which is exact where T is many μ, and within a point of goodput elsewhere. A step in which chips fail still counts,
    several failures in one step are one, failures during a stop are absorbed, and no work is lost.

    Arguments:
        failures_per_s: λ, of all its chips together.
        step_s: h.
        times: t_down, T = `repair_s` and t_up.
        elastic: whether it goes on without the chips that failed.
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
    """The share of time in which each decoupled learner is not stopped by a failure."""
    rate, times = fleet.chips / fleet.learners / fleet.times.mtbi_s, fleet.times
    return [
        availability(rate, times.step_s / speed, times, elastic=fleet.elastic_learners)
        for speed in fleet.relative_speeds
    ]


def all_stopped(fleet: Fleet) -> float:
    """Chance that at a given moment no learner runs: 1 − G for what steps together, Π(1 − G_m) for decoupled learners.

    The syncer is taken never to stop. Uptime is one minus this.
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
        goodput: of the work that the same chips would do without failures and waiting.
        interval: its 95 % confidence interval, of the simulation alone.
        waiting, stopped: where the rest went: waiting for other learners, standing still for a failure.
        closed_form: the same by formula; None where there is none.
        all_stopped: chance that no learner runs at a given moment; uptime is 100 minus this.
    """

    goodput: float
    interval: tuple[float, float]
    waiting: float
    stopped: float
    closed_form: float | None
    all_stopped: float
    num_runs: int


def simulate(fleet: Fleet, seed: int = 0) -> Goodput:
    """Simulate a fleet. Arguments: the fleet; a seed of the random numbers. Returns a `Goodput`."""
    runs = _stretches(fleet, seed)
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
    """The time of a step: a gamma distribution of this mean and coefficient of variation."""

    mean_s: float
    variation: float

    def many(self, rng: random.Random, number: int) -> float:
        """How long `number` steps take together."""
        if self.variation == 0 or number == 0:
            return number * self.mean_s
        shape = 1 / self.variation**2
        return rng.gammavariate(number * shape, self.mean_s / shape)

    def chance_of_failure(self, failures_per_s: float) -> float:
        """The chance that at least one failure falls into a step: 1 − E[e^(−λD)]."""
        if self.variation == 0:
            return -math.expm1(-failures_per_s * self.mean_s)
        shape = 1 / self.variation**2
        return -math.expm1(-shape * math.log1p(failures_per_s * self.mean_s / shape))


def _stretches(fleet: Fleet, seed: int) -> list[tuple[float, float]]:
    """Goodput and waiting of independent runs. Each has one machine for each way in which a part of the fleet steps and
    stops."""
    rng = random.Random(f"{seed}/failures")
    speeds, step_s = fleet.relative_speeds, fleet.times.step_s
    if fleet.mode == "decoupled":
        rate = fleet.chips / fleet.learners / fleet.times.mtbi_s
        machines = [
            (speed * speeds.count(speed) / sum(speeds), 1.0, _Step(step_s / speed, fleet.speeds.jitter))
            for speed in sorted(set(speeds))
        ]
    else:
        rate, together = fleet.chips / fleet.times.mtbi_s, _lock_step(fleet, seed)
        machines = [(1.0, step_s / together.mean_s / statistics.fmean(speeds), together)]
    failures = max(4, FAILURES_PER_RUN // len(machines))
    runs = []
    for _ in range(RUNS):
        shares = [_running(rng, rate, step, fleet.times, fleet.is_elastic, failures) for _, _, step in machines]
        running = sum(weight * share for (weight, _, _), share in zip(machines, shares, strict=True))
        goodput = sum(weight * pace * share for (weight, pace, _), share in zip(machines, shares, strict=True))
        runs.append((goodput, running - goodput))
    return runs


def _lock_step(fleet: Fleet, seed: int) -> _Step:
    """The steps of learners that all wait for the slowest: mean and variation of the maximum of their step times."""
    speeds, step_s, jitter = fleet.relative_speeds, fleet.times.step_s, fleet.speeds.jitter
    if jitter == 0 or len(speeds) == 1:
        return _Step(step_s / min(speeds), jitter)
    import numpy as np

    rng = np.random.default_rng([seed, 1])
    slowest = np.zeros(20_000)
    for speed in speeds:
        np.maximum(slowest, rng.gamma(jitter**-2, step_s / speed * jitter**2, slowest.size), out=slowest)
    return _Step(float(slowest.mean()), float(slowest.std() / slowest.mean()))


def _running(rng: random.Random, rate: float, step: _Step, times: FailureTimes, elastic: bool, failures: int) -> float:
    """Share of time in which a machine runs, over whole cycles that begin with all chips present."""
    chance = step.chance_of_failure(rate)
    run_s = stopped_s = 0.0
    while failures > 0:
        repaired_s = math.inf  # when the missing chips are back
        while True:
            steps = 1 + int(math.log1p(-rng.random()) / math.log1p(-chance)) if chance < 1 else 1
            now_s = run_s + stopped_s
            needed = (
                max(0, math.ceil((repaired_s - now_s) / step.mean_s)) if elastic and repaired_s < math.inf else steps
            )
            if needed < steps:  # before the next failure
                run_s += step.many(rng, needed)
                stopped_s += times.up_s
                break
            run_s += step.many(rng, steps)
            failures -= 1
            if not elastic:
                stopped_s += times.repair_s + times.up_s
                break
            repaired_s = min(repaired_s, run_s + stopped_s + times.repair_s)
            stopped_s += times.down_s
    return run_s / (run_s + stopped_s)
