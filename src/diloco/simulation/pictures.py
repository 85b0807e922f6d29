"""Pictures of a simulated run: what each learner did when, and the loss against time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from diloco.planning.palette import COMPUTING, GREY
from diloco.planning.picture_axes import Axis
from diloco.planning.pictures import Line, Picture, lines
from diloco.planning.timelines import time_unit, timeline

if TYPE_CHECKING:
    from diloco.simulation.virtual_run import Simulated

MOST_ROWS = 12
NO_LOSS = "No loss was measured: no learner was evaluated or came to its first step event."


def pictures(done: Simulated) -> list[Picture]:
    """The timeline and, where a loss was measured, the losses."""
    heads = ("learner", "utilisation", "computing, s", "waiting, s", "gone, s")
    rows = [
        (name, f"{each.utilisation:.1%}", f"{each.compute_s:,.1f}", f"{each.waiting_s:,.1f}", f"{each.stopped_s:,.1f}")
        for name, each in done.times().items()
    ]
    text = "Each learner's time; its transfers run beside it."
    drawn = [Picture("timeline", "Learners in time", text, partial(timeline, done.spans), heads, rows)]
    return [*drawn, _loss(done)] if done.losses or done.training_losses else drawn


def _loss(done: Simulated) -> Picture:
    unit_s, unit = time_unit(done.duration_s)
    series = {
        "training, mean of learners": (done.training_losses, GREY),
        "global model, held-out data": (done.losses, COMPUTING),
    }
    curves = [
        Line(name, [at_s / unit_s for at_s, _ in points], [loss for _, loss in points], colour=colour)
        for name, (points, colour) in series.items()
        if points
    ]
    axes = Axis(f"virtual time, {unit}"), Axis("loss, nats per token")
    text = {
        0: "The global model was never evaluated: no learner ended the run, or came to an evaluation.",
        1: "The global model was evaluated once; evaluate.every_steps in the run file evaluates it on the way.",
    }.get(len(done.losses), f"The global model was evaluated {len(done.losses)} times.")
    name, points = ("held-out loss", done.losses) if done.losses else ("training loss", done.training_losses)
    every = -(-len(points) // MOST_ROWS)
    rows = [(f"{at_s:,.1f}", f"{loss:.4f}") for at_s, loss in points[::-every][::-1]]  # with the last
    return Picture("loss", "Loss against time", text, partial(lines, curves, *axes), ("virtual time, s", name), rows)
