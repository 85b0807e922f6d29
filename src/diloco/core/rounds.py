"""What a syncer's state machine is made of: deadlines, members, rounds, and the actions that it answers with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from diloco.core.update import Contribution
from diloco.core.values import positive
from diloco.errors import ConfigError


@dataclass(frozen=True)
class Deadlines:
    """When a silent learner is given up: a multiple of its own measured step time, within a floor and a cap.

    Attributes:
        lost_steps, lost_floor_s, lost_cap_s: nothing was heard of it (connection lost, no heartbeat) for this many of its steps.
        stalled_steps, stalled_floor_s, stalled_cap_s: heartbeats arrive, but no step was taken, and it does not wait for an answer.
    """

    lost_steps: float = 20.0
    lost_floor_s: float = 6.0
    lost_cap_s: float = 120.0
    stalled_steps: float = 50.0
    stalled_floor_s: float = 60.0
    stalled_cap_s: float = 3600.0

    def __post_init__(self) -> None:
        for kind in ("lost", "stalled"):
            floor, cap = getattr(self, f"{kind}_floor_s"), getattr(self, f"{kind}_cap_s")
            if not 0 < floor <= cap:
                raise ConfigError(
                    f"{kind}_floor_s={floor} and {kind}_cap_s={cap} leave no deadline; use 0 < floor <= cap."
                )
            positive(f"{kind}_steps", getattr(self, f"{kind}_steps"))

    def lost_after_s(self, step_s: float | None) -> float:
        """Seconds of silence after which a learner with this step time is lost."""
        return min(self.lost_cap_s, max(self.lost_floor_s, self.lost_steps * (step_s or 0.0)))

    def stalled_after_s(self, step_s: float | None) -> float:
        """Seconds without a step after which it is stalled; the cap before there is a measured step time."""
        return (
            self.stalled_cap_s
            if step_s is None
            else min(self.stalled_cap_s, max(self.stalled_floor_s, self.stalled_steps * step_s))
        )


@dataclass
class Member:
    """A learner that is not given up.

    Attributes:
        ready: it has trained since it joined; one that is still starting up delays nobody.
        ready_step: the inner step known when it became ready: it may have passed that one without contributing.
        tokens: trained by this incarnation.
        sent_step: by fragment, the inner step after which it last contributed, or joined.
        sent_work: by fragment, tokens and steps of its last contribution.
    """

    learner: str
    incarnation: int
    step: int
    seen_at: float
    progressed_at: float
    step_s: float | None = None
    waiting: bool = False
    connected: bool = True
    ready: bool = False
    ready_step: int = 0
    tokens: int = 0
    sent_step: dict[int, int] = field(default_factory=dict)
    sent_work: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Connected and ready."""
        return self.connected and self.ready


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
