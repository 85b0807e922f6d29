"""The actions of `SyncerCore`: values that the driver executes."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.protocol.contribution import Contribution


@dataclass(frozen=True)
class Acknowledge:
    """Acknowledge a contribution and keep its payload: the syncer is responsible for it now.

    `duplicate`: it is already open, or has a verdict; drop this copy.
    """

    contribution: Contribution
    duplicate: bool


@dataclass(frozen=True)
class Reject:
    """Drop a contribution's payload: it will not be merged. Its learner is sent the verdict once that is durable."""

    contribution: Contribution
    reason: str


@dataclass(frozen=True)
class MergeRound:
    """Close the round: merge these contributions and take the outer step; then call `merged`, or `abandoned`. After
    `merged`, make the new version durable together with the record `saved(storing=[fragment])`, and call `stored`.

    Contributions are in learner-id order. Several contributions of one learner, the late ones first, are added up.

    Attributes:
        weights: one per learner.
        scale: multiplies the merged outer gradient.
        members: the learners of the round.
        reason: why the round is closed now, in one sentence.
    """

    fragment: int
    round: int
    contributions: tuple[Contribution, ...]
    weights: tuple[float, ...]
    scale: float
    members: frozenset[str]
    reason: str


@dataclass(frozen=True)
class PersistRecord:
    """Make a record durable soon: take `saved()`, then call `recorded`. The record of a stored version suffices."""


@dataclass(frozen=True)
class Publish:
    """The version is durable: make it visible, and send each learner its standing."""

    fragment: int
    version: int
    contributors: tuple[str, ...]


@dataclass(frozen=True)
class Tell:
    """Send these learners their standing, which has changed."""

    learners: tuple[str, ...]


@dataclass(frozen=True)
class Evict:
    """Notify this incarnation of its eviction. `replaced`: a newer one took its place, so it must not rejoin."""

    learner: str
    incarnation: int
    reason: str
    replaced: bool


@dataclass(frozen=True)
class WakeAt:
    """Call `tick` at this time at the latest; an earlier `WakeAt` is void."""

    at: float


Action = Acknowledge | Reject | MergeRound | PersistRecord | Publish | Tell | Evict | WakeAt
