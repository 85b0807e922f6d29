"""Pictures of wall clock: what the hours go into, and hours against the link between sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from diloco.planning.pictures import BLUE, VIOLET, Axis, Bars, Line, Picture, bars, lines
from diloco.planning.training_time import Link, TrainingPlan, WallClock, wall_clock
from diloco.planning.units import significant

HOUR_S = 3600.0


def pictures(found: Sequence[tuple[str, TrainingPlan, WallClock]]) -> list[Picture]:
    """All pictures of jobs, each with the name of its network across sites and its wall clock."""
    return [_phases(found), _against_link(found)]


def title(job: TrainingPlan) -> str:
    """The method and its learners."""
    return "data parallel" if job.learners == 1 else f"DiLoCo, M = {job.learners}"


def _phases(found: Sequence[tuple[str, TrainingPlan, WallClock]]) -> Picture:
    labels = [f"{network}: {title(job)}" for network, job, _ in found]
    clocks = [clock for _, _, clock in found]
    phases = [
        Bars("computing", [each.compute_s / HOUR_S for each in clocks], colour=BLUE),
        Bars("reducing within a learner", [each.within_s / HOUR_S for each in clocks], colour=VIOLET),
        Bars("reducing across sites", [each.across_s / HOUR_S for each in clocks], colour="#fbbf24"),
    ]
    rows = [
        (
            label,
            *(
                significant(seconds / HOUR_S)
                for seconds in (each.compute_s, each.within_s, each.across_s, each.total_s)
            ),
        )
        for label, each in zip(labels, clocks, strict=True)
    ]
    return Picture(
        "phases",
        "What the hours go into",
        f"{found[0][1].num_parameters:.3g} parameters on {found[0][1].chips:,} chips; nothing overlaps.",
        bars(labels, phases, Axis("hours", low=0), stacked=True),
        ("network across sites: method", "computing, h", "within, h", "across, h", "in all, h"),
        rows,
    )


def _against_link(found: Sequence[tuple[str, TrainingPlan, WallClock]]) -> Picture:
    jobs = list({job.learners: job for _, job, _ in found}.values())
    rates = [1e8 * 10 ** (power / 4) for power in range(17)]
    curves = {
        title(job): [
            wall_clock(replace(job, across=Link(rate, job.across.latency_s))).total_s / HOUR_S for rate in rates
        ]
        for job in jobs
    }
    gbit_per_s = [rate / 1e9 for rate in rates]
    drawn = [Line(name, gbit_per_s, each) for name, each in curves.items()]
    marks = list(range(0, 17, 4))
    return Picture(
        "hours",
        "Hours against the link across sites",
        f"Latency of {jobs[0].across.latency_s * 1e3:g} ms. A link to the right of the bend is not what the hours are "
        "spent on.",
        lines(drawn, Axis("bandwidth across sites, Gbit/s", log=True), Axis("hours", log=True)),
        ("Gbit/s", *(f"{name}, h" for name in curves)),
        [(f"{gbit_per_s[mark]:g}", *(significant(each[mark]) for each in curves.values())) for mark in marks],
    )
