"""Pictures of plans: lines, bars and timelines, each as a PNG file, and all of them in one self-contained HTML page
with their tables.

matplotlib is imported when a picture is drawn, and its state machine (`pyplot`) is never used.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from diloco.errors import ConfigError, StoreError, translated
from diloco.planning.pages import page, svg, table
from diloco.planning.units import significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, AMBER, GREEN, VIOLET, RED, SKY = "#1f6feb", "#d97706", "#16a34a", "#8b5cf6", "#dc2626", "#38bdf8"
WAITING, STOPPED = "#fbbf24", "#fca5a5"
GREY, TEXT, GRID = "#94a3b8", "#475569", "#e5e7eb"
COLOURS = (BLUE, AMBER, GREEN, VIOLET, RED, SKY, "#0f766e", "#be185d")
WIDTH_IN = 7.6
SMALL = 9

Kind = Literal["compute", "waiting", "stopped", "up", "down"]
KINDS: Mapping[Kind, tuple[str, float, float]] = {
    "compute": (BLUE, -0.2, 0.4),
    "waiting": (WAITING, -0.2, 0.4),
    "stopped": (STOPPED, -0.2, 0.4),
    "up": (VIOLET, 0.23, 0.11),
    "down": (GREEN, -0.34, 0.11),
}
"""What a learner does: the colour, and where its band lies in the learner's row (bottom, height). Transfers run beside
compute."""


# ------------------------------------------------------------------------------------------------------ what is drawn


@dataclass(frozen=True)
class Axis:
    """One axis: its label with the unit, and its range where the data's own would mislead."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True)
class Line:
    """One curve. `errors` are half widths of confidence intervals; a `style` of "o" draws points only."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    errors: Sequence[float] = ()
    style: Literal["-", "--", ":", "o"] = "-"
    colour: str = ""


@dataclass(frozen=True)
class Bars:
    """One series of bars, a value for every label of the chart."""

    label: str
    values: Sequence[float]
    colour: str = ""


@dataclass(frozen=True)
class Span:
    """Something a learner does from one time to another."""

    begin_s: float
    end_s: float
    kind: Kind


@dataclass(frozen=True)
class Picture:
    """A figure and the numbers it shows.

    Attributes:
        name: of its PNG file, without the ending.
        title: a few words; the page's heading and the PNG's title.
        text: what the reader should see, in a sentence or two.
        heads, rows: the table beside it; the first column is text, the others are numbers.
    """

    name: str
    title: str
    text: str
    figure: Figure
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


# -------------------------------------------------------------------------------------------------------- the figures


def lines(curves: Sequence[Line], x: Axis, y: Axis, *, height_in: float = 3.9) -> Figure:
    """Curves over a common axis, each named at its end, and points, named beside them."""
    figure, axes = new_axes(height_in)
    ends, points = [], []
    for index, each in enumerate(curves):
        colour = each.colour or COLOURS[index % len(COLOURS)]
        named = (each.label, each.x[-1], each.y[-1], colour)
        if each.errors:
            axes.errorbar(each.x, each.y, each.errors, color=colour, capsize=3, linewidth=1.4, fmt="none", zorder=4)
        if each.style == "o":
            axes.plot(each.x, each.y, "o", color=colour, markersize=7, markeredgecolor="white", zorder=5)
            points.append(named)
        else:
            marker = "o" if len(each.x) <= 12 else ""
            axes.plot(each.x, each.y, color=colour, linewidth=2, linestyle=each.style, marker=marker, markersize=3.5)
            ends.append(named)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    _scale(axes, "x", x)
    _scale(axes, "y", y)
    _name_ends(axes, ends, height_in)
    _name_points(axes, points)
    return figure


def bars(labels: Sequence[str], series: Sequence[Bars], value: Axis) -> Figure:
    """Horizontal bars, the first label on top; several series are stacked, one after the other.

    On a logarithmic axis, where lengths mean nothing, points instead. Values of a single series are written beside it.
    """
    figure, axes = new_axes(1.1 + 0.42 * len(labels))
    left, places = [0.0] * len(labels), [-row for row in range(len(labels))]
    for index, each in enumerate(series):
        colour = each.colour or COLOURS[index % len(COLOURS)]
        if value.log:
            axes.plot(each.values, places, "o", color=colour, markersize=9, label=each.label)
        else:
            axes.barh(places, each.values, left=left, height=0.58, color=colour, label=each.label)
        if len(series) == 1:
            for end in zip(each.values, places, strict=True):
                text = significant(end[0])
                axes.annotate(text, end, (8, 0), textcoords="offset points", va="center", fontsize=SMALL)
        left = [a + b for a, b in zip(left, each.values, strict=True)]
    _name_rows(axes, labels, top=0.5)
    _scale(axes, "x", value)
    if len(series) > 1:
        legend_above(axes, len(series))
    elif not value.high:
        axes.margins(x=0.12)  # the numbers beside the bars
    return figure


def timeline(rows: Mapping[str, Sequence[Span]], *, seconds: str = "seconds") -> Figure:
    """A row for each learner, the first on top: what it does when; its transfers run beside its compute."""
    figure, axes = new_axes(0.55 * len(rows) + 1.2)
    drawn: set[Kind] = set()
    for row, spans in enumerate(rows.values()):
        for kind, (colour, bottom, height) in KINDS.items():
            found = [(each.begin_s, each.end_s - each.begin_s) for each in spans if each.kind == kind]
            if found:
                label = kind if kind not in drawn else None
                axes.broken_barh(found, (bottom - row, height), facecolors=colour, linewidth=0, label=label)
                drawn.add(kind)
    _name_rows(axes, list(rows), top=0.55)
    axes.margins(x=0.01)
    axes.set_xlabel(seconds)
    if drawn:
        legend_above(axes, len(drawn))
    return figure


def new_axes(height_in: float) -> tuple[Figure, Axes]:
    """A figure with one panel as wide as a page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.add_subplot()
    plain(axes)
    return figure, axes


