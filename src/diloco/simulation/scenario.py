"""The scenario of a simulated run: step times, links and faults, from a site file or a recorded run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco.config import RunConfig
from diloco.exchange.virtual.delivery import Fault
from diloco.planning.network import Network
from diloco.planning.recorded_run import RecordedLearner
from diloco.planning.site import Site


@dataclass(frozen=True)
class Scenario:
    """Step times, links, starts and faults of a simulated run.

    Attributes:
        step_s: seconds of a learner's n-th inner step at its own batch (learner index, n from 0).
        network: the links; None: transfers are instantaneous.
        faults: learners to kill, and times.
        starts_s: start of each learner; None: all at 0.
        warm_step_s: seconds of the n-th step of the warm start (n from 0), at the full batch; where it returns None,
            the first step's seconds are scaled by the size of the full batch.
    """

    step_s: Callable[[int, int], float] = lambda *_: 1.0
    network: Network | None = None
    faults: Sequence[Fault] = ()
    starts_s: Sequence[float] | None = None
    warm_step_s: Callable[[int], float | None] = lambda _: None


def scenario_of_site(site: Site, run: RunConfig) -> Scenario:
    """Return the scenario of a site file. Random failures cover a hundred times the length of an undisturbed run."""
    learners = site.learners()
    horizon_s = 100.0 * run.schedule_steps * max(each.step_s for each in learners)
    faults = [
        Fault(outage.learner, outage.at_s, None if math.isinf(outage.back_s) else outage.back_s)
        for outage in site.outages(horizon_s)
    ]
    return Scenario(lambda index, step: learners[index].step_seconds(step, run.run.seed), site.network(), faults)


def scenario_of_recorded_run(recorded: Sequence[RecordedLearner], network: Network | None) -> Scenario:
    """Return the scenario of a recorded run, over other links; None: instantaneous transfers."""
    faults = [Fault(index, at_s, back_s) for index, each in enumerate(recorded) for at_s, back_s in each.absences]
    starts_s = [each.start_s for each in recorded]
    first = next((each for each in recorded if each.warm_step_times), recorded[0])
    return Scenario(lambda index, step: recorded[index].step_s(step), network, faults, starts_s, first.warm_step_s)
