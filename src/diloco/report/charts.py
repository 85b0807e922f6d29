"""A run's pictures, as SVG text."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.planning.pages import svg
from diloco.planning.pictures import AMBER, BLUE, COLOURS, GREEN, GREY, GRID, RED, SMALL, TEXT, WIDTH_IN, plain
from diloco.report.timeline import Timeline

MERGE, PARTIAL, KILL, BACK, BAND = BLUE, AMBER, RED, GREEN, "#dbeafe"


def losses_chart(timeline: Timeline) -> str:
    """Held-out loss of the global model against the run's tokens, by who evaluated it."""
    figure, axes = row_of_axes(3.4)
    for (name, evaluated), colour in zip(
        sorted(timeline.evaluated.items()), COLOURS * len(timeline.evaluated), strict=False
    ):
        axes.plot([e.tokens for e in evaluated], [e.loss for e in evaluated], color=colour, label=name, linewidth=2,
                  marker="o", markersize=2.8)  # fmt: skip
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g} M")
    axes.set_xlabel("tokens trained by the run")
    axes.set_ylabel("held-out loss, nats per token")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.legend(frameon=False, loc="upper right")
    return svg(figure)


def training_chart(timeline: Timeline) -> str:
    """Each learner's training loss against its steps."""
    figure, axes = row_of_axes(3.4)
    for (name, steps), colour in zip(sorted(timeline.steps.items()), COLOURS * len(timeline.steps), strict=False):
        axes.plot([s.step for s in steps], [s.loss for s in steps], color=colour, label=name, linewidth=1, alpha=0.8)
    axes.set_xlim(left=0)
    axes.set_xlabel("inner step")
    axes.set_ylabel("training loss, nats per token")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.legend(frameon=False, loc="upper right")
    return svg(figure)


def timeline_chart(timeline: Timeline) -> str:
    """Who was there, who was in which merge, who was killed and came back. A row per process."""
    names = ["syncer", *sorted(timeline.presence)]
    figure, axes = row_of_axes(0.5 * len(names) + 1.1)
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
    axes.set_yticks([-row for row in range(len(names))], names)
    axes.set_ylim(-len(names) + 0.45, 0.55)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds since the syncer started")
    return svg(figure)


def _syncer_row(axes: Axes, timeline: Timeline, start: float) -> None:
    """Its lives, and every merge: in another colour where not all learners of the run were in it."""
    kills = sorted(kill.t for kill in timeline.kills if kill.name == "syncer")
    for begin in timeline.syncer_starts:
        end = min([t for t in kills if t > begin], default=timeline.ended_at)
        axes.barh(0, end - begin, left=begin - start, height=0.5, color="#f1f5f9")
    for begin in timeline.syncer_starts[1:]:
        axes.plot(begin - start, 0, ">", color=BACK, markersize=8, zorder=4)
    for is_full, colour in ((True, GREY), (False, PARTIAL)):
        merges = [m.t - start for m in timeline.merges if (len(m.contributors) == len(timeline.presence)) == is_full]
        axes.plot(merges, [0] * len(merges), "|", color=colour, markersize=11, markeredgewidth=1.1)


def row_of_axes(height_in: float) -> tuple[Figure, Axes]:
    """One panel as wide as a page."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.add_subplot()
    plain(axes)
    return figure, axes
