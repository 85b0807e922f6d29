"""How far a run is: the inner learning rate as a pure function of a learner's step, and the tokens that are spent."""

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
    """Estimates the tokens of the whole run now, from what was last heard of it and from what this learner did since.

    A learner hears of the run's tokens about once a second; until then it takes the others to go on at the pace that
    the last report showed: run(now) ≈ run(heard) + own(since) · Δrun / Δown. Where reports come at every step it is
    exact.
    """

    def __init__(self, own: int, heard: int) -> None:
        self._own = own
        self._heard = heard
        self._pace = 1.0

    def spent(self, own: int, heard: int) -> int:
        """Tokens of the run now; `own` is this learner's count now, `heard` the run's as last reported."""
        if heard != self._heard:
            if own > self._own:
                # At least its own pace: a learner that left takes its tokens with it, which looks like a negative pace.
                self._pace = max(1.0, (heard - self._heard) / (own - self._own))
            self._own, self._heard = own, heard
        return heard + int((own - self._own) * self._pace)

    def state_dict(self) -> dict[str, float]:
        """The last report, its time in own tokens, and the pace."""
        return {"own": self._own, "heard": self._heard, "pace": self._pace}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict`, where the run has not gone on."""
        self._own, self._heard, self._pace = int(state["own"]), int(state["heard"]), state["pace"]
