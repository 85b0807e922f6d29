"""The fragments that learners hold in virtual time. All holders of a version have the same bits, so each update is
decoded once for all."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from torch import Tensor

from diloco.core.held import Advanced, HeldFragment, advance
from diloco.core.layout import Layout
from diloco.core.method import Method
from diloco.run.global_model import Fetched

KEPT_RESULTS = 8
"""Per fragment; with an overlap of two intervals learners are two versions apart."""


class Replicas:
    """What fetched updates lead to, for all learners of a run of this model by this method."""

    def __init__(self, method: Method, layout: Layout) -> None:
        self._method, self._layout = method, layout
        self._results: dict[int, OrderedDict[tuple[int, str, int, str], Advanced]] = {}

    @property
    def hold_outer_states(self) -> bool:
        """Whether learners take the outer steps themselves."""
        return self._method.outer_at == "learners"

    def fetched(self, held: HeldFragment | None, fetched: Fetched[HeldFragment, Tensor]) -> Advanced:
        """The version that an update leads to from the one that a learner holds; None: it holds none.

        Raises:
            VersionError, DigestError: as `advance`.
        """
        update, payload = fetched.update, fetched.payload
        if payload is None:  # the whole fragment, losslessly
            return Advanced(self.as_learners_hold(fetched.held))
        assert held is not None
        results = self._results.setdefault(update.fragment, OrderedDict())
        key = held.version, held.digest, update.version, update.digest
        if key not in results:
            results[key] = advance(self._method, held, update, payload, self._layout.fragments[update.fragment].tensors)
            if len(results) > KEPT_RESULTS:
                results.popitem(last=False)
        return results[key]

    def as_learners_hold(self, held: HeldFragment) -> HeldFragment:
        """Without what only the syncer needs."""
        outer_state = held.outer_state if self.hold_outer_states else {}
        return replace(held, outer_state=outer_state, residual=None)

    def num_bytes(self, fetched: Fetched[HeldFragment, Tensor]) -> int:
        """As it goes over the network."""
        if fetched.payload is not None:
            return fetched.payload.numel()
        held = self.as_learners_hold(fetched.held)
        return sum(4 * each.numel() for each in (held.theta, *held.outer_state.values()))
