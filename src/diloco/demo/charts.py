"""The report's pictures, as SVG text."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.demo.accounting import KINDS
from diloco.demo.plan import NUM_LEARNERS
from diloco.demo.timeline import Timeline
from diloco.planning.pages import svg
from diloco.planning.pictures import AMBER, BLUE, GREEN, GREY, GRID, RED, SKY, SMALL, TEXT, VIOLET, WIDTH_IN, plain

GLOBAL, BASELINE, ISOLATED, KILL, BACK, BAND = BLUE, AMBER, VIOLET, RED, GREEN, "#dbeafe"
KIND_COLOURS = dict(zip(KINDS, (GLOBAL, SKY, "#a78bfa", GREY), strict=True))


def loss_chart(timeline: Timeline, tokens_per_step: int, end: tuple[int, float]) -> str:
    """Held-out loss against tokens: the global model up to its `end` (tokens, loss), and the controls."""
    figure, axes = _axes(3.7)
    curves = {
        "data parallel": (BASELINE, [(e.tokens, e.loss) for e in timeline.evaluated.get("baseline", [])]),
        # It trains a third of the tokens: what counts is that it stands where the learners of the run stand.
        "isolated learner, at the same step": (
            ISOLATED,
            [(e.step * tokens_per_step, e.loss) for e in timeline.evaluated.get("isolated", [])],
        ),
        "global model": (GLOBAL, [*((e.tokens, e.loss) for e in timeline.evaluated.get("learner-0", [])), end]),
    }
    for label, (colour, points) in curves.items():
        if points:
            tokens, losses = zip(*sorted(points), strict=True)
            axes.plot(tokens, losses, color=colour, label=label, linewidth=2, marker="o", markersize=2.8)
    axes.axvspan(0, timeline.initial_tokens, color="#f1f5f9", linewidth=0)
    axes.text(timeline.initial_tokens / 2, 0.03, "warm start,\none learner", transform=axes.get_xaxis_transform(),
              ha="center", va="bottom", fontsize=SMALL, color=TEXT)  # fmt: skip
    axes.set_xlim(0, end[0] * 1.02)
    axes.set_ylim(top=min(axes.get_ylim()[1], end[1] * 1.75))  # the first steps are far above
    axes.set_xlabel("tokens trained by the run")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g} M")
    axes.legend(frameon=False, loc="upper right")
    return svg(figure)


def bytes_chart(summary: dict[str, Any]) -> str:
    """Bytes on the wire against the baseline's, on a logarithmic axis; below, what they were for."""
    figure = Figure(figsize=(WIDTH_IN, 2.9), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[2, 1.15])
    for axes in (above, below):
        plain(axes)
    totals = [("data parallel", summary["baseline_wire_bytes"], BASELINE), ("this run", summary["wire_bytes"], GLOBAL)]
    for place, (_, num_bytes, colour) in enumerate(totals):
        above.barh(-place, max(num_bytes, 1), color=colour, height=0.6)
        above.text(max(num_bytes, 1) * 1.1, -place, f"{num_bytes / 1e6:,.1f} MB", va="center", fontsize=SMALL)
    above.set_yticks([0, -1], [label for label, _, _ in totals])
    above.set_xscale("log")
    above.set_xlim(1e5, max(num_bytes for _, num_bytes, _ in totals) * 6)
    above.set_xlabel("bytes of all learners, both directions (logarithmic)", fontsize=SMALL)
    left = 0.0
    for kind in KINDS:
        megabytes = summary["wire_bytes_by_kind"][kind] / 1e6
        below.barh(0, megabytes, left=left, color=KIND_COLOURS[kind], height=0.6, label=f"{kind} {megabytes:,.2f} MB")
        left += megabytes
    below.set_yticks([0], ["of which"])
    below.set_xlim(0, max(left, 1e-6))
    below.set_xlabel("MB", fontsize=SMALL)
    below.legend(frameon=False, ncols=len(KINDS), loc="lower left", bbox_to_anchor=(0, 1), fontsize=SMALL,
                 handlelength=0.9, columnspacing=1.2, borderaxespad=0.1)  # fmt: skip
    return svg(figure)


def timeline_chart(timeline: Timeline) -> str:
    """Who was there, who was in which merge, who was killed and came back. A row per process."""
    names = ["syncer", *sorted(timeline.presence)]
    figure, axes = _axes(0.5 * len(names) + 1.1)
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
        axes.plot(merges, [-row] * len(merges), "|", color=GLOBAL, markersize=11, markeredgewidth=1.1)
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
    """Its lives, and every merge: in another colour where not all planned learners were in it."""
    kills = sorted(kill.t for kill in timeline.kills if kill.name == "syncer")
    for begin in timeline.syncer_starts:
        end = min([t for t in kills if t > begin], default=timeline.ended_at)
        axes.barh(0, end - begin, left=begin - start, height=0.5, color="#f1f5f9")
    for begin in timeline.syncer_starts[1:]:
        axes.plot(begin - start, 0, ">", color=BACK, markersize=8, zorder=4)
    for is_full, colour in ((True, GREY), (False, BASELINE)):
        merges = [m.t - start for m in timeline.merges if (len(m.contributors) == NUM_LEARNERS) == is_full]
        axes.plot(merges, [0] * len(merges), "|", color=colour, markersize=11, markeredgewidth=1.1)


def _axes(height_in: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.add_subplot()
    plain(axes)
    return figure, axes
