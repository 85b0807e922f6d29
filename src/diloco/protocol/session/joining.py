"""The beginning and end of a session: wait for the run's model or upload it before joining; wait for acknowledgements
before leaving.
"""

from __future__ import annotations

import math
from typing import Literal

from diloco.errors import AlreadyInitialisedError, DilocoError, NotInitialisedError

LEAVE_TIMEOUT_S = 10.0
"""How long a leaving learner waits until a syncer that answers has acknowledged its contributions and its goodbye."""

GONE_TIMEOUT_S = 1.0
"""How long a leaving learner waits for a syncer that does not answer, at most."""

AWAY_AFTER_S = 4.0
"""After this long without a message the syncer counts as not answering."""

Step = Literal["ask", "initialise", "join"]

Initialises = Literal[True, False, "if-empty"]
"""Whether a learner gives the run its model: True: it must; "if-empty": only if the run has none."""


class Entrance:
    """The steps of a learner before it joins a run.

    Arguments:
        run: its name.
        initialises: whether this learner gives the run its model.
        timeout_s: how long to wait for a syncer, and for the run to have a model; None: as long as it takes.

    Attributes:
        initialises: as given.
        step: the next request.
    """

    def __init__(self, run: str, *, initialises: Initialises, timeout_s: float | None) -> None:
        self.step: Step = "ask"
        self.initialises = initialises
        self._run, self._timeout_s = run, timeout_s
        self._began_at = 0.0
        self._may_have_uploaded = False

    def begin(self, now: float) -> None:
        """The timeout begins."""
        self._began_at = now

    def is_late(self, now: float) -> bool:
        """Whether the timeout has passed."""
        return self._timeout_s is not None and now - self._began_at > self._timeout_s

    def described(self, now: float, *, has_model: bool) -> DilocoError | None:
        """The syncer told whether the run has a model. Returns the error if the learner cannot join."""
        if has_model and self.initialises is True and not self._may_have_uploaded:
            return AlreadyInitialisedError(
                f"run {self._run!r} has a model already and keeps it; join it without initialising it."
            )
        if has_model:
            self.step = "join"
        elif self.initialises:
            self.step = "initialise"
        elif self.is_late(now):
            return NotInitialisedError(
                f"run {self._run!r} has no model after {self._timeout_s:g} s; start one learner that initialises it."
            )
        return None

    @property
    def adopts(self) -> bool:
        """Whether this learner takes the run's model where it would have given its own."""
        return self.initialises == "if-empty" and not self._may_have_uploaded

    def uploaded(self) -> None:
        """The run has this learner's model."""
        self.step, self._may_have_uploaded = "join", True

    def lost(self) -> None:
        """The connection was lost during the upload: the syncer may have the model, without its answer arriving."""
        self.step, self._may_have_uploaded = "ask", True

    def refused(self) -> bool:
        """The run has a model already; returns whether this learner may have uploaded it before, or takes any."""
        self.step = "join"
        return self._may_have_uploaded or self.initialises == "if-empty"


class Departure:
    """The deadlines of a learner that leaves; it stays until `begin` is called.

    Attributes:
        gone_timeout_s: the timeout of the goodbye to a syncer that does not answer.
        over_at: when the learner stops waiting for the answer to its goodbye; infinite until it says one.
    """

    def __init__(self) -> None:
        self._leave_by = self._heard_at = self.over_at = math.inf
        self.gone_timeout_s = GONE_TIMEOUT_S

    def begin(self, now: float, timeout_s: float) -> None:
        """The learner begins to leave, within this time if the syncer answers."""
        self._leave_by = now + timeout_s
        self.gone_timeout_s = min(GONE_TIMEOUT_S, timeout_s)

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
        return max(self.gone_timeout_s, self._leave_by - now)

    @property
    def next_at(self) -> float:
        """The next of these deadlines; infinite for a learner that stays."""
        return min(self._leave_by, self._heard_at + AWAY_AFTER_S) if self._leave_by < math.inf else math.inf
