"""Units of the run's data with their fates in each fragment (`protocol.leases`), and those merged of late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from diloco.protocol.ranges import Ranges, common, count, minus, ranges_of, union

MERGED = "merged"
"""The fate of a unit in a fragment whose version has the work on it."""

KEPT_VERSIONS = 4
"""Newest versions of a fragment whose units are known. A state directory has the tensors of two; a repair goes back to
one of those."""


@dataclass
class UnitFates:
    """Units, and what became of them so far.

    Attributes:
        units: which they are.
        fates: per fragment, of these units by fate.
    """

    units: Ranges
    fates: list[dict[str, Ranges]]

    def settled(self, fragment: int) -> Ranges:
        """Units that have their fate in a fragment."""
        return union(*self.fates[fragment].values())

    def settle(self, fragment: int, units: Ranges, fate: str) -> None:
        """These units have met their fate."""
        if units:
            self.fates[fragment][fate] = union(self.fates[fragment].get(fate, ()), units)

    def forget(self, fragment: int, units: Ranges, fate: str) -> None:
        """These units have not met this fate after all."""
        its = self.fates[fragment].pop(fate, ())
        self.settle(fragment, minus(its, units), fate)

    def taken(self, units: Ranges) -> list[dict[str, Ranges]]:
        """Remove units; returns their fates."""
        taken = [{fate: common(its, units) for fate, its in by_fate.items()} for by_fate in self.fates]
        self.units = minus(self.units, units)
        for by_fate in self.fates:
            for fate in list(by_fate):
                by_fate[fate] = minus(by_fate[fate], units)
                if not by_fate[fate]:
                    del by_fate[fate]
        return taken

    def add(self, units: Ranges, fates: Sequence[Mapping[str, Ranges]]) -> None:
        """Take in units with the fates that they have."""
        self.units = union(self.units, units)
        for fragment, by_fate in enumerate(fates):
            for fate, its in by_fate.items():
                self.settle(fragment, its, fate)


class RecentMerges:
    """The units in the newest versions of each fragment: what comes back where a repair goes back to an earlier one.

    Attributes:
        versions: of each fragment, by version, the units that were merged into it.
        done: those of them that are done.
    """

    def __init__(self, num_fragments: int) -> None:
        self.versions: list[dict[int, Ranges]] = [{} for _ in range(num_fragments)]
        self.done = UnitFates((), [{} for _ in range(num_fragments)])

    def merged(self, fragment: int, version: int, units: Ranges) -> None:
        """These units are in this version, the newest of its fragment, and maybe others."""
        by_version = self.versions[fragment]
        if units:
            by_version[version] = union(by_version.get(version, ()), units)
        for old in [each for each in by_version if each <= version - KEPT_VERSIONS]:
            del by_version[old]
        recent = union(*(its for by_version in self.versions for its in by_version.values()))
        self.done.taken(minus(self.done.units, recent))

    def lose(self, fragment: int, version: int) -> tuple[int, Ranges]:
        """The versions after this one are lost. Returns how many merges were in them, and of which units."""
        by_version = self.versions[fragment]
        lost = [by_version.pop(each) for each in list(by_version) if each > version]
        return sum(map(count, lost)), union(*lost)

    def as_list(self) -> list[Any]:
        """Plain values (JSON)."""
        by_version = [[[version, units] for version, units in each.items()] for each in self.versions]
        return [by_version, self.done.units, [dict(by_fate) for by_fate in self.done.fates]]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Self:
        """What `as_list` gave."""
        by_version, units, fates = values
        recent = cls(len(by_version))
        recent.versions = [{version: ranges_of(its) for version, its in each} for each in by_version]
        recent.done = UnitFates(ranges_of(units), fates_of(fates))
        return recent


def fates_of(values: Sequence[Mapping[str, Any]]) -> list[dict[str, Ranges]]:
    """Fates, from plain values."""
    return [{fate: ranges_of(its) for fate, its in by_fate.items()} for by_fate in values]
