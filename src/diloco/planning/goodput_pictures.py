"""Pictures of goodput: against the number of chips, where the time goes, and what a quorum costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

from diloco.planning import pictures as draw
from diloco.planning.failures import Goodput, simulate
from diloco.planning.fleet import Fleet, Mode, closed_form
from diloco.planning.palette import COMPUTING, GREEN, INK, METHODS, OLIVE, SKY, STOPPED, WAITING
from diloco.planning.picture_axes import Axis, short

NAMES: Mapping[Mode, str] = {
    "data-parallel": "data parallel", "elastic": "elastic data parallel", "decoupled": "decoupled"
}  # fmt: skip


def pictures(fleet: Fleet, found: Mapping[Mode, Goodput], seed: int) -> list[draw.Picture]:
    """All pictures of a fleet, given its goodput in every mode."""
    drawn = [_against_chips(fleet, found[fleet.mode], seed), _where_time_goes(fleet, found)]
    return [*drawn, _against_quorum(fleet, seed)] if fleet.has_rounds and fleet.learners > 1 else drawn


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


def _against_quorum(fleet: Fleet, seed: int) -> draw.Picture:
    spread = fleet.learners - 1
    quorums = sorted({1 + round(spread * step / min(7, spread)) for step in range(min(7, spread) + 1)})
    drawn, heads, columns = [], ["quorum"], []
    with_grace = fleet.rounds.grace or 0.8
    colours = {"with grace": (COMPUTING, GREEN), "without grace": (SKY, OLIVE)}
    for name, (blue, green) in colours.items():
        grace = with_grace if name == "with grace" else 0.0
        rules = [replace(fleet.rounds, quorum=quorum, grace=grace) for quorum in quorums]
        found = [simulate(replace(fleet, rounds=each), seed) for each in rules]
        goodput, in_time = [each.goodput for each in found], [each.participation or 0 for each in found]
        for what, column, colour in (("goodput", goodput, blue), ("in time", in_time, green)):
            style: Literal["-", "--"] = "-" if grace else "--"  # dashes over a line, where both are the same
            drawn.append(draw.Line(f"{what}, {name}", quorums, column, style=style, colour=colour))
            heads.append(f"{what} {name}, %")
            columns.append(column)
    waits = "." if fleet.rounds.wait else ", and learners never wait."
    text = (
        "A higher quorum waits for slower learners; a low one closes a round without them. The grace window uses the "
        "time before a learner has to wait. In time: running learners whose work is in the round it was made for. "
        f"Overlap of {fleet.rounds.overlap} steps{waits}"
    )
    axes = Axis("quorum, learners", ticks=tuple(quorums)), Axis("share, %", low=0, high=103)
    rows = draw.rows_of([short(quorum) for quorum in quorums], columns, "{:.1f}".format)
    title = "What a quorum costs, and what it gets"
    return draw.Picture("quorum", title, text, partial(draw.lines, drawn, *axes), heads, rows)
