"""One learner's state of one fragment: pending work, contributions in flight, and the ledger of tokens.

`protocol.learner` decides when each of these methods is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from diloco.protocol.contribution import NOTHING, OVERLAP
from diloco.protocol.units import Ranges, as_lists, common, ranges_of, union


@dataclass
class Ledger:
    """One learner's tokens for one fragment.

    Always trained = pending + merged + Σ discarded + lost: pending is the rest, and no sum may exceed trained.
    """

    trained: int = 0
    merged: int = 0
    lost: int = 0
    discarded: dict[str, int] = field(default_factory=dict)

    @property
    def pending(self) -> int:
        """Tokens whose work is not merged, discarded or lost yet."""
        return self.trained - self.merged - self.lost - sum(self.discarded.values())

    def discard(self, tokens: int, reason: str) -> None:
        """Count tokens whose work was discarded; a negative number undoes that."""
        total = self.discarded.pop(reason, 0) + tokens
        if total:
            self.discarded[reason] = total

    def lose(self) -> None:
        """Count all pending tokens as lost with the learner."""
        self.lost += self.pending

    def as_dict(self) -> dict[str, int | dict[str, int]]:
        """Plain values, with the pending tokens."""
        return {"trained": self.trained, "pending": self.pending, "merged": self.merged, "lost": self.lost,
                "discarded": dict(self.discarded)}  # fmt: skip


def total(ledgers: Iterable[Ledger]) -> Ledger:
    """The sum over learners."""
    out = Ledger()
    for ledger in ledgers:
        out.trained += ledger.trained
        out.merged += ledger.merged
        out.lost += ledger.lost
        for reason, tokens in ledger.discarded.items():
            out.discard(tokens, reason)
    return out


@dataclass
class InFlight:
    """A contribution that was sent and is not complete: its version is not adopted, and it was not removed by a
    rejection.

    Attributes:
        number, round, base, tokens, steps: as in `Contribution`; number 0: of an earlier incarnation.
        apply_at: the inner step after which its answer is due.
        listed: a received version contains it.
        is_rejected: it was rejected, and the learner still waits for its round's version.
        kept: it was rejected as `DROPPED`, and its work stays in the learner's parameters.
        units: as in `Contribution`.
        routed: likewise; empty: not counted.
    """

    number: int
    round: int
    base: int
    tokens: int
    steps: int
    apply_at: int
    listed: bool = False
    is_rejected: bool = False
    kept: bool = False
    units: Ranges = ()
    routed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Send:
    """Measure the displacement of `fragment` from version `base` now, and offer it to merge `round`.

    `discarded`: tokens discarded by adoption since the previous send, by reason. `units`, `overwritten`: as in
    `Contribution`.
    """

    fragment: int
    number: int
    round: int
    base: int
    tokens: int
    steps: int
    discarded: tuple[tuple[str, int], ...] = ()
    units: Ranges = ()
    overwritten: Ranges = ()


@dataclass
class FragmentWork:
    """One learner's work on a fragment.

    Attributes:
        version: the adopted version; `NOTHING`: the learner does not hold the fragment.
        number: of the newest contribution; 0: none was sent.
        received: versions that were received and are not adopted.
        in_flight: contributions, oldest first.
        pending_tokens, pending_steps: work that was not sent.
        overwritten_tokens: discarded by adoption and not yet reported.
        ledger: of this incarnation's tokens.
        pending_units, overwritten_units: the units of leased data (`protocol.leases`) of the same tokens.
        pending_routed: of the pending tokens, those routed to the expert of each tensor, as far as they were read from
            the model's device; empty: none were.
    """

    version: int
    number: int = 0
    received: set[int] = field(default_factory=set)
    in_flight: list[InFlight] = field(default_factory=list)
    pending_tokens: int = 0
    pending_steps: int = 0
    overwritten_tokens: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    pending_units: Ranges = ()
    overwritten_units: Ranges = ()
    pending_routed: tuple[int, ...] = ()

    @property
    def is_held(self) -> bool:
        """Whether the learner holds the fragment."""
        return self.version != NOTHING

    def stepped(self, tokens: int, units: Ranges = ()) -> None:
        """An inner step of work on the fragment."""
        self.pending_tokens += tokens
        if units:
            self.pending_units = union(self.pending_units, units)
        self.pending_steps += 1
        self.ledger.trained += tokens

    def offer(self, fragment: int, round_: int, *, apply_at: int) -> Send:
        """Send all pending work as a new contribution."""
        self.number += 1
        flight = InFlight(
            self.number, round_, self.version, self.pending_tokens, self.pending_steps, apply_at,
            units=self.pending_units, routed=self.pending_routed,
        )  # fmt: skip
        self.in_flight.append(flight)
        discarded = ((OVERLAP, self.overwritten_tokens),) if self.overwritten_tokens else ()
        overwritten = self.overwritten_units
        self.pending_tokens = self.pending_steps = self.overwritten_tokens = 0
        self.pending_units = self.overwritten_units = self.pending_routed = ()
        return Send(
            fragment, flight.number, round_, self.version, flight.tokens, flight.steps, discarded, flight.units,
            overwritten,
        )  # fmt: skip

    def add_routed(self, routed: tuple[int, ...], number: int | None = None) -> tuple[int, ...]:
        """Add tokens by tensor that were routed to its expert: to the contribution with this number, or the pending
        ones. Returns the sum."""
        if number is None:
            self.pending_routed = _sum(self.pending_routed, routed)
            return self.pending_routed
        flight = next(each for each in self.in_flight if each.number == number)
        flight.routed = _sum(flight.routed, routed)
        return flight.routed

    def take_back(self, flight: InFlight) -> None:
        """The work of a contribution is pending again."""
        self.pending_tokens += flight.tokens
        self.pending_steps += flight.steps
        self.pending_units = union(self.pending_units, flight.units)
        self.pending_routed = _sum(self.pending_routed, flight.routed)

    def arrived(self, version: int, merged: int) -> tuple[InFlight, ...]:
        """A version was received; contributions up to number `merged` are in it or an earlier one, unless rejected.
        Returns the contributions in flight that are newly known to be merged."""
        if version <= self.version or not self.is_held:
            return ()
        self.received.add(version)
        listed = tuple(
            flight
            for flight in self.in_flight
            if 0 < flight.number <= merged and not (flight.listed or flight.is_rejected)
        )
        for flight in listed:
            flight.listed = True
            self.ledger.merged += flight.tokens
        return listed

    def overwrite(self) -> None:
        """A version replaces the parameters: the pending work is discarded."""
        self.ledger.discard(self.pending_tokens, OVERLAP)
        self.overwritten_tokens += self.pending_tokens
        self.overwritten_units = union(self.overwritten_units, self.pending_units)
        self.pending_tokens = self.pending_steps = 0
        self.pending_units = self.pending_routed = ()

    def forget(self, *, keep_work: bool) -> bool:
        """Drop the contributions in flight that no received version lists. Returns whether there were any.

        `keep_work`: their work is pending again; otherwise all work so far is lost.
        """
        void = [flight for flight in self.in_flight if not flight.listed]
        self.in_flight = [flight for flight in self.in_flight if flight.listed]
        for flight in void:
            if keep_work:
                self.take_back(flight)
            else:
                self.pending_steps = 0
                self.pending_units = self.pending_routed = ()
        return bool(void)

    @property
    def has_units(self) -> bool:
        """Whether the next contribution accounts for units of data."""
        return bool(self.pending_units or self.overwritten_units)

    def keep_units(self, units: Ranges) -> None:
        """Keep only those units that are still leased to the learner."""
        self.pending_units = common(self.pending_units, units)
        self.overwritten_units = common(self.overwritten_units, units)

    def forget_tokens(self) -> None:
        """Start a new incarnation that keeps the work: numbers start from 1, and tokens from 0."""
        self.number = 0
        self.pending_tokens = self.overwritten_tokens = 0
        self.pending_routed = ()
        self.ledger = Ledger()
        for flight in self.in_flight:
            flight.number = flight.tokens = 0
            flight.routed = ()

    def lose(self) -> None:
        """The learner is evicted for good: contributions in flight are void, and pending tokens are lost."""
        self.in_flight = []
        self.pending_tokens = self.pending_steps = self.overwritten_tokens = 0
        self.pending_units = self.overwritten_units = self.pending_routed = ()
        self.ledger.lose()

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        flights = [
            {**asdict(flight), "units": as_lists(flight.units), "routed": list(flight.routed)}
            for flight in self.in_flight
        ]
        units = {"pending_units": as_lists(self.pending_units), "overwritten_units": as_lists(self.overwritten_units)}
        sent = {"received": sorted(self.received), "in_flight": flights}
        return {**asdict(self), **sent, **units, "pending_routed": list(self.pending_routed)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From the values of `as_dict`. Raises ValueError, TypeError or LookupError for any others."""
        ledger = Ledger(**{**values["ledger"], "discarded": dict(values["ledger"]["discarded"])})
        flights = [
            InFlight(**{**flight, "units": ranges_of(flight["units"]), "routed": tuple(flight["routed"])})
            for flight in values["in_flight"]
        ]
        units = {key: ranges_of(values[key]) for key in ("pending_units", "overwritten_units")}
        routed = {"pending_routed": tuple(values["pending_routed"])}
        sent = {"received": set(values["received"]), "in_flight": flights, "ledger": ledger}
        it = cls(**{**values, **units, **routed, **sent})
        require_whole_numbers(
            *([it.version] if it.is_held else ()), it.number, it.pending_tokens, it.pending_steps,
            it.overwritten_tokens, *it.received,
            *(n for each in (units["pending_units"], units["overwritten_units"]) for pair in each for n in pair),
            *it.pending_routed, ledger.trained, ledger.merged, ledger.lost, *map(abs, ledger.discarded.values()),
        )  # fmt: skip
        for flight in flights:
            require_whole_numbers(
                flight.number, flight.round, flight.base, flight.tokens, flight.steps, flight.apply_at, *flight.routed
            )
            if {type(flight.listed), type(flight.is_rejected), type(flight.kept)} != {bool}:
                raise TypeError("a flag of a contribution in flight is neither true nor false")
        return it


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The sum by place; an empty tuple is zeros."""
    return tuple(x + y for x, y in zip(a, b, strict=True)) if a and b else a or b


def require_whole_numbers(*values: object) -> None:
    """Check that values from a file are whole numbers of 63 bits. Raises ValueError."""
    for each in values:
        if type(each) is not int or not 0 <= each < 2**63:
            raise ValueError(f"{str(each)[:40]!r} is not a whole number")
