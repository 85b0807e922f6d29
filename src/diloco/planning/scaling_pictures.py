"""Pictures of the scaling laws: loss against parameters, inside and outside what was measured."""

from __future__ import annotations

from diloco.planning.pictures import COLOURS, Axis, Line, Picture, lines
from diloco.planning.scaling_laws import DATA_PARALLEL_LOSS, LEARNERS, LOSS, PARAMETERS, Expected

RANGE = tuple(PARAMETERS[0] * (PARAMETERS[1] / PARAMETERS[0]) ** (step / 8) for step in range(9))


def pictures(here: Expected) -> list[Picture]:
    """Loss and penalty by model size."""
    sizes = sorted({*RANGE, here.num_parameters})
    kinds = sorted({*LEARNERS, here.num_learners})
    penalties = {f"M = {each}": [100 * (LOSS(n, each) / DATA_PARALLEL_LOSS(n) - 1) for n in sizes] for each in kinds}
    losses = {
        "data parallel": [DATA_PARALLEL_LOSS(n) for n in sizes],
        **{f"M = {m}": [LOSS(n, m) for n in sizes] for m in kinds},
    }
    x = Axis("parameters", log=True)
    drawn = [Line(name, sizes, each, colour=COLOURS[index]) for index, (name, each) in enumerate(losses.items())]
    above = [Line(name, sizes, each, colour=COLOURS[index + 1]) for index, (name, each) in enumerate(penalties.items())]
    point = Line("this model", [here.num_parameters], [here.loss], style="o", colour="#111827")
    mark = Line("this model", [here.num_parameters], [here.loss_penalty_percent], style="o", colour="#111827")
    text = (
        "Power laws, measured from 35M to 2.4B parameters with 1, 2, 4 and 8 learners at 20 tokens per parameter; "
        "further out they are "
        "extrapolated."
    )
    return [
        Picture(
            "loss",
            "Loss by the scaling laws",
            text,
            lines([*drawn, point], x, Axis("held-out loss, nats per token")),
            ("parameters", *losses),
            _rows(sizes, list(losses.values()), 3),
        ),
        Picture(
            "penalty",
            "Loss above data parallel",
            text + " The fits are off by up to a point here.",
            lines([*above, mark], x, Axis("loss above data parallel, %")),
            ("parameters", *(f"{name}, %" for name in penalties)),
            _rows(sizes, list(penalties.values()), 2),
        ),
    ]


def _rows(sizes: list[float], values: list[list[float]], digits: int) -> list[tuple[str, ...]]:
    return [(f"{size:.3g}", *(f"{each[row]:.{digits}f}" for each in values)) for row, size in enumerate(sizes)]
