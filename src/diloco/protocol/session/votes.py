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
        joins_at: the same for a learner that is to join again at a syncer that serves the run: this one may need the
            votes first, and answers no request to join before.
        has_asked: whether that one has said which syncer it is, since the vote before.
        is_refused: the syncer that hears the votes serves the run, and this learner cannot follow it, as it is told.
    """

    def __init__(self) -> None:
        self.connection: int | None = None
        self.due_at = math.inf
        self.joins_at = -math.inf
        self.has_asked = self.is_refused = False
        self._num_left = 0

    def begin(self, now: float, connection: int, silent_s: float, *, is_refused: bool = False) -> None:
        """A syncer says that it does not serve the run. `silent_s`: since the one that is followed was heard."""
        self.connection, self.due_at, self.is_refused = connection, now, is_refused
        self._num_left = NUM_VOTES if silent_s >= SHORTLY_S and not is_refused else 1

    def joining(self, now: float, *, promised: bool) -> None:
        """A vote of a learner that is to join again was answered. `promised`: with a promise that is to be told."""
        self.has_asked = False
        self.joins_at = now if promised else now + VOTE_EVERY_S

    def said(self, now: float) -> bool:
        """A vote was answered; returns whether that was the last one here."""
        self._num_left -= 1
        self.due_at = now + VOTE_EVERY_S
        return self._num_left <= 0

    def end(self) -> None:
        """No more votes here."""
        self.connection, self.due_at = None, math.inf
