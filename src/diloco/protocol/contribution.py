"""Contributions, verdicts and calls, as the state machines see them: plain values, without the tensors.

Each contribution has a number, ascending per incarnation and fragment. Verdicts name it, and retransmissions are
recognised by it. A syncer sends a learner's whole `Standing` on every connection and with every heartbeat, so the next
message repairs a lost one, and a message that arrives twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco.core.choices import whole_number
from diloco.protocol.units import Ranges

NOTHING = -1
"""The version of a fragment that a learner does not hold, or has not fetched yet."""

# Reasons for which the work of a rejected contribution stays pending, and is part of its learner's next contribution.
OUT_OF_STEP = "out of step"
"""Its learner is a round behind: it was sent at or before the step of the previous round."""
DROPPED = "dropped"
"""`AllLive(drop=…)` leaves it out."""
ABANDONED = "abandoned"
"""It was left out of a merge that has no finite result: there is no version to wait for."""

KEPT = (OUT_OF_STEP, DROPPED, ABANDONED)

# The reason for which a learner discards tokens by itself.
OVERLAP = "overlap"
"""Trained between a send and the adoption that overwrote it."""

# Reasons for which a contribution is discarded.
MISSED = "missed"
"""Its round is closed. The learner still receives the round's version."""
TWICE = "twice in one round"
"""The round has a contribution of an earlier incarnation. The learner still receives the round's version."""
LATE = "late"
"""It was measured from an older version than the one it would be merged into, and the quorum's `late` is "drop"."""
VERSION = "version"
"""No learner can have its round or base."""
OUTLIER = "outlier"
"""The method's screen refused its norm."""
NOT_FINITE = "not finite"
"""The merge of its round, or of an earlier round, has no finite result."""

UNMERGED = "not merged at the end"
"""The reason for which the syncer discards what a learner had in flight or had not sent when it finished or left."""


@dataclass(frozen=True)
class Contribution:
    """The description of an outer gradient that a learner sends.

    Attributes:
        learner, incarnation: the learner that measured it.
        fragment: index of the fragment.
        number: 1, 2, 3, … of this incarnation and fragment, in the order sent.
        round: the merge that it is intended for; round r takes version r to version r + 1.
        base: the version that the displacement was measured from. It is less than `round` if, by an overlap of a whole
            interval, the answer of the previous round is still outstanding.
        tokens, steps: work in it, since the learner's previous contribution of this fragment.
        trained: tokens this incarnation has trained in all, when it was sent.
        discarded: tokens of this fragment that adoption has overwritten since the previous contribution, by reason.
        step: the inner step after which it was sent. A round does not wait for a learner that passed the round's step
            without contributing.
        tensors: indices, in the fragment, of the tensors that this learner trains; None: all of them.
        units: of the run's data (`protocol.leases`), that its work is on; empty where data is not leased.
        overwritten: units whose work on this fragment adoption has overwritten since the previous contribution.
        routed: of a fragment of experts, the tokens of its work that were routed to the expert of each of its tensors;
            None: not counted.
    """

    learner: str
    incarnation: int
    fragment: int
    number: int
    round: int
    base: int
    tokens: int
    steps: int
    trained: int = 0
    discarded: tuple[tuple[str, int], ...] = ()
    step: int = field(kw_only=True)
    tensors: tuple[int, ...] | None = field(default=None, kw_only=True)
    units: Ranges = field(default=(), kw_only=True)
    overwritten: Ranges = field(default=(), kw_only=True)
    routed: tuple[int, ...] | None = field(default=None, kw_only=True)

    @property
    def is_empty(self) -> bool:
        """Whether its learner trains no tensor of the fragment: its payload has no bytes."""
        return self.tensors == ()

    @property
    def accounted(self) -> int:
        """Tokens that it accounts for: those of its work, and those discarded since the previous contribution."""
        return self.tokens + sum(tokens for _, tokens in self.discarded)


Decided = tuple[Contribution, str | None, int]
"""A contribution, the reason for which it is rejected (None: it is merged), and the version with which that is decided.
"""


@dataclass(frozen=True)
class Verdict:
    """Whether a contribution was merged or rejected.

    Attributes:
        fragment, number: of the contribution; the incarnation is that of the receiver.
        reason: why it was rejected; None: it is merged.
        version: the version that it is merged in, or that the fragment had when it was rejected.
    """

    fragment: int
    number: int
    reason: str | None
    version: int


@dataclass(frozen=True)
class Rejection:
    """A contribution of this learner will not be merged."""

    fragment: int
    number: int
    reason: str


@dataclass(frozen=True)
class CallForWork:
    """The syncer calls for this learner's work on a fragment that is at this version."""

    fragment: int
    version: int


@dataclass(frozen=True)
class Drained:
    """This learner was evicted, and the run has no place for it any more: its contributions in flight are void, and it
    takes no more steps."""


@dataclass(frozen=True)
class Hold:
    """The run is paused and the learner takes no steps; `is_paused` false: the run continues."""

    is_paused: bool


@dataclass(frozen=True)
class Settled:
    """The run has ended: no version follows those that this learner has received. Otherwise, another learner has
    joined."""

    is_settled: bool


@dataclass(frozen=True)
class Budget:
    """When a run ends.

    Attributes:
        tokens: of all learners together.
        steps: the inner step of the run after which each learner ends. None: no limit.

    Raises:
        ConfigError: a limit below 1.
    """

    tokens: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        for name, limit in (("tokens", self.tokens), ("steps", self.steps)):
            if limit is not None:
                whole_number(f"{name} of a run", limit, minimum=1)

    def is_spent(self, tokens: int | None, step: int) -> bool:
        """Whether it ends a learner that is at this inner step, of a run that has trained so many tokens."""
        has_tokens = self.tokens is not None and tokens is not None and tokens >= self.tokens
        return has_tokens or (self.steps is not None and step >= self.steps)


@dataclass(frozen=True)
class Standing:
    """The whole state of the run for one learner. Receiving it again changes nothing.

    Attributes:
        step: the highest inner step known of any learner.
        start_step: the inner step that the learner starts from if it has not trained yet; less than `step` where a
            round waits for its send after that step.
        run_tokens: tokens trained by the whole run.
        num_live: live learners.
        sync_every: inner steps between two pushes of this learner; None: the method's H.
        versions: of each fragment, published.
        calls: (fragment, version) of the calls for work that it has not answered.
        verdicts: those of its incarnation that it has not confirmed, by fragment and number.
        drained: the run has no place for it any more (`protocol.steering`): it sends its last work, and leaves.
        order: ascending for one process of the syncer: of two that overtook each other, the higher is the newer.
        paused: no round is merged, and learners take no steps.
        at_least: the fewest learners that a round is merged with, if an operator has set it; 0: as in the method.
        settled: all learners have finished, and nothing is left to merge: `versions` are final unless one joins, or the
            syncer is started again, which may call for late work once more.
        budget: of the run.
        dealt: the groups of experts that it is to hold; none: its set is fixed.
    """

    step: int
    start_step: int
    run_tokens: int
    num_live: int
    sync_every: int | None
    versions: tuple[int, ...]
    calls: tuple[tuple[int, int], ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    drained: bool = False
    order: int = 0
    paused: bool = False
    at_least: int = 0
    settled: bool = False
    budget: Budget = Budget()
    dealt: tuple[int, ...] = ()
