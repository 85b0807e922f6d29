"""Display of a learner's progress for people: a live line in a terminal, plain lines elsewhere, or nothing."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from diloco.protocol.contribution import NOTHING


def status_line(
    name: str, step: int, loss: float, lr: float, tokens_per_s: float, run_tokens: int, budget: int,
    metrics: Mapping[str, Any], note: str = "",
) -> str:  # fmt: skip
    """The state of a learner after a step, as one line of text.

    Arguments:
        budget: tokens of the whole run.
        metrics: as `Learner.metrics`; empty for a learner that exchanges nothing.
    """
    parts = [
        f"{name} step {step}",
        f"loss {loss:.3f}",
        f"lr {lr:.2e}",
        f"{tokens_per_s:,.0f} tokens/s",
        f"run {run_tokens / budget:.0%} of {budget:,} tokens",
    ]
    if versions := [version for version in metrics.get("versions", ()) if version != NOTHING]:
        low, high = min(versions), max(versions)
        parts.append(f"versions {low}" if low == high else f"versions {low}-{high}")
    num_bytes = Counter[str](metrics.get("num_bytes"))
    sent, received = num_bytes["contributions"], num_bytes["updates"] + num_bytes["joins"]
    if sent or received:
        parts.append(f"up {sent / 1e6:.2f} MB down {received / 1e6:.2f} MB")
    if metrics.get("updates"):  # the share of the merges known to this learner that include its work
        parts.append(f"participation {metrics['merges'] / metrics['updates']:.0%}")
    return " | ".join([*parts, note] if note else parts)


class ProgressDisplay:
    """A display that shows nothing; its subclasses show a line of status every few seconds."""

    def is_due(self) -> bool:
        """Whether to show a status now; computing one may wait for the device."""
        return False

    def show(self, status: str) -> None:
        """Show a status."""

    def say(self, text: str) -> None:
        """Show a sentence that stays visible."""

    def close(self) -> None:
        """Restore the terminal."""


class _PeriodicDisplay(ProgressDisplay):
    """A display that shows a status every `every_s` seconds."""

    def __init__(self, every_s: float, clock: Callable[[], float]) -> None:
        self._every_s, self._clock = every_s, clock
        self._due_at = clock()

    def is_due(self) -> bool:
        if self._clock() < self._due_at:
            return False
        self._due_at = self._clock() + self._every_s
        return True


class LineProgress(_PeriodicDisplay):
    """Plain lines for logs and pipes. Where a full disk refuses a line, it is lost and training continues."""

    def __init__(self, file: TextIO, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(every_s, clock)
        self._file = file

    def show(self, status: str) -> None:
        """Print the status as a line."""
        self.say(status)

    def say(self, text: str) -> None:
        """Print a sentence."""
        with suppress(OSError):
            print(text, file=self._file, flush=True)


class LiveProgress(_PeriodicDisplay):
    """One line of a terminal that is redrawn in place."""

    def __init__(self, console: Console, every_s: float = 0.25, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(every_s, clock)
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def show(self, status: str) -> None:
        """Redraw the line."""
        self._live.update(Text(status), refresh=True)

    def say(self, text: str) -> None:
        """Print a sentence above the line."""
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last status on the screen."""
        self._live.stop()


def make_progress(file: TextIO, every_s: float) -> ProgressDisplay:
    """A live line if `file` is a terminal, plain lines otherwise."""
    return LiveProgress(Console(file=file)) if file.isatty() else LineProgress(file, every_s)
