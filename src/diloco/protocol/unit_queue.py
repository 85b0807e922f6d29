"""A learner's end of leases (`protocol.leases`): its units that are held, drawn for batches, taken, or trained.

    held → drawn → taken → trained

A loader draws units ahead, for batches that may never be trained. A unit is taken when the training loop receives its
batch, and trained at the next step; only trained units are in a contribution.

No clock, thread or permutation is used here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from diloco.protocol.leases import Ask, DataSet, Grant
from diloco.protocol.units import Ranges, common, minus, union, units_of


class UnitQueue:
    """The units of one learner, over all its incarnations.

    Arguments:
        data: its training data.
        num_ahead: units per request; it requests units whenever it holds fewer than this.

    Attributes:
        data: as given.
        has_ended: whether no unit was free at the last answer.
    """

    def __init__(self, data: DataSet, num_ahead: int) -> None:
        self.has_ended = False
        self.data, self._num_ahead = data, num_ahead
        self._held: deque[tuple[int, int]] = deque()
        self._drawn: deque[Ranges] = deque()
        self._taken: Ranges = ()
        self._num_taken = 0  # batches since the last step
        self._number, self._is_asking = 0, False

    # --- leases -------------------------------------------------------------------------------------------------------

    def wants(self, at_least: int = 0) -> bool:
        """Whether to make a request now."""
        enough = at_least if self.has_ended else max(self._num_ahead, at_least)
        return not self._is_asking and self._num_held < enough

    def ask(self, unsent: Sequence[Ranges], *, at_least: int = 0) -> Ask | None:
        """Return the request to make now; None: enough units are held, or a request is pending.

        Arguments:
            unsent: by fragment, the units of the next contribution.
            at_least: units that are needed now; after the end of the data, units may have been returned.
        """
        if not self.wants(at_least):
            return None
        self._number, self._is_asking, self.has_ended = self._number + 1, True, False
        claim: tuple[Ranges, ...] = ()
        if self._number == 1:
            own = union(self._taken, *self._drawn)
            claim = tuple(union(own, its) for its in unsent) if own or any(unsent) else ()
        return Ask(self._number, max(self._num_ahead, at_least), self.data, claim)

    def granted(self, grant: Grant) -> None:
        """Handle the answer to the pending request."""
        self._is_asking = False
        self._held.extend(grant.units)
        self.has_ended = not grant.units and self.data.groups is None
        if grant.number == 1:  # other learners have the rest of an earlier incarnation's units
            self._taken = common(self._taken, grant.claimed)
            self._drawn = deque(common(its, grant.claimed) for its in self._drawn)

    def start_over(self) -> None:
        """Start a new incarnation, without a lease; drawn units are claimed for it."""
        self._held.clear()
        self._number, self._is_asking, self.has_ended = 0, False, False

    @property
    def is_sure(self) -> bool:
        """Whether the drawn and taken units are leased to this incarnation."""
        return self._number > 1 or (self._number == 1 and not self._is_asking)

    @property
    def has_drawn(self) -> bool:
        """Whether a drawn batch is not taken yet."""
        return bool(self._drawn)

    # --- units --------------------------------------------------------------------------------------------------------

    @property
    def _num_held(self) -> int:
        return sum(stop - first for first, stop in self._held)

    def has(self, num: int) -> bool:
        """Whether `num` units, or the last ones, can be drawn."""
        return self.is_sure and (self._num_held >= num or self.has_ended)

    def draw(self, num: int) -> list[int]:
        """Draw the next `num` units, or fewer at the end of the data."""
        units: list[int] = []
        while self._held and len(units) < num:
            first, stop = self._held.popleft()
            cut = min(stop, first + num - len(units))
            units += range(first, cut)
            if cut < stop:
                self._held.appendleft((cut, stop))
        if units:
            self._drawn.append(units_of(units))
        return units

    def put_back(self) -> None:
        """Put back units that were drawn and not taken, to be drawn again in the same order."""
        for its in reversed(self._drawn):
            self._held.extendleft(reversed(its))
        self._drawn.clear()

    def take(self, without: Ranges = ()) -> Ranges:
        """Record that the training loop has received the oldest drawn batch, `without` some of its units. Returns the
        others; after `is_sure`, they are leased to this incarnation."""
        units = minus(self._drawn.popleft(), without)
        self._taken = union(self._taken, units)
        self._num_taken += 1
        return units

    def trained(self) -> Ranges | None:
        """Record a step on all units taken since the previous one. Return those that are leased to this incarnation;
        None: no batch was taken."""
        units, num, self._taken, self._num_taken = self._taken, self._num_taken, (), 0
        return units if num else None
