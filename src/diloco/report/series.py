"""Curves and lists of a page in bounded memory: long curves get coarser, lists keep the newest items."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

MAX_POINTS = 1000
"""Points of a curve; at this number, every second point is removed."""


class Numbers:
    """Ascending numbers of points and items, by which a reader asks for new ones."""

    def __init__(self) -> None:
        self.newest = 0

    def next(self) -> int:
        """The next number."""
        self.newest += 1
        return self.newest


class Series:
    """The points of a curve."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._points: list[tuple[int, float, float]] = []
        self._stride, self._seen = 1, 0

    def add(self, x: float, y: float) -> None:
        """Add a point; long curves keep only every second, fourth, … point."""
        self._seen += 1
        if self._seen % self._stride:
            return
        self._points.append((self._numbers.next(), x, y))
        if len(self._points) >= MAX_POINTS:
            del self._points[::2]
            self._stride *= 2

    def since(self, number: int) -> list[tuple[float, float]]:
        """The points (x, y) after a number, in the order of their addition."""
        return [(x, y) for own, x, y in self._points if own > number]


class Newest:
    """The newest items of a list of plain values.

    Attributes:
        total: number of all items ever added.
    """

    def __init__(self, numbers: Numbers, most: int) -> None:
        self._numbers = numbers
        self._items: deque[tuple[int, dict[str, Any]]] = deque(maxlen=most)
        self.total = 0

    def add(self, item: dict[str, Any]) -> None:
        """Add an item; a full list drops its oldest one."""
        self.total += 1
        self._items.append((self._numbers.next(), item))

    def since(self, number: int) -> list[dict[str, Any]]:
        """The items after a number, oldest first."""
        return [item for own, item in self._items if own > number]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (item for _, item in self._items)


def ring_all_reduce_bytes(num_learners: int, num_parameters: int) -> float:
    """Bytes that all learners send for one data-parallel step: M · 2·(M − 1)/M · 2·N bytes in bf16.

    A ring all-reduce of N values makes each of M learners send (M − 1)/M of them twice (reduce-scatter, then
    all-gather; Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms", 2009), at 2 bytes each.
    """
    return num_learners * 2 * (num_learners - 1) / num_learners * 2 * num_parameters if num_learners else 0.0
