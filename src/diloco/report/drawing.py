"""Drawings: figures of plotly as plain values, each with a legend.

Colours are variables of `assets/page.css`, since a page is light or dark; `assets/drawing.js` draws the figures.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from diloco.escaping import printable, shortened

Figure = dict[str, Any]
"""`data` and `layout`, as plotly has them."""

# ------------------------------------------------------------------------------------------------------------- colours

BLUE, RED, GREEN, PINK = "var(--blue)", "var(--red)", "var(--green)", "var(--pink)"
AMBER, SKY, VIOLET, OLIVE = "var(--amber)", "var(--sky)", "var(--violet)", "var(--olive)"
INK, GREY, SHADE, PAPER = "var(--ink)", "var(--other)", "var(--line)", "var(--bg)"
COMPUTING, WAITING, STOPPED = BLUE, AMBER, RED

METHODS: Mapping[str, str] = {
    "data-parallel": RED, "elastic": PINK, "diloco": BLUE, "streaming": GREEN, "eager": AMBER, "decoupled": SKY
}  # fmt: skip
"""By method, as `Setting` and `Fleet` name it."""
_LEARNERS: Mapping[int, str] = {1: SKY, 2: BLUE, 4: GREEN, 8: VIOLET}


def of_learners(numbers: Sequence[int]) -> dict[int, str]:
    """A colour for each number of learners; 1, 2, 4 and 8 have the same colours in every picture."""
    others = iter((PINK, OLIVE, AMBER, GREY) * len(numbers))
    return {number: _LEARNERS.get(number) or next(others) for number in numbers}


# ------------------------------------------------------------------------------------------------------ what is drawn


@dataclass(frozen=True)
class Axis:
    """One axis: its label with the unit, and its range if the range of the data would mislead.

    Attributes:
        band: a shaded interval of the x axis, and its label.
    """

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: tuple[float, ...] = ()
    band: tuple[float, float, str] | None = None


@dataclass(frozen=True)
class Line:
    """One curve. `errors` are half widths of confidence intervals; style "o" draws points only."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    errors: Sequence[float] = ()
    style: Literal["-", "--", "o"] = "-"


@dataclass(frozen=True)
class Bars:
    """One series of bars: a value for every label of the chart, a common colour or one for each, a format of values."""

    label: str
    values: Sequence[float]
    colour: str | Sequence[str]
    show: Callable[[float], str] = str


Kind = Literal["compute", "waiting", "stopped", "up", "down"]
KINDS: Mapping[Kind, tuple[str, str, float, float]] = {
    "compute": ("computing", COMPUTING, -0.2, 0.4),
    "waiting": ("waiting", WAITING, -0.2, 0.4),
    "stopped": ("gone", STOPPED, -0.2, 0.4),
    "up": ("on the link, up", VIOLET, 0.23, 0.11),
    "down": ("on the link, down", GREEN, -0.34, 0.11),
}
"""Activities of a learner: label, colour, and the band in the learner's row (bottom, height). Transfers are beside
compute."""


@dataclass(frozen=True)
class Span:
    """An activity of a learner, with begin and end."""

    begin_s: float
    end_s: float
    kind: Kind


@dataclass(frozen=True)
class Picture:
    """A figure and its numbers.

    Attributes:
        title: the heading, a few words.
        text: the finding, in a sentence or two.
        heads, rows: the table below the figure; its first column is text, the others are numbers.
    """

    title: str
    text: str
    figure: Figure
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def rows_of(
    firsts: Sequence[str], columns: Iterable[Sequence[float]], show: Callable[[float], str]
) -> list[tuple[str, ...]]:
    """The rows of a picture's table: a first cell, then one number of each column."""
    return [(first, *map(show, numbers)) for first, *numbers in zip(firsts, *columns, strict=True)]


# -------------------------------------------------------------------------------------------------------------- curves

RESOLUTION = 0.004
"""Curves closer than this share of the panel, half the width of a line, are indistinguishable."""
EQUAL = 1e-9
FEW_POINTS = 12
"""Up to this number, each point of a curve has a marker."""
EDGE = {"color": PAPER, "width": 1}


