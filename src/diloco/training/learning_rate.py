"""The inner learning rate as a pure function of a learner's step."""

import math

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
