"""What has arrived of contributions whose upload was cut off, so that the next one goes on from there.

One for each incarnation at most: a learner sends one contribution at a time. It is dropped when its incarnation ends,
sends another contribution, or does not come back to it in time, and all are dropped when room is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from diloco.protocol.contribution import Contribution
from diloco.run.ports import S

KEPT_S = 600.0
"""How long a prefix waits for its learner, which repeats an upload within seconds unless the link is down."""


@dataclass(frozen=True)
class Prefix(Generic[S]):
    """The first `received` bytes of a payload of `num_bytes`, in its slot."""

    contribution: Contribution
    num_bytes: int
    slot: S
    received: int
    cut_at_s: float


class Prefixes(Generic[S]):
    """Of all learners.

    Arguments:
        release: gives a slot back.
    """

    def __init__(self, release: Callable[[S], None]) -> None:
        self._release = release
        self._kept: dict[tuple[str, int], Prefix[S]] = {}

    def keep(self, prefix: Prefix[S]) -> None:
        """The upload was cut off."""
        self.drop(*_owner(prefix.contribution))
        self._kept[_owner(prefix.contribution)] = prefix

    def take(self, c: Contribution, num_bytes: int) -> Prefix[S] | None:
        """The prefix of a contribution that is uploaded again; one of another contribution is dropped."""
        kept = self._kept.get(_owner(c))
        if kept is None or kept.contribution != c or kept.num_bytes != num_bytes:
            self.drop(*_owner(c))
            return None
        return self._kept.pop(_owner(c))

    def settled(self, c: Contribution) -> None:
        """The contribution has arrived, by another upload."""
        kept = self._kept.get(_owner(c))
        if kept is not None and kept.contribution == c:
            self.drop(*_owner(c))

    def drop(self, learner: str, incarnation: int) -> None:
        """The incarnation is out, or sends something else."""
        if (kept := self._kept.pop((learner, incarnation), None)) is not None:
            self._release(kept.slot)

    def tick(self, now_s: float) -> None:
        """Drop those that have waited for too long."""
        for owner in [owner for owner, kept in self._kept.items() if now_s - kept.cut_at_s >= KEPT_S]:
            self.drop(*owner)

    def make_room(self) -> None:
        """Drop all: there is no room for contributions that come up now."""
        for owner in list(self._kept):
            self.drop(*owner)


def _owner(c: Contribution) -> tuple[str, int]:
    return c.learner, c.incarnation
