"""A learner's end of leases (`protocol.leases`): units that it has, those drawn for batches, those trained.

    held → drawn → taken → trained

A loader draws units ahead, for batches that may never be trained. A unit is taken when its batch comes to the training
loop, and trained at the next step; only then it is in a contribution.

No clock, thread or permutation is in here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from diloco.protocol.leases import Ask, DataSet, Grant
from diloco.protocol.units import Ranges, common, union


class UnitQueue:
    """Of one learner, over all its incarnations.

    Arguments:
        data: what it trains on.
        num_ahead: units that it asks for at a time, whenever it has fewer than that.

    Attributes:
        has_ended: nothing was free when the last request was answered.
    """

    def __init__(self, data: DataSet, num_ahead: int) -> None:
        self.has_ended = False
        self._data, self._num_ahead = data, num_ahead
        self._held: deque[tuple[int, int]] = deque()
        self._drawn: deque[Ranges] = deque()
        self._taken: Ranges = ()
        self._num_taken = 0  # batches since the last step
        self._number, self._is_asking = 0, False

    # --- leases -------------------------------------------------------------------------------------------------------

    def wants(self, at_least: int = 0) -> bool:
        """Whether there is a request to make now."""
        enough = at_least if self.has_ended else max(self._num_ahead, at_least)
        return not self._is_asking and self._num_held < enough

    def ask(self, unsent: Sequence[Ranges], *, at_least: int = 0) -> Ask | None:
        """The request to make now; None: enough is held, or one is under way.

        Arguments:
            unsent: by fragment, the units that the next contribution accounts for.
            at_least: units that are needed now; where the data had ended, units may have come back since.
        """
        if not self.wants(at_least):
            return None
        self._number, self._is_asking, self.has_ended = self._number + 1, True, False
        claim: tuple[Ranges, ...] = ()
        if self._number == 1:
            own = union(self._taken, *self._drawn)
            claim = tuple(union(own, its) for its in unsent) if own or any(unsent) else ()
        return Ask(self._number, max(self._num_ahead, at_least), self._data, claim)

    def granted(self, grant: Grant) -> None:
        """The request under way is answered."""
        self._is_asking = False
        self._held.extend(grant.units)
        self.has_ended = not grant.units
        if grant.number == 1:  # others have what is not claimed of an earlier incarnation
            self._taken = common(self._taken, grant.claimed)
            self._drawn = deque(common(its, grant.claimed) for its in self._drawn)

    def start_over(self) -> None:
        """A new incarnation has no lease; what was drawn is claimed for it."""
        self._held.clear()
        self._number, self._is_asking, self.has_ended = 0, False, False

    @property
    def is_sure(self) -> bool:
        """Whether what was drawn and taken is leased to this incarnation."""
        return self._number > 1 or (self._number == 1 and not self._is_asking)

    @property
    def has_drawn(self) -> bool:
        """Whether there are batches drawn and not taken."""
        return bool(self._drawn)

    # --- units --------------------------------------------------------------------------------------------------------

    @property
    def _num_held(self) -> int:
        return sum(stop - first for first, stop in self._held)

    def has(self, num: int) -> bool:
        """Whether `num` units can be drawn, or the last ones."""
        return self.is_sure and (self._num_held >= num or self.has_ended)

    def draw(self, num: int) -> list[int]:
        """The next units, `num` of them, or fewer at the end of the data."""
        units: list[int] = []
        while self._held and len(units) < num:
            first, stop = self._held.popleft()
            cut = min(stop, first + num - len(units))
            units += range(first, cut)
            if cut < stop:
                self._held.appendleft((cut, stop))
        if units:
            self._drawn.append(_as_ranges(units))
        return units

    def put_back(self) -> None:
        """What was drawn and not taken is drawn again, in the same order."""
        for its in reversed(self._drawn):
            self._held.extendleft(reversed(its))
        self._drawn.clear()

    def take(self) -> None:
        """The oldest batch drawn has come to the training loop."""
        self._taken = union(self._taken, self._drawn.popleft())
        self._num_taken += 1

    def trained(self) -> Ranges | None:
        """A step is taken on all units taken since the one before. Returns them, as far as they are leased to this
        incarnation; None: no batch was taken."""
        units, num, self._taken, self._num_taken = self._taken, self._num_taken, (), 0
        return units if num else None


def _as_ranges(units: Sequence[int]) -> Ranges:
    return union(*(((unit, unit + 1),) for unit in units))
