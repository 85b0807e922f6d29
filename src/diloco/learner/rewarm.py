"""A short re-warm-up of the learning rate, for a learner that joins a run under way without a checkpoint, and so with a
new optimizer state.

At the k-th of n inner steps every parameter group has k/n of the schedule's learning rate, set by hooks around
`optimizer.step`. Outside of that call the group has the schedule's rate, so schedules and logs are not affected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diloco.core.choices import whole_number
from diloco.errors import ConfigError

REWARM_STEPS = 5
"""Default of a joining learner. 5 steps cost nothing, 60 steps 0.01 nats/byte (studies/README.md, healing)."""


class Rewarm:
    """The re-warm-up of one learner.

    Arguments:
        optimizers: of the model.
        joining_steps: inner steps of the re-warm-up if the learner joins a run under way; 0: no re-warm-up. None: the
            default, or no re-warm-up where the optimizers do not support it.

    Raises:
        ConfigError: `joining_steps` is no whole number, or the optimizers cannot be re-warmed.

    Attributes:
        num_steps: inner steps of the re-warm-up; 0: none.
        num_taken: those that were taken.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], joining_steps: int | None) -> None:
        if joining_steps is not None:
            whole_number("rewarm_steps", joining_steps, 0)
        if joining_steps:
            _require_rates(optimizers)
        self.num_steps = self.num_taken = 0
        self._optimizers, self._joining_steps = optimizers, joining_steps
        self._obstacle = ""  # the reason why a learner that joined a run under way has no re-warm-up
        self._hooks: list[Any] = []
        self._rates: dict[int, list[Any]] = {}  # the groups' own rates during a step, by optimizer
        self._depths = Counter[int]()  # of nested hooks, where a subclass's step calls its parent's

    @property
    def factor(self) -> float:
        """The factor of the learning rate in the next inner step."""
        return 1.0 if self.num_taken >= self.num_steps else (self.num_taken + 1) / self.num_steps

    @property
    def num_left(self) -> int:
        """Inner steps until the learning rate is the schedule's."""
        return max(0, self.num_steps - self.num_taken)

    def notice(self, first: int) -> str:
        """The log message on the re-warm-up of a learner whose first inner step is `first`; "": none."""
        if self._obstacle:
            return f"joins a run under way without a re-warm-up of its learning rate: {self._obstacle}"
        if not self.num_left:
            return ""
        return f"re-warms its learning rate over {self.num_left} steps from step {first} on, as its optimizer is new"

    def join(self) -> None:
        """Begin the re-warm-up of a learner that has joined a run under way without a checkpoint."""
        if self._joining_steps is not None:
            self.begin(self._joining_steps)
            return
        try:
            self.begin(REWARM_STEPS)
        except ConfigError as error:
            self._obstacle = str(error)

    def begin(self, num_steps: int, num_taken: int = 0) -> None:
        """Begin a re-warm-up, or continue it after `num_taken` steps.

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
        """Count an inner step."""
        self._depths.clear()  # a step that raised has not called its hooks after the step
        if self._hooks:
            self.num_taken += 1
            if self.num_taken >= self.num_steps:
                self._end()

    def state_dict(self) -> dict[str, int]:
        """The state for a checkpoint: a learner that is stopped during a re-warm-up continues it."""
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
    """Raise ConfigError unless hooks can change the optimizers' learning rates at each step."""
    for optimizer in optimizers:
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            what = "calls no hooks at its steps, like some wrappers of optimizers"
        elif not all(isinstance(group.get("lr"), int | float | Tensor) for group in optimizer.param_groups):
            what = "has parameters without a learning rate (lr)"
        else:
            continue
        raise ConfigError(
            f"{type(optimizer).__name__} {what}, and cannot be re-warmed; pass rewarm_steps=0 to Learner."
        )
