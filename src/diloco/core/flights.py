"""What a learner's state machine is made of: contributions in flight, what to send, and the books of a fragment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from diloco.core.ledger import Ledger


@dataclass
class Flight:
    """A contribution that was sent and not yet settled: `listed` in an update, or dropped by a rejection.

    `kept`: it was dropped on purpose, and its work stays in the learner's parameters.
    """

    round: int
    base: int
    tokens: int
    steps: int
    apply_at: int
    listed: bool = False
    kept: bool = False


@dataclass(frozen=True)
class Send:
    """Measure `fragment` now and offer it to merge `round`; the displacement is taken from version `base`.

    `discarded`: tokens given up by adoption since the previous send, by reason.
    """

    fragment: int
    round: int
    base: int
    tokens: int
    steps: int
    discarded: tuple[tuple[str, int], ...] = ()


@dataclass
class FragmentBook:
    """One fragment as one learner sees it.

    Attributes:
        held: the version adopted.
        received: versions that are here and not adopted.
        overwritten: tokens discarded by adoption and not yet reported.
        asked: the syncer has called it when it could not be answered.
        push_at, push_every: where learners push: the inner step of the next push, and how many lie between the last one and it.
        answered: where learners push: the newest contribution is settled, so the newest version may be adopted.
    """

    held: int
    received: set[int] = field(default_factory=set)
    flights: list[Flight] = field(default_factory=list)
    pending_tokens: int = 0
    pending_steps: int = 0
    overwritten: int = 0
    asked: bool = False
    push_at: int = 0
    push_every: int = 0
    answered: bool = False
    ledger: Ledger = field(default_factory=Ledger)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "received": sorted(self.received)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `as_dict` gave."""
        ledger = Ledger(**{**values["ledger"], "discarded": dict(values["ledger"]["discarded"])})
        flights = [Flight(**flight) for flight in values["flights"]]
        return cls(**{**values, "received": set(values["received"]), "flights": flights, "ledger": ledger})
