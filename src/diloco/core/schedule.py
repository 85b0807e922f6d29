"""Which fragment is sent, and which applied, after which inner step. Integers only.

Inner steps count t = 1, 2, 3, …. With H = sync_every, P = num_fragments, τ = overlap and one offset o_p per fragment:

    fragment p is sent    after the inner steps t ≡ o_p (mod H)
    fragment p is applied after the inner steps t + τ

so every fragment is synchronised once in H steps, and a learner keeps training for τ steps while its outer gradient
travels. Sends are spread evenly by default, o_p = ⌊(p + 1)·H / P⌋: with P = 1 that is DiLoCo, a synchronisation after
H, 2H, … steps. torchft's convention, which counts to the application, is o_p = (p + 1)·H / P − τ.

At one boundary (after one inner step) sends come before applications: with τ = H a fragment's next outer gradient is
measured before the answer to the previous one is applied.

Streaming DiLoCo, arXiv 2501.18512, algorithm 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diloco.core.values import whole_number
from diloco.errors import ConfigError


class Due(NamedTuple):
    """What is due at the boundary after one inner step: fragments to send, then to apply, in ascending order."""

    send: tuple[int, ...]
    apply: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """The communication pattern of one learner.

    sync_every: H ≥ 1, inner steps between two synchronisations of one fragment. num_fragments: P ≥ 1. overlap: τ, 0 ≤
    τ ≤ H, inner steps between sending and applying. offsets: one integer in 0..H per fragment (0 means H); afterwards
    `offsets` holds the resolved ones, in 1..H: the first inner step after which each fragment is sent. When τ > H / P
    several fragments are in flight at once. Raises ConfigError when the numbers cannot work.

    >>> schedule = Schedule(sync_every=6, num_fragments=2, overlap=1)
    >>> schedule.offsets
    (3, 6)
    >>> schedule.due(3), schedule.due(4)
    (Due(send=(0,), apply=()), Due(send=(), apply=(0,)))
    """

    sync_every: int
    num_fragments: int
    overlap: int = 0
    offsets: Sequence[int] | None = None

    def __post_init__(self) -> None:
        whole_number("sync_every", self.sync_every, minimum=1)
        whole_number("num_fragments", self.num_fragments, minimum=1)
        whole_number("overlap", self.overlap, minimum=0)
        if self.overlap > self.sync_every:
            raise ConfigError(
                f"overlap={self.overlap} exceeds sync_every={self.sync_every}; an overlap is at most one period."
            )
        object.__setattr__(self, "offsets", self._resolved_offsets())

    def sends(self, step: int) -> tuple[int, ...]:
        """The fragments sent after inner step `step` (1, 2, 3, …), in ascending order."""
        return self._phase(step)

    def applies(self, step: int) -> tuple[int, ...]:
        """The fragments applied after inner step `step`: those sent τ steps earlier."""
        return self._phase(step - self.overlap)

    def due(self, step: int) -> Due:
        """What is due after inner step `step`; the sends come first."""
        return Due(self.sends(step), self.applies(step))

    def _phase(self, step: int) -> tuple[int, ...]:
        if step < 1:
            return ()
        assert self.offsets is not None
        return tuple(p for p, offset in enumerate(self.offsets) if (step - offset) % self.sync_every == 0)

    def _resolved_offsets(self) -> tuple[int, ...]:
        if self.offsets is None:
            if self.sync_every < self.num_fragments:
                raise ConfigError(
                    f"sync_every={self.sync_every} is less than the {self.num_fragments} fragments;"
                    " use fewer fragments, a larger sync_every, or give offsets."
                )
            return tuple((p + 1) * self.sync_every // self.num_fragments for p in range(self.num_fragments))
        if len(self.offsets) != self.num_fragments:
            raise ConfigError(
                f"offsets={tuple(self.offsets)} needs one offset for each of the {self.num_fragments} fragments."
            )
        for offset in self.offsets:
            if type(offset) is not int or not 0 <= offset <= self.sync_every:
                raise ConfigError(f"offset {offset!r} must be a whole number from 0 to sync_every={self.sync_every}.")
        return tuple(offset or self.sync_every for offset in self.offsets)
