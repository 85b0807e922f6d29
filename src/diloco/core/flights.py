"""What a learner's state machine is made of: contributions in flight, what to send, and the books of a fragment.

A book moves the tokens of one fragment from pending to wherever they end; `core.learner` decides when.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from diloco.core.ledger import Ledger
from diloco.core.contribution import OVERLAP


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

    def stepped(self, tokens: int) -> None:
        """One more inner step of work on it."""
        self.pending_tokens += tokens
        self.pending_steps += 1
        self.ledger.trained += tokens

    def offer(self, fragment: int, round_: int, *, apply_at: int) -> Send:
        """All pending work goes out."""
        flight = Flight(round_, self.held, self.pending_tokens, self.pending_steps, apply_at)
        self.flights.append(flight)
        discarded = ((OVERLAP, self.overwritten),) if self.overwritten else ()
        self.pending_tokens = self.pending_steps = self.overwritten = 0
        return Send(fragment, round_, self.held, flight.tokens, flight.steps, discarded)

    def take_back(self, flight: Flight) -> None:
        """Its work is pending again."""
        self.pending_tokens += flight.tokens
        self.pending_steps += flight.steps

    def arrived(self, version: int, merged_round: int) -> tuple[Flight, ...]:
        """A version is here, which the contributions up to `merged_round` are in; returns those of which that is news."""
        if version <= self.held:
            return ()
        self.received.add(version)
        listed = tuple(flight for flight in self.flights if flight.round <= merged_round and not flight.listed)
        for flight in listed:
            flight.listed = True
            self.ledger.merged += flight.tokens
            self.answered = True
        return listed

    def overwrite(self) -> None:
        """A version replaces the parameters, and with them what was pending."""
        self.ledger.discard(self.pending_tokens, OVERLAP)
        self.overwritten += self.pending_tokens
        self.pending_tokens = self.pending_steps = 0

    def forget_flights(self, *, keep_work: bool) -> bool:
        """Nobody will say what becomes of contributions that are not listed; whether there was any. `keep_work`: theirs is pending again,
        or else work begins here."""
        forgotten = [flight for flight in self.flights if not flight.listed]
        self.flights = [flight for flight in self.flights if flight.listed]
        for flight in forgotten:
            if keep_work:
                self.take_back(flight)
            else:
                self.pending_steps = 0
        return bool(forgotten)

    def forget_tokens(self) -> None:
        """Work goes on, and its tokens so far are counted elsewhere."""
        self.pending_tokens = self.overwritten = 0
        self.ledger = Ledger()
        for flight in self.flights:
            flight.tokens = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "received": sorted(self.received)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `as_dict` gave."""
        ledger = Ledger(**{**values["ledger"], "discarded": dict(values["ledger"]["discarded"])})
        flights = [Flight(**flight) for flight in values["flights"]]
        return cls(**{**values, "received": set(values["received"]), "flights": flights, "ledger": ledger})
