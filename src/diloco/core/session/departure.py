"""How long a learner that leaves waits for its syncer."""

from __future__ import annotations

import math

LEAVE_TIMEOUT_S = 10.0
"""For a syncer that answers, to take what is in flight and to hear goodbye."""

GONE_TIMEOUT_S = 1.0
"""For one that does not answer, to hear goodbye."""

AWAY_AFTER_S = 4.0
"""A syncer that was not heard of for this long does not answer."""


class Departure:
    """The time that a learner has left before it goes. Without `begin` it stays."""

    def __init__(self) -> None:
        self._leave_by = self._heard_at = math.inf

    def begin(self, now: float) -> None:
        """The learner wants to leave."""
        self._leave_by = now + LEAVE_TIMEOUT_S

    def heard(self, now: float) -> None:
        """Something was heard of the syncer."""
        self._heard_at = now

    def is_silent(self, now: float) -> bool:
        """Whether nothing was heard of the syncer for long."""
        return now >= self._heard_at + AWAY_AFTER_S  # as `next_at` says, to the bit

    def is_late(self, now: float) -> bool:
        """Whether what is in flight is not waited for any longer."""
        return now >= self._leave_by

    def timeout_s(self, now: float) -> float:
        """How long a syncer that answers has to hear goodbye."""
        return max(GONE_TIMEOUT_S, self._leave_by - now)

    @property
    def next_at(self) -> float:
        """When to look again; infinite for a learner that stays."""
        return min(self._leave_by, self._heard_at + AWAY_AFTER_S) if self._leave_by < math.inf else math.inf
