"""Pictures of the scaling laws: loss against parameters, inside and outside what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.planning.pictures import COLOURS, Axis, Line, Picture, lines, rows_of
from diloco.planning.scaling_laws import DATA_PARALLEL_LOSS, LEARNERS, LOSS, PARAMETERS, Expected

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANGE = tuple(PARAMETERS[0] * (PARAMETERS[1] / PARAMETERS[0]) ** (step / 8) for step in range(9))
TEXT = (
    "Power laws, measured from 35M to 2.4B parameters with 1, 2, 4 and 8 learners at 20 tokens per parameter; further "
    "out they are extrapolated."
)


def pictures(here: Expected) -> list[Picture]:
    """Loss and penalty by model size."""
    sizes = sorted({*RANGE, here.num_parameters})
    kinds = sorted({*LEARNERS, here.num_learners})
    reference = [DATA_PARALLEL_LOSS(n) for n in sizes]
    losses = {"data parallel": reference, **{f"M = {m}": [LOSS(n, m) for n in sizes] for m in kinds}}
    penalties = {
        name: [100 * (loss / least - 1) for loss, least in zip(each, reference, strict=True)]
        for name, each in list(losses.items())[1:]
    }
    x, names = Axis("parameters", log=True), [f"{size:.3g}" for size in sizes]
    colours = dict(zip(losses, COLOURS, strict=False))

    def figure(curves: dict[str, list[float]], at: float, label: str) -> Figure:
        drawn = [Line(name, sizes, each, colour=colours[name]) for name, each in curves.items()]
        return lines(
            [*drawn, Line("this model", [here.num_parameters], [at], style="o", colour="#111827")], x, Axis(label)
        )

    loss = figure(losses, here.loss, "held-out loss, nats per token")
    penalty = figure(penalties, here.loss_penalty_percent, "loss above data parallel, %")
    heads, text = (
        ("parameters", *(f"{name}, %" for name in penalties)),
        f"{TEXT} The fits are off by up to a point here.",
    )
    return [
        Picture("loss", "Loss by the scaling laws", TEXT, loss, ("parameters", *losses), _rows(names, losses, 3)),
        Picture("penalty", "Loss above data parallel", text, penalty, heads, _rows(names, penalties, 2)),
    ]


def _rows(names: list[str], curves: dict[str, list[float]], digits: int) -> list[tuple[str, ...]]:
    return rows_of(names, curves.values(), f"{{:.{digits}f}}".format)
