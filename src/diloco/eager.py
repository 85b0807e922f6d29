"""Eager updates on one learner: its own anchors and outer states, which differ from the run's for a while (arXiv 2502.12996).

At every send of a fragment a learner takes an outer step by itself, with the mean that is due, in which its own old outer gradient is
replaced by its newest (`core.adopt.eager_gradient`). A learner adds its newest one with the share of an average live learner, for it
cannot know its weight in a mean that is not there yet. What it takes away when that mean comes is what it added, whatever part of the
mean is its own: after any number of rounds it has taken the steps of all means that came, and those of its own work that is on its way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diloco.core.adopt import eager_gradient
from diloco.core.elementwise import flush_denormals
from diloco.core.flights import Send
from diloco.core.method import Method
from diloco.exchange.base import Arrived, Opened


class EagerSteps:
    """What a learner keeps for eager updates: per fragment anchor and outer state, fp32 on the host, and what it has sent."""

    def __init__(self, method: Method, opened: Opened) -> None:
        self._method = method
        self.anchors = list(opened.model.fragments)
        """What this learner measures its next outer gradients from."""
        self._states: list[Mapping[str, Tensor]] = list(opened.outer_states)
        self._newest: dict[int, Tensor] = {}  # by fragment: the outer gradient sent at this boundary, as decoded
        self._added: dict[tuple[int, int], Tensor] = {}
        """By fragment and round: what this learner has added to the means before, times its share, and not yet taken away."""

    def sent(self, send: Send, payload: Tensor, num_elements: int) -> None:
        """An outer gradient goes out, encoded like this."""
        self._newest[send.fragment] = self._method.up.decode(payload, num_elements)

    def step(self, fragment: int, send: Send | None, arrived: Arrived | None, num_live: int) -> Tensor:
        """The outer step of a boundary at which the fragment was sent, a version of it is due, or both; returns the new anchor.

        A version that was fetched whole (a restart) starts the fragment again from the run's own values, in which nothing is that this
        learner has added.

        Arguments:
            num_live: learners that take part: what the mean of this send will probably be over.
        """
        if arrived is not None and arrived.outer_state is not None:
            self.anchors[fragment], self._states[fragment] = arrived.theta, arrived.outer_state
            self._added = {key: added for key, added in self._added.items() if key[0] != fragment}
        mean = None if arrived is None else arrived.mean
        taken_back = None if arrived is None else self._added.pop((fragment, arrived.update.base), None)
        own = None
        if send is not None:
            own = self._newest.pop(fragment).mul(1.0 / num_live)
            earlier = self._added.get((fragment, send.round))  # the round is tried again
            self._added[fragment, send.round] = own if earlier is None else earlier.add(own)
        gradient = eager_gradient(own, mean, taken_back)
        if gradient is not None:
            state, anchor = self._states[fragment], self.anchors[fragment]
            new, self._states[fragment] = self._method.outer.step(state, anchor, gradient)
            self.anchors[fragment] = flush_denormals(new)
        return self.anchors[fragment]

    def state_dict(self) -> dict[str, Any]:
        """Tensors in nested dicts, from which `load_state_dict` continues exactly."""
        return {
            "anchors": {str(f): anchor for f, anchor in enumerate(self.anchors)},
            "states": {str(f): dict(state) for f, state in enumerate(self._states)},
            "added": {f"{f}.{round_}": added for (f, round_), added in self._added.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.anchors = [state["anchors"][str(f)] for f in range(len(self.anchors))]
        self._states = [state["states"][str(f)] for f in range(len(self._states))]
        self._added = {(int(f), int(r)): added for key, added in state["added"].items() for f, r in [key.split(".")]}