def lines(curves: Sequence[Line], x: Axis, y: Axis) -> Figure:
    """Curves and points over a common axis. The legend lists curves by their height at the right end, then points.

    Indistinguishable curves are drawn as one, with all their names.
    """
    drawn = merged(curves, y)
    ranked = sorted(drawn, key=lambda each: math.inf if each.style == "o" else -each.y[-1])
    data = [
        {
            "type": "scatter", "name": wrapped(each.label), "legendrank": ranked.index(each),
            "x": _compact(each.x), "y": _compact(each.y),
            "mode": "markers" if each.style == "o" else "lines+markers" if len(each.x) <= FEW_POINTS else "lines",
            "line": {"color": each.colour, "width": 2, "dash": "dash" if each.style == "--" else "solid"},
            "marker": {"color": each.colour, "size": 9 if each.style == "o" else 5, "line": EDGE},
            **({"error_y": {"type": "data", "array": _compact(each.errors)}} if each.errors else {}),
        }
        for each in drawn
    ]  # fmt: skip
    xs, ys = [value for each in drawn for value in each.x], [value for each in drawn for value in each.y]
    layout = _layout(390, _axis(x, xs), _axis(y, ys), num_keys=len(data) + (x.band is not None))
    if x.band is not None:
        low, high, label = x.band
        band = {"x0": low, "x1": high, "y0": 0, "y1": 1, "yref": "paper", "fillcolor": SHADE, "line": {"width": 0}}
        layout["shapes"] = [
            {"type": "rect", "layer": "below", "opacity": 0.6, "name": wrapped(label), "showlegend": True, **band}
        ]
    return {"data": data, "layout": layout}


def merged(curves: Sequence[Line], y: Axis) -> list[Line]:
    """The curves to draw: a curve that is indistinguishable from an earlier one adds its name to that one's label.

    The name follows "=" if all values are equal, and "≈" otherwise. Points are never merged.
    """
    ends = [value for each in curves for value in each.y]
    low, high = (y.low if y.low is not None else min(ends)), (y.high if y.high is not None else max(ends))
    place: Callable[[float], float] = math.log if y.log else float
    most = RESOLUTION * (place(high) - place(low))
    groups: list[Line] = []
    for each in curves:
        for index, first in enumerate(groups):
            if "o" in (first.style, each.style) or list(first.x) != list(each.x):
                continue
            pairs = list(zip(first.y, each.y, strict=True))
            if all(abs(place(a) - place(b)) <= most for a, b in pairs):
                sign = "=" if all(math.isclose(a, b, rel_tol=EQUAL) for a, b in pairs) else "≈"
                groups[index] = replace(first, label=f"{first.label}\n{sign} {each.label}")
                break
        else:
            groups.append(each)
    return groups


# ---------------------------------------------------------------------------------------------------------------- bars


def bars(labels: Sequence[str], series: Sequence[Bars], value: Axis, *, marked: Collection[int] = ()) -> Figure:
    """Horizontal bars below their labels, the first label on top; several series are stacked.

    A logarithmic axis has points instead, since lengths mean nothing there. Values of a single series are written
    beside the bars. A series of zeros is not drawn; smallest values are a hairline. `marked`: rows with a bold label.
    """
    rows, data = [-row for row in range(len(labels))], []
    names = [wrapped(label, 44) for label in labels]
    for each in series:
        if not any(each.values):
            continue
        colours = [each.colour] * len(labels) if isinstance(each.colour, str) else list(each.colour)
        look: dict[str, Any] = {"color": colours, "line": {"color": colours, "width": 0.7}}
        how: dict[str, Any] = {"type": "bar", "orientation": "h", "width": 0.4, "marker": look}
        if value.log:
            how = {"type": "scatter", "mode": "markers", "marker": {"color": colours, "size": 11}}
        if len(series) == 1:
            written = {"text": list(map(each.show, each.values)), "cliponaxis": False}
            how |= written | ({"mode": "markers+text", "textposition": "middle right"} if value.log else
                              {"textposition": "outside"})  # fmt: skip
        hover = {"customdata": names, "hovertemplate": "%{customdata}<br>%{x:,.4~r}<extra>%{fullData.name}</extra>"}
        data.append({"name": wrapped(each.label), "x": _compact(each.values), "y": rows, **how, **hover})
    num_lines = max((name.count("<br>") for name in names), default=0) + 1
    along = _axis(_with_room(value, series), [size for each in series for size in each.values])
    along |= {"showgrid": False, "ticks": "outside"}  # the labels and the values lie inside the panel
    of_rows = {"showticklabels": False, "showgrid": False, "range": [rows[-1] - 0.4, 1]}
    layout = _layout((34 + 17 * num_lines) * len(labels) + 70 + 12 * len(data), along, of_rows, num_keys=len(data))
    layout["annotations"] = [
        {
            "text": f"<b>{name}</b>" if row in marked else name, "x": 0, "xref": "paper", "xanchor": "left",
            "y": 0.24 - row, "yanchor": "bottom", "align": "left", "showarrow": False,
        }
        for row, name in enumerate(names)
    ]  # fmt: skip
    return {"data": data, "layout": layout | {"barmode": "stack"}}


