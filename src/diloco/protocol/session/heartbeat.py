"""The heartbeats of a learner: their content, when they are due, and the timeout of their answers."""

from __future__ import annotations

import math
from dataclasses import replace

from diloco.protocol.members import Report
from diloco.protocol.session.lanes import StallTimeout

HEARTBEAT_S = 0.5
"""Between two heartbeats; a learner's first inner step is reported at once."""

STARTING_HEARTBEAT_S = 0.2
"""The same while a learner waits for enough learners to begin."""

SHORTEST_S = 0.05
"""The shortest time between two heartbeats, even if the learner takes steps faster."""

ANSWER_FLOOR_S, ANSWER_CAP_S = 1.2, 30.0
"""How long an answer may take before the control connection is dialled again. Together with the time between two
heartbeats it is well within the syncer's deadline for a broken connection (`Deadlines.reconnect_floor_s`), which may be
broken at the syncer's end only. On a link with slow answers the timeout grows, and a failure is noticed later."""

ANSWER_OF_SEVERAL_CAP_S = 3.0
"""The same cap for a run with several syncers. A learner asks them in turn, and one of them may have taken over and
count the learner as lost after `Deadlines.lost_floor_s`."""


class Heartbeat:
    """The heartbeats of one learner, one at a time.

    Arguments:
        reports_every_step: every inner step is reported at once.
        every_s: between two heartbeats while nothing changes.
        shortest_s: between any two heartbeats.
        answer_cap_s: the longest timeout of an answer.

    Attributes:
        report: the content of the next heartbeat.
    """

    def __init__(
        self, *, reports_every_step: bool, every_s: float = HEARTBEAT_S, shortest_s: float = SHORTEST_S,
        answer_cap_s: float = ANSWER_CAP_S,
    ) -> None:  # fmt: skip
        self.report = Report()
        self._reports_every_step, self._every_s, self._shortest_s = reports_every_step, every_s, shortest_s
        self._answer_time = StallTimeout(ANSWER_FLOOR_S, answer_cap_s)
        self._began_at = -math.inf
        self._due_at = math.inf

    def reported(self, report: Report) -> None:
        """Set the content of the next heartbeats."""
        is_first = self.report.tokens == 0 and report.tokens > 0
        waits_or_waited = report.waiting or self.report.waiting
        has_worked = (report.step, report.tokens) > (self.report.step, self.report.tokens)
        if is_first or waits_or_waited or report.finished or (self._reports_every_step and has_worked):
            self.urge()
        self.report = replace(report, earlier_tokens=max(report.earlier_tokens, self.report.earlier_tokens))

    def trained_earlier(self, tokens: int) -> None:
        """Incarnations before the newest have trained `tokens` in all; the newest has trained nothing yet."""
        self.report = replace(self.report, earlier_tokens=max(tokens, self.report.earlier_tokens))

    def start_over(self) -> None:
        """A new incarnation has trained nothing."""
        before = self.report
        self.report = Report(
            step=before.step,
            finished=before.finished,
            earlier_tokens=before.all_tokens,
            evaluation=before.evaluation,
            blocked_s=before.blocked_s,
        )

    def urge(self) -> None:
        """The next heartbeat is due as soon as `shortest_s` allows."""
        self._due_at = -math.inf

    def plan(self, now: float, *, starting: bool = False) -> None:
        """The next heartbeat is due after the usual time, unless it is due earlier."""
        is_sooner = starting and self._every_s < math.inf
        self._due_at = min(self._due_at, now + (STARTING_HEARTBEAT_S if is_sooner else self._every_s))

    def leave(self, now: float) -> None:
        """The learner leaves: until it has left, regular heartbeats show whether the syncer answers."""
        self._every_s = min(self._every_s, HEARTBEAT_S)
        self.plan(now)

    @property
    def due_at(self) -> float:
        """When the next heartbeat is due; infinite while one is under way."""
        return max(self._due_at, self._began_at + self._shortest_s)

    @property
    def timeout_s(self) -> float:
        """How long its answer may take."""
        return self._answer_time.limit_s

    def began(self, now: float) -> None:
        """A heartbeat is sent."""
        self._began_at, self._due_at = now, math.inf

    def ended(self, now: float) -> None:
        """The heartbeat was answered, or has failed."""
        self._answer_time.waited(now - self._began_at)