def plain(axes: Axes) -> None:
    """Style axes: no box, quiet ticks, a light grid behind."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=TEXT, labelsize=SMALL)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(TEXT)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def legend_above(axes: Axes, entries: int) -> None:
    """Put the legend in one row above the panel."""
    axes.legend(
        frameon=False, ncols=entries, loc="lower left", bbox_to_anchor=(0, 1), fontsize=SMALL, handlelength=0.9,
        columnspacing=1.4, borderaxespad=0.1,
    )  # fmt: skip


def _name_rows(axes: Axes, names: Sequence[str], top: float) -> None:
    axes.set_yticks([-row for row in range(len(names))], names)
    axes.set_ylim(0.5 - len(names), top)


def _scale(axes: Axes, way: Literal["x", "y"], wanted: Axis) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    axis = axes.xaxis if way == "x" else axes.yaxis
    axes.set(**{f"{way}label": wanted.label, f"{way}scale": "log" if wanted.log else "linear"})
    axes.set(**{f"{way}lim": (wanted.low, wanted.high)})
    if wanted.ticks:
        axis.set_major_locator(FixedLocator(wanted.ticks))
    elif wanted.log:
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 300 else (1.0,)))
    if wanted.ticks or wanted.log:
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: short(value))


def short(value: float, digits: int = 6) -> str:
    """A count as the field writes it, to `digits` significant digits: 1500 → "1.5k", 1.2e6 → "1.2M", 70e9 → "70B"."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.{digits}g}{suffix}"
    return f"{value:.{digits}g}"


def _name_ends(axes: Axes, ends: Sequence[tuple[str, float, float, str]], height_in: float) -> None:
    """Every curve's name to the right of its end, pushed apart where they would cover each other."""
    to_axes = axes.transData + axes.transAxes.inverted()
    height_pt, line_pt = 72 * height_in * 0.8, SMALL * 1.35
    places = sorted((float(to_axes.transform((x, y))[1]) * height_pt, label, colour) for label, x, y, colour in ends)
    heights: list[float] = []
    for wanted, _, _ in places:
        heights.append(max(wanted, heights[-1] + line_pt) if heights else wanted)
    above = height_pt + line_pt  # what was pushed out at the top comes down again
    for index in reversed(range(len(heights))):
        heights[index] = above = min(heights[index], above - line_pt)
    for (_, label, colour), height in zip(places, heights, strict=True):
        at = height / height_pt
        axes.text(1.015, at, label, transform=axes.transAxes, color=colour, fontsize=SMALL, va="center")


def _name_points(axes: Axes, points: Sequence[tuple[str, float, float, str]]) -> None:
    """Every point's name beside it, readable over curves, on the side where there is room."""
    to_axes = axes.transData + axes.transAxes.inverted()
    for label, x, y, colour in points:
        is_right = float(to_axes.transform((x, y))[0]) > 0.8
        axes.annotate(
            label,
            (x, y),
            (-9 if is_right else 9, -4),
            textcoords="offset points",
            color=colour,
            fontsize=SMALL,
            fontweight="bold",
            va="top",
            ha="right" if is_right else "left",
            zorder=6,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )


def rows_of(
    firsts: Sequence[str], columns: Iterable[Sequence[float]], show: Callable[[float], str]
) -> list[tuple[str, ...]]:
    """The rows of a picture's table: a first cell, then one number of each column."""
    return [(first, *map(show, numbers)) for first, *numbers in zip(firsts, *columns, strict=True)]


# ---------------------------------------------------------------------------------------------------------- the files


def require() -> None:
    """Raises ConfigError where there is no matplotlib to draw with."""
    if find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib, which is not installed; pip install 'diloco[plot]'")


def write(directory: Path, name: str, title: str, text: str, pictures: Sequence[Picture]) -> list[Path]:
    """Write every picture as `directory`/<its name>.png, and all with their tables as `directory`/<name>.html.

    Returns the files. Raises StoreError where the directory cannot be written to.
    """
    sections = [section(each) for each in pictures]  # before the PNG files: those have titles
    body = f'<h1>{html.escape(title)}</h1>\n<p class="lead">{html.escape(text)}</p>\n' + "\n".join(sections)
    files = [directory / f"{each.name}.png" for each in pictures]
    page_file = directory / f"{name}.html"
    with translated(OSError, StoreError, f"cannot write pictures to {directory}", "name another directory with --out"):
        directory.mkdir(parents=True, exist_ok=True)
        for each, file in zip(pictures, files, strict=True):
            each.figure.suptitle(each.title, x=0.01, ha="left", fontsize=12, fontweight="bold", color="#1f2937")
            each.figure.savefig(file, dpi=150)
            each.figure.suptitle("")
        page_file.write_text(page(title, body), encoding="utf-8")
    return [*files, page_file]


def section(picture: Picture) -> str:
    """A picture with its heading, its text and its table, as HTML."""
    heading, text = html.escape(picture.title), html.escape(picture.text)
    return f"<h2>{heading}</h2>\n<p>{text}</p>\n{svg(picture.figure)}\n{table(picture.heads, picture.rows)}"
