"""Random numbers that depend on a seed, a name and how often that name was drawn, and on nothing else.

What one part of a storm draws does not change what another draws, so that a storm without one of its faults is
otherwise the same storm.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """All draws of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._counts: Counter[str] = Counter()

    def unit(self, name: str) -> float:
        """In [0, 1)."""
        count = self._counts[name]
        self._counts[name] += 1
        drawn = hashlib.blake2b(f"{self.seed}/{name}/{count}".encode(), digest_size=8).digest()
        return int.from_bytes(drawn, "big") / 2**64

    def between(self, name: str, low: float, high: float) -> float:
        """In [low, high)."""
        return low + (high - low) * self.unit(name)

    def whole(self, name: str, low: int, high: int) -> int:
        """In [low, high]."""
        return low + int(self.unit(name) * (high - low + 1))

    def of(self, name: str, choices: Sequence[T]) -> T:
        """One of these."""
        return choices[int(self.unit(name) * len(choices))]
