"""Pictures of wall clock: what the hours go into, and hours against the link between sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from diloco.planning.pictures import BLUE, VIOLET, WAITING, Axis, Bars, Line, Picture, bars, lines, rows_of
from diloco.planning.training_time import Link, TrainingPlan, WallClock, wall_clock
from diloco.planning.units import significant

HOUR_S = 3600.0

Found = Sequence[tuple[str, TrainingPlan, WallClock]]


def pictures(found: Found) -> list[Picture]:
    """All pictures of plans, each with the name of its network across sites and its wall clock."""
    return [_phases(found), _against_link(found)]


def title(plan: TrainingPlan) -> str:
    """The method and its learners."""
    return "data parallel" if plan.learners == 1 else f"DiLoCo, M = {plan.learners}"


def _phases(found: Found) -> Picture:
    labels = [f"{network}: {title(plan)}" for network, plan, _ in found]
    seconds = [(each.compute_s, each.within_s, each.across_s, each.total_s) for _, _, each in found]
    columns = [[each / HOUR_S for each in column] for column in zip(*seconds, strict=True)]
    phases = [
        Bars("computing", columns[0], colour=BLUE),
        Bars("reducing within a learner", columns[1], colour=VIOLET),
        Bars("reducing across sites", columns[2], colour=WAITING),
    ]
    text = f"{found[0][1].num_parameters:.3g} parameters on {found[0][1].chips:,} chips; nothing overlaps."
    heads = ("network across sites: method", "computing, h", "within, h", "across, h", "in all, h")
    figure = bars(labels, phases, Axis("hours", low=0))
    return Picture("phases", "What the hours go into", text, figure, heads, rows_of(labels, columns, significant))


def _against_link(found: Found) -> Picture:
    plans = list({plan.learners: plan for _, plan, _ in found}.values())
    gbit_per_s, curves = [10 ** (power / 4 - 1) for power in range(17)], {}
    for plan in plans:
        links = [Link(1e9 * rate, plan.across.latency_s) for rate in gbit_per_s]
        curves[title(plan)] = [wall_clock(replace(plan, across=link)).total_s / HOUR_S for link in links]
    latency_ms = plans[0].across.latency_s * 1e3
    text = f"Latency of {latency_ms:g} ms. To the right of the bend the hours do not depend on the link."
    drawn = [Line(name, gbit_per_s, each) for name, each in curves.items()]
    figure = lines(drawn, Axis("bandwidth across sites, Gbit/s", log=True), Axis("hours", log=True))
    heads, marks = ("Gbit/s", *(f"{name}, h" for name in curves)), slice(0, None, 4)
    rows = rows_of([f"{rate:g}" for rate in gbit_per_s[marks]], [each[marks] for each in curves.values()], significant)
    return Picture("hours", "Hours against the link across sites", text, figure, heads, rows)