def _with_room(value: Axis, series: Sequence[Bars]) -> Axis:
    """The axis, extended for the values beside the bars of a single series."""
    if len(series) > 1 or value.high is not None:
        return value
    low, high = min(series[0].values), max(series[0].values)
    if not value.log:
        return replace(value, high=1.2 * high)
    return replace(value, low=low / 1.3, high=high * (high / low) ** 0.25)


# ----------------------------------------------------------------------------------------------------------- timelines

TOUCHING = 1e-9
MOST_BANDS = 8000
"""Most bands of a timeline: they need less than 200 kB, and exceed the pixels of a screen."""
HAIRLINE, MOST_HAIRLINES = 0.4, 80
"""Outline of a band in pixels, so that the shortest is visible; thinner in rows with more bands than this."""
Times = list[tuple[float, float]]


def timeline(rows: Mapping[str, Sequence[Span]]) -> Figure:
    """A row of activities for each learner, the first learner on top, transfers beside compute. A cross marks a kill.

    Rows with too many bands are divided into short intervals, in each of which the activities are sorted by kind.
    """
    longest_s = max((each.end_s for spans in rows.values() for each in spans), default=0.0)
    unit_s, unit = time_unit(longest_s)
    of_kind = {kind: [_joined(spans, kind) for spans in rows.values()] for kind in KINDS}
    kills = [(row, begin_s) for row, times in enumerate(of_kind["stopped"]) for begin_s, _ in times]
    if sum(len(times) for of_rows in of_kind.values() for times in of_rows) > MOST_BANDS:
        width_s = longest_s * len(KINDS) * len(rows) / MOST_BANDS
        unit = f"{unit}; each {width_s:.3g} s of a learner sorted by what it does"
        sorted_rows = [_binned(spans, width_s) for spans in rows.values()]
        of_kind = {kind: [_joined(spans, kind) for spans in sorted_rows] for kind in KINDS}
    data: list[dict[str, Any]] = []
    for kind, (label, colour, bottom, height) in KINDS.items():
        bands = [(row, begin_s, end_s) for row, times in enumerate(of_kind[kind]) for begin_s, end_s in times]
        bands = [each for each in bands if each[2] > each[1]]
        most = max((len(times) for times in of_kind[kind]), default=0)
        if bands:
            edge = HAIRLINE * min(1.0, MOST_HAIRLINES / most)
            data.append({
                "type": "bar", "orientation": "h", "name": label, "width": height, "offset": bottom,
                "y": [-row for row, _, _ in bands], "base": _compact(begin_s / unit_s for _, begin_s, _ in bands),
                "x": _compact((end_s - begin_s) / unit_s for _, begin_s, end_s in bands),
                "marker": {"color": colour, "line": {"color": colour, "width": edge}},
                "hovertemplate": f"%{{base:.4~f}} to %{{x:.4~f}}<extra>{label}</extra>",
            })  # fmt: skip
    if kills:
        data.append({
            "type": "scatter", "mode": "markers", "name": "killed", "x": _compact(at_s / unit_s for _, at_s in kills),
            "y": [-row for row, _ in kills], "hovertemplate": "%{x:.4~f}<extra>killed</extra>",
            "marker": {"symbol": "x", "size": 11, "color": INK, "line": EDGE},
        })  # fmt: skip
    names, places = [wrapped(shortened(name, 20)) for name in rows], [-row for row in range(len(rows))]
    of_rows = {"showgrid": False, "range": [0.5 - len(rows), 0.55], "tickvals": places, "ticktext": names}
    along = _axis(Axis(unit, low=0.0, high=longest_s / unit_s))
    layout = _layout(110 + 34 * len(rows), along, of_rows, num_keys=len(data))
    return {"data": data, "layout": layout | {"barmode": "overlay"}}


