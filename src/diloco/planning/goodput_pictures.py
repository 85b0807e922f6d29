"""Pictures of goodput: against the number of chips, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from diloco.planning import pictures as draw
from diloco.planning.goodput import Fleet, Goodput, Mode, closed_form, simulate
from diloco.planning.palette import COMPUTING, INK, METHODS, STOPPED, WAITING
from diloco.planning.picture_axes import Axis

NAMES: Mapping[Mode, str] = {
    "data-parallel": "data parallel", "elastic": "elastic data parallel", "decoupled": "decoupled"
}  # fmt: skip


def pictures(fleet: Fleet, found: Mapping[Mode, Goodput], seed: int) -> list[draw.Picture]:
    """All pictures of a fleet, given its goodput in every mode."""
    return [_against_chips(fleet, found[fleet.mode], seed), _where_time_goes(fleet, found)]


def title(fleet: Fleet, mode: Mode) -> str:
    """A mode's name, with the number of learners where it matters."""
    return f"{fleet.learners} decoupled learners" if mode == "decoupled" and fleet.learners > 1 else NAMES[mode]


def _goodput(fleet: Fleet, seed: int) -> float:
    """By formula where there is one: it has no noise."""
    formula = closed_form(fleet)
    return simulate(fleet, seed).goodput if formula is None else 100 * formula


def _against_chips(fleet: Fleet, here: Goodput, seed: int) -> draw.Picture:
    counts = sorted({max(fleet.learners, round(fleet.chips * 2.0**power)) for power in range(-4, 4)})
    drawn, heads, columns = [], ["chips"], []
    for mode in NAMES:
        columns.append([_goodput(replace(fleet, chips=chips, mode=mode), seed) for chips in counts])
        drawn.append(draw.Line(title(fleet, mode), counts, columns[-1], colour=METHODS[mode]))
        heads.append(f"{title(fleet, mode)}, %")
    goodput = columns[list(NAMES).index(fleet.mode)][counts.index(fleet.chips)]
    label, errors = "this plan, by formula", []
    if here.closed_form is None:
        label, errors = "this plan, simulated: 95 % interval", [(here.interval[1] - here.interval[0]) / 2]
    drawn.append(draw.Line(label, [fleet.chips], [goodput], errors, style="o", colour=INK))
    worst = min(map(min, columns))
    low = 0.0 if worst < 50 else 100 - 2 * (100 - worst)  # a small fleet's goodput is near 100 %
    span = Axis("goodput, %", low=low, high=100 + 0.03 * (100 - low)) if low < 100 else Axis("goodput, %")
    text = (
        "Work done, in percent of what the same chips would do without failures and waiting. What steps together "
        "stands still together, so the more chips, the less each of them does; a decoupled learner's failure stops "
        "only itself."
    )
    figure = partial(draw.lines, drawn, Axis("chips", log=True, ticks=tuple(counts)), span)
    rows = draw.rows_of([f"{chips:,}" for chips in counts], columns, _percent)
    return draw.Picture("goodput", "Goodput against chips", text, figure, heads, rows)


def _percent(value: float) -> str:
    """Finer near 100, where the difference to it is what counts."""
    return f"{value:.3f}" if 99 < value < 100 else f"{value:.1f}"


def _where_time_goes(fleet: Fleet, found: Mapping[Mode, Goodput]) -> draw.Picture:
    labels, values = [title(fleet, mode) for mode in found], list(found.values())
    goodput, waiting, stopped = zip(*((each.goodput, each.waiting, each.stopped) for each in values), strict=True)
    shares = [
        draw.Bars("working", goodput, colour=COMPUTING),
        draw.Bars("waiting for other learners", waiting, colour=WAITING),
        draw.Bars("standing still after a failure", stopped, colour=STOPPED),
    ]
    axis = Axis("share of the chips' time, %", low=0, high=100)
    figure = partial(draw.bars, labels, shares, axis, marked=[list(found).index(fleet.mode)])
    text = f"Of {fleet.chips:,} chips; in bold, this plan."
    heads = ("", "goodput, %", "waiting, %", "standing still, %", "some learner runs, %")
    uptime = [100 - each.all_stopped for each in values]
    rows = draw.rows_of(labels, (goodput, waiting, stopped, uptime), "{:.2f}".format)
    return draw.Picture("time", "Where the time goes", text, figure, heads, rows)
