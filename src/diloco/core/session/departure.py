"""How long a learner that leaves waits for its syncer."""

from __future__ import annotations

import math

LEAVE_TIMEOUT_S = 10.0
"""How long a leaving learner waits for a syncer that answers, to acknowledge its contributions and its goodbye."""

GONE_TIMEOUT_S = 1.0
"""How long it waits for a syncer that does not answer."""

AWAY_AFTER_S = 4.0
"""After this long without a message the syncer counts as not answering."""


class Departure:
    """The deadlines of a learner that leaves. Without `begin` it stays."""

    def __init__(self) -> None:
        self._leave_by = self._heard_at = math.inf

    def begin(self, now: float) -> None:
        """The learner wants to leave."""
        self._leave_by = now + LEAVE_TIMEOUT_S

    def heard(self, now: float) -> None:
        """A message from the syncer has arrived."""
        self._heard_at = now

    def is_silent(self, now: float) -> bool:
        """Whether the syncer counts as not answering."""
        return now >= self._heard_at + AWAY_AFTER_S  # as `next_at` says, to the bit

    def is_late(self, now: float) -> bool:
        """Whether the learner stops waiting for contributions in flight."""
        return now >= self._leave_by

    def timeout_s(self, now: float) -> float:
        """The timeout of the goodbye to a syncer that answers."""
        return max(GONE_TIMEOUT_S, self._leave_by - now)

    @property
    def next_at(self) -> float:
        """When to look again; infinite for a learner that stays."""
        return min(self._leave_by, self._heard_at + AWAY_AFTER_S) if self._leave_by < math.inf else math.inf
