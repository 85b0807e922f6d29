"""Schedule-free optimizers (Defazio et al., arXiv 2405.15682), which hold one of two models in the parameters.

In train mode the parameters hold y, where gradients are taken, and in eval mode x, the average. `train()` and `eval()`
compute one from the other and the base sequence z, in place: x = (y − (1 − β) z) / β. A learner exchanges what the
parameters hold when it steps, and z stays its own. So after an adoption only the model that was exchanged is global:
the other one contains the learner's own z, and must not be evaluated in place of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def is_in_train_mode(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether the parameters hold y; None: the optimizer is not schedule-free."""
    mode = optimizer.param_groups[0].get("train_mode", getattr(optimizer, "train_mode", None))
    return mode if isinstance(mode, bool) else None


@contextmanager
def in_eval_mode(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """All schedule-free optimizers are in eval mode inside, so that calling `eval()` there changes nothing."""
    switched: list[Any] = [each for each in optimizers if is_in_train_mode(each)]
    for optimizer in switched:
        optimizer.eval()
    try:
        yield
    finally:
        for optimizer in switched:
            optimizer.train()
