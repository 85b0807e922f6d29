"""Notices to learners: one queue for each that listens."""

from __future__ import annotations

import queue
from collections.abc import Collection

from diloco.exchange.wire.syncer_pb2 import Notice

Notices = queue.SimpleQueue[Notice | None]
"""What one learner will hear, in order; None ends it."""


class Watches:
    """Who listens. Guarded by the run's lock; readers of a queue need none."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], Notices] = {}

    def open(self, learner: str, incarnation: int) -> Notices:
        """Start a queue; one that this incarnation had before (its connection broke) ends."""
        self.close(learner, incarnation)
        notices: Notices = queue.SimpleQueue()
        self._open[learner, incarnation] = notices
        return notices

    def close(self, learner: str, incarnation: int) -> None:
        """End an incarnation's queue, if it has one, after what is in it."""
        notices = self._open.pop((learner, incarnation), None)
        if notices is not None:
            notices.put(None)

    def close_all(self) -> None:
        """End all of them."""
        for key in list(self._open):
            self.close(*key)

    def lost(self, learner: str, incarnation: int, notices: Notices) -> bool:
        """Nobody reads this queue any more; whether it was the newest of its incarnation."""
        if self._open.get((learner, incarnation)) is not notices:
            return False
        del self._open[learner, incarnation]
        return True

    def tell(self, learner: str, incarnation: int, notice: Notice) -> None:
        """One learner; nobody, where it does not listen."""
        if (notices := self._open.get((learner, incarnation))) is not None:
            notices.put(notice)

    def tell_all(self, notice: Notice, only: Collection[str] | None = None) -> None:
        """Everybody who listens; `only`: of these learners."""
        for (learner, _), notices in self._open.items():
            if only is None or learner in only:
                notices.put(notice)

    @property
    def learners(self) -> set[str]:
        """Who listens."""
        return {learner for learner, _ in self._open}
