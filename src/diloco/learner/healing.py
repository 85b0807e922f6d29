"""A learner that joins a run under way, and has no inner optimizer's state of its own, heals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diloco.core.healing import Heal, Healed
from diloco.errors import ConfigError
from diloco.exchange.base import Exchange
from diloco.learner.inner_state import InnerState
from diloco.learner.models import require_hooks
from diloco.learner.rewarm import Rewarm


class Healing:
    """The healing of one learner.

    Arguments:
        optimizers: that train the model.
        parameters: by their names in the layout.
        exchange: with the other learners.
        rewarm: of the learning rate.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, Tensor],
        exchange: Exchange,
        rewarm: Rewarm,
    ) -> None:
        self._optimizers, self._parameters = optimizers, parameters
        self._exchange, self._rewarm = exchange, rewarm

    def require(self, heal: Heal) -> None:
        """Check that the learner can heal so.

        Raises:
            ConfigError: it cannot.
        """
        if heal.rewarm_steps:
            for optimizer in self._optimizers:
                require_hooks(optimizer)

    def heal(self, heal: Heal) -> Healed:
        """Begin the inner optimizer anew."""
        for optimizer in self._optimizers:
            if optimizer.state:
                optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
        self._rewarm.begin(heal.rewarm_steps)
        return Healed("global", heal.rewarm_steps)
