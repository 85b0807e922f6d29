"""Pictures of advice: hours and utilisation of each method, the recommended one marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from diloco.planning.advice import standing
from diloco.planning.outcomes import Case, Outcome
from diloco.planning.palette import METHODS
from diloco.planning.picture_axes import Axis
from diloco.planning.pictures import Bars, Picture, bars
from diloco.planning.units import SIZE, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAR = 20
"""Hours that differ by more than this factor are drawn on a logarithmic axis."""

Ranked = Sequence[tuple[int, Outcome]]


def mark(rank: int, choose: int) -> str:
    """What a rank is besides: the one that is recommended, the one that --choose takes instead, or nothing."""
    return "recommended" if rank == 1 else "chosen" if rank == choose else ""


def numbers(case: Case, outcome: Outcome, no_price: str) -> tuple[str, ...]:
    """Utilisation, hours, bytes, money and loss, for a table."""
    percent = outcome.penalty.percent
    return (
        f"{100 * case.utilization(outcome):.1f} %", significant(outcome.hours), SIZE.show(outcome.total_bytes),
        no_price if outcome.usd is None else f"{outcome.usd:,.0f}",
        "unknown" if percent is None else f"{percent:+.1f} %",
    )  # fmt: skip


def pictures(case: Case, shown: Ranked, choose: int) -> list[Picture]:
    """Hours and utilisation of the ranks that are shown."""
    labels, names = [], []
    for rank, each in shown:
        status, role = standing(case, each), mark(rank, choose)
        notes = [role] * bool(role) + [f"loss {status}"] * (status != "allowed")
        title = ": ".join([each.setting.title, *([", ".join(notes)] if notes else [])])
        labels.append(f"{title}\n{each.setting.detail}")
        names.append(f"{each.setting.label}{f' ({role})' if role else ''}")
    marked = [row for row, (rank, _) in enumerate(shown) if mark(rank, choose)]
    rows = [(name, *numbers(case, each, no_price="")) for name, (_, each) in zip(names, shown, strict=True)]
    hours = [each.hours for _, each in shown]
    percents = [100 * case.utilization(each) for _, each in shown]
    colours = [METHODS[each.setting.method] for _, each in shown]
    far = max(hours) > FAR * min(hours)
    hours_axis = Axis("hours until the tokens are trained", log=far, low=None if far else 0.0)
    busy_axis = Axis("computing, % of the time of all accelerators", low=0.0, high=100.0)
    heads = ("method", "computing", "hours", "bytes in all", "USD", "loss")
    text = (
        "The best setting of each method: first those whose loss penalty is allowed, then those whose penalty is not, "
        f"then those whose penalty is not known. In bold: the recommended one{', and the chosen' * (choose > 1)}."
    )

    def drawn(series: Bars, axis: Axis) -> Callable[[float], Figure]:
        return partial(bars, labels, [series], axis, marked=marked)

    return [
        Picture("hours", "Hours", text, drawn(Bars("hours", hours, colours), hours_axis), heads, rows),
        Picture(
            "computing", "Utilisation", "What part of the time the accelerators compute.",
            drawn(Bars("computing", percents, colours, "{:.1f} %".format), busy_axis), heads[:2],
            [row[:2] for row in rows],
        ),
    ]  # fmt: skip
