"""What a syncer's state machine is made of: fragments and their rounds, and the actions that it answers with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from diloco.core.contribution import Contribution


@dataclass
class Round:
    """An open round of a fragment.

    Attributes:
        number: the version that it starts from.
        opened_at: when its first contribution came, or when it was called.
        step: after which inner step its contributions were sent (the earliest).
        members: who is waited for.
        contributions: the newest of each learner.
        earlier: what came too late for the round before, of learners that have a newer one here.
        fresh: who has answered the call (brought work on this very version), or pushed since the round before was closed.
        refused: what the method's screen has left out, once it is merged.
        missed: what came after it was closed. Its learners are told when the version is stored.
        called: the syncer has asked for it.
        quorum_at: when enough fresh contributions were there.
        closed_at: when it was closed to be merged.
    """

    number: int
    opened_at: float
    step: int
    members: set[str]
    contributions: dict[str, Contribution] = field(default_factory=dict)
    earlier: list[Contribution] = field(default_factory=list)
    fresh: set[str] = field(default_factory=set)
    refused: list[Contribution] = field(default_factory=list)
    missed: list[Contribution] = field(default_factory=list)
    called: bool = False
    quorum_at: float | None = None
    closed_at: float | None = None

    @property
    def everything(self) -> tuple[Contribution, ...]:
        """All contributions, in merge order: by learner, and a learner's late ones before its fresh one."""
        late = sorted(self.earlier, key=lambda c: (c.incarnation, c.round))
        by_learner = sorted((*late, *self.contributions.values()), key=lambda c: c.learner)
        return tuple(by_learner)

    def refuse(self, learners: Sequence[str]) -> None:
        """The screen leaves these out."""
        self.refused = [c for c in self.everything if c.learner in learners]
        self.earlier = [c for c in self.earlier if c.learner not in learners]
        for learner in learners:
            del self.contributions[learner]


@dataclass
class FragmentState:
    """One fragment as the syncer sees it: `version` is published, `step` is that of the round it came from (0: not known).

    `phase` is that of the round that follows it: "open", "merging" (tensor work under way) or "storing". `turn`: the run clock at
    which the syncer calls it next, where it calls.
    """

    version: int
    phase: Literal["open", "merging", "storing"] = "open"
    step: int = 0
    turn: int = 0
    rounds: dict[int, Round] = field(default_factory=dict)


@dataclass(frozen=True)
class Accept:
    """Acknowledge the contribution: it belongs to the syncer now. `duplicate`: its bytes are here already."""

    contribution: Contribution
    duplicate: bool


@dataclass(frozen=True)
class Reject:
    """Tell the learner that the contribution will not be merged, and why."""

    contribution: Contribution
    reason: str


@dataclass(frozen=True)
class Merge:
    """Close the round: merge these contributions and take the outer step; then call `merged`.

    In learner-id order; a learner may have several, the late ones first, which are added up. `weights`: one per learner.
    """

    fragment: int
    round: int
    contributions: tuple[Contribution, ...]
    weights: tuple[float, ...]
    scale: float


@dataclass(frozen=True)
class Store:
    """Make the new version durable; then call `stored`."""

    fragment: int
    version: int


@dataclass(frozen=True)
class Publish:
    """The version is durable: show it to everybody."""

    fragment: int
    version: int
    contributors: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """Ask these learners for their work on the fragment, which is at this version."""

    fragment: int
    version: int
    learners: tuple[str, ...]


@dataclass(frozen=True)
class Evict:
    """Tell this incarnation that it is out. `replaced`: a newer one has its place, so it must not come back."""

    learner: str
    incarnation: int
    reason: str
    replaced: bool


@dataclass(frozen=True)
class WakeAt:
    """Call `tick` at this time at the latest."""

    at: float


Action = Accept | Reject | Merge | Store | Publish | Call | Evict | WakeAt
