"""A learner at a syncer that follows another one: it says what it has seen, and is asked for promises."""

from __future__ import annotations

import math

VOTE_EVERY_S = 0.5
"""Between two votes at one syncer."""

NUM_VOTES = 4
"""At one syncer, before the next address is tried again."""

SHORTLY_S = 2.0
"""For which the learner goes back to the other address after one vote: that syncer is being started again, perhaps."""


class Votes:
    """When to vote, and where.

    Attributes:
        connection: the control connection to the syncer that does not serve the run; None: there is none.
        due_at: when the next vote is due.
    """

    def __init__(self) -> None:
        self.connection: int | None = None
        self.due_at = math.inf
        self._num_left = 0

    def begin(self, now: float, connection: int, silent_s: float) -> None:
        """A syncer says that it does not serve the run. `silent_s`: since the one that is followed was heard."""
        self.connection, self.due_at = connection, now
        self._num_left = NUM_VOTES if silent_s >= SHORTLY_S else 1

    def said(self, now: float) -> bool:
        """A vote was answered; returns whether that was the last one here."""
        self._num_left -= 1
        self.due_at = now + VOTE_EVERY_S
        return self._num_left <= 0

    def end(self) -> None:
        """No more votes here."""
        self.connection, self.due_at = None, math.inf
