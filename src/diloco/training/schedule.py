"""The inner learning rate as a pure function of a learner's step, and an estimate of the tokens of the whole run."""

import math
from collections.abc import Mapping

from diloco.config import RunConfig, ScheduleTable


def lr_factor(schedule: ScheduleTable, steps: int, step: int) -> float:
    """Share of the peak rate at inner step `step` = 1, 2, 3 …; after `steps` it stays at its last value.

    Warm-up: step / warmup_steps. "cosine": f + (1−f)·(1 + cos πx)/2 with x the share of the remaining steps done.
    "wsd" (warm-up, stable, decay): 1, then linearly to f over the last `decay_fraction` of `steps`. "constant": 1.
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    step, final = min(step, steps), schedule.final_fraction
    if schedule.kind == "cosine":
        done = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
    if schedule.kind == "wsd":
        decay_steps = max(1, round(steps * schedule.decay_fraction))
        return 1 - (1 - final) * max(0, step - (steps - decay_steps)) / decay_steps
    return 1.0


def schedule_factor(config: RunConfig, step: int) -> float:
    """Share of the peak rate of a run at a learner's step; the same for every parameter."""
    return lr_factor(config.schedule, config.schedule_steps, step)


def learning_rate(config: RunConfig, step: int) -> float:
    """The inner learning rate (AdamW's) of a run at a learner's step."""
    return config.inner.lr * schedule_factor(config, step)


class TokenEstimate:
    """Estimates the current tokens of the whole run from its last report and from this learner's tokens since.

    A learner receives a report of the run's tokens about once a second. Between reports the other learners are assumed
    to keep the pace of the last report: run(now) ≈ run(reported) + own(since) · Δrun / Δown. The estimate is exact
    where every step brings a report.

    Arguments:
        own: tokens of this learner at the report.
        reported: tokens of the run in the report.
    """

    def __init__(self, own: int, reported: int) -> None:
        self._own = own
        self._reported = reported
        self._pace = 1.0

    def now(self, own: int, reported: int) -> int:
        """Tokens of the run now; `own` is this learner's count now, `reported` the run's in the newest report."""
        if reported != self._reported:
            if own > self._own:
                # At least this learner's own pace: the tokens of a learner that leaves go with it, which would look
                # like a negative pace.
                self._pace = max(1.0, (reported - self._reported) / (own - self._own))
            self._own, self._reported = own, reported
        return reported + int((own - self._own) * self._pace)

    def state_dict(self) -> dict[str, float]:
        """The last report, this learner's tokens at it, and the pace."""
        return {"own": self._own, "heard": self._reported, "pace": self._pace}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict`, where the run has not advanced since."""
        self._own, self._reported, self._pace = int(state["own"]), int(state["heard"]), state["pace"]
