"""The inner learning rate as a pure function of a learner's step."""

import math

from diloco.config import RunConfig


def lr_factor(
    step: int, *, kind: str, steps: int, warmup_steps: int = 0, final_fraction: float = 0.1, decay_fraction: float = 0.2
) -> float:
    """Share of the peak rate at inner step `step` = 1, 2, 3 …; after `steps` it stays at its last value.

    Warm-up: step / warmup_steps. "cosine": f + (1−f)·(1 + cos πx)/2 with x the share of the remaining steps done.
    "wsd" (warm-up, stable, decay): 1, then linearly to f over the last `decay_fraction` of `steps`. "constant": 1.
    """
    if step <= warmup_steps:
        return step / warmup_steps
    step = min(step, steps)
    if kind == "cosine":
        done = (step - warmup_steps) / max(1, steps - warmup_steps)
        return final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * done)) / 2
    if kind == "wsd":
        decay_steps = max(1, round(steps * decay_fraction))
        done = max(0, step - (steps - decay_steps)) / decay_steps
        return 1 - (1 - final_fraction) * done
    return 1.0


def schedule_factor(config: RunConfig, step: int) -> float:
    """Share of the peak rate of a run at a learner's step; the same for every parameter."""
    schedule = config.schedule
    return lr_factor(
        step,
        kind=schedule.kind,
        steps=config.schedule_steps,
        warmup_steps=schedule.warmup_steps,
        final_fraction=schedule.final_fraction,
        decay_fraction=schedule.decay_fraction,
    )


def learning_rate(config: RunConfig, step: int) -> float:
    """The inner learning rate (AdamW's) of a run at a learner's step."""
    return config.inner.lr * schedule_factor(config, step)
