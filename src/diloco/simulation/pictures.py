"""Pictures of a simulated run: what each learner did when, and the loss against time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco.report.drawing import COMPUTING, GREY, Axis, Line, Picture, lines, time_unit, timeline
from diloco.simulation.scenario import Losses

if TYPE_CHECKING:
    from diloco.simulation.virtual_run import SimulationResult

MOST_ROWS, MOST_POINTS = 12, 1000
NO_LOSS = "No loss was measured: no learner was evaluated or came to its first step event."


def pictures(done: SimulationResult) -> list[Picture]:
    """The timeline and, where a loss was measured, the losses."""
    heads = ("learner", "utilisation", "computing, s", "waiting, s", "gone, s")
    rows = [
        (name, f"{each.utilisation:.1%}", f"{each.compute_s:,.1f}", f"{each.waiting_s:,.1f}", f"{each.stopped_s:,.1f}")
        for name, each in done.times().items()
    ]
    text = "Each learner's time; its transfers run beside it."
    drawn = [Picture("Learners in time", text, timeline(done.spans), heads, rows)]
    return [*drawn, _loss(done)] if done.losses or done.training_losses else drawn


def _loss(done: SimulationResult) -> Picture:
    unit_s, unit = time_unit(done.duration_s)
    series = {
        "training, mean of learners": (done.training_losses, GREY),
        "global model, held-out data": (done.losses, COMPUTING),
    }
    curves = []
    for name, (points, colour) in series.items():
        if shown := _thinned(points, MOST_POINTS):
            curves.append(Line(name, [at_s / unit_s for at_s, _ in shown], [loss for _, loss in shown], colour))
    text = {
        0: "The global model was never evaluated: no learner ended the run, or came to an evaluation.",
        1: "The global model was evaluated once; evaluate.every_steps in the run file evaluates it on the way.",
    }.get(len(done.losses), f"The global model was evaluated {len(done.losses)} times.")
    heading, points = ("held-out loss", done.losses) if done.losses else ("training loss", done.training_losses)
    rows = [(f"{at_s:,.1f}", f"{loss:.4f}") for at_s, loss in _thinned(points, MOST_ROWS)]
    figure = lines(curves, Axis(f"virtual time, {unit}"), Axis("loss, nats per token"))
    return Picture("Loss against time", text, figure, ("virtual time, s", heading), rows)


def _thinned(points: Losses, most: int) -> Losses:
    """So many of them at most, at equal distances, with the last."""
    every = -(-len(points) // most) or 1
    return points[::-every][::-1]
