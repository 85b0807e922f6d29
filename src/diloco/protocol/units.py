"""Units of a run's data: sets of them, their order in a pass, and their fates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

# Sets of whole numbers as ranges: sorted, disjoint, non-adjacent pairs (first, stop), `stop` excluded.
#
# A learner's data is a few ranges of any length, so all costs are linear in the number of ranges.

Ranges = tuple[tuple[int, int], ...]


def ranges_of(pairs: Iterable[Iterable[int]]) -> Ranges:
    """Return the set of all numbers in the pairs (first, stop), which may be unordered and overlap."""
    out: list[tuple[int, int]] = []
    for first, stop in sorted((first, stop) for first, stop in pairs):
        if first >= stop:
            continue
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((first, stop))
    return tuple(out)


def as_lists(a: Ranges) -> list[list[int]]:
    """Return the ranges as lists, for JSON."""
    return [list(pair) for pair in a]


def units_of(those: Iterable[int]) -> Ranges:
    """Return the set of these numbers."""
    return ranges_of((number, number + 1) for number in those)


def numbers_of(a: Ranges) -> list[int]:
    """Return all numbers of the set, in order."""
    return [number for first, stop in a for number in range(first, stop)]


def numbers(a: Iterable[Iterable[int]]) -> str:
    """Return the numbers as text, such as "0-3, 7"."""
    return ", ".join(f"{first}" if stop == first + 1 else f"{first}-{stop - 1}" for first, stop in a)


def union(*each: Ranges) -> Ranges:
    """Return the union."""
    return ranges_of(pair for ranges in each for pair in ranges)


def common(a: Ranges, b: Ranges) -> Ranges:
    """Return the intersection."""
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        first, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if first < stop:
            out.append((first, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


def minus(a: Ranges, b: Ranges) -> Ranges:
    """Return the difference."""
    out, j = [], 0
    for first, stop in a:
        while j < len(b) and b[j][1] <= first:
            j += 1
        k = j
        while first < stop and k < len(b) and b[k][0] < stop:
            if first < b[k][0]:
                out.append((first, b[k][0]))
            first = b[k][1]
            k += 1
        if first < stop:
            out.append((first, stop))
    return tuple(out)


def count(a: Ranges) -> int:
    """Return the number of elements."""
    return sum(stop - first for first, stop in a)


def split(a: Ranges, num: int) -> tuple[Ranges, Ranges]:
    """Return the `num` lowest elements, or all, and the rest."""
    for index, (first, stop) in enumerate(a):
        if num < stop - first:
            head = ((first, first + num),) if num > 0 else ()
            return (*a[:index], *head), ((first + max(num, 0), stop), *a[index + 1 :])
        num -= stop - first
    return a, ()


def is_set(a: Iterable[tuple[int, int]]) -> bool:
    """Whether pairs are sorted, disjoint, non-empty, non-adjacent and without negative numbers."""
    end = -1
    for first, stop in a:
        if not end < first < stop:
            return False
        end = stop
    return True


def permute(index: int, size: int, key: bytes) -> int:
    """A pseudo-random permutation of 0 … size−1 at `index`, in constant memory.

    A four-round Feistel network over the next even number of bits, iterated until the result is in range (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_ in range(4):
            mixed = hashlib.blake2b(right.to_bytes(8, "little") + bytes([round_]), digest_size=8, key=key).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        index = left << half | right
        if index < size:
            return index


def place_of_unit(unit: int, num_units: int, seed: int) -> int:
    """Return the index, among `num_units` windows or samples, of unit `unit` of a run's leased data
    (`protocol.leases`): every pass has its own order."""
    number, place = divmod(unit, num_units)
    return permute(place, num_units, seed.to_bytes(8, "little") + b"unit" + number.to_bytes(8, "little"))


MERGED = "merged"
"""The fate of a unit that was merged into a version of a fragment."""

KEPT_VERSIONS = 4
"""Newest versions of a fragment whose units are listed. A state directory has the tensors of two, and a repair rolls
back to one of them."""


@dataclass
class UnitFates:
    """Units and their fates so far.

    Attributes:
        units: all of them.
        fates: per fragment, units by fate.
    """

    units: Ranges
    fates: list[dict[str, Ranges]]

    def settled(self, fragment: int) -> Ranges:
        """Return the units with a fate in a fragment."""
        return union(*self.fates[fragment].values())

    def settle(self, fragment: int, units: Ranges, fate: str) -> None:
        """Set the fate of units in a fragment."""
        if units:
            self.fates[fragment][fate] = union(self.fates[fragment].get(fate, ()), units)

    def forget(self, fragment: int, units: Ranges, fate: str) -> None:
        """Revoke the fate of units in a fragment."""
        its = self.fates[fragment].pop(fate, ())
        self.settle(fragment, minus(its, units), fate)

    def taken(self, units: Ranges) -> list[dict[str, Ranges]]:
        """Remove units; return their fates."""
        taken = [{fate: common(its, units) for fate, its in by_fate.items()} for by_fate in self.fates]
        self.units = minus(self.units, units)
        for by_fate in self.fates:
            for fate in list(by_fate):
                by_fate[fate] = minus(by_fate[fate], units)
                if not by_fate[fate]:
                    del by_fate[fate]
        return taken

    def add(self, units: Ranges, fates: Sequence[Mapping[str, Ranges]]) -> None:
        """Add units with their fates."""
        self.units = union(self.units, units)
        for fragment, by_fate in enumerate(fates):
            for fate, its in by_fate.items():
                self.settle(fragment, its, fate)


class RecentMerges:
    """The units in the newest versions of each fragment, which a repair returns when it rolls back to an earlier
    version.

    Attributes:
        versions: per fragment, by version, the units merged into it.
        done: the done units among them.
    """

    def __init__(self, num_fragments: int) -> None:
        self.versions: list[dict[int, Ranges]] = [{} for _ in range(num_fragments)]
        self.done = UnitFates((), [{} for _ in range(num_fragments)])

    def merged(self, fragment: int, version: int, units: Ranges) -> None:
        """Record units merged into a version, the newest of its fragment; it may contain others."""
        by_version = self.versions[fragment]
        if units:
            by_version[version] = union(by_version.get(version, ()), units)
        for old in [each for each in by_version if each <= version - KEPT_VERSIONS]:
            del by_version[old]
        recent = union(*(its for by_version in self.versions for its in by_version.values()))
        self.done.taken(minus(self.done.units, recent))

    def lose(self, fragment: int, version: int) -> tuple[int, Ranges]:
        """Discard the versions after this one. Return the number of merges in them, and their units."""
        by_version = self.versions[fragment]
        lost = [by_version.pop(each) for each in list(by_version) if each > version]
        return sum(map(count, lost)), union(*lost)

    def as_list(self) -> list[Any]:
        """Plain values (JSON)."""
        by_version = [[[version, units] for version, units in each.items()] for each in self.versions]
        return [by_version, self.done.units, [dict(by_fate) for by_fate in self.done.fates]]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Self:
        """Read the values of `as_list`."""
        by_version, units, fates = values
        recent = cls(len(by_version))
        recent.versions = [{version: ranges_of(its) for version, its in each} for each in by_version]
        recent.done = UnitFates(ranges_of(units), fates_of(fates))
        return recent


def fates_of(values: Sequence[Mapping[str, Any]]) -> list[dict[str, Ranges]]:
    """Read fates from plain values."""
    return [{fate: ranges_of(its) for fate, its in by_fate.items()} for by_fate in values]
