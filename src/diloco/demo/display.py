"""What a person sees while the demo runs: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from diloco.demo.accounting import Timeline

LINE_EVERY_S = 2.0


class Display:
    """`say(phase, timeline)` as often as one likes; a phase is a few words."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._console = Console(stderr=to_stderr)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._started = self._last_line = time.monotonic()
        self._last_phase = ""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, phase: str, timeline: Timeline | None) -> None:
        now = time.monotonic()
        if self._live is not None:
            self._live.update(_panel(phase, timeline, now - self._started))
        elif now - self._last_line >= LINE_EVERY_S or phase.startswith("kill"):
            self._last_line = now
            self._console.print(
                f"[{now - self._started:5.0f} s] {phase}{_numbers(timeline)}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def _numbers(timeline: Timeline | None) -> str:
    if timeline is None:
        return ""
    steps = ", ".join(
        f"{name} step {steps[-1].step} loss {steps[-1].loss:.2f}" for name, steps in timeline.steps.items() if steps
    )
    num_bytes = sum(timeline.traffic.values())
    return f"; {steps}; {len(timeline.merges)} merges, {num_bytes / 1e6:.1f} MB" if steps else ""


def _panel(phase: str, timeline: Timeline | None, elapsed_s: float) -> Group:
    title = Text(f"{elapsed_s:4.0f} s  {phase}", style="bold")
    if timeline is None:
        return Group(title)
    table = Table("learner", "state", "step", "loss", "tokens/s", "in the newest merge")
    live = timeline.live_learners()
    for name, steps in timeline.steps.items():
        if steps:
            state = "in the run" if name in live else "gone" if name in timeline.presence else "not in the run yet"
            merged = "yes" if timeline.is_merging(name) else ""
            table.add_row(
                name, state, str(steps[-1].step), f"{steps[-1].loss:.3f}", f"{steps[-1].tokens_per_s:,.0f}", merged
            )
    num_bytes = sum(timeline.traffic.values())
    return Group(title, table, Text(f"{len(timeline.merges)} merges, {num_bytes / 1e6:.2f} MB on the wire"))
