"""The report's pictures, as SVG text."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diloco.demo.accounting import KINDS
from diloco.demo.timeline import Timeline

GLOBAL, BASELINE, ISOLATED, GREY, KILL = "#1f6feb", "#d97706", "#8b5cf6", "#9aa4b2", "#dc2626"
KIND_COLOURS = dict(zip(KINDS, ("#1f6feb", "#38bdf8", "#a78bfa", "#94a3b8"), strict=True))


def loss_chart(timeline: Timeline, outcome_config: Any) -> str:
    """Held-out loss of the global model and of the controls, against tokens."""
    figure, axes = _axes(7.6, 3.6)
    full = outcome_config.tokens_per_full_step
    curves = [
        ("data parallel", BASELINE, [(e.tokens, e.loss) for e in timeline.evaluated.get("baseline", [])]),
        (
            "isolated learner, at the same step",
            ISOLATED,
            [(e.step * full, e.loss) for e in timeline.evaluated.get("isolated", [])],
        ),
        ("global model", GLOBAL, [(e.tokens, e.loss) for e in timeline.evaluated.get("learner-0", [])]),
    ]
    for label, colour, points in curves:
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, label=label, linewidth=2, marker="o", markersize=3)
    axes.axvline(timeline.initial_tokens, color=GREY, linewidth=1, linestyle="--")
    axes.text(
        timeline.initial_tokens,
        1,
        " the run begins",
        color="#5b6472",
        transform=axes.get_xaxis_transform(),
        va="top",
        fontsize=9,
    )
    axes.set_xlabel("tokens trained")
    axes.set_ylabel("held-out loss (nats per byte)")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M")
    axes.legend(frameon=False)
    return _svg(figure)


def bytes_chart(summary: dict[str, Any]) -> str:
    """Bytes on the wire against the baseline's, on a logarithmic axis."""
    figure, axes = _axes(7.6, 1.9)
    bars = [
        ("data parallel,\nring all-reduce in bf16", summary["baseline_wire_bytes"], BASELINE),
        ("this run", summary["wire_bytes"], GLOBAL),
    ]
    bars += [(kind, summary["wire_bytes_by_kind"][kind], KIND_COLOURS[kind]) for kind in KINDS]
    figure.set_size_inches(7.6, 3.0)
    for place, (_, num_bytes, colour) in enumerate(bars):
        axes.barh(-place, max(num_bytes, 1), color=colour, height=0.62)
        axes.text(max(num_bytes, 1) * 1.08, -place, f"{num_bytes / 1e6:,.2f} MB", va="center", fontsize=9)
    axes.set_yticks([-place for place in range(len(bars))], [label for label, _, _ in bars])
    axes.set_xscale("log")
    axes.set_xlim(1e4, max(num_bytes for _, num_bytes, _ in bars) * 6)
    axes.set_xlabel("bytes, both directions (logarithmic)")
    return _svg(figure)


def timeline_chart(timeline: Timeline) -> str:
    """Who was there, and who was in which merge."""
    names = sorted(timeline.presence)
    figure, axes = _axes(7.6, 0.55 * len(names) + 1.3)
    start = timeline.initialised_at or 0.0
    for row, name in enumerate(names):
        for begin, end in timeline.presence[name]:
            stop = timeline.ended_at if end is None else end
            axes.barh(-row, stop - begin, left=begin - start, height=0.5, color="#dbeafe")
        merges = [merge.t - start for merge in timeline.merges if name in merge.contributors]
        axes.plot(merges, [-row] * len(merges), "|", color=GLOBAL, markersize=13, markeredgewidth=1.2)
        for eviction in timeline.evictions:
            if eviction.learner == name:
                axes.plot(eviction.t - start, -row, "x", color=KILL, markersize=9, markeredgewidth=2.5)
        for begin, _ in timeline.presence[name][1:]:
            axes.plot(begin - start, -row, ">", color="#16a34a", markersize=8)
    for restart in timeline.syncer_starts[1:]:
        axes.axvline(restart - start, color=KILL, linewidth=1, linestyle=":")
    axes.set_yticks([-row for row in range(len(names))], names)
    axes.set_ylim(-len(names) + 0.4, 0.6)
    axes.set_xlabel("seconds since the run was initialised")
    return _svg(figure)


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
