"""The panel of a picture: its size and look, its axes and their ticks, the names of its rows, its key."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from diloco.escaping import printable, shortened
from diloco.planning.palette import GREY, GRID, INK, TEXT

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN, NARROW_IN = 7.6, 3.6
"""Of a figure on a page, and on a phone."""
SMALL = 9
LINE_IN = 0.17
"""A line of small text."""
CHAR_EM = 0.53
"""Width of a character, in the mean."""
MOST_NAME = 60


@dataclass(frozen=True)
class Axis:
    """One axis: its label with the unit, and its range where the data's own would mislead.

    Attributes:
        band: a stretch of the x axis that is shaded, and what it is.
    """

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: tuple[float, ...] = ()
    band: tuple[float, float, str] | None = None


def new_axes(height_in: float, width_in: float = WIDTH_IN) -> tuple[Figure, Axes]:
    """A figure with one panel as wide as a page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    axes = figure.add_subplot()
    plain(axes)
    return figure, axes


def figure_of(axes: Axes) -> Figure:
    """The whole figure."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def is_narrow(axes: Axes) -> bool:
    """Whether the figure is one for a phone."""
    return figure_of(axes).get_figwidth() < (WIDTH_IN + NARROW_IN) / 2


def plain(axes: Axes) -> None:
    """Style axes: no box, quiet ticks, a light grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=TEXT, labelsize=SMALL)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(TEXT)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def legend_above(axes: Axes, entries: int, handles: Sequence[Artist] = ()) -> None:
    """Put the key above the panel, in as many columns as there is room for; the figure grows with its rows."""
    figure = figure_of(axes)
    shown = list(handles) or axes.get_legend_handles_labels()[0]
    handle_em = 2.2 if handles else 0.9
    rows = [len(line) for each in axes.get_yticklabels() for line in each.get_text().split("\n")]
    room_em = 72 / SMALL * figure.get_figwidth() - max(6.0, CHAR_EM * max(rows, default=0) + 2)
    texts = [_label(each).split("\n") for each in shown]

    def width_em(columns: int) -> float:
        longest = (max(len(line) for text in column for line in text) for column in _columns(texts, columns))
        return sum(CHAR_EM * each + handle_em + 2.3 for each in longest)

    columns = next((num for num in range(entries, 1, -1) if width_em(num) <= room_em), 1)
    tallest = max(sum(map(len, column)) for column in _columns(texts, columns))
    figure.set_figheight(figure.get_figheight() + LINE_IN * (tallest - 1))
    legend(
        axes, shown, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), handlelength=handle_em, columnspacing=1.4,
        borderaxespad=0.1,
    )  # fmt: skip


def _columns(texts: Sequence[Sequence[str]], columns: int) -> list[Sequence[Sequence[str]]]:
    """As a key fills its columns: from the top down, the first ones with one entry more."""
    each, more = divmod(len(texts), columns)
    ends = [each * number + min(number, more) for number in range(columns + 1)]
    return [texts[begin:end] for begin, end in itertools.pairwise(ends)]


def legend(axes: Axes, handles: Sequence[Artist], **place: Any) -> int:
    """Put the key of these where it is said; each is named by its label, as it is. Returns the number of its lines."""
    labels = list(map(_label, handles))
    axes.legend(list(handles), labels, frameon=False, fontsize=SMALL, labelcolor=TEXT, **place)
    return sum(label.count("\n") + 1 for label in labels)


def _label(handle: Artist) -> str:
    return "\n".join(_wrapped(line, 30) for line in str(handle.get_label()).split("\n"))


def plain_text(text: str) -> str:
    """Text of any origin as it is: no mathematics, and nothing that does not print."""
    return printable(text).replace("$", r"\$")


def _wrapped(text: str, width: int) -> str:
    """In lines of at most so many characters; what is equal to what stays together."""
    together = shortened(printable(text), MOST_NAME).replace(" = ", "\0")
    return "\n".join(plain_text(line.replace("\0", " = ")) for line in textwrap.wrap(together, width))


def row_chars(width_in: float) -> int:
    """Characters in a line of a row's name that leave room for the panel."""
    return 16 if width_in < WIDTH_IN else 34


def row_names(names: Sequence[str], width_in: float) -> list[str]:
    """Names of rows, in lines that leave room for the panel."""
    return ["\n".join(_wrapped(line, row_chars(width_in)) for line in name.split("\n")) for name in names]


def name_rows(axes: Axes, names: Sequence[str], top: float, marked: Collection[int] = ()) -> None:
    axes.set_yticks([-row for row in range(len(names))], row_names(names, figure_of(axes).get_figwidth()))
    axes.set_ylim(0.5 - len(names), top)
    for row in marked:
        axes.get_yticklabels()[row].set(fontweight="bold", color=INK)


def scale(axes: Axes, way: Literal["x", "y"], wanted: Axis) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

    axis, narrow = axes.xaxis if way == "x" else axes.yaxis, is_narrow(axes)
    label = textwrap.fill(wanted.label, 30) if narrow and way == "x" else wanted.label
    axes.set(**{f"{way}label": label, f"{way}scale": "log" if wanted.log else "linear"})
    axes.set(**{f"{way}lim": (wanted.low, wanted.high)})
    low, high = axis.get_view_interval()
    if wanted.ticks:
        axis.set_major_locator(FixedLocator(wanted.ticks, nbins=4 if narrow and way == "x" else 8))
    elif wanted.log and high / low < 8:
        axis.set_major_locator(MaxNLocator(5))
    elif wanted.log:
        fine = high / low < (30 if narrow else 300)
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if fine else (1.0,)))
    elif narrow and way == "x":
        axis.set_major_locator(MaxNLocator(4))
    if wanted.ticks or wanted.log:
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: short(value))


def short(value: float, digits: int = 6) -> str:
    """A count as the field writes it, to `digits` significant digits: 1500 → "1.5k", 1.2e6 → "1.2M", 70e9 → "70B"."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.{digits}g}{suffix}"
    return f"{value:.{digits}g}"
