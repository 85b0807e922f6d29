"""Rows of predictions and measurements, what they come to, and how they are shown: a table, a picture, the page
dev/shaped-links.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from studies.pages import filled
from studies.shaped_links.cases import SYNC_EVERY

NAME = "shaped_links"
RESULTS = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[2] / "dev" / "shaped-links.md"

MEDIAN_LIMIT, WORST_LIMIT = 0.10, 0.25
"""What is accepted."""


def beside(predicted: float, measured: float) -> dict[str, float]:
    """A prediction, a measurement, and the prediction's error as a part of what was measured."""
    return {"predicted": predicted, "measured": measured, "error": (predicted - measured) / measured}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and worst of all errors, and whether both are accepted."""
    errors = [abs(row["error"]) for row in rows]
    found = {"cells": len(errors), "median_error": median(errors), "worst_error": max(errors)}
    return {**found, "accepted": found["median_error"] < MEDIAN_LIMIT and found["worst_error"] < WORST_LIMIT}


def cells_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a cell."""
    lines = ["| | Mbit/s | | predicted | measured | error |", "|---|---:|---|---:|---:|---:|"]
    last = ""
    for row in rows:
        name, last = ("" if row["method"] == last else row["method"]), row["method"]
        unit = "steps between merges" if row["judged"] == "period_steps" else "utilisation"
        digits = 1 if row["judged"] == "period_steps" else 3
        values = [f"{row[kind]:.{digits}f}" for kind in ("predicted", "measured")]
        lines.append(f"| {name} | {_mbit(row)} | {unit} | {' | '.join(values)} | {100 * row['error']:+.1f} % |")
    return "\n".join(lines)


def in_turns_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Called rounds with K = 1: two predictions, and the measurement."""
    lines = ["| Mbit/s | predicted, equal links | predicted, links 1 % apart | measured |", "|---:|---:|---:|---:|"]
    for row in rows:
        values = [f"{row[kind]:.1f}" for kind in ("predicted", "predicted_uneven", "measured")]
        lines.append(f"| {_mbit(row)} | {' | '.join(values)} |")
    return "\n".join(lines)


def equals_table(values: Mapping[str, Any]) -> str:
    """Utilisation of learners that reduce among themselves, and of a syncer's learners, by rate."""
    equals = [*values["collective"], *values["torchft"]]
    found = {
        **{name: [row for row in values["rows"] if row["method"] == name] for name in _methods(values["rows"])},
        "A process group, streaming, fp32": values["collective"],
        "torchft 0.2.0, streaming, fp32": values["torchft"],
        "the plan for both, among equals": [{**row, "utilization": row["predicted"]} for row in equals],
    }
    rates = sorted({row["bit_per_s"] for row in equals})
    lines = [
        f"| utilisation | {' | '.join(f'{rate / 1e6:g} Mbit/s' for rate in rates)} |",
        "|---|" + "---:|" * len(rates),
    ]
    for name, rows in found.items():
        by_rate = {row["bit_per_s"]: f"{row['utilization']:.2f}" for row in rows}
        lines.append(f"| {name} | {' | '.join(by_rate.get(rate, '') for rate in rates)} |")
    return "\n".join(lines)


def told_table(values: Mapping[str, Any]) -> str:
    """What the planner was told besides the rate."""
    lines = ["| | bytes of a fragment | seconds of a round on the syncer | latency, ms |", "|---|---:|---:|---:|"]
    for name, told in values["told"].items():
        lines.append(f"| {name} | {told['fragment_bytes']:,} | {told['merge_s']:.3f} | {1e3 * told['latency_s']:.2f} |")
    return "\n".join(lines)


def sentence(values: Mapping[str, Any]) -> str:
    """How it came out."""
    it, machine = values["summary"], values["machine"]
    priority = "real-time priority, " if machine["real_time"] else ""
    verdict = "within" if it["accepted"] else "**not** within"
    return (
        f"{it['cells']} cells: median error {100 * it['median_error']:.1f} %, worst {100 * it['worst_error']:.1f} %; "
        f"{verdict} what was asked for, 10 and 25 %. {machine['cpu']}, {machine['cores']} cores, Linux "
        f"{machine['kernel']}, TCP {machine['tcp']}; {priority}load {machine['load']} at the beginning, "
        f"{machine['load_after']} at the end; {values['seconds']:.0f} s in all; {values['date']}."
    )


def tables(values: Mapping[str, Any]) -> dict[str, str]:
    """Those for which something was run, by their names in the page."""
    found = {"told": told_table(values)}
    if values["rows"]:
        found = {"outcome": sentence(values), "cells": cells_table(values["rows"]), **found}
    if values["in_turns"]:
        found["in-turns"] = in_turns_table(values["in_turns"])
    if values["collective"] or values["torchft"]:
        found["equals"] = equals_table(values)
    return found


def markdown(values: Mapping[str, Any]) -> str:
    """The study's own file."""
    return "\n\n".join(["## shaped links", *tables(values).values()]) + "\n"


def results() -> dict[str, Any]:
    """What was measured last."""
    values: dict[str, Any] = json.loads((RESULTS / f"{NAME}.json").read_text())
    return values


def write(values: Mapping[str, Any]) -> None:
    """JSON, table, picture, page."""
    (RESULTS / f"{NAME}.json").write_text(json.dumps(values, indent=1) + "\n")
    show(values)


def show(values: Mapping[str, Any]) -> None:
    """Table, picture and page, from what the JSON file holds."""
    (RESULTS / f"{NAME}.md").write_text(markdown(values))
    _draw(values)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables(values)), encoding="utf-8")


def _draw(values: Mapping[str, Any]) -> None:
    """Lines are predictions, points are measurements; of called rounds the pace, H ÷ the steps between two merges."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(7.6, 3.9), layout="constrained")
    axes = figure.add_subplot()
    for index, name in enumerate(_methods(values["rows"])):
        rows = [row for row in values["rows"] if row["method"] == name]
        x = [row["bit_per_s"] / 1e6 for row in rows]
        label = f"{name}: pace" if rows[0]["judged"] == "period_steps" else name
        axes.plot(x, [_drawn(row, "predicted") for row in rows], label=label, color=f"C{index}")
        axes.plot(x, [_drawn(row, "measured") for row in rows], "o", color=f"C{index}")
    equals = sorted([*values["collective"], *values["torchft"]], key=lambda row: row["bit_per_s"])
    x = [row["bit_per_s"] / 1e6 for row in equals]
    axes.plot(x, [row["predicted"] for row in equals], ":", color="grey", label="among equals")
    axes.plot(x, [row["measured"] for row in equals], "o", color="grey", label="measured")
    axes.set(xlabel="link, Mbit/s", xscale="log", ylabel="utilisation", ylim=(0.0, 1.05))
    axes.xaxis.set(major_locator=FixedLocator(sorted({row["bit_per_s"] / 1e6 for row in [*values["rows"], *equals]})))
    axes.xaxis.set(minor_locator=NullLocator(), major_formatter="{x:g}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
    figure.suptitle("Predicted (lines) and measured (points)", x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.savefig(RESULTS / f"{NAME}.png", dpi=110)


def _methods(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _drawn(row: Mapping[str, Any], kind: str) -> float:
    value: float = row[kind]
    return min(1.0, SYNC_EVERY / value) if row["judged"] == "period_steps" else value


def _mbit(row: Mapping[str, Any]) -> str:
    return f"{row['bit_per_s'] / 1e6:g}"
