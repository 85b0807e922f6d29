"""The report's pictures, as SVG text."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from diloco.demo.accounting import KINDS
from diloco.planning import pictures as draw
from diloco.planning.pages import svg
from diloco.report.timeline import Timeline

GLOBAL, BASELINE, ISOLATED = draw.BLUE, draw.AMBER, draw.VIOLET
KIND_COLOURS = dict(zip(KINDS, (GLOBAL, draw.SKY, "#a78bfa", draw.GREY), strict=True))


def loss_chart(timeline: Timeline, tokens_per_step: int, end: tuple[int, float]) -> str:
    """Held-out loss against tokens: the global model up to its `end` (tokens, loss), and the controls."""
    figure, axes = draw.new_axes(3.7)
    found = timeline.evaluated
    curves = {
        "data parallel": (BASELINE, [(e.tokens, e.loss) for e in found.get("baseline", [])]),
        # It trains a third of the tokens and is drawn where the learners of the run are at the same step.
        "isolated learner, at the same step": (
            ISOLATED,
            [(e.step * tokens_per_step, e.loss) for e in found.get("isolated", [])],
        ),
        "global model": (GLOBAL, [*((e.tokens, e.loss) for e in found.get("learner-0", [])), end]),
    }
    for label, (colour, points) in curves.items():
        if points:
            tokens, losses = zip(*sorted(points), strict=True)
            axes.plot(tokens, losses, color=colour, label=label, linewidth=2, marker="o", markersize=2.8)
    axes.axvspan(0, timeline.initial_tokens, color="#f1f5f9", linewidth=0)
    axes.text(timeline.initial_tokens / 2, 0.03, "warm start,\none learner", transform=axes.get_xaxis_transform(),
              ha="center", va="bottom", fontsize=draw.SMALL, color=draw.TEXT)  # fmt: skip
    axes.set_xlim(0, end[0] * 1.02)
    axes.set_ylim(top=min(axes.get_ylim()[1], end[1] * 1.75))  # the first steps are far above
    axes.set_xlabel("tokens trained by the run")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.grid(axis="y", color=draw.GRID, linewidth=0.8)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g} M")
    axes.legend(frameon=False, loc="upper right")
    return svg(figure)


def bytes_chart(summary: dict[str, Any]) -> str:
    """Bytes on the wire against the baseline's, on a logarithmic axis; below, what they were for."""
    figure = Figure(figsize=(draw.WIDTH_IN, 2.9), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[2, 1.15])
    for axes in (above, below):
        draw.plain(axes)
    totals = [("data parallel", summary["baseline_wire_bytes"], BASELINE), ("this run", summary["wire_bytes"], GLOBAL)]
    for place, (_, num_bytes, colour) in enumerate(totals):
        above.barh(-place, max(num_bytes, 1), color=colour, height=0.6)
        above.text(max(num_bytes, 1) * 1.1, -place, f"{num_bytes / 1e6:,.1f} MB", va="center", fontsize=draw.SMALL)
    above.set_yticks([0, -1], [label for label, _, _ in totals])
    above.set_xscale("log")
    above.set_xlim(1e5, max(num_bytes for _, num_bytes, _ in totals) * 6)
    above.set_xlabel("bytes of all learners, both directions (logarithmic)", fontsize=draw.SMALL)
    left = 0.0
    for kind in KINDS:
        megabytes = summary["wire_bytes_by_kind"][kind] / 1e6
        below.barh(0, megabytes, left=left, color=KIND_COLOURS[kind], height=0.6, label=f"{kind} {megabytes:,.2f} MB")
        left += megabytes
    below.set_yticks([0], ["of which"])
    below.set_xlim(0, max(left, 1e-6))
    below.set_xlabel("MB", fontsize=draw.SMALL)
    draw.legend_above(below, len(KINDS))
    return svg(figure)
