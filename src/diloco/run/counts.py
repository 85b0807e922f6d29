"""Counts what a driver does, to compare one that is replayed with one that would have decided otherwise."""

from __future__ import annotations

from collections import Counter
from typing import Any

from diloco.core.actions import Evict, Reject
from diloco.run.ports import MergedRound, NullObserver


class Counts(NullObserver):
    """What a driver does with a run's contributions.

    Attributes:
        counts: by what it is.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def rejected(self, action: Reject) -> None:
        self.counts[f"contributions rejected: {action.reason}"] += 1

    def evicted(self, action: Evict) -> None:
        self.counts["learners evicted"] += not action.replaced

    def published(self, merged: MergedRound[Any, Any], num_live: int, persist_s: float) -> None:
        self.counts["versions published"] += 1
        self.counts["contributions merged"] += len(merged.action.contributions) - len(merged.refused)
        self.counts["tokens merged"] += merged.tokens
