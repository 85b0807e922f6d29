"""The published goodput table beside the planner's formula and its simulation. Writes tables of studies/published.md.

python -m studies.goodput
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import get_args

from diloco.planning.goodput import Fleet, Goodput, LearnerSpeeds, Mode, simulate
from studies.pages import filled

PAGE = Path(__file__).parent / "published.md"

CHIPS = (150_000, 600_000, 1_200_000, 2_400_000)
PUBLISHED: dict[tuple[Mode, int], tuple[int, ...]] = {
    ("data-parallel", 1): (72, 38, 27, 18),
    ("elastic", 1): (88, 69, 58, 40),
    ("decoupled", 2): (94, 80, 70, 54),
    ("decoupled", 8): (98, 94, 88, 80),
}
"""Decoupled DiLoCo, arXiv 2604.21428: percent, by mode and learners, for these numbers of chips, one failure per chip
and year."""

SPEEDS = (1.0,) * 6 + (0.68,) * 2


def cells() -> Iterator[tuple[Fleet, int]]:
    """Every published cell: the fleet, with the planner's default times, and the percentage."""
    for (mode, learners), row in PUBLISHED.items():
        for chips, percent in zip(CHIPS, row, strict=True):
            yield Fleet(chips, learners, mode), percent


def published_table() -> str:
    """Three lines a row."""
    lines = [
        f"| goodput, % | | {' | '.join(f'{chips:,} chips' for chips in CHIPS)} |",
        "|---|---|" + "---:|" * len(CHIPS),
    ]
    for (mode, learners), row in PUBLISHED.items():
        found = [simulate(Fleet(chips, learners, mode)) for chips in CHIPS]
        name = {"data-parallel": "data parallel", "elastic": "elastic data parallel"}.get(
            mode, f"decoupled, M = {learners}"
        )
        lines.append(_line(name, "published", [str(percent) for percent in row]))
        lines.append(_line("", "formula", [f"{it.closed_form:.1f}" for it in found]))
        lines.append(_line("", "simulated", [f"{it.goodput:.1f} ± {_half(it):.1f}" for it in found]))
    return "\n".join(lines)


def distances_table() -> str:
    """How far apart the three are, over all cells."""
    found = [(simulate(fleet), percent) for fleet, percent in cells()]
    pairs = {
        "formula and published": [abs((it.closed_form or 0) - percent) for it, percent in found],
        "simulation and published": [abs(it.goodput - percent) for it, percent in found],
        "formula and simulation": [abs((it.closed_form or 0) - it.goodput) for it, _ in found],
    }
    lines = ["| points between | most | in the mean |", "|---|---:|---:|"]
    return "\n".join([*lines, *(f"| {name} | {max(each):.2f} | {fmean(each):.2f} |" for name, each in pairs.items())])


def speeds_table() -> str:
    """Eight learners, two of them slower: how long learners wait."""
    names: dict[Mode, str] = {"data-parallel": "data parallel", "elastic": "elastic data parallel"}
    lines = ["| | goodput, % | waiting, % | stopped, % |", "|---|---:|---:|---:|"]
    for mode in get_args(Mode):
        it = simulate(Fleet(1_200_000, 8, mode, speeds=LearnerSpeeds(0.05, SPEEDS)))
        lines.append(
            f"| {names.get(mode, mode)} | {it.goodput:.1f} ± {_half(it):.1f} | {it.waiting:.1f} | {it.stopped:.1f} |"
        )
    return "\n".join(lines)


def _half(it: Goodput) -> float:
    return (it.interval[1] - it.interval[0]) / 2


def _line(title: str, what: str, values: list[str]) -> str:
    return f"| {title} | {what} | {' | '.join(values)} |"


def tables() -> dict[str, str]:
    """All of them, by their names in the page."""
    return {"published": published_table(), "distances": distances_table(), "speeds": speeds_table()}


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
