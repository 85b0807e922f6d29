"""A fleet of chips that fail, and its goodput: the part of the accelerators' time that trains the model.

Goodput is the work done, divided by the work of the same chips without any failure or waiting. A chip fails once in its
mean time between interruptions (MTBI), independently of the others. The modes differ in what stops with it:

    data-parallel   All learners step together. A failure stops all of them until the chip is repaired and taken in.
    elastic         All learners step together. A failure stops them while the job is scaled down, and later scaled up.
    decoupled       Each learner steps alone. A failure stops only its learner: as elastic, or until the repair
                    (`elastic_learners=False`).

The closed forms hold where no learner waits at random; `diloco.planning.failures` simulates every case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from diloco.core.choices import fraction, positive, whole_number
from diloco.errors import ConfigError
from diloco.planning.units import amount, not_negative

Mode = Literal["data-parallel", "elastic", "decoupled"]
MOST_JITTER = 3.0
YEAR_S = 365.25 * 86400.0


@dataclass(frozen=True)
class Times:
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
            positive(f"Times({name}=…)", getattr(self, name))
        for name in ("down_s", "repair_s", "up_s"):
            not_negative(f"Times({name}=…)", getattr(self, name))


@dataclass(frozen=True)
class Speeds:
    """How learners differ from each other, and from themselves.

    Attributes:
        jitter: coefficient of variation of a learner's step time: standard deviation divided by mean, drawn anew every
            step.
        relative: each learner's speed, in steps per second compared with 1 / `Times.step_s`; empty: all are 1.
    """

    jitter: float = 0.0
    relative: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        not_negative("Speeds(jitter=…)", self.jitter)
        if self.jitter > MOST_JITTER:
            raise ConfigError(
                f"step times that vary by {100 * self.jitter:g} % of their mean cannot be simulated; give "
                f"{100 * MOST_JITTER:g} % or less."
            )
        for speed in self.relative:
            amount("a learner's speed", speed)


@dataclass(frozen=True)
class RoundRules:
    """When decoupled learners wait for each other.

    The syncer opens a round when the first learner has made its next `sync_every` steps. Every learner contributes at
    the end of its own, and goes on for `overlap` steps before it needs the answer. The round closes when K running
    learners have contributed and the grace window is over, which is min(cap, max(0, γ·(τ·ξ_step − ξ_quorum − ξ_sync))),
    or when all running learners have. Late work joins the next round, where it does not count for the quorum. Stopped
    learners are not waited for.

    Attributes:
        quorum: K; fewer where fewer learners run.
        grace: γ, 0 to 1.
        grace_cap_s: the longest grace window.
        overlap: τ, in steps.
        wait: whether a learner waits for an answer it needs; this package's `DecoupledDiLoCo` never does.
        sync_every: steps from one round to the next: H, or H/P where P fragments take turns.
        sync_s: from the close of a round until the learners have its result.
    """

    quorum: int = 1
    grace: float = 0.8
    grace_cap_s: float = 10.0
    overlap: int = 2
    wait: bool = True
    sync_every: int = 1
    sync_s: float = 0.0

    def __post_init__(self) -> None:
        fraction("RoundRules(grace=…)", self.grace, below_one=False)
        for name in ("grace_cap_s", "sync_s"):
            not_negative(f"RoundRules({name}=…)", getattr(self, name))
        for name, minimum in (("quorum", 1), ("sync_every", 1), ("overlap", 0)):
            whole_number(f"RoundRules({name}=…)", getattr(self, name), minimum)


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
        ConfigError: numbers that cannot be: fewer chips than learners, speeds of another number of learners, a quorum
            above M.
    """

    chips: int
    learners: int = 1
    mode: Mode = "decoupled"
    times: Times = field(default_factory=Times)
    speeds: Speeds = field(default_factory=Speeds)
    rounds: RoundRules = field(default_factory=RoundRules)
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
        if self.rounds.quorum > self.learners:
            raise ConfigError(f"a quorum of {self.rounds.quorum} cannot be met by {self.learners} learners; lower it.")

    @property
    def relative_speeds(self) -> tuple[float, ...]:
        return self.speeds.relative or (1.0,) * self.learners

    @property
    def is_elastic(self) -> bool:
        """Whether what fails goes on without the chips that failed."""
        return self.mode == "elastic" or (self.mode == "decoupled" and self.elastic_learners)

    @property
    def has_rounds(self) -> bool:
        """Whether decoupled learners depend on each other's times: they differ, need a quorum, or an answer is late."""
        if self.mode != "decoupled":
            return False
        differ = self.speeds.jitter > 0 or len(set(self.relative_speeds)) > 1 or self.rounds.quorum > 1
        return (self.learners > 1 and differ) or self.rounds.sync_s > self.rounds.overlap * self.times.step_s


def availability(failures_per_s: float, step_s: float, times: Times, *, elastic: bool) -> float:
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
    if fleet.has_rounds and fleet.rounds.wait:
        return None
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
