"""The tensors of a run: each fragment's newest version, its outer state, and the newest updates as they go over the wire."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from diloco.core.layout import Layout
from diloco.core.method import Method
from diloco.core.update import Closed, Update
from diloco.errors import CorruptPayloadError, LayoutError

KEPT_UPDATES = 3
"""Encoded updates of a fragment kept in memory: with an overlap of two intervals a learner may be two behind."""

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
class HeldFragment:
    """One fragment at `version`, and the newest updates that led to it (oldest first)."""

    version: int
    theta: Tensor
    outer_state: Mapping[str, Tensor]
    residual: Tensor | None
    digest: str
    contributors: tuple[str, ...] = ()
    merged: MergedRounds = field(default_factory=dict)
    updates: deque[Pulled] = field(default_factory=lambda: deque(maxlen=KEPT_UPDATES))

    def take(self, update: Update, closed: Closed, merged: MergedRounds) -> None:
        """A new version is published."""
        self.version, self.digest, self.contributors, self.merged = (
            update.version,
            update.digest,
            update.contributors,
            merged,
        )
        self.theta, self.outer_state, self.residual = closed.theta, closed.outer_state, closed.residual
        self.updates.append(Pulled(update, closed.payload, merged))


@dataclass
class HeldModel:
    """The whole model: `static` is a safetensors file with the frozen parameters and buffers, `newest` what this process has published
    last."""

    method: Method
    layout: Layout
    static: bytes
    fragments: list[HeldFragment]
    newest: Update | None = None

    def take(self, update: Update, closed: Closed, merged: MergedRounds) -> None:
        """A new version is published."""
        self.fragments[update.fragment].take(update, closed, merged)
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
        for kept in held.updates:
            if kept.update.base == base:
                return kept
        update = Update(index, held.version - 1, held.version, held.contributors, (), 1.0, held.digest, lossless=True)
        outer_state = held.outer_state if self.method.outer_at == "learners" else {}
        return Pulled(update, held.theta, held.merged, outer_state)
