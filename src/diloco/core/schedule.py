"""After which inner steps each fragment is sent, and its answer applied. Integer arithmetic only.

Inner steps count t = 1, 2, 3, …. With H = sync_every, P = num_fragments, τ = overlap and one offset o_p per fragment:

    fragment p is sent    after the inner steps t ≡ o_p (mod H)
    fragment p is applied after the inner steps t + τ

so every fragment is synchronised once in H steps, and a learner keeps training for the τ steps in which its outer
gradient is in flight. Sends are spread evenly by default, o_p = ⌊(p + 1)·H / P⌋: with P = 1 that is DiLoCo, a
synchronisation after H, 2H, … steps; with P > H several fragments are sent after one step. An offset of 0 is one of H.
torchft's convention, which counts to the application, is o_p = (p + 1)·H / P − τ.

At one boundary (after one inner step) sends come before applications: with τ = H a fragment's next outer gradient is
measured before the answer to the previous one is applied.

A fragment with the multiple k_p is synchronised once in k_p·H steps: every H above is then k_p·H, as for the experts of
a mixture (`fragments.Experts`).

An interval is H inner steps. H may change over a run: `sync_every = ((0, 30), (1000, 100))` synchronises every 30
inner steps up to step 1000 and every 100 after it. Each of these pieces of the run counts its intervals from its own
first step.

Where the outer optimizer is on the learners an overlap may be two intervals, τ = 2H (eager updates, arXiv 2502.12996).

Streaming DiLoCo, arXiv 2501.18512, algorithm 2.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import ClassVar, cast

from diloco.core.choices import whole_number
from diloco.errors import ConfigError

SyncEvery = int | tuple[tuple[int, int], ...]
"""H, or (from_step, H) for each piece of a run."""

MAX_INTERVALS_IN_FLIGHT = 2


def sync_every_of(value: object) -> SyncEvery:
    """H as a run file or a caller gives it: a number, or pairs (from_step, H) in ascending order, the first from 0.

    Raises:
        ConfigError: any other value.
    """
    if not isinstance(value, list | tuple):
        whole_number("sync_every", value, minimum=1)
        return cast("int", value)
    pieces: list[tuple[int, int]] = []
    for piece in value:
        if not isinstance(piece, list | tuple) or len(piece) != 2:
            raise ConfigError(
                f"sync_every must be a whole number of at least 1 or pairs [from_step, H], not {value!r}."
            )
        from_step, every = piece
        whole_number("from_step of sync_every", from_step, minimum=0)
        whole_number("H of sync_every", every, minimum=1)
        if from_step != 0 if not pieces else from_step <= pieces[-1][0]:
            raise ConfigError(f"the pieces of sync_every start at 0 and ascend, unlike {value!r}.")
        pieces.append((from_step, every))
    if not pieces:
        raise ConfigError("sync_every is an empty list; give a whole number, or pairs [from_step, H].")
    return pieces[0][1] if len(pieces) == 1 else tuple(pieces)


@dataclass(frozen=True)
class Schedule:
    """The communication pattern of one learner.

    Attributes:
        sync_every: H ≥ 1, inner steps between two synchronisations of one fragment, or (from_step, H) of each piece.
        num_fragments: P ≥ 1.
        overlap: τ, 0 ≤ τ ≤ 2H, inner steps between sending and applying. When τ > H / P several fragments are in flight
            at once.
        offsets: as an argument, one integer in 0..H per fragment (0 means H); None: o_p as above. As an attribute, the
            resolved offsets of the first piece, in 1..H: the first inner step after which each fragment is sent.
        multiples: k_p of each fragment; empty: 1.
        together: without offsets, all fragments are sent after the same inner steps, o_p = H.

    Raises:
        ConfigError: the numbers do not fit each other.

    >>> schedule = Schedule(sync_every=6, num_fragments=2, overlap=1)
    >>> schedule.offsets
    (3, 6)
    >>> schedule.sends(3), schedule.sends(4), schedule.sends(6)
    ((0,), (), (1,))
    """

    sync_every: SyncEvery
    num_fragments: int
    overlap: int = 0
    offsets: Sequence[int] | None = None
    multiples: tuple[int, ...] = ()
    together: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sync_every", sync_every_of(self.sync_every))
        whole_number("num_fragments", self.num_fragments, minimum=1)
        whole_number("overlap", self.overlap, minimum=0)
        object.__setattr__(self, "multiples", tuple(self.multiples) or (1,) * self.num_fragments)
        if self.offsets is not None and len(self._pieces) > 1:
            raise ConfigError("offsets belong to one sync_every; drop them, or give sync_every one value.")
        for _, every in self._pieces:
            if self.overlap > MAX_INTERVALS_IN_FLIGHT * every:
                raise ConfigError(f"overlap={self.overlap} exceeds two intervals of sync_every={every}; lower it.")
        resolved = [self._resolved_offsets(every) for _, every in self._pieces]
        object.__setattr__(self, "offsets", resolved[0])
        object.__setattr__(self, "_resolved", tuple(resolved))

    @property
    def _pieces(self) -> tuple[tuple[int, int], ...]:
        return ((0, self.sync_every),) if isinstance(self.sync_every, int) else self.sync_every

    @property
    def sends_together(self) -> bool:
        """Whether there are inner steps after which all fragments are sent, once in max(k_p) intervals."""
        pieces = zip(self._resolved, self._pieces, strict=True)
        return all(own == tuple(every * k for k in self.multiples) for own, (_, every) in pieces)

    @property
    def intervals_in_flight(self) -> int:
        """The number of answers to a fragment that may be in flight when its next outer gradient is sent."""
        return self.intervals_in(self.overlap)

    def intervals_in(self, overlap: int) -> int:
        """The number of whole intervals in an overlap."""
        return max(overlap // every for _, every in self._pieces)

    def sync_every_at(self, step: int, fragment: int | None = None) -> int:
        """H in the piece of inner step `step`; with `fragment`, k_p·H."""
        return self._pieces[self._piece(step)][1] * (1 if fragment is None else self.multiples[fragment])

    def sends(self, step: int) -> tuple[int, ...]:
        """The fragments sent after inner step `step` (1, 2, 3, …), in ascending order."""
        if step < 1:
            return ()
        piece = self._piece(step)
        start, every = self._pieces[piece]
        own = zip(self._resolved[piece], self.multiples, strict=True)
        return tuple(p for p, (offset, k) in enumerate(own) if (step - start - offset) % (k * every) == 0)

    def next_send(self, fragment: int, after: float) -> int:
        """The first inner step later than `after` after which the fragment is sent."""
        step = floor(after) + 1
        while True:
            piece = self._piece(step)
            start, every = self._pieces[piece]
            due = step + (start + self._resolved[piece][fragment] - step) % (every * self.multiples[fragment])
            if piece + 1 == len(self._pieces) or due <= self._pieces[piece + 1][0]:
                return due
            step = self._pieces[piece + 1][0] + 1

    def last_send(self, *, before: int) -> int:
        """The last inner step before this one after which any fragment is sent; 0 where there is none."""
        return next((step for step in range(before - 1, 0, -1) if self.sends(step)), 0)

    def _piece(self, step: int) -> int:
        """The index of the piece of inner step `step` (≥ 1): the last that starts before it."""
        return max(0, bisect_left(self._pieces, (step, 0)) - 1)

    def _resolved_offsets(self, every: int) -> tuple[int, ...]:
        if self.offsets is None:
            own = [every * k for k in self.multiples]
            if self.together:
                return tuple(own)
            return tuple((p + 1) * each // self.num_fragments or each for p, each in enumerate(own))
        if len(self.offsets) != self.num_fragments:
            raise ConfigError(
                f"offsets={tuple(self.offsets)} needs one offset for each of the {self.num_fragments} fragments; give "
                "them all, or none."
            )
        for offset, k in zip(self.offsets, self.multiples, strict=True):
            if type(offset) is not int or not 0 <= offset <= every * k:
                raise ConfigError(f"offset {offset!r} must be a whole number from 0 to sync_every={every * k}.")
        return tuple(offset or every * k for offset, k in zip(self.offsets, self.multiples, strict=True))

    _resolved: ClassVar[tuple[tuple[int, ...], ...]]  # of each piece; ClassVar keeps it out of the fields
