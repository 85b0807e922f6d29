"""Sets of whole numbers as ranges: sorted, disjoint, not adjacent pairs (first, stop), `stop` not included.

A learner's data is a few ranges however many units they have, so all costs are in the number of ranges.
"""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]


def ranges_of(pairs: Iterable[Iterable[int]]) -> Ranges:
    """The set of all numbers in any of the pairs (first, stop), which may come in any order and overlap."""
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
    """As JSON has it."""
    return [list(pair) for pair in a]


def union(*each: Ranges) -> Ranges:
    """What is in any of them."""
    return ranges_of(pair for ranges in each for pair in ranges)


def common(a: Ranges, b: Ranges) -> Ranges:
    """What is in both."""
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
    """What is in `a` and not in `b`."""
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
    """How many numbers are in it."""
    return sum(stop - first for first, stop in a)


def split(a: Ranges, num: int) -> tuple[Ranges, Ranges]:
    """The `num` lowest numbers of it, or all, and the others."""
    for index, (first, stop) in enumerate(a):
        if num < stop - first:
            head = ((first, first + num),) if num > 0 else ()
            return (*a[:index], *head), ((first + max(num, 0), stop), *a[index + 1 :])
        num -= stop - first
    return a, ()


def is_set(a: Iterable[tuple[int, int]]) -> bool:
    """Whether pairs are sorted, disjoint, not empty, not adjacent and without negative numbers."""
    end = -1
    for first, stop in a:
        if not end < first < stop:
            return False
        end = stop
    return True
