"""Monte Carlo of failures, stops and waiting: the goodput of any fleet, with its confidence interval.

What steps together or alone is simulated from failure to failure, a whole stretch of steps at a time; learners that
meet in rounds round by round (`diloco.planning.waiting`). Everything is seeded: the same fleet and seed, the same
numbers.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

from diloco.planning.fleet import Fleet, Times, all_stopped, closed_form
from diloco.planning.waiting import RunShares, simulate_rounds

CONFIDENCE = 0.95
RUNS = 64
FAILURES_PER_RUN = 600


@dataclass(frozen=True)
class Goodput:
    """The result of a simulation. All but `method` and `num_runs` in percent.

    Attributes:
        goodput: of the work that the same chips would do without failures and waiting.
        interval: its 95 % confidence interval, of the simulation alone.
        waiting, stopped: where the rest went: waiting for other learners, standing still for a failure.
        closed_form: the same by formula; None where there is none.
        all_stopped: chance that no learner runs at a given moment; uptime is 100 minus this.
        participation: share of the running learners that contribute to a round before it closes; None where all do.
        method: how it was computed.
    """

    goodput: float
    interval: tuple[float, float]
    waiting: float
    stopped: float
    closed_form: float | None
    all_stopped: float
    participation: float | None
    method: str
    num_runs: int


def simulate(fleet: Fleet, seed: int = 0) -> Goodput:
    """Simulate a fleet. Arguments: the fleet; a seed of the random numbers. Returns a `Goodput`."""
    if fleet.has_rounds:
        runs, method = simulate_rounds(fleet, seed), "event simulation, round by round"
    else:
        runs, method = _stretches(fleet, seed), "event simulation, from failure to failure"
    goodput, error = _mean([run.goodput for run in runs])
    half = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
    waiting, _ = _mean([run.waiting for run in runs])
    joined = [run.participation for run in runs if run.participation is not None]
    formula = closed_form(fleet)
    return Goodput(
        goodput=100 * min(1.0, goodput),
        interval=(100 * min(1.0, max(0.0, goodput - half)), 100 * min(1.0, goodput + half)),
        waiting=100 * waiting,
        stopped=100 * max(0.0, 1 - goodput - waiting),
        closed_form=None if formula is None else 100 * formula,
        all_stopped=100 * all_stopped(fleet),
        participation=100 * statistics.fmean(joined) if joined else None,
        method=method,
        num_runs=len(runs),
    )


def _mean(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


# -------------------------------------------------------------------------------------------- from failure to failure


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


def _stretches(fleet: Fleet, seed: int) -> list[RunShares]:
    """Every run has one machine for each way in which a part of the fleet steps and stops."""
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
        runs.append(RunShares(goodput, running - goodput))
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


def _running(rng: random.Random, rate: float, step: _Step, times: Times, elastic: bool, failures: int) -> float:
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
