"""Eager updates on one learner: its own anchors and outer states, which differ from the run's for a while (arXiv 2502.12996).

At every send of a fragment the learner takes an outer step by itself, with the mean that is due, in which its own old outer gradient is
replaced by its newest (`core.adopt.eager_gradient`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diloco.core.adopt import eager_gradient
from diloco.core.flights import Send
from diloco.core.method import Method
from diloco.core.update import flush_denormals
from diloco.exchange.base import Arrived, Opened


class EagerSteps:
    """What a learner keeps for eager updates: per fragment anchor and outer state, fp32 on the host, and what it has sent."""

    def __init__(self, method: Method, opened: Opened) -> None:
        self._method = method
        self.anchors = list(opened.model.fragments)
        """What this learner measures its next outer gradients from."""
        self._states: list[Mapping[str, Tensor]] = list(opened.outer_states)
        self._own: dict[tuple[int, int], Tensor] = {}  # by fragment and round: outer gradients sent, as decoded

    def sent(self, send: Send, payload: Tensor, num_elements: int) -> None:
        """An outer gradient goes out, encoded like this."""
        self._own[send.fragment, send.round] = self._method.up.decode(payload, num_elements)

    def adopted(self, fragment: int, arrived: Arrived) -> None:
        """A version is due. One that was fetched whole (a restart) starts the fragment again from the run's own values."""
        if arrived.outer_state is not None:
            self.anchors[fragment] = arrived.theta
            self._states[fragment] = arrived.outer_state

    def step(self, send: Send, arrived: Arrived | None, name: str, num_live: int) -> Tensor:
        """The eager outer step at a send; returns the new anchor.

        Arguments:
            arrived: the version that is due at this boundary; None: none is.
            name: this learner's.
            num_live: learners that take part: what the mean of this send will probably be over.
        """
        f = send.fragment
        mean, listed, share = None, None, 0.0
        if arrived is not None and arrived.mean is not None:
            mean = arrived.mean
            update = arrived.update
            if name in update.contributors and arrived.merged_round >= update.base:
                listed = self._own.get((f, update.base))
                share = update.weights[update.contributors.index(name)] / sum(update.weights)
        gradient = eager_gradient(self._own[f, send.round], 1.0 / num_live, mean, listed, share)
        new, self._states[f] = self._method.outer.step(self._states[f], self.anchors[f], gradient)
        self.anchors[f] = flush_denormals(new)
        if arrived is not None:
            self._own = {key: own for key, own in self._own.items() if key[0] != f or key[1] >= arrived.update.version}
        return self.anchors[f]

    def state_dict(self) -> dict[str, Any]:
        """Tensors in nested dicts, from which `load_state_dict` continues exactly."""
        return {
            "anchors": {str(f): anchor for f, anchor in enumerate(self.anchors)},
            "states": {str(f): dict(state) for f, state in enumerate(self._states)},
            "own": {f"{f}.{round_}": own for (f, round_), own in self._own.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.anchors = [state["anchors"][str(f)] for f in range(len(self.anchors))]
        self._states = [state["states"][str(f)] for f in range(len(self._states))]
        self._own = {(int(f), int(r)): own for key, own in state["own"].items() for f, r in [key.split(".")]}
