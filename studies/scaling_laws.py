"""The published losses beside the published fits. Writes tables of studies/published.md.

python -m studies.scaling_laws
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from diloco.planning.penalty import LOSSES
from diloco.planning.scaling_laws import DATA_PARALLEL_LOSS, LEARNERS, LOSS
from diloco.planning.training_time import NETWORKS, TrainingPlan, wall_clock
from studies.pages import filled

PAGE = Path(__file__).parent / "published.md"
SIZES = [(size, row) for size, row in LOSSES.items() if size != min(LOSSES)]  # that one is this project's own


def residuals() -> Iterator[tuple[float, int | None, float, float]]:
    """Parameters, learners (None: data parallel), the loss as measured, and as fitted."""
    for size, row in SIZES:
        yield size, None, row[0], DATA_PARALLEL_LOSS(size)
        for learners, measured in zip(LEARNERS, row[1:], strict=True):
            yield size, learners, measured, LOSS(size, learners)


def losses_table() -> str:
    """Measured, fitted."""
    lines = ["| loss | | data parallel | M = 1 | M = 2 | M = 4 | M = 8 |", "|---|---|" + "---:|" * 5]
    for size, row in SIZES:
        fits = [fitted for each, _, _, fitted in residuals() if each == size]
        name = f"{size / 1e6:.0f}M" if size < 1e9 else f"{size / 1e9:g}B"
        lines.append(f"| {name} | measured | {' | '.join(f'{loss:.3f}' for loss in row)} |")
        lines.append(f"|  | by the fit | {' | '.join(f'{loss:.3f}' for loss in fits)} |")
        lines.append(
            f"|  | fit above, % | {' | '.join(f'{100 * (a / b - 1):+.1f}' for a, b in zip(fits, row, strict=True))} |"
        )
    return "\n".join(lines)


def hours_table() -> str:
    """A model of 10 billion parameters on 200 billion tokens and 2,048 chips."""
    lines = ["| network across sites | data parallel, h | M = 2, h | M = 4, h | M = 8, h |", "|---|" + "---:|" * 4]
    for name, link in NETWORKS.items():
        clocks = [wall_clock(TrainingPlan(10e9, 200e9, 4e6, 2048, learners, across=link)) for learners in LEARNERS]
        label = f"{name}: {link.bit_per_s / 1e9:g} Gbit/s, {link.latency_s * 1e3:g} ms"
        lines.append(f"| {label} | {' | '.join(f'{clock.total_s / 3600:.1f}' for clock in clocks)} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """All of them, by their names in the page."""
    return {"losses": losses_table(), "hours": hours_table()}


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
