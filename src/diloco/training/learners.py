"""The learner that exchanges nothing, with the methods of `diloco.Learner` that the trainer uses."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from diloco.core.fragments import Layout
from diloco.errors import CheckpointError
from diloco.learner import Learner


class StandaloneLearner:
    """A learner without an exchange: the data-parallel baseline in one process, the warm start, the isolated learner.

    Every step counts as `tokens_per_step` tokens of the run: what the baseline and the warm start train, and what the
    isolated learner and its peers would train together, so that all of them stop after as many steps.
    """

    versions: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()
    layout: Layout | None = None
    drained = False
    lr_factor = 1.0

    def __init__(self, model: nn.Module, tokens_per_step: int) -> None:
        self._model = model
        self._tokens_per_step = tokens_per_step
        self.steps = 0
        self.run_tokens = 0

    def step(self, *, tokens: int) -> None:
        """Count one inner step."""
        self.steps += 1
        self.run_tokens += self._tokens_per_step

    def log(self, *, training_loss: float | None = None, held_out_loss: float | None = None) -> None:
        """Do nothing: there is no syncer to tell."""

    def global_state_dict(self) -> Mapping[str, Tensor]:
        """The global model, which is the model itself without an exchange."""
        return {name: tensor.detach() for name, tensor in self._model.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """The counters."""
        return {"type": "alone", "steps": self.steps, "run_tokens": self.run_tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue from saved counters. Raises CheckpointError when another kind of learner wrote them."""
        if state.get("type") != "alone":
            raise CheckpointError("the checkpoint was written by a learner with an exchange; resume it with one")
        self.steps = int(state["steps"])
        self.run_tokens = int(state["run_tokens"])
        return True

    def metrics(self) -> dict[str, Any]:
        """No counters: nothing is exchanged."""
        return {}

    def finish(self) -> None:
        """Do nothing: no round waits for this learner."""

    def close(self) -> None:
        """Do nothing: there is no exchange to leave."""


AnyLearner = Learner | StandaloneLearner
"""What the trainer trains with."""
