"""Where every trained token went: per fragment, it is pending, merged, discarded (with a reason) or lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """One learner's tokens for one fragment.

    trained = pending + merged + Σ discarded + lost, always: pending is what the other three leave, and none may exceed
    trained.
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
        """Count tokens whose work was given up; a negative number takes that back."""
        total = self.discarded.pop(reason, 0) + tokens
        if total:
            self.discarded[reason] = total

    def lose(self) -> None:
        """Count all pending tokens as lost with the learner."""
        self.lost += self.pending

    def as_dict(self) -> dict[str, int | dict[str, int]]:
        """Plain values, with pending."""
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
