"""Pictures of goodput: against the number of chips, where the time goes, and what a quorum costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from diloco.planning.failures import Goodput, simulate
from diloco.planning.fleet import Fleet, Mode, closed_form
from diloco.planning.pictures import AMBER, BLUE, GREEN, RED, VIOLET, Axis, Bars, Line, Picture, bars, lines, short

NAMES: Mapping[Mode, str] = {
    "data-parallel": "data parallel",
    "elastic": "elastic data parallel",
    "decoupled": "decoupled",
}
COLOURS: Mapping[Mode, str] = {"data-parallel": AMBER, "elastic": VIOLET, "decoupled": BLUE}
WAITING, STOPPED = "#fbbf24", "#fca5a5"


def pictures(fleet: Fleet, found: Mapping[Mode, Goodput], seed: int) -> list[Picture]:
    """All pictures of a fleet, given what came out for it in every mode."""
    drawn = [_against_chips(fleet, found[fleet.mode], seed), _where_time_goes(fleet, found)]
    return [*drawn, _against_quorum(fleet, seed)] if fleet.has_rounds and fleet.learners > 1 else drawn


def title(fleet: Fleet, mode: Mode) -> str:
    """A mode's name, with the number of learners where it matters."""
    return f"{fleet.learners} decoupled learners" if mode == "decoupled" and fleet.learners > 1 else NAMES[mode]


def _goodput(fleet: Fleet, seed: int) -> float:
    formula = closed_form(fleet)
    return simulate(fleet, seed).goodput if formula is None else 100 * formula


def _against_chips(fleet: Fleet, here: Goodput, seed: int) -> Picture:
    counts = sorted({max(fleet.learners, round(fleet.chips * 2.0**power)) for power in range(-4, 4)})
    curves = {mode: [_goodput(replace(fleet, chips=chips, mode=mode), seed) for chips in counts] for mode in NAMES}
    drawn = [Line(title(fleet, mode), counts, each, colour=COLOURS[mode]) for mode, each in curves.items()]
    half = (here.interval[1] - here.interval[0]) / 2
    drawn.append(Line("this plan", [fleet.chips], [here.goodput], [half], style="o", colour=RED))
    worst = min(min(each) for each in curves.values())
    low = 0.0 if worst < 50 else 100 - 2 * (100 - worst)  # a small fleet's goodput is near 100 %
    span = Axis("goodput, %", low=low, high=100 + 0.03 * (100 - low)) if low < 100 else Axis("goodput, %")
    figure = lines(drawn, Axis("chips", log=True, ticks=tuple(counts)), span)
    return Picture(
        "goodput",
        "Goodput against chips",
        "Work done, in percent of what the same chips would do if nothing failed and nobody waited. What steps "
        "together stands still "
        "together, so the more chips, the less each of them does; learners of their own keep a failure to themselves.",
        figure,
        ("chips", *(f"{title(fleet, mode)}, %" for mode in curves)),
        [(f"{chips:,}", *(f"{each[row]:.1f}" for each in curves.values())) for row, chips in enumerate(counts)],
    )


def _where_time_goes(fleet: Fleet, found: Mapping[Mode, Goodput]) -> Picture:
    labels, values = [title(fleet, mode) for mode in found], list(found.values())
    shares = [
        Bars("working", [each.goodput for each in values], colour=BLUE),
        Bars("waiting for other learners", [each.waiting for each in values], colour=WAITING),
        Bars("standing still after a failure", [each.stopped for each in values], colour=STOPPED),
    ]
    return Picture(
        "time",
        "Where the time goes",
        f"Of {fleet.chips:,} chips.",
        bars(labels, shares, Axis("share of the chips' time, %", low=0, high=100), stacked=True),
        ("", "goodput, %", "waiting, %", "standing still, %", "some learner runs, %"),
        [
            (label, *(f"{value:.2f}" for value in (each.goodput, each.waiting, each.stopped, 100 - each.all_stopped)))
            for label, each in zip(labels, values, strict=True)
        ],
    )


def _against_quorum(fleet: Fleet, seed: int) -> Picture:
    spread = fleet.learners - 1
    quorums = sorted({1 + round(spread * step / min(7, spread)) for step in range(min(7, spread) + 1)})
    kinds = {"with grace": fleet.rounds.grace or 0.8, "without": 0.0}
    found = {
        name: [
            simulate(replace(fleet, rounds=replace(fleet.rounds, quorum=quorum, grace=grace)), seed)
            for quorum in quorums
        ]
        for name, grace in kinds.items()
    }
    drawn = [
        Line("goodput, with grace", quorums, [each.goodput for each in found["with grace"]], colour=BLUE),
        Line("goodput, without", quorums, [each.goodput for each in found["without"]], style="--", colour=BLUE),
        Line("in time, with grace", quorums, [each.participation or 0 for each in found["with grace"]], colour=GREEN),
        Line(
            "in time, without",
            quorums,
            [each.participation or 0 for each in found["without"]],
            style="--",
            colour=GREEN,
        ),
    ]
    return Picture(
        "quorum",
        "What a quorum costs, and what it gets",
        "A higher quorum waits for slower learners; a low one closes a round without them. The grace window uses the "
        "time in which "
        "nobody waits yet. In time: running learners whose work is in the round it was made for. Overlap of "
        f"{fleet.rounds.overlap} steps" + (", and no learner ever waits." if not fleet.rounds.wait else "."),
        lines(drawn, Axis("quorum, learners", ticks=tuple(quorums)), Axis("share, %", low=0, high=103)),
        ("quorum", *(f"{what} {name}, %" for name in found for what in ("goodput", "in time"))),
        [
            (
                short(quorum),
                *(
                    f"{value:.1f}"
                    for each in found.values()
                    for value in (each[row].goodput, each[row].participation or 0)
                ),
            )
            for row, quorum in enumerate(quorums)
        ],
    )
