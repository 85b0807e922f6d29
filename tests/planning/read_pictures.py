"""What a figure shows: its key, what is drawn, and whether its words can be read."""

import itertools
from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text


def key_of(axes: Axes) -> list[str]:
    """What the key names, lines of a name joined as they were before they were wrapped."""
    legend = axes.get_legend()
    return [] if legend is None else [text.get_text().replace("\n", " ") for text in legend.get_texts()]


def drawn_on(axes: Axes) -> list[str]:
    """The names of what is drawn: curves, points, bars, bands and what is shaded."""
    artists = (*axes.lines, *axes.collections, *axes.containers, *axes.patches)
    labels = (str(each.get_label()).replace("\n", " ") for each in artists)
    return sorted({label for label in labels if label and not label.startswith("_")})


def shown_texts(figure: Figure) -> Iterator[tuple[str, Text]]:
    """Every text of a figure that is seen, and what it is of: x ticks, y ticks, or else."""
    figure.draw_without_rendering()
    [axes] = figure.axes
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        for tick in axis.get_major_ticks():
            if low * (1 - 1e-9) <= tick.get_loc() <= high * (1 + 1e-9):
                yield axis.axis_name, tick.label1
        yield "label", axis.label
    legend = axes.get_legend()
    yield from (("key", text) for text in (legend.get_texts() if legend else []))
    yield from (("beside", text) for text in axes.texts)


def require_readable(figure: Figure) -> None:
    """No text is cut off by the figure's edge, and no tick is written over the next."""
    found: dict[str, list[tuple[float, float]]] = {"x": [], "y": []}
    for of, text in shown_texts(figure):
        box = text.get_window_extent()
        if text.get_text():
            assert -1 <= box.x0 <= box.x1 <= figure.bbox.x1 + 1, text
            assert -1 <= box.y0 <= box.y1 <= figure.bbox.y1 + 1, text
        if of in found:
            found[of].append((box.x0, box.x1) if of == "x" else (box.y0, box.y1))
    for places in found.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(places)))
