"""What a run's event files say: who was there, who was in which merge, and how many bytes crossed the sockets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from diloco import events as ev

KINDS = ("contributions", "updates", "joins", "control")


@dataclass
class Timeline:
    """The events of one run, sorted out. Times are Unix seconds."""

    initialised_at: float | None = None
    initial_tokens: int = 0
    num_parameters: int = 0
    merges: list[ev.Merged] = field(default_factory=list)
    presence: dict[str, list[tuple[float, float | None]]] = field(default_factory=dict)
    evictions: list[ev.Evicted] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    steps: dict[str, list[ev.Stepped]] = field(default_factory=dict)
    evaluated: dict[str, list[ev.Evaluated]] = field(default_factory=dict)
    traffic: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    ended_at: float = 0.0

    @property
    def step(self) -> int:
        """The furthest step of any learner."""
        return max(
            (steps[-1].step for name, steps in self.steps.items() if name.startswith("learner") and steps), default=0
        )

    def is_merging(self, learner: str) -> bool:
        """Whether the learner is in the newest merge."""
        return bool(self.merges) and learner in self.merges[-1].contributors

    def live_learners(self) -> list[str]:
        """Learners that joined and neither left nor were given up."""
        return sorted(name for name, spans in self.presence.items() if spans and spans[-1][1] is None)

    def num_live(self, at: float) -> int:
        """Learners that were there at a time."""
        return sum(
            any(start <= at and (end is None or at < end) for start, end in spans) for spans in self.presence.values()
        )


def read_timeline(directory: Path) -> Timeline:
    """Everything under a run's directory."""
    timeline = Timeline()
    syncer = directory / "syncer" / "events.jsonl"
    traffic: dict[str, ev.Traffic] = {}
    for event in ev.read_events(syncer) if syncer.exists() else []:
        timeline.ended_at = event.t
        match event:
            case ev.SyncerStarted():
                _settle_traffic(timeline, traffic)
                if timeline.initialised_at is not None:
                    timeline.restarts.append(event.t)
            case ev.Initialised():
                timeline.initialised_at, timeline.initial_tokens = event.t, event.tokens
                timeline.num_parameters = event.num_parameters
            case ev.Joined():
                timeline.presence.setdefault(event.learner, []).append((event.t, None))
            case ev.Left() | ev.Evicted():
                spans = timeline.presence[event.learner]
                spans[-1] = (spans[-1][0], event.t)
                if isinstance(event, ev.Evicted):
                    timeline.evictions.append(event)
            case ev.Merged():
                timeline.merges.append(event)
            case ev.Traffic():
                traffic[event.learner] = event
            case ev.Finished():
                timeline.tokens = event.tokens
            case _:
                pass
    _settle_traffic(timeline, traffic)
    for path in sorted(directory.glob("*/events.jsonl")):
        if path != syncer:
            found = ev.read_events(path)
            timeline.steps[path.parent.name] = [event for event in found if isinstance(event, ev.Stepped)]
            timeline.evaluated[path.parent.name] = [event for event in found if isinstance(event, ev.Evaluated)]
    return timeline


def _settle_traffic(timeline: Timeline, traffic: dict[str, ev.Traffic]) -> None:
    """Counts are totals of one syncer process: add its last ones when the next process begins."""
    for event in traffic.values():
        for counts in (event.sent_bytes, event.received_bytes):
            for kind, num_bytes in counts.items():
                timeline.traffic[kind] = timeline.traffic.get(kind, 0) + num_bytes
    traffic.clear()


def baseline_bytes(timeline: Timeline, tokens_per_full_step: int) -> int:
    """What data parallel would have sent for the same tokens: a ring all-reduce in bf16 at every step.

    With m learners training, one step costs each of them 2·(m − 1)/m·2·N bytes, 4·(m − 1)·N in all (N parameters). A step is
    `tokens_per_full_step` tokens. m is the number of learners that were there when the tokens were trained; tokens of a lone learner,
    the warm start among them, cost nothing.
    """
    num_bytes = 0.0
    for name, steps in timeline.steps.items():
        if not name.startswith("learner"):
            continue
        before = timeline.initial_tokens if name == "learner-0" else 0
        for event in steps:
            learners = timeline.num_live(event.t)
            trained, before = event.tokens - before, event.tokens
            if learners >= 2 and trained > 0:
                num_bytes += trained / tokens_per_full_step * 4 * (learners - 1) * timeline.num_parameters
    return round(num_bytes)


def participation(timeline: Timeline) -> dict[str, float]:
    """By learner, the share of all merges that it was in."""
    names = sorted(timeline.presence)
    return {
        name: sum(name in merge.contributors for merge in timeline.merges) / max(1, len(timeline.merges))
        for name in names
    }
