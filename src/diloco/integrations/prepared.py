"""What is inside an optimizer that an Accelerator has prepared, and which of its steps a gradient scaler skips."""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.integrations.needs import needs

with needs("accelerate"):
    from accelerate.optimizer import AcceleratedOptimizer


class Prepared:
    """A prepared optimizer.

    Arguments:
        optimizer: as `accelerator.prepare` returned it, or a plain one.

    Attributes:
        inner: the optimizer inside.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._outer = optimizer
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        self.inner = optimizer
        self._found_inf: Tensor | None = None
        self.inner.register_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """A fused optimizer is called, and skips the step by itself where the scaler says so; accelerate takes that for
        a step."""
        self._found_inf = getattr(optimizer, "found_inf", None)

    @property
    def has_skipped(self) -> bool:
        """Whether the gradient scaler has skipped the last step."""
        if isinstance(self._outer, AcceleratedOptimizer) and self._outer.step_was_skipped:
            return True
        return self._found_inf is not None and bool(self._found_inf)
