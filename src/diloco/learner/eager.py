"""Eager updates of one learner: its own anchors and outer states, which differ from the run's (arXiv 2502.12996).

At every send of a fragment the learner takes an outer step of its own. The step is along the mean that is due, in which
the learner's earlier outer gradient is replaced by its newest (`core.adopt.eager_gradient`). The learner does not know
its weight in a mean that is not computed yet, so it adds its newest outer gradient with the share 1 / (live learners).
When that mean arrives, the learner subtracts exactly the term that it added, whatever its weight in the mean is. After
any number of rounds it has therefore taken the steps of all means that arrived, and those of its own work in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from diloco.core.adopt import eager_gradient
from diloco.core.averaged import AveragedElements
from diloco.core.layout import Placement
from diloco.core.memory import flush_denormals, new_like
from diloco.core.method import Method
from diloco.exchange.base import Arrived, StartingState
from diloco.protocol.in_flight import Send


class EagerSteps:
    """The anchors and outer states of eager updates, flat fp32 host tensors, and the outer gradients in flight.

    Arguments:
        places: the tensors of each fragment, or of this rank's shard of it.

    Attributes:
        anchors: per fragment, what this learner's outer gradients are measured from.
    """

    def __init__(self, method: Method, places: Sequence[Sequence[Placement]], opened: StartingState) -> None:
        self._method = method
        self._averaged = [AveragedElements(each) for each in places]
        self.anchors = [held.theta for held in opened.fragments]
        self._states = [held.outer_state for held in opened.fragments]
        # By fragment: the outer gradient that is sent at this boundary, as decoded from its payload.
        self._newest: dict[int, Tensor] = {}
        # By fragment and round: the outer gradient, times its share, that was added and not yet subtracted.
        self._added: dict[tuple[int, int], Tensor] = {}

    def sent(self, send: Send, payload: Tensor, num_elements: int) -> None:
        """Record the payload of an outer gradient that is sent at this boundary."""
        self._newest[send.fragment] = self._method.up.decode(payload, num_elements)

    def step(self, fragment: int, send: Send | None, arrived: Arrived | None, num_live: int) -> Tensor:
        """Take the outer step of a boundary at which the fragment was sent, a version of it is due, or both.

        A version that was fetched whole (after a restart) replaces anchor and outer state by the run's own, which
        contain nothing that this learner has added.

        Arguments:
            send: the send of the fragment at this boundary; None: it is not sent.
            arrived: the version that is due; None: none.
            num_live: the number of live learners; its inverse is the share of this send.

        Returns:
            The new anchor, flat fp32 on the host.
        """
        if arrived is not None and arrived.mean is None:
            self.anchors[fragment], self._states[fragment] = arrived.held.theta, arrived.held.outer_state
            self._added = {key: added for key, added in self._added.items() if key[0] != fragment}
        mean = None if arrived is None else arrived.mean
        subtracted = None if arrived is None else self._added.pop((fragment, arrived.update.base), None)
        own = None
        if send is not None:
            own = self._newest.pop(fragment).mul(1.0 / num_live)
            earlier = self._added.get((fragment, send.round))  # of an earlier attempt at the same round
            self._added[fragment, send.round] = own if earlier is None else earlier.add(own)
        gradient = eager_gradient(own, mean, subtracted)
        if gradient is not None:
            state, anchor = self._states[fragment], self.anchors[fragment]
            new, new_state = new_like(anchor), {name: new_like(each) for name, each in state.items()}
            whole, averaged = slice(0, anchor.numel()), self._averaged[fragment]
            averaged.step(self._method.outer, whole, state, anchor, gradient, new, new_state)
            averaged.floor(whole, new)
            self.anchors[fragment], self._states[fragment] = flush_denormals(new), new_state
        return self.anchors[fragment]

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts of tensors, from which `load_state_dict` continues exactly."""
        return {
            "anchors": {str(f): anchor for f, anchor in enumerate(self.anchors)},
            "states": {str(f): dict(state) for f, state in enumerate(self._states)},
            "added": {f"{f}.{round_}": added for (f, round_), added in self._added.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.anchors = [state["anchors"][str(f)] for f in range(len(self.anchors))]
        self._states = [state["states"][str(f)] for f in range(len(self._states))]
        self._added = {(int(f), int(r)): added for key, added in state["added"].items() for f, r in [key.split(".")]}
