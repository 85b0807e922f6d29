"""The tensors of a run: each fragment's newest version, and updates for learners that are behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco.core.held import Closed, HeldFragment
from diloco.core.layout import Layout
from diloco.core.method import Method
from diloco.core.update import Update
from diloco.errors import CorruptPayloadError, LayoutError

KEPT_UPDATES = 3
"""Updates of a fragment kept encoded in memory at most, for learners that are behind: as many as together have fewer
bytes than the fragment itself, but no fewer than a schedule lets learners be behind."""

MergedRounds = Mapping[str, tuple[int, int]]
"""By learner: incarnation and round of its newest contribution that is in a version or an earlier one."""


@dataclass(frozen=True)
class Pulled:
    """What is sent for a fragment.

    Attributes:
        update: what it says of itself. Lossless: `payload` is the whole fragment, fp32.
        payload: as it goes over the wire.
        merged: whose work is in it.
        outer_state: with a whole fragment, where the outer optimizer is on the learners; elsewhere empty.
    """

    update: Update
    payload: Tensor
    merged: MergedRounds
    outer_state: Mapping[str, Tensor] = field(default_factory=dict)

    def merged_round(self, learner: str, incarnation: int) -> int:
        """The newest round of a contribution of this incarnation that is in it or an earlier version; −1: none is."""
        last, round_ = self.merged.get(learner, (0, -1))
        return round_ if last == incarnation else -1


@dataclass
class HeldModel:
    """The whole model: `static` is a safetensors file with the frozen parameters and buffers, `contributors` and
    `merged` are of each fragment's newest version, `newest` is what this process has published last."""

    method: Method
    layout: Layout
    static: bytes
    fragments: list[HeldFragment]
    contributors: list[tuple[str, ...]]
    merged: list[MergedRounds]
    newest: Update | None = None

    def __post_init__(self) -> None:
        in_flight = self.method.schedule(len(self.fragments)).intervals_in_flight if self.method.quorum.scheduled else 0
        self._num_due = 1 + in_flight
        self._updates: list[deque[Pulled]] = [deque() for _ in self.fragments]  # oldest first

    def take(self, closed: Closed, merged: MergedRounds) -> None:
        """A new version is published."""
        update, f = closed.update, closed.update.fragment
        self.fragments[f], self.contributors[f], self.merged[f] = closed.held, update.contributors, merged
        updates = self._updates[f]
        updates.append(Pulled(update, closed.payload, merged))
        num_shorter = (4 * closed.held.theta.numel() - 1) // closed.payload.numel()
        if len(updates) > max(self._num_due, min(KEPT_UPDATES, num_shorter)):
            updates.popleft()
        self.newest = update

    def fragment(self, index: int) -> HeldFragment:
        """Raises LayoutError for one that there is not."""
        if not 0 <= index < len(self.fragments):
            raise LayoutError(
                f"the run has fragments 0 to {len(self.fragments) - 1}, not {index}; use the run's layout."
            )
        return self.fragments[index]

    def require_size(self, fragment: int, num_bytes: int) -> None:
        """A contribution has exactly the size that its fragment and codec need.

        Raises:
            LayoutError: no such fragment. CorruptPayloadError: another size.
        """
        up = self.method.up
        expected = up.encoded_bytes(self.fragment(fragment).theta.numel())
        if num_bytes != expected:
            raise CorruptPayloadError(
                f"a contribution to fragment {fragment} has {expected} bytes as {up.name}, not {num_bytes}; "
                "encode it with the run's codec."
            )

    def require_tensors(self, fragment: int, tensors: Collection[int] | None) -> None:
        """Raises LayoutError for a tensor that the fragment does not have (None: a learner that trains all of them)."""
        num_tensors = len(self.layout.fragments[fragment].tensors)
        for index in tensors or ():
            if not 0 <= index < num_tensors:
                raise LayoutError(
                    f"fragment {fragment} has tensors 0 to {num_tensors - 1}, not {index}; use the run's layout."
                )

    def pull(self, index: int, base: int) -> Pulled:
        """The update that follows version `base`, as encoded; the newest whole fragment, losslessly, where that is not kept.

        Raises:
            LayoutError: no such fragment.
        """
        held = self.fragment(index)
        for kept in self._updates[index]:
            if kept.update.base == base:
                return kept
        contributors = self.contributors[index]
        update = Update(index, held.version - 1, held.version, contributors, (), 1.0, held.digest, lossless=True)
        outer_state = held.outer_state if self.method.outer_at == "learners" else {}
        return Pulled(update, held.theta.view(torch.uint8), self.merged[index], outer_state)
