"""A run in memory, from its events: presence of learners, merges, losses, bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco import events as ev
from diloco.event_log import EventTail

Span = tuple[float, float | None]


@dataclass
class Timeline:
    """The events of one run. Times are Unix seconds; bytes are the syncer's counts of its messages.

    Attributes:
        presence: by learner, the periods in which it was a member; the last one is open while it is a member.
        steps, evaluated: by process (learners, baseline, isolated), in the order of writing.
        waits: by process, the periods in which the training thread waited.
        syncer_starts: of every syncer process, and its event log.
        takeovers: of a run in a bucket, when a syncer began to serve, and its event log.
        finished: by process, its newest `Finished` event.
        tokens: largest number of trained tokens that a progress event of the syncer names.
        missing: number of events that could not be written, over all processes.
        as_of: Unix time of the moment at which the run is looked at; None: all events are taken.
    """

    initialised_at: float | None = None
    initialiser: str = ""
    initial_tokens: int = 0
    num_parameters: int = 0
    ended_at: float = 0.0
    merges: list[ev.Merged] = field(default_factory=list)
    presence: dict[str, list[Span]] = field(default_factory=dict)
    evictions: list[ev.Evicted] = field(default_factory=list)
    syncer_starts: list[tuple[float, str]] = field(default_factory=list)
    takeovers: list[tuple[float, str]] = field(default_factory=list)
    run: str = ""
    method: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, list[ev.Stepped]] = field(default_factory=dict)
    evaluated: dict[str, list[ev.Evaluated]] = field(default_factory=dict)
    waits: dict[str, list[ev.Waited]] = field(default_factory=dict)
    finished: dict[str, ev.Finished] = field(default_factory=dict)
    tokens: int = 0
    missing: int = 0
    as_of: float | None = None
    _incarnations: dict[str, int] = field(default_factory=dict)
    traffic: ev.TrafficTotals = field(default_factory=ev.TrafficTotals)

    def includes(self, event: ev.Event) -> bool:
        """Whether an event belongs to the run at `as_of`: those of controls and admins' orders do at any time."""
        is_of_run = event.who in ("syncer", *self.presence) and not isinstance(event, ev.Steered)
        return self.as_of is None or event.t <= self.as_of or not is_of_run

    def take(self, event: ev.Event, log: str) -> None:
        """Add one event of an event log."""
        process = event.who
        match event:
            case ev.Gap():
                self.missing += event.missing
            case ev.Stepped():
                self.steps.setdefault(process, []).append(event)
            case ev.Evaluated():
                self.evaluated.setdefault(process, []).append(event)
            case ev.Waited():
                self.waits.setdefault(process, []).append(event)
            case ev.Finished():
                self.finished[process] = event
                self.ended_at = max(self.ended_at, event.t if process == "syncer" else 0.0)
            case _ if process == "syncer":
                self._take_syncers(event, log)

    def _take_syncers(self, event: ev.Event, log: str) -> None:
        if not isinstance(event, ev.Steered):  # which may be later than `as_of`
            self.ended_at = max(self.ended_at, event.t)
        self.traffic.take(event, log)
        match event:
            case ev.SyncerStarted():
                self.run, self.method = event.run, event.method
                self.syncer_starts.append((event.t, log))
            case ev.StandingChanged(standing="serving"):
                self.takeovers.append((event.t, log))
            case ev.Initialised():
                self.initialised_at, self.initial_tokens = event.t, event.tokens
                self.initialiser, self.num_parameters = event.learner, event.num_parameters
            case ev.Joined():
                self._close_span(event.learner, event.t)
                self.presence.setdefault(event.learner, []).append((event.t, None))
                self._incarnations[event.learner] = event.incarnation
            case ev.Left():
                self._close_span(event.learner, event.t)
            case ev.Evicted():
                if event.incarnation >= self._incarnations.get(event.learner, 0):  # not replaced by a newer one
                    self._close_span(event.learner, event.t)
                self.evictions.append(event)
            case ev.Merged():
                self.merges.append(event)
            case ev.Progress():
                self.tokens = max(self.tokens, event.tokens)

    def _close_span(self, learner: str, at: float) -> None:
        """End the learner's open span, if there is one: a killed syncer logs no end."""
        spans = self.presence.get(learner, [])
        if spans and spans[-1][1] is None:
            spans[-1] = (spans[-1][0], at)

    @property
    def serving(self) -> str:
        """The event log of the syncer that served the run last; "": no syncer has started."""
        return max(self.takeovers or self.syncer_starts, default=(0.0, ""))[1]

    @property
    def num_restarts(self) -> int:
        """Of syncers."""
        return len(self.syncer_starts) - len({log for _, log in self.syncer_starts})

    @property
    def step(self) -> int:
        """The furthest step of any learner."""
        return max((self.newest_step(name) for name in self.steps if is_learner(name)), default=0)

    def newest_step(self, process: str) -> int:
        """The step of the newest step event; 0 if there is none."""
        steps = self.steps.get(process)
        return steps[-1].step if steps else 0

    def is_merging(self, learner: str) -> bool:
        """Whether the learner contributed to the newest merge."""
        return bool(self.merges) and learner in self.merges[-1].contributors

    def num_live(self, at: float) -> int:
        """Number of members at a time."""
        return sum(
            any(start <= at and (end is None or at < end) for start, end in spans) for spans in self.presence.values()
        )


class TimelineFollower:
    """Reads the event files under a run's directory as they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tails: dict[str, EventTail] = {}
        self.timeline = Timeline()

    def read(self) -> Timeline:
        """Add new events to the timeline and return it."""
        for path in sorted(self._directory.glob("*/events.jsonl")):
            log = path.parent.name
            for event in self._tails.setdefault(log, EventTail(path)).read():
                self.timeline.take(event, log)
        return self.timeline


def is_learner(process: str) -> bool:
    """Whether a process is a learner of the run, not a control; `process` is the name of its directory."""
    return process.startswith("learner-")
