"""The display of a running demo: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.demo.accounting import back_after_s
from diloco.demo.story import STARTING, DemoState
from diloco.report.timeline import Kill, Timeline, is_learner

LINE_EVERY_S = 60.0
"""In a pipe, while a phase lasts."""

TRAINING = ("warming up", "in the run", "training alone")
STYLES = {"killed": "bold red", "coming back": "yellow", "in the run": "green", "serving": "green", "done": "dim"}


class Display:
    """Shows a demo: call `show(state)` as often as wanted. A context manager; on standard error where asked."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._console = Console(stderr=to_stderr)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._started = self._last_line = time.monotonic()
        self._last_phase = self._page_url = ""
        self._num_kills = 0
        self._away: list[Kill] = []

    def __enter__(self) -> Self:
        self._last_phase = STARTING
        self.say(STARTING)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, state: DemoState) -> None:
        """In a terminal what happens now; elsewhere a line for each phase, and one a minute while it lasts."""
        if self._page_url != state.page_url:
            self._page_url = state.page_url
            self.say(f"watch the run at {state.page_url} as soon as its syncer has started")
        if self._live is not None:
            self._live.update(_panel(state, time.monotonic() - self._started))
            return
        self._say_kills(state.timeline)
        if state.phase != self._last_phase or time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_phase = state.phase
            self.say("; ".join([state.phase, *_news(state)]))

    def _say_kills(self, timeline: Timeline) -> None:
        new = timeline.kills[self._num_kills :]
        self._num_kills = len(timeline.kills)
        for kill in new:
            self.say(f"{kill.name} was killed; it is started again")
        self._away += new
        for kill in list(self._away):
            if (seconds := back_after_s(timeline, kill)) is not None:
                self._away.remove(kill)
                self.say(f"{kill.name} works again, {seconds:.1f} s after it was killed")

    def say(self, text: str) -> None:
        """Print a line with the time."""
        self._last_line = time.monotonic()
        line = f"[{self._last_line - self._started:5.1f} s] {text}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _news(state: DemoState) -> list[str]:
    """The numbers of one line: of the processes that train, in order."""
    timeline = state.timeline
    running = [name for name, doing in state.states.items() if doing in TRAINING and timeline.newest_step(name)]
    if not running:
        return []
    steps = "/".join(str(timeline.newest_step(name)) for name in running)
    losses = "/".join(f"{timeline.steps[name][-1].loss:.2f}" for name in running)
    news = [f"step {steps}", f"loss {losses}"]
    evaluated = timeline.evaluated.get(running[0])
    if evaluated:
        news.append(f"held out {evaluated[-1].loss:.3f}")
    return [*news, _wire(timeline)] if is_learner(running[0]) and timeline.merges else news


def _wire(timeline: Timeline) -> str:
    return f"{len(timeline.merges)} merges, {sum(timeline.traffic.values()) / 1e6:.1f} MB on the wire"


def _panel(state: DemoState, elapsed_s: float) -> Group:
    timeline = state.timeline
    table = Table("process", "state", "step", "", "loss", "held out", "tokens/s", "merged", box=None, pad_edge=False)
    for name, doing in state.states.items():
        if name == "syncer":
            table.add_row(name, Text(doing, style=STYLES.get(doing, "")))
            continue
        step, steps, evaluated = timeline.newest_step(name), timeline.steps.get(name), timeline.evaluated.get(name)
        table.add_row(
            name,
            Text(doing, style=STYLES.get(doing, "")),
            str(step),
            ProgressBar(total=state.plan.steps, completed=min(step, state.plan.steps), width=24),
            f"{steps[-1].loss:.3f}" if steps else "",
            f"{evaluated[-1].loss:.3f}" if evaluated else "",
            f"{steps[-1].tokens_per_s:,.0f}" if steps and doing != "done" else "",
            "yes" if is_learner(name) and timeline.is_merging(name) else "",
        )
    title = Text(f"{elapsed_s:4.0f} s  {state.phase}", style="bold")
    kills = ", ".join(f"{kill.name}" for kill in timeline.kills)
    footer = Text(_wire(timeline) + (f"; killed and started again: {kills}" if kills else ""), style="dim")
    return Group(title, table, footer)
