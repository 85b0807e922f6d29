"""The result of a simulated run: times and summaries of its learners, losses, and the pictures of both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from diloco.event_log import read_events
from diloco.events import Evaluated, Stepped
from diloco.report.drawing import COMPUTING, GREY, Axis, Kind, Line, Picture, Span, lines, time_unit, timeline

if TYPE_CHECKING:
    from diloco.training.spec import Summary

Losses = list[tuple[float, float]]
"""Time in seconds and loss in nats per token, in order."""

MOST_ROWS, MOST_POINTS = 12, 1000
NO_LOSS = "No loss was measured: no learner reached an evaluation or its first step event."


@dataclass(frozen=True)
class LearnerTime:
    """Seconds that a learner spent computing, waiting for answers, and stopped."""

    compute_s: float
    waiting_s: float
    stopped_s: float

    @property
    def utilisation(self) -> float:
        """compute ÷ (compute + waiting), from the learner's first step until it leaves."""
        running_s = self.compute_s + self.waiting_s
        return self.compute_s / running_s if running_s else 0.0


@dataclass
class SimulationResult:
    """The result of a simulated run.

    Attributes:
        summaries: by learner, its trainer's summary; None for a learner that was killed for good or found no place in a
            pool that had shrunk.
        spans: by learner, its activities.
        loss: held-out loss of the newest global model with which a learner ended, nats per token; None if none ended.
            Where learners hold parts of a mixture: of the syncer's model at the end, with all experts.
        duration_s: virtual seconds until the last learner ended or was killed.
        tokens: tokens trained by the run, as the syncer counted them.
        losses, training_losses: of the global model and of the learners' steps over virtual time: see `read_losses`.
    """

    summaries: dict[str, Summary | None]
    spans: dict[str, list[Span]] = field(default_factory=dict)
    loss: float | None = None
    duration_s: float = 0.0
    tokens: int = 0
    losses: Losses = field(default_factory=list)
    training_losses: Losses = field(default_factory=list)

    def times(self) -> dict[str, LearnerTime]:
        """Return the times of each learner."""

        def total_s(spans: Sequence[Span], kind: Kind) -> float:
            return math.fsum(each.end_s - each.begin_s for each in spans if each.kind == kind)

        return {
            name: LearnerTime(total_s(spans, "compute"), total_s(spans, "waiting"), total_s(spans, "stopped"))
            for name, spans in self.spans.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        learners = {}
        for name, each in self.times().items():
            summary = self.summaries[name]
            known = {} if summary is None else {
                "steps": summary.steps, "tokens": summary.tokens, "num_bytes": summary.metrics.get("num_bytes", {}),
                "merges": summary.metrics.get("merges", 0), "incarnation": summary.metrics.get("incarnation", 0),
            }  # fmt: skip
            learners[name] = {**asdict(each), "utilisation": each.utilisation, **known}
        return {"loss": self.loss, "duration_s": self.duration_s, "tokens": self.tokens, "learners": learners}


def read_losses(logs: Iterable[Path]) -> tuple[Losses, Losses]:
    """Read the held-out losses of the global model and the training losses of logged steps.

    Learners in one process evaluate each global model once: the first learner whose evaluation is due. A training loss
    is the learners' mean at the same step, at their mean time.
    """
    events = [event for log in logs if log.is_file() for event in read_events(log)]
    held_out, newest = Losses(), 0
    for each in sorted((event for event in events if isinstance(event, Evaluated)), key=lambda event: event.t):
        if sum(each.versions) >= newest:  # a slow learner may evaluate a model older than an evaluated one
            newest = sum(each.versions)
            held_out.append((each.t, each.loss))
    steps: dict[int, list[Stepped]] = {}
    for event in events:
        if isinstance(event, Stepped):
            steps.setdefault(event.step, []).append(event)
    means = ((fmean(each.t for each in same), fmean(each.loss for each in same)) for same in steps.values())
    return held_out, sorted(means)


# --- pictures ---------------------------------------------------------------------------------------------------------


def pictures(result: SimulationResult) -> list[Picture]:
    """Draw the timeline and, if a loss was measured, the losses."""
    heads = ("learner", "utilisation", "computing, s", "waiting, s", "gone, s")
    rows = [
        (name, f"{each.utilisation:.1%}", f"{each.compute_s:,.1f}", f"{each.waiting_s:,.1f}", f"{each.stopped_s:,.1f}")
        for name, each in result.times().items()
    ]
    text = "Each learner's time; its transfers run beside it."
    drawn = [Picture("Learners in time", text, timeline(result.spans), heads, rows)]
    return [*drawn, _loss(result)] if result.losses or result.training_losses else drawn


def _loss(result: SimulationResult) -> Picture:
    unit_s, unit = time_unit(result.duration_s)
    series = {
        "training, mean of learners": (result.training_losses, GREY),
        "global model, held-out data": (result.losses, COMPUTING),
    }
    curves = []
    for name, (points, colour) in series.items():
        if shown := _thinned(points, MOST_POINTS):
            curves.append(Line(name, [at_s / unit_s for at_s, _ in shown], [loss for _, loss in shown], colour))
    text = {
        0: "The global model was never evaluated: no learner ended the run or reached an evaluation.",
        1: "The global model was evaluated once; evaluate.every_steps in the run file evaluates it during the run.",
    }.get(len(result.losses), f"The global model was evaluated {len(result.losses)} times.")
    heading, points = ("held-out loss", result.losses)
    if not points:
        heading, points = ("training loss", result.training_losses)
    rows = [(f"{at_s:,.1f}", f"{loss:.4f}") for at_s, loss in _thinned(points, MOST_ROWS)]
    figure = lines(curves, Axis(f"virtual time, {unit}"), Axis("loss, nats per token"))
    return Picture("Loss against time", text, figure, ("virtual time, s", heading), rows)


def _thinned(points: Losses, most: int) -> Losses:
    """Return at most `most` points, equally spaced, with the last."""
    every = -(-len(points) // most) or 1
    return points[::-every][::-1]
