"""Reports of a part of a run: events for programs, progress for people. Only the first of several ranks reports."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from diloco import events as ev
from diloco.event_log import EventLog
from diloco.tracking.feed import Feed
from diloco.tracking.values import Point, learner_values, trainer_point
from diloco.training.checkpoint import UnusableCheckpoint
from diloco.training.progress import ProgressDisplay, StepStatus
from diloco.training.spec import Clock


class Reporter:
    """Writes the events file at `path`, talks to `progress` and feeds trackers; without a path, it does neither."""

    def __init__(
        self,
        path: Path | None,
        who: str,
        progress: ProgressDisplay,
        clock: Clock | None = None,
        feed: Feed | None = None,
    ) -> None:
        self.who = who
        self._feed = feed if path is not None else None
        self._clock = clock or Clock()
        self._log = None if path is None else EventLog(path, who=who, clock=self._clock.stamp)
        self._progress = progress if path is not None else ProgressDisplay()
        self._last_step = (self._clock.seconds(), 0)
        self._waits = (0.0, 0)

    def append(self, event: ev.Event) -> None:
        """Write an event."""
        if self._log is not None:
            stamped = self._log.append(event)
            if self._feed is not None and (point := trainer_point(stamped)) is not None:
                self._feed.put(point)

    def say(self, text: str) -> None:
        """Tell people one sentence about this part."""
        self._progress.say(f"{self.who} {text}")

    def wants_status(self) -> bool:
        """Whether people are to be shown the state of things now."""
        return self._progress.wants()

    def show(self, status: StepStatus) -> None:
        """Show it."""
        self._progress.show(status)

    def begins(self, tokens: int) -> None:
        """The first step is about to be taken: speed is measured from here on."""
        self._last_step = (self._clock.seconds(), tokens)

    def stepped(self, step: int, *, loss: float, lr: float, tokens: int, gradient_norm: float) -> None:
        """How the inner loop goes, and how fast since the last time."""
        now = self._clock.seconds()
        since, before = self._last_step
        self._last_step = (now, tokens)
        rate = (tokens - before) / max(1e-9, now - since)
        self.append(
            ev.Stepped(step=step, loss=loss, lr=lr, tokens=tokens, tokens_per_s=rate, gradient_norm=gradient_norm)
        )

    def adopted(self, step: int, before: Sequence[tuple[int, str]], after: Sequence[tuple[int, str]]) -> None:
        """Report the fragments that have a new version; `before`, `after`: version and digest of each."""
        for fragment, (old, new) in enumerate(zip(before, after, strict=True)):
            if new != old:
                self.append(ev.Adopted(step=step, fragment=fragment, version=new[0], digest=new[1]))

    def set_aside(self, checkpoint: UnusableCheckpoint) -> None:
        """A checkpoint cannot be used."""
        self.say(f"cannot use its checkpoint: {checkpoint.error}; it is kept as {checkpoint.kept}")
        kept, path = str(checkpoint.kept), str(checkpoint.path)
        self.append(ev.CheckpointUnusable(path=path, kept=kept, error=checkpoint.error))

    def exchanged(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A learner's counters, and how long the training thread stood still since the last time."""
        if self._feed is not None and (values := learner_values(metrics)):
            self._feed.put(Point(step, self._clock.stamp(), values))
        seconds, times = float(metrics.get("blocked_s", 0.0)), int(metrics.get("num_blocked", 0))
        if times > self._waits[1]:
            self.append(ev.Waited(step=step, seconds=seconds - self._waits[0], times=times - self._waits[1]))
        self._waits = (seconds, times)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()
