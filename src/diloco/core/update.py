"""What is said of a contribution and of a published version. Plain values: tensors travel beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

# Why a contribution is sent back: the work stays with the learner, pending, and goes with its next contribution.
OUT_OF_STEP = "out of step"
"""The others sent theirs to the round before after this same step of the schedule."""
DROPPED = "dropped"
"""It is one of those that `AllLive(drop=…)` leaves out."""

KEPT = (OUT_OF_STEP, DROPPED)

# Why a learner discards tokens by itself.
OVERLAP = "overlap"
"""Trained between a send and the adoption that overwrote it."""

# Why a contribution is discarded.
MISSED = "missed"
"""The round is closed. Its answer comes all the same."""
TWICE = "twice in one round"
"""The round has one of an earlier incarnation. Its answer comes all the same."""
LATE = "late"
"""It was measured from an older version than the one it would be merged into, and the quorum's `late` is "drop"."""
VERSION = "version"
"""Nobody who follows the protocol could send it."""
OUTLIER = "outlier"
"""The method's screen refused its norm."""


@dataclass(frozen=True)
class Contribution:
    """What a learner says with an outer gradient.

    Attributes:
        learner, incarnation: who measured it.
        fragment: index of the fragment.
        round: the merge it is meant for; round r takes version r to version r + 1.
        base: the version the displacement was measured from. Less than `round` where an overlap of a whole interval has
            the answer to the previous round still on its way.
        tokens, steps: work in it, since the learner's previous contribution of this fragment.
        trained: tokens this incarnation has trained in all, when it was sent.
        discarded: tokens of this fragment that adoption has overwritten since the previous contribution, by reason.
        step: the inner step after which it was sent. Who has passed that step without it is not waited for.
        tensors: indices, in the fragment, of the tensors that this learner trains; None: all of them.
    """

    learner: str
    incarnation: int
    fragment: int
    round: int
    base: int
    tokens: int
    steps: int
    trained: int = 0
    discarded: tuple[tuple[str, int], ...] = ()
    step: int = field(kw_only=True)
    tensors: tuple[int, ...] | None = field(default=None, kw_only=True)

    @property
    def accounted(self) -> int:
        """Tokens that it accounts for: those whose work is in it, and those given up since the one before."""
        return self.tokens + sum(tokens for _, tokens in self.discarded)


@dataclass(frozen=True)
class Update:
    """A published version of a fragment.

    Attributes:
        fragment: index of the fragment.
        base, version: the versions it joins.
        contributors, weights: whose work is in it, in merge order.
        scale: what the merged outer gradient was multiplied by.
        digest: of the new global fragment, fp32.
        lossless: True: the payload is the new fragment in fp32 and needs no base. False: it is the encoded change from `base`, or
            the encoded outer gradient that takes `base` to `version`.
    """

    fragment: int
    base: int
    version: int
    contributors: tuple[str, ...]
    weights: tuple[float, ...]
    scale: float
    digest: str
    lossless: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `as_dict` gave; JSON in between does no harm."""
        return cls(**{**values, "contributors": tuple(values["contributors"]), "weights": tuple(values["weights"])})
