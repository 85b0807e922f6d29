"""Who took part in a run and when, as SVG text."""

from __future__ import annotations

from matplotlib.axes import Axes

from diloco.escaping import printable
from diloco.planning.pages import svg
from diloco.planning.palette import AMBER, BLUE, GREEN, GREY, RED, TEXT
from diloco.planning.picture_axes import SMALL, new_axes
from diloco.report.timeline import Timeline

MERGE, PARTIAL, KILL, BACK, BAND = BLUE, AMBER, RED, GREEN, "#dbeafe"


def _plain(name: str) -> str:
    """A name as a label, which is no mathematics."""
    return printable(name).replace("$", r"\$")


def timeline_chart(timeline: Timeline) -> str:
    """A row per process: when it was part of the run, its merges, kills and returns."""
    names = ["syncer", *sorted(timeline.presence)]
    figure, axes = new_axes(0.5 * len(names) + 1.1)
    start = timeline.syncer_starts[0] if timeline.syncer_starts else 0.0
    _syncer_row(axes, timeline, start)
    if timeline.initialised_at is not None and (steps := timeline.steps.get(timeline.initialiser)):
        row = names.index(timeline.initialiser)
        first = steps[0].t - start
        axes.barh(-row, timeline.initialised_at - start - first, left=first, height=0.5, color="#fef3c7")
        axes.text(first + 0.3, -row, "warm start", va="center", fontsize=SMALL, color=TEXT)
    for row, name in enumerate(names[1:], start=1):
        for begin, end in timeline.presence[name]:
            stop = timeline.ended_at if end is None else end
            axes.barh(-row, stop - begin, left=begin - start, height=0.5, color=BAND)
        merges = [merge.t - start for merge in timeline.merges if name in merge.contributors]
        axes.plot(merges, [-row] * len(merges), "|", color=MERGE, markersize=11, markeredgewidth=1.1)
        for begin, _ in timeline.presence[name][1:]:
            axes.plot(begin - start, -row, ">", color=BACK, markersize=8, zorder=4)
    for kill in timeline.kills:
        if kill.name in names:
            axes.plot(
                kill.t - start,
                -names.index(kill.name),
                "X",
                color=KILL,
                markersize=9,
                markeredgecolor="white",
                zorder=5,
            )
    axes.set_yticks([-row for row in range(len(names))], list(map(_plain, names)))
    axes.set_ylim(-len(names) + 0.45, 0.55)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds since the syncer started")
    return svg(figure)


def _syncer_row(axes: Axes, timeline: Timeline, start: float) -> None:
    """Draw the syncer's lifetimes and every merge, in another colour where learners of the run are missing."""
    kills = sorted(kill.t for kill in timeline.kills if kill.name == "syncer")
    for begin in timeline.syncer_starts:
        end = min([t for t in kills if t > begin], default=timeline.ended_at)
        axes.barh(0, end - begin, left=begin - start, height=0.5, color="#f1f5f9")
    for begin in timeline.syncer_starts[1:]:
        axes.plot(begin - start, 0, ">", color=BACK, markersize=8, zorder=4)
    for is_full, colour in ((True, GREY), (False, PARTIAL)):
        merges = [m.t - start for m in timeline.merges if (len(m.contributors) == len(timeline.presence)) == is_full]
        axes.plot(merges, [0] * len(merges), "|", color=colour, markersize=11, markeredgewidth=1.1)
