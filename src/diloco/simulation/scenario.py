"""The scenario of a simulated run: step times, links and faults, from a site file or a recorded run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from diloco.config import RunConfig
from diloco.event_log import read_events
from diloco.events import Evaluated, Stepped
from diloco.exchange.virtual.delivery import Fault
from diloco.planning.network import Network
from diloco.planning.recorded_run import RecordedLearner
from diloco.planning.site import Site


@dataclass(frozen=True)
class Scenario:
    """Step times, links, starts and faults of a simulated run.

    Attributes:
        step_s: seconds of a learner's n-th inner step at its own batch (learner index, n from 0).
        network: the links; None: everything arrives at once.
        faults: who is killed, and when.
        starts_s: when each learner starts; None: all at 0.
        warm_step_s: seconds of the n-th step of the warm start (n from 0), at the full batch; where that is None, as
            many times those of a first step as the full batch is larger.
    """

    step_s: Callable[[int, int], float] = lambda *_: 1.0
    network: Network | None = None
    faults: Sequence[Fault] = ()
    starts_s: Sequence[float] | None = None
    warm_step_s: Callable[[int], float | None] = lambda _: None


def scenario_of_site(site: Site, run: RunConfig) -> Scenario:
    """The scenario of a site file. Random failures cover a hundred times the length of an undisturbed run."""
    learners = site.learners()
    horizon_s = 100.0 * run.schedule_steps * max(each.step_s for each in learners)
    faults = [
        Fault(outage.learner, outage.at_s, None if math.isinf(outage.back_s) else outage.back_s)
        for outage in site.outages(horizon_s)
    ]
    return Scenario(lambda index, step: learners[index].step_seconds(step, run.run.seed), site.network(), faults)


def scenario_of_recorded_run(recorded: Sequence[RecordedLearner], network: Network | None) -> Scenario:
    """The scenario of a recorded run, over links that may differ from its own."""
    faults = [Fault(index, at_s, back_s) for index, each in enumerate(recorded) for at_s, back_s in each.gone]
    starts_s = [each.start_s for each in recorded]
    began = next((each for each in recorded if each.warm_paces), recorded[0])
    return Scenario(lambda index, step: recorded[index].step_s(step), network, faults, starts_s, began.warm_step_s)


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
