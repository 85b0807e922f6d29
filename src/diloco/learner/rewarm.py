"""A short re-warm-up: the learning rate is a growing part of the schedule's while an optimizer's state is young.

At the k-th of n inner steps every parameter group has k/n of the learning rate that it would have, by hooks around
`optimizer.step`. Outside of that call the group has its own rate, so that schedules and logs see what they would see
without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diloco.errors import CheckpointError
from diloco.escaping import MAX_REASON, printable
from diloco.learner.models import require_hooks


class Rewarm:
    """The re-warm-up of one learner.

    Arguments:
        optimizers: that train the model.

    Attributes:
        num_steps: inner steps that it takes; 0: there is none.
        num_taken: those behind it.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.num_steps = self.num_taken = 0
        self._optimizers = optimizers
        self._hooks: list[Any] = []
        self._rates: dict[int, list[Any]] = {}  # by optimizer, of its groups during its step
        self._depths = Counter[int]()  # of a subclass whose step calls its parent's, each of which calls the hooks

    @property
    def factor(self) -> float:
        """Of the learning rate in the next inner step."""
        return 1.0 if self.num_taken >= self.num_steps else (self.num_taken + 1) / self.num_steps

    def begin(self, num_steps: int, num_taken: int = 0) -> None:
        """Begin, or go on after `num_taken` steps.

        Raises:
            ConfigError: an optimizer is a wrapper that has no hooks.
        """
        self._end()
        self.num_steps, self.num_taken = num_steps, num_taken
        if num_taken >= num_steps:
            return
        for optimizer in self._optimizers:
            require_hooks(optimizer)
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before))
            self._hooks.append(optimizer.register_step_post_hook(self._after))

    def stepped(self) -> None:
        """An inner step was taken."""
        self._depths.clear()  # a step that failed has not left
        if self._hooks:
            self.num_taken += 1
            if self.num_taken >= self.num_steps:
                self._end()

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint: a learner that is stopped in the middle goes on with it."""
        return {"num_steps": self.num_steps, "num_taken": self.num_taken}

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._depths[id(optimizer)] += 1
        if self._depths[id(optimizer)] > 1:
            return
        self._rates[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._depths[id(optimizer)] -= 1
        if self._depths[id(optimizer)] > 0:
            return
        for group, rate in zip(optimizer.param_groups, self._rates.pop(id(optimizer)), strict=True):
            group["lr"] = rate

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def rewarm_of(state: Mapping[str, Any]) -> tuple[int, int]:
    """What `Rewarm.begin` takes to continue from `Rewarm.state_dict`.

    Raises:
        CheckpointError: it is none.
    """
    num_steps, num_taken = state.get("num_steps"), state.get("num_taken")
    if type(num_steps) is not int or type(num_taken) is not int or min(num_steps, num_taken) < 0:
        raise CheckpointError(
            f"the checkpoint's re-warm-up is {printable(repr(dict(state)), MAX_REASON)}; it is damaged, use another "
            "one."
        )
    return num_steps, num_taken
