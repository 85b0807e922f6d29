"""What if a run had merged otherwise: its rounds, closed a second time by another method.

The rounds are as they were: the same contributions, weights and scales. So are the contributions, which learners
measured from the model that the run had, and not from the one that this method would have made. That is what the
answer assumes; over many rounds learners would have gone elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diloco.core.actions import MergeRound
from diloco.core.held import HeldFragment
from diloco.core.layout import Layout
from diloco.core.method import Method
from diloco.errors import PayloadError
from diloco.run.tensor_jobs import TensorJobs, TensorSlot

FIELDS = ("merge", "screen", "outer", "down")
"""Fields of a method that change what becomes of a round's contributions, and nothing else."""

ASSUMED = (
    "Assumed: the rounds, their contributions, weights and scales are as they were. Learners measured the "
    "contributions from the model that the run had; with another one they would have sent others. The steps are mean "
    "norms of outer steps, and the distance is that of the two models after the last round."
)


class OtherMerges:
    """Closes rounds by another method (`replay_ports.OtherClose`).

    Arguments:
        changes: fields of the method, as in `Method.to_dict`.

    Attributes:
        versions: by fragment: (version, norm of the run's outer step, norm of the other's, norm of the difference
            between the two models) of each round.
        num_failed: rounds that have no result by the other method; the model stays as it is in them.
        num_refused: contributions that its screen has left out.
    """

    def __init__(self, changes: Mapping[str, Any]) -> None:
        self.versions: dict[int, list[tuple[int, float, float, float]]] = {}
        self.num_failed = self.num_refused = 0
        self._changes = changes

    def close(
        self, method: Method, action: MergeRound, layout: Layout, held: HeldFragment, new: HeldFragment,
        other: HeldFragment | None, slots: Sequence[TensorSlot],
    ) -> HeldFragment:  # fmt: skip
        """As `replay_ports.OtherClose`."""
        changed = Method.from_dict(method.to_dict() | dict(self._changes))
        before = other or HeldFragment.first(changed, held.fragment, held.theta, held.version)
        closed = TensorJobs(changed, seconds=None).close(action, layout, before, slots)
        if isinstance(closed, PayloadError):
            self.num_failed += 1
            after = before
        else:
            self.num_refused += len(closed.refused)
            after = closed.held
        norms = (
            _norm(new.theta - held.theta), _norm(after.theta - before.theta), _norm(after.theta - new.theta)
        )  # fmt: skip
        self.versions.setdefault(action.fragment, []).append((new.version, *norms))
        return after


def _norm(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
