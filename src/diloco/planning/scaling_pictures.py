"""Pictures of the scaling laws: loss against parameters, inside and outside what was measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from diloco.planning.palette import INK, METHODS, of_learners
from diloco.planning.picture_axes import Axis, short
from diloco.planning.pictures import Line, Picture, lines, rows_of
from diloco.planning.scaling_laws import DATA_PARALLEL_LOSS, LEARNERS, LOSS, PARAMETERS, Expected

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_SHOWN, NUM_DRAWN = 8, 32
"""Steps from the smallest model to the largest, in the table and of a curve."""
TEXT = (
    "Power laws, measured from 35M to 2.4B parameters with 1, 2, 4 and 8 learners at 20 tokens per parameter; further "
    "out they are extrapolated."
)


def pictures(here: Expected) -> list[Picture]:
    """Loss and penalty by model size."""
    size = here.num_parameters
    shown_sizes = sorted({size, *_steps(*PARAMETERS, NUM_SHOWN)})
    sizes = sorted({*shown_sizes, *_steps(shown_sizes[0], shown_sizes[-1], NUM_DRAWN)})
    shown = [sizes.index(each) for each in shown_sizes]
    kinds = sorted({*LEARNERS, here.num_learners})
    reference = [DATA_PARALLEL_LOSS(n) for n in sizes]
    losses = {"data parallel": reference, **{f"M = {m}": [LOSS(n, m) for n in sizes] for m in kinds}}
    penalties = {
        name: [100 * (loss / least - 1) for loss, least in zip(each, reference, strict=True)]
        for name, each in list(losses.items())[1:]
    }
    by_number = of_learners(kinds)
    colours = {"data parallel": METHODS["data-parallel"], **{f"M = {m}": by_number[m] for m in kinds}}
    measured = (*PARAMETERS, "sizes that were measured")
    x, names = Axis("parameters", log=True, band=measured), [short(each, 3) for each in shown_sizes]

    def figure(curves: dict[str, list[float]], at: float, label: str) -> Callable[[float], Figure]:
        drawn = [Line(name, sizes, each, colour=colours[name]) for name, each in curves.items()]
        return partial(lines, [*drawn, Line("this model", [size], [at], style="o", colour=INK)], x, Axis(label))

    def rows(curves: dict[str, list[float]], digits: int) -> list[tuple[str, ...]]:
        columns = [[each[index] for index in shown] for each in curves.values()]
        return rows_of(names, columns, f"{{:.{digits}f}}".format)

    loss = figure(losses, here.loss, "held-out loss, nats per token")
    penalty = figure(penalties, here.loss_penalty_percent, "loss above data parallel, %")
    heads, text = (
        ("parameters", *(f"{name}, %" for name in penalties)),
        f"{TEXT} The fits are off by up to a point here.",
    )
    return [
        Picture("loss", "Loss by the scaling laws", TEXT, loss, ("parameters", *losses), rows(losses, 3)),
        Picture("penalty", "Loss above data parallel", text, penalty, heads, rows(penalties, 2)),
    ]


def _steps(low: float, high: float, num: int) -> list[float]:
    return [low * (high / low) ** (step / num) for step in range(num + 1)]