def _joined(spans: Iterable[Span], kind: Kind) -> Times:
    """The times of one kind of activity, in seconds; adjacent times are joined, so that no seam is visible."""
    times: Times = []
    for begin_s, end_s in sorted((each.begin_s, each.end_s) for each in spans if each.kind == kind):
        if times and begin_s <= times[-1][1] * (1 + TOUCHING):
            times[-1] = times[-1][0], max(times[-1][1], end_s)
        else:
            times.append((begin_s, end_s))
    return times


def _binned(spans: Iterable[Span], width_s: float) -> list[Span]:
    """Activities sorted by kind in every interval of `width_s`, with unchanged total times; transfers in parallel."""
    took_s: dict[int, dict[Kind, float]] = defaultdict(lambda: dict.fromkeys(KINDS, 0.0))
    for each in spans:
        for number in range(int(each.begin_s / width_s), math.ceil(each.end_s / width_s)):
            inside_s = min(each.end_s, (number + 1) * width_s) - max(each.begin_s, number * width_s)
            took_s[number][each.kind] += inside_s
    found = []
    for number, of_kind in took_s.items():
        at_s = number * width_s
        for kind, length_s in of_kind.items():
            begin_s = number * width_s if kind in ("up", "down") else at_s
            found.append(Span(begin_s, begin_s + length_s, kind))
            at_s = begin_s + length_s
    return found


def time_unit(longest_s: float) -> tuple[float, str]:
    """A readable unit for a duration: its seconds, and its name."""
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
    return next(((size_s, name) for size_s, name in units if longest_s >= 5 * size_s), (1.0, "seconds"))


# ---------------------------------------------------------------------------------------------------------- the panels


def _layout(height: int, x: dict[str, Any], y: dict[str, Any], *, num_keys: int) -> dict[str, Any]:
    return {"height": height, "showlegend": num_keys > 1, "xaxis": x, "yaxis": y}


def _axis(it: Axis, drawn: Sequence[float] = ()) -> dict[str, Any]:
    place: Callable[[float], float] = math.log10 if it.log else float
    values: dict[str, Any] = {"title": {"text": it.label}, "type": "log" if it.log else "linear"}
    if it.low is not None or it.high is not None:
        values["range"] = [None if end is None else place(end) for end in (it.low, it.high)]
    if ticks := it.ticks or (_log_ticks(min(drawn), max(drawn)) if it.log else ()):
        values |= {"tickvals": list(ticks), "ticktext": [short(each) for each in ticks]}
    return values


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, …, or powers of ten on a long axis."""
    steps = (1, 2, 5) if high < 300 * low else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**decade for decade in decades for step in steps]


def short(value: float, digits: int = 6) -> str:
    """A count with a suffix, to `digits` significant digits: 1500 → "1.5k", 1.2e6 → "1.2M", 70e9 → "70B"."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if float(f"{abs(value):.{digits}g}") >= factor:
            return f"{value / factor:.{digits}g}{suffix}"
    return f"{value:.{digits}g}"


def _compact(values: Iterable[float]) -> list[float]:
    """Values rounded to six digits, below the resolution of a screen."""
    return [float(f"{value:.6g}") for value in values]


def wrapped(text: str, width: int = 36, most: int = 60) -> str:
    """Untrusted text as a label, in lines of at most `width` characters; "a = b" is never broken."""
    together = (shortened(printable(line), most).replace(" = ", "\xa0=\xa0") for line in text.split("\n"))
    lines = (part for line in together for part in textwrap.wrap(line, width))
    return "<br>".join(html.escape(line.replace("\xa0", " "), quote=False) for line in lines)
