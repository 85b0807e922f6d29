"""A short re-warm-up: the learning rate is a growing part of the schedule's while an optimizer's state is young, as it
is in a learner that joins a run under way without a checkpoint.

At the k-th of n inner steps every parameter group has k/n of the learning rate that it would have, by hooks around
`optimizer.step`. Outside of that call the group has its own rate, so that schedules and logs see what they would see
without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diloco.core.choices import whole_number
from diloco.errors import CheckpointError, ConfigError
from diloco.escaping import MAX_REASON, printable

REWARM_STEPS = 5
"""Default of a joiner. Measured (docs/studies.md, healing): 5 steps cost nothing, 60 steps 0.01 nats per byte."""


class Rewarm:
    """The re-warm-up of one learner.

    Arguments:
        optimizers: that train the model.
        joining_steps: inner steps that it takes in a learner that joins a run under way; 0: there is none. None: the
            default, or none where the optimizers cannot be re-warmed.

    Raises:
        ConfigError: `joining_steps` is no whole number, or the optimizers cannot be re-warmed.

    Attributes:
        num_steps: inner steps that it takes; 0: there is none.
        num_taken: those behind it.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], joining_steps: int | None) -> None:
        if joining_steps is not None:
            whole_number("rewarm_steps", joining_steps, 0)
        if joining_steps:
            _require_rates(optimizers)
        self.num_steps = self.num_taken = 0
        self._optimizers, self._joining_steps = optimizers, joining_steps
        self._obstacle = ""  # why there is none in a learner that has joined a run under way
        self._hooks: list[Any] = []
        self._rates: dict[int, list[Any]] = {}  # by optimizer, of its groups during its step
        self._depths = Counter[int]()  # of a subclass whose step calls its parent's, each of which calls the hooks

    @property
    def factor(self) -> float:
        """Of the learning rate in the next inner step."""
        return 1.0 if self.num_taken >= self.num_steps else (self.num_taken + 1) / self.num_steps

    @property
    def num_left(self) -> int:
        """Inner steps before the learning rate is the schedule's."""
        return max(0, self.num_steps - self.num_taken)

    def notice(self, first: int) -> str:
        """What a learner whose first inner step is this one says of its re-warm-up; "": nothing."""
        if self._obstacle:
            return f"joins a run under way without a re-warm-up of its learning rate: {self._obstacle}"
        if not self.num_left:
            return ""
        return f"re-warms its learning rate over {self.num_left} steps from step {first} on, as its optimizer is new"

    def join(self) -> None:
        """The learner has joined a run under way, without a checkpoint."""
        if self._joining_steps is not None:
            self.begin(self._joining_steps)
            return
        try:
            self.begin(REWARM_STEPS)
        except ConfigError as error:
            self._obstacle = str(error)

    def begin(self, num_steps: int, num_taken: int = 0) -> None:
        """Begin, or go on after `num_taken` steps.

        Raises:
            ConfigError: the optimizers cannot be re-warmed.
        """
        self._end()
        if num_taken < num_steps:
            _require_rates(self._optimizers)
        self.num_steps, self.num_taken, self._obstacle = num_steps, num_taken, ""
        if self.num_left:
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


def _require_rates(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ConfigError unless the learning rates of the optimizers can be changed at each step."""
    for optimizer in optimizers:
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            what = "calls no hooks at its steps, as a wrapper around an optimizer may not"
        elif not all(isinstance(group.get("lr"), int | float | Tensor) for group in optimizer.param_groups):
            what = "has parameters without a learning rate (lr)"
        else:
            continue
        raise ConfigError(
            f"{type(optimizer).__name__} {what}, and cannot be re-warmed; pass rewarm_steps=0 to Learner."
        )


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
