"""The losses that the learners of a run have told."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from diloco.event_log import read_events
from diloco.events import Evaluated, Stepped

Losses = list[tuple[float, float]]
"""Time in seconds and loss in nats per token, in order."""


def read_losses(logs: Iterable[Path]) -> tuple[Losses, Losses]:
    """The held-out losses of the global model, and the training losses of the steps that are told of.

    Learners in one process evaluate each global model once: the first that comes to an evaluation with it. A training
    loss is the mean of the learners at the same step, at the mean of their times.
    """
    told = [event for log in logs if log.is_file() for event in read_events(log)]
    held_out, newest = Losses(), 0
    for each in sorted((event for event in told if isinstance(event, Evaluated)), key=lambda event: event.t):
        if sum(each.versions) >= newest:  # a learner that is behind may evaluate a model that others have left behind
            newest = sum(each.versions)
            held_out.append((each.t, each.loss))
    steps: dict[int, list[Stepped]] = {}
    for event in told:
        if isinstance(event, Stepped):
            steps.setdefault(event.step, []).append(event)
    means = ((fmean(each.t for each in same), fmean(each.loss for each in same)) for same in steps.values())
    return held_out, sorted(means)
