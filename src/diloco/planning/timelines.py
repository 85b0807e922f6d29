"""Timelines: what learners do when, their transfers beside their compute, and where they are killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from diloco.escaping import shortened
from diloco.planning.palette import COMPUTING, GREEN, INK, PAPER, STOPPED, VIOLET, WAITING
from diloco.planning.picture_axes import WIDTH_IN, legend_above, name_rows, new_axes, row_chars

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.path import Path

HAIRLINE, MOST_HAIRLINES = 0.4, 80
"""Points around a band of a timeline, so that the shortest is seen; thinner where more would fill the row."""
TOUCHING = 1e-9

Kind = Literal["compute", "waiting", "stopped", "up", "down"]
KINDS: Mapping[Kind, tuple[str, str, float, float]] = {
    "compute": ("computing", COMPUTING, -0.2, 0.4),
    "waiting": ("waiting", WAITING, -0.2, 0.4),
    "stopped": ("gone", STOPPED, -0.2, 0.4),
    "up": ("on the link, up", VIOLET, 0.23, 0.11),
    "down": ("on the link, down", GREEN, -0.34, 0.11),
}
"""What a learner does: in words, its colour, and where its band lies in the learner's row (bottom, height). Transfers
run beside compute."""


@dataclass(frozen=True)
class Span:
    """Something a learner does from one time to another."""

    begin_s: float
    end_s: float
    kind: Kind


def timeline(rows: Mapping[str, Sequence[Span]], width_in: float = WIDTH_IN) -> Figure:
    """A row for each learner, the first on top: what it does when; its transfers run beside its compute. A cross is
    where it was killed."""
    from matplotlib.patches import PathPatch

    figure, axes = new_axes(max(0.55 * min(len(rows), 12), 0.22 * len(rows)) + 1.2, width_in)
    unit_s, unit = time_unit(max((each.end_s for spans in rows.values() for each in spans), default=0.0))
    drawn: set[str] = set()
    look: dict[str, Any]

    def key(label: str) -> str:
        new = label not in drawn
        drawn.add(label)
        return label if new else ""

    for row, spans in enumerate(rows.values()):
        for kind, (label, colour, bottom, height) in KINDS.items():
            times = [(begin_s / unit_s, (end_s - begin_s) / unit_s) for begin_s, end_s in _joined(spans, kind)]
            if bands := [(begin, length) for begin, length in times if length > 0]:
                edge = HAIRLINE * min(1.0, MOST_HAIRLINES / len(bands))
                look = {"facecolor": colour, "edgecolor": colour, "linewidth": edge, "label": key(label)}
                axes.add_patch(PathPatch(_rectangles(bands, bottom - row, height), **look))
            if kind == "stopped":
                for begin, _ in times:
                    look = {"color": INK, "markersize": 9, "markeredgecolor": PAPER, "label": key("killed")}
                    axes.plot(begin, -row, "X", zorder=5, **look)
    name_rows(axes, [shortened(name, row_chars(width_in)) for name in rows], top=0.55)
    axes.margins(x=0.01)
    axes.autoscale_view(scaley=False)
    axes.set_xlabel(unit)
    if drawn:
        legend_above(axes, len(drawn))
    return figure


def _rectangles(bands: Sequence[tuple[float, float]], bottom: float, height: float) -> Path:
    """All bands (begin, length) of a kind in one path: a page with one for each would be several times as large."""
    from matplotlib.path import Path

    top, places, codes = bottom + height, list[tuple[float, float]](), list[Any]()
    for begin, length in bands:
        end = begin + length
        places += [(begin, bottom), (begin, top), (end, top), (end, bottom), (begin, bottom)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    return Path(places, codes)


def _joined(spans: Sequence[Span], kind: Kind) -> list[tuple[float, float]]:
    """When something is done, in seconds; times that touch are one, so that no seam is seen."""
    times: list[tuple[float, float]] = []
    for begin_s, end_s in sorted((each.begin_s, each.end_s) for each in spans if each.kind == kind):
        if times and begin_s <= times[-1][1] * (1 + TOUCHING):
            times[-1] = times[-1][0], max(times[-1][1], end_s)
        else:
            times.append((begin_s, end_s))
    return times


def time_unit(longest_s: float) -> tuple[float, str]:
    """The unit in which so long a time reads well: its seconds, and its name."""
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
    return next(((size_s, name) for size_s, name in units if longest_s >= 5 * size_s), (1.0, "seconds"))
