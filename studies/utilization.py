"""The papers' tables of bandwidth for a compute utilisation, beside what the planner says. Writes tables of
studies/published.md.

python -m studies.utilization
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diloco.planning.bandwidth import GraphLinkModel, required_bit_per_s
from diloco.planning.published_tables import published_run
from diloco.planning.units import significant
from studies.pages import filled
from studies.published import TABLE_4, TABLE_5, TABLE_6, TARGETS, Row

PAGE = Path(__file__).parent / "published.md"


def same_convention(row: Row) -> list[str]:
    """The cells of a row by the paper's convention."""
    run = published_run(row.convention, row.model, row.method, **row.options)  # type: ignore[arg-type]
    return [cell.text for cell in run.cells([target / 100 for target in TARGETS])]


def steady(row: Row) -> list[float]:
    """What the same model and setting need in a long run, Gbit/s."""
    run = published_run(row.convention, row.model, row.method, **row.options)  # type: ignore[arg-type]
    rates = required_bit_per_s(GraphLinkModel(run.workload, run.setting), [target / 100 for target in TARGETS])
    return [rate / 1e9 for rate in rates]


def table(rows: Sequence[Row]) -> str:
    """Three lines a row: as printed, by the same convention, steady."""
    lines = [
        f"| | Gbit/s for | {' | '.join(f'{target} %' for target in TARGETS)} |",
        "|---|---|" + "---:|" * len(TARGETS),
    ]
    for row in rows:
        lines.append(_line(row.title, "printed", row.cells))
        lines.append(_line("", "ours, their convention", same_convention(row)))
        lines.append(_line("", "ours, steady", [significant(value) for value in steady(row)]))
    return "\n".join(lines)


def _line(title: str, what: str, cells: Sequence[str]) -> str:
    return f"| {title} | {what} | {' | '.join(cells)} |"


GROUPS = {
    "data parallel": lambda row: row.method == "data-parallel",
    "DiLoCo": lambda row: row.method == "diloco",
    "Streaming, H = 100": lambda row: row.method == "streaming" and row.options["sync_every"] == 100,
    "Streaming, H = 30": lambda row: row.method == "streaming" and row.options["sync_every"] == 30,
    "eager, H = 100": lambda row: row.method == "eager" and row.options["sync_every"] == 100,
    "eager, H = 30": lambda row: row.method == "eager" and row.options["sync_every"] == 30,
}


def factors() -> str:
    """What a steady run needs, divided by what is printed: the least and the most of each group of rows."""
    lines = ["| | steady ÷ printed | in the mean |", "|---|---:|---:|"]
    for title, belongs in GROUPS.items():
        ratios = [
            value / float(cell)
            for row in (*TABLE_4, *TABLE_5, *TABLE_6)
            if belongs(row)
            for value, cell in zip(steady(row), row.cells, strict=True)
            if not cell.endswith("+")
        ]
        lines.append(f"| {title} | {min(ratios):.2f} to {max(ratios):.2f} | {sum(ratios) / len(ratios):.2f} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """All of them, by their names in the page."""
    return {"streaming": table(TABLE_4), "eager": table(TABLE_5), "scaling-laws": table(TABLE_6), "factors": factors()}


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
