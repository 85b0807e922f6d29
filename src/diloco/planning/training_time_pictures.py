"""Pictures of wall clock: what the hours go into, and hours against the link between sites."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from diloco.planning.palette import COMPUTING, METHODS, VIOLET, WAITING, of_learners
from diloco.planning.picture_axes import Axis, short
from diloco.planning.pictures import Bars, Line, Picture, bars, lines, rows_of
from diloco.planning.training_time import Link, TrainingPlan, WallClock, wall_clock
from diloco.planning.units import significant

HOUR_S = 3600.0
LEAST_SHOWN, MOST_SHOWN, NUM_STEPS = 0.1, 1000.0, 32
"""Gbit/s that the axis has, and what was asked for, in so many steps."""

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
        Bars("computing", columns[0], colour=COMPUTING),
        Bars("reducing within a learner", columns[1], colour=VIOLET),
        Bars("reducing across sites", columns[2], colour=WAITING),
    ]
    text = f"{short(found[0][1].num_parameters, 3)} parameters on {found[0][1].chips:,} chips; nothing overlaps."
    heads = ("network across sites: method", "computing, h", "within, h", "across, h", "in all, h")
    figure = partial(bars, labels, phases, Axis("hours", low=0))
    return Picture("phases", "What the hours go into", text, figure, heads, rows_of(labels, columns, significant))


def _against_link(found: Found) -> Picture:
    plans = list({plan.learners: plan for _, plan, _ in found}.values())
    asked = [plan.across.bit_per_s / 1e9 for _, plan, _ in found]
    low, high = (math.log10(end) for end in (min(LEAST_SHOWN, *asked), max(MOST_SHOWN, *asked)))
    gbit_per_s, columns = [10 ** (low + (high - low) * step / NUM_STEPS) for step in range(NUM_STEPS + 1)], []
    colours = of_learners([plan.learners for plan in plans if plan.learners > 1])
    for plan in plans:
        links = [Link(1e9 * rate, plan.across.latency_s) for rate in gbit_per_s]
        columns.append([wall_clock(replace(plan, across=link)).total_s / HOUR_S for link in links])
    drawn = [
        Line(title(plan), gbit_per_s, hours, colour=colours.get(plan.learners, METHODS["data-parallel"]))
        for plan, hours in zip(plans, columns, strict=True)
    ]
    axes = Axis("bandwidth across sites, Gbit/s", log=True), Axis("hours", log=True)
    latency_ms = plans[0].across.latency_s * 1e3
    text = f"Latency of {latency_ms:g} ms. To the right of the bend the hours do not depend on the link."
    heads, marks = ("Gbit/s", *(f"{title(plan)}, h" for plan in plans)), slice(0, None, 8)
    rows = rows_of([short(rate, 3) for rate in gbit_per_s[marks]], [each[marks] for each in columns], significant)
    return Picture("hours", "Hours against the link across sites", text, partial(lines, drawn, *axes), heads, rows)
