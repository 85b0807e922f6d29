"""The demo in one sentence, from its numbers (`summary.json`), whatever they are."""

from __future__ import annotations

import math
from typing import Any

from diloco.report.timeline import is_learner

SAME_PERCENT = 2.0
"""Losses that differ by less are called the same, within what they differ by."""


def headline(summary: dict[str, Any]) -> str:
    """For instance "49 times fewer bytes, same loss within 0.4 %, one learner killed and back in 5.2 s"."""
    parts = (
        _bytes(summary["wire_bytes"], summary["baseline_wire_bytes"]),
        _loss(summary["loss_gap_percent"]),
        _kills(summary["kills"]),
    )
    return ", ".join(parts)


def _bytes(num_bytes: int, baseline: int) -> str:
    if not num_bytes:
        return "bytes not counted"
    ratio = baseline / num_bytes
    if round(ratio, 1) == 1.0:
        return "as many bytes"
    if ratio < 1:
        return f"{_times(1 / ratio)} times more bytes" if ratio else "more bytes than data parallel, which needed none"
    return f"{_times(ratio)} times fewer bytes"


def _times(ratio: float) -> str:
    """A ratio with as many digits as are of use."""
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:,.0f}"


def _loss(gap_percent: float) -> str:
    if not math.isfinite(gap_percent):
        return "a loss that is no number"
    if abs(gap_percent) < SAME_PERCENT:
        within = math.ceil(round(10 * abs(gap_percent), 6)) / 10
        return f"same loss within {max(0.1, within):.1f} %"
    return f"loss {abs(gap_percent):.1f} % {'worse' if gap_percent > 0 else 'better'}"


def _kills(kills: list[dict[str, Any]]) -> str:
    """`kills`: name of the process and seconds until it was back, or None, of each."""
    if not kills:
        return "no process killed"
    back_s = [kill["back_s"] for kill in kills if kill["back_s"] is not None]
    slowest = f"{max(back_s):.1f} s" if back_s else ""
    if len(kills) == 1:
        name = kills[0]["name"]
        who = "one learner" if is_learner(name) else "the syncer" if name == "syncer" else "a control"
        return f"{who} killed and back in {slowest}" if back_s else f"{who} killed and not back before the end"
    if len(back_s) < len(kills):
        return f"{len(kills)} kills, {len(back_s)} of them with a return"
    return f"{len(kills)} kills and all back, the slowest in {slowest}"
