"""Pictures of plans: lines and bars, each with a key that names exactly what is drawn.

matplotlib is imported when a picture is drawn, and its state machine (`pyplot`) is never used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from diloco.planning.palette import (
    COLOURS,
    GRID,
    PAPER,
    TEXT,
)
from diloco.planning.picture_axes import (
    LINE_IN,
    SMALL,
    WIDTH_IN,
    Axis,
    is_narrow,
    legend,
    legend_above,
    name_rows,
    new_axes,
    row_names,
    scale,
)
from diloco.planning.units import significant

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

RESOLUTION = 0.004
"""Curves that are nowhere farther apart than this share of the panel, half the width of a line, are seen as one."""
EQUAL = 1e-9


# ------------------------------------------------------------------------------------------------------ what is drawn


@dataclass(frozen=True)
class Line:
    """One curve. `errors` are half widths of confidence intervals; a `style` of "o" draws points only. Without a label
    it is one of several that look like one which has it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] = ()
    style: Literal["-", "--", ":", "o"] = "-"
    colour: str = ""


@dataclass(frozen=True)
class Bars:
    """One series of bars: a value for every label of the chart, one colour or one for each, how a value is written."""

    label: str
    values: Sequence[float]
    colour: str | Sequence[str] = ""
    show: Callable[[float], str] = significant


@dataclass(frozen=True)
class Picture:
    """A figure and the numbers it shows.

    Attributes:
        name: of its PNG file, without the ending.
        title: a few words; the page's heading and the PNG's title.
        text: what the reader should see, in a sentence or two.
        draw: makes the figure, given its width in inches.
        heads, rows: the table beside it; the first column is text, the others are numbers.
    """

    name: str
    title: str
    text: str
    draw: Callable[[float], Figure]
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


# -------------------------------------------------------------------------------------------------------- the figures


def lines(curves: Sequence[Line], x: Axis, y: Axis, width_in: float = WIDTH_IN, *, height_in: float = 3.9) -> Figure:
    """Curves and points over a common axis. The key lists them by their height at the right end, the points last.

    Curves that cannot be told apart are drawn as one, under all their names.
    """
    figure, axes = new_axes(height_in, width_in)
    named: list[tuple[float, Artist]] = []
    for index, each in enumerate(merged(curves, y)):
        colour = each.colour or COLOURS[index % len(COLOURS)]
        if each.errors:
            axes.errorbar(each.x, each.y, each.errors, color=colour, capsize=3, linewidth=1.4, fmt="none", zorder=4)
        if each.style == "o":
            look: dict[str, Any] = {
                "linestyle": "",
                "marker": "o",
                "markersize": 7,
                "markeredgecolor": PAPER,
                "zorder": 5,
            }
        else:
            marker = "o" if len(each.x) <= 12 else ""
            look = {"linewidth": 2, "linestyle": each.style, "marker": marker, "markersize": 3.5}
        [drawn] = axes.plot(each.x, each.y, color=colour, label=each.label, **look)
        if each.label:
            named.append((-math.inf if each.style == "o" else each.y[-1], drawn))
    handles = [drawn for _, drawn in sorted(named, key=lambda it: -it[0])]
    if x.band is not None:
        low, high, label = x.band
        handles.append(axes.axvspan(low, high, color=GRID, alpha=0.7, linewidth=0, zorder=0, label=label))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    scale(axes, "x", x)
    scale(axes, "y", y)
    if is_narrow(axes):
        legend_above(axes, len(handles), handles)
    else:
        num_lines = legend(axes, handles, loc="upper left", bbox_to_anchor=(1, 1), handlelength=2.2)
        figure.set_figheight(max(height_in, LINE_IN * num_lines + 0.9))
    return figure


def merged(curves: Sequence[Line], y: Axis) -> list[Line]:
    """The curves to draw: those that lie on an earlier one, to half the width of a line, add their names to its own.

    "=" stands before a name where all values are equal, "≈" where they only look it. Points stay by themselves.
    """
    ends = [value for each in curves for value in each.y]
    low, high = (y.low if y.low is not None else min(ends)), (y.high if y.high is not None else max(ends))
    place: Callable[[float], float] = math.log if y.log else float
    most = RESOLUTION * (place(high) - place(low))
    groups: list[tuple[Line, str]] = []
    for each in curves:
        for index, (first, label) in enumerate(groups):
            if "o" in (first.style, each.style) or list(first.x) != list(each.x):
                continue
            pairs = list(zip(first.y, each.y, strict=True))
            if all(abs(place(a) - place(b)) <= most for a, b in pairs):
                sign = "=" if all(math.isclose(a, b, rel_tol=EQUAL) for a, b in pairs) else "≈"
                groups[index] = (first, f"{label}\n{sign} {each.label}")
                break
        else:
            groups.append((each, each.label))
    return [replace(first, label=label) for first, label in groups]


def bars(
    labels: Sequence[str], series: Sequence[Bars], value: Axis, width_in: float = WIDTH_IN, *,
    marked: Collection[int] = (),
) -> Figure:  # fmt: skip
    """Horizontal bars, the first label on top; several series are stacked, one after the other.

    On a logarithmic axis, where lengths mean nothing, points instead. Values of a single series are written beside it.
    A series of zeros is not drawn; all else is seen, if only as a hairline. `marked`: rows whose label stands out.
    """
    num_lines = max(text.count("\n") for text in row_names(labels, width_in)) + 1
    figure, axes = new_axes(1.1 + max(0.42, LINE_IN * num_lines + 0.16) * len(labels), width_in)
    left = [0.0] * len(labels)
    shown = [each for each in series if any(each.values)]
    for index, each in enumerate(shown):
        own = each.colour or COLOURS[index % len(COLOURS)]
        colours = [own] * len(labels) if isinstance(own, str) else own
        label = each.label
        for row, (size, colour) in enumerate(zip(each.values, colours, strict=True)):
            if value.log:
                axes.plot(size, -row, "o", color=colour, markersize=9, label=label)
            elif size:
                axes.barh(
                    -row, size, left=left[row], height=0.58, color=colour, edgecolor=colour, linewidth=0.7,
                    label=label, zorder=3 - index / 100,
                )  # fmt: skip
                label = ""
        if len(series) == 1:
            for row, size in enumerate(each.values):
                axes.annotate(
                    each.show(size), (size, -row), (8, 0), textcoords="offset points", va="center", fontsize=SMALL,
                    color=TEXT,
                )  # fmt: skip
        left = [a + b for a, b in zip(left, each.values, strict=True)]
    name_rows(axes, labels, top=0.5, marked=marked)
    scale(axes, "x", value)
    if len(series) > 1:
        legend_above(axes, len(shown))
    elif not value.high:
        axes.margins(x=0.25 if is_narrow(axes) else 0.12)  # the numbers beside the bars
    return figure


def rows_of(
    firsts: Sequence[str], columns: Iterable[Sequence[float]], show: Callable[[float], str]
) -> list[tuple[str, ...]]:
    """The rows of a picture's table: a first cell, then one number of each column."""
    return [(first, *map(show, numbers)) for first, *numbers in zip(firsts, *columns, strict=True)]
