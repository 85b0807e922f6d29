"""Before joining: wait for the run's model, or upload it."""

from __future__ import annotations

from typing import Literal

from diloco.errors import AlreadyInitialisedError, DilocoError, NotInitialisedError

Step = Literal["ask", "initialise", "join"]


class Entrance:
    """The steps of a learner before it joins a run.

    Arguments:
        run: its name.
        initialises: this learner gives the run its model.
        timeout_s: how long to wait for a syncer, and for the run to have a model; None: as long as it takes.

    Attributes:
        step: what comes next.
    """

    def __init__(self, run: str, *, initialises: bool, timeout_s: float | None) -> None:
        self.step: Step = "ask"
        self._run, self._initialises, self._timeout_s = run, initialises, timeout_s
        self._began_at = 0.0
        self._may_have_uploaded = False

    def begin(self, now: float) -> None:
        """The waiting begins."""
        self._began_at = now

    def is_late(self, now: float) -> bool:
        """Whether it has taken too long."""
        return self._timeout_s is not None and now - self._began_at > self._timeout_s

    def described(self, now: float, *, has_model: bool) -> DilocoError | None:
        """The syncer said whether the run has a model. Returns the error if the learner cannot join."""
        if has_model and self._initialises and not self._may_have_uploaded:
            return AlreadyInitialisedError(
                f"run {self._run!r} has a model already and keeps it; join it without initialise=True."
            )
        if has_model:
            self.step = "join"
        elif self._initialises:
            self.step = "initialise"
        elif self.is_late(now):
            return NotInitialisedError(
                f"run {self._run!r} has no model after {self._timeout_s:g} s; start one learner with --initialise."
            )
        return None

    def uploaded(self) -> None:
        """The run has this learner's model."""
        self.step = "join"

    def lost(self) -> None:
        """The syncer was lost during the upload: it may have the model, and only its answer did not arrive."""
        self.step, self._may_have_uploaded = "ask", True

    def refused(self) -> bool:
        """The run has a model already; returns whether it may be one that this learner uploaded before."""
        self.step = "join"
        return self._may_have_uploaded
