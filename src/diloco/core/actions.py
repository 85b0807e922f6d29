"""What a syncer's state machine answers an event with: values, carried out by the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.core.contribution import Contribution


@dataclass(frozen=True)
class Accept:
    """Keep the contribution's bytes: they belong to the syncer now. `duplicate`: they are here already, or were
    settled; drop these."""

    contribution: Contribution
    duplicate: bool


@dataclass(frozen=True)
class Reject:
    """Drop the contribution's bytes: it will not be merged. Its learner hears why from its standing, once that is
    durable."""

    contribution: Contribution
    reason: str


@dataclass(frozen=True)
class MergeRound:
    """Close the round: merge these contributions and take the outer step; then call `merged`, or `abandoned`.

    Contributions come in learner-id order; a learner may have several, the late ones first, which are added up.

    Attributes:
        weights: one per learner.
        scale: multiplies the merged outer gradient.
        members: the learners that the round had.
    """

    fragment: int
    round: int
    contributions: tuple[Contribution, ...]
    weights: tuple[float, ...]
    scale: float
    members: frozenset[str]


@dataclass(frozen=True)
class PersistVersion:
    """Make the new version durable, together with the record `saved(storing=fragment)`; then call `stored`."""

    fragment: int
    version: int


@dataclass(frozen=True)
class PersistRecord:
    """Make a record durable, soon: `saved()`, then call `recorded`. A version that is stored first serves as well."""


@dataclass(frozen=True)
class Publish:
    """The version is durable: show it to all learners, and send each its standing."""

    fragment: int
    version: int
    contributors: tuple[str, ...]


@dataclass(frozen=True)
class Tell:
    """Send these learners their standing: it has changed."""

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
    """Call `tick` at this time at the latest; an earlier `WakeAt` is void."""

    at: float


Action = Accept | Reject | MergeRound | PersistVersion | PersistRecord | Publish | Tell | Evict | WakeAt


@dataclass(frozen=True)
class Record:
    """What of a run must survive besides its tensors.

    Attributes:
        serial: ascending. What a record holds is durable once it, or a later one, is stored.
        values: plain values (JSON).
    """

    serial: int
    values: Mapping[str, Any]
