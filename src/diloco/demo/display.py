"""The display of a running demo: lines, progress bars in a terminal, and pages in a browser."""

from __future__ import annotations

import sys
import time
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID

from diloco.demo.processes import DemoProcesses, Kill
from diloco.demo.summary import recovery
from diloco.report.timeline import Timeline

LINE_EVERY_S = 60.0
"""Interval of lines during a phase, if standard output is not a terminal."""


class Display:
    """Prints a line for each phase and each kill; a terminal also shows progress bars, a pipe a line each minute.

    Arguments:
        num_steps: steps of the run.
        page_urls: addresses of the run's live page, by syncer.
        opens: open that page in a browser.
    """

    def __init__(self, num_steps: int, page_urls: Mapping[str, str], *, opens: bool, to_stderr: bool) -> None:
        self._num_steps, self._page_urls, self._opens = num_steps, page_urls, opens
        self._console = Console(stderr=to_stderr)
        columns = ("{task.description}", BarColumn(20), MofNCompleteColumn(), "{task.fields[doing]}")
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._bars: dict[str, TaskID] = {}
        self._started = self._last_line = time.monotonic()
        self._phase = ""
        self._serving = ""
        self._num_kills = 0
        self._down: list[Kill] = []

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line with the elapsed time."""
        self._last_line = time.monotonic()
        line = f"[{self._last_line - self._started:5.1f} s] {text}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def show(self, phase: str, timeline: Timeline, family: DemoProcesses) -> None:
        """Update the display; call it often."""
        self.report_kills(family.kills, lambda kill: recovery(timeline, kill), timeline.serving)
        if timeline.serving:
            self.page_of(timeline.serving)
        steps = {name: timeline.newest_step(name) for name in timeline.steps}
        bars = {name: (step, _doing(name, timeline, family)) for name, step in steps.items()}
        bars = {"syncer": (timeline.step, _doing("syncer", timeline, family)), **bars}
        self.advance(phase, _progress(timeline, family), bars)

    def page_of(self, syncer: str) -> None:
        """Name the page of the syncer that serves the run, and open it, unless that was the last one."""
        if syncer != self._serving:
            self._serving = syncer
            url = self._page_urls[self._serving]
            self.say(f"watch the run at {url}")
            if self._opens and not open_page(url):
                self.say("found no browser; open the page yourself")

    def advance(self, phase: str, numbers: Sequence[str], bars: Mapping[str, tuple[int, str]]) -> None:
        """Print a line if one is due, and update the bars. `bars`: by name, the step, and what is done there."""
        is_silent = not self._console.is_terminal and time.monotonic() - self._last_line >= LINE_EVERY_S
        if phase != self._phase or is_silent:
            self._phase = phase
            self.say("; ".join([phase, *numbers]))
        for name, (step, doing) in bars.items():
            if name not in self._bars:
                self._bars[name] = self._progress.add_task(name, total=self._num_steps, doing="")
            self._progress.update(self._bars[name], completed=step, doing=doing)

    def report_kills(
        self, kills: Sequence[Kill], find: Callable[[Kill], tuple[float | None, str]], serving: str = ""
    ) -> None:  # fmt: skip
        """Print a line for each new kill, and one when the work went on. `find`: as `recovery`."""
        for kill in kills[self._num_kills :]:
            is_shared = kill.name == serving and len(self._page_urls) > 1
            self.say(f"{kill.name} was killed; {'its standby takes over' if is_shared else 'it will be restarted'}")
            self._down.append(kill)
        self._num_kills = len(kills)
        for kill in list(self._down):
            seconds, by = find(kill)
            if seconds is not None:
                self._down.remove(kill)
                how = "again" if by == kill.name else f"in the place of {kill.name}"
                self.say(f"{by} works {how}, {seconds:.1f} s after the kill")


def _progress(timeline: Timeline, family: DemoProcesses) -> list[str]:
    """Steps and losses of the training processes, in order, and the bytes on the wire."""
    training = [name for name in timeline.steps if name in family.children and not family.children[name].done]
    if not training:
        return []
    steps = "/".join(str(timeline.newest_step(name)) for name in training)
    losses = "/".join(f"{timeline.steps[name][-1].loss:.2f}" for name in training)
    numbers = [f"step {steps}", f"loss {losses}"]
    return [*numbers, _wire(timeline)] if timeline.merges else numbers


def _wire(timeline: Timeline) -> str:
    return f"{len(timeline.merges)} merges, {sum(timeline.traffic.ways()) / 1e6:.1f} MB on the wire"


def _doing(name: str, timeline: Timeline, family: DemoProcesses) -> str:
    child = family.children.get(timeline.serving if name == "syncer" else name)
    if child is not None and child.restart_at is not None:
        return "[bold red]killed[/]"
    return _wire(timeline) if name == "syncer" else f"loss {timeline.steps[name][-1].loss:.3f}"


def is_wanted(environ: Mapping[str, str], *, is_terminal: bool, platform: str = sys.platform) -> bool:
    """Whether to open a browser by default: in a terminal with a display, and not in CI."""
    has_display = platform in ("darwin", "win32") or any(environ.get(it) for it in ("DISPLAY", "WAYLAND_DISPLAY"))
    return is_terminal and has_display and environ.get("CI", "false") in ("", "0", "false")


def open_page(url: str) -> bool:
    """Open a page in a browser of its own process; False: there is none.

    Text browsers are not used: they would draw in this terminal.
    """
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    is_textual = type(browser) in (webbrowser.GenericBrowser, webbrowser.Elinks)
    return not is_textual and browser.open(url)
