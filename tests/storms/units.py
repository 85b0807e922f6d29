"""Leased data in storms: what a learner reads, and that each unit of it is merged once as `protocol.leases` says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tests.chaos.versions import require

from diloco.protocol.contribution import Contribution
from diloco.protocol.leases import MERGED, UNHELD, DataSet, Leases
from diloco.protocol.unit_queue import UnitQueue
from diloco.protocol.units import Ranges, common, count, minus, union

DATA = DataSet(num_units=40, passes=0, digest="storm")
AHEAD_STEPS = 3
"""Inner steps that a lease lasts."""


class Reader:
    """One process of a learner reads this many units a step."""

    def __init__(self, num_units: int, data: DataSet = DATA) -> None:
        self.queue = UnitQueue(data, AHEAD_STEPS * num_units)
        self._num_units, self._has_batch = num_units, False

    def is_ready(self) -> bool:
        """Draw the next batch, if its units are there."""
        if not self._has_batch and self.queue.has(self._num_units):
            self.queue.draw(self._num_units)
            self.queue.take()
            self._has_batch = True
        return self._has_batch and self.queue.is_sure

    def trained(self) -> Ranges:
        """A step was taken on the batch."""
        self._has_batch = False
        units = self.queue.trained()
        assert units is not None
        return units


class UnitLedger:
    """What is durable.

    Attributes:
        merges: how often each unit is in a version of each fragment.
    """

    def __init__(self, num_fragments: int) -> None:
        self.merges = [Counter[int]() for _ in range(num_fragments)]

    def durable(self, contributions: Sequence[Contribution], record: Mapping[str, Any]) -> None:
        """A record is on the disk, with the contributions of its version, if it has one."""
        for c in contributions:
            self.merges[c.fragment].update(unit for first, stop in c.units for unit in range(first, stop))
        if record["leases"] is None:
            return
        leases = Leases(len(self.merges))
        leases.restore(record["leases"], {(learner, number) for learner, number, _ in record["leases"]["leases"]})
        check_leases(leases)
        done = {unit for first, stop in leases.done for unit in range(first, stop)}
        skipped = done - set[int]().union(*self.merges)
        require(not skipped, f"units {sorted(skipped)} are done and in no version")
        for fragment, (totals, merges) in enumerate(zip(leases.totals, self.merges, strict=True)):
            num = merges.total()
            require(totals.merges == num, f"fragment {fragment}: {totals.merges} merges are counted, and {num} there")
            again = sum(each - 1 for each in merges.values())
            require(again <= totals.repeated, f"fragment {fragment}: {again} repeats, {totals.repeated} counted")
            lacking = sum(unit not in merges for unit in done)
            given_up = sum(num for fate, num in totals.fates.items() if fate != MERGED)
            require(lacking <= given_up, f"fragment {fragment} lacks {lacking} units that are done, of {given_up}")


def check_held(leases: Leases, held_as: Mapping[tuple[str, int], frozenset[int]]) -> None:
    """A unit under lease has no fate but one in fragments that its learner does not hold, and is under lease until it
    has one in each of those that it does.

    Arguments:
        held_as: the fragments that an incarnation of a learner holds.
    """
    for one, lease in leases.leases.items():
        if one not in held_as:
            continue  # its grant is not durable yet
        settled = lease.units
        for fragment, by_fate in enumerate(lease.fates):
            unheld = by_fate.get(UNHELD, ())
            expected = () if fragment in held_as[one] else lease.units
            require(unheld == expected, f"{one} holds {held_as[one]}; in {fragment} it has {unheld} of {lease.units}")
            if settled and fragment in held_as[one]:
                settled = common(settled, lease.settled(fragment))
        require(settled == (), f"{one} has {settled} under lease, which are settled in all that it holds")


def check_leases(leases: Leases) -> None:
    """All adds up."""
    if leases.data is None and not (leases.frontier or leases.leases or leases.left or leases.returned):
        return  # no learner has asked
    leased, num_done = leases.leased, count(leases.done)
    if leases.data is not None and leases.data.groups is not None:
        num_done = leases.totals[0].fates.total()  # as many as groups are merged: tests.storms.groups
    require(common(leased, leases.returned) == (), f"{leased} are leased, and {leases.returned} free")
    each = [lease.units for lease in leases.leases.values()]
    require(count(union(*each)) == sum(map(count, each)), "units are leased twice")
    for lease in leases.left.values():
        require(minus(lease.units, leases.returned) == (), f"{lease.units} are remembered as free, and are not")
    for fragment, totals in enumerate(leases.totals):
        num_fates = sum(totals.fates.values())
        require(num_fates == num_done, f"fragment {fragment}: {num_fates} fates of {num_done} units that are done")
        waiting = sum(count(lease.fates[fragment].get(MERGED, ())) for lease in leases.leases.values())
        there = totals.fates[MERGED] + waiting + totals.repeated
        require(totals.merges == there, f"fragment {fragment}: {totals.merges} merges, and {there} accounted for")
    for it in (leases.status() or {"passes": []})["passes"]:
        require(it["done"] + it["leased"] + it["free"] == DATA.num_units, f"{it} does not add up")
