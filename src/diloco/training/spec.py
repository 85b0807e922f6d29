"""Inputs and result of a `Trainer`: its learner's role, a clock, a request to stop, a summary."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from diloco.events import CheckpointUnusable
from diloco.protocol.session.joining import Initialises
from diloco.training.data.corpus import Corpus

INTERRUPT_AFTER_S = 0.2
"""Delay between a request to stop and the interruption of a learner that waits for others."""

Role = Literal["learner", "baseline", "isolated"]


@dataclass(frozen=True)
class LearnerSpec:
    """The learner that a trainer trains.

    Attributes:
        role: "learner" trains one shard and exchanges; "isolated" trains one shard and exchanges nothing; "baseline"
            is data parallel: it trains every shard in one process, with the full batch at every step.
        initialise: this learner makes the warm start and gives the run its model; "if-empty": if the run has none.
        resume_from: directory of a checkpoint.
        supervised: a supervisor restarts this process until the learner is done.
        unusable: damaged checkpoints that were set aside before this start.
    """

    name: str
    role: Role = "learner"
    shard: int = 0
    initialise: Initialises = False
    resume_from: Path | None = None
    supervised: bool = False
    unusable: tuple[CheckpointUnusable, ...] = ()


@dataclass(frozen=True)
class Clock:
    """The clock of a trainer; real time by default.

    Attributes:
        stamp: time of an event, in seconds.
        seconds: clock that measures durations.
        stepped_alone: called after every step of a learner without an exchange; virtual time advances here.
    """

    stamp: Callable[[], float] = time.time
    seconds: Callable[[], float] = time.perf_counter
    stepped_alone: Callable[[], None] = lambda: None


@dataclass
class SharedInputs:
    """Inputs that the trainers of one process share.

    Attributes:
        losses: held-out losses by the digest of the global model.
    """

    corpus: Corpus
    losses: dict[Hashable, float] = field(default_factory=dict)


class StopRequest:
    """A request to stop training. Signal handlers and any thread may call any method.

    Attributes:
        is_set: training has been asked to stop.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._interrupt: Callable[[float], None] | None = None

    def set(self) -> None:
        """Stop after the current step, or while the learner waits for others."""
        self.is_set = True
        if self._interrupt is not None:
            self._interrupt(INTERRUPT_AFTER_S)

    def interrupt_with(self, interrupt: Callable[[float], None]) -> None:
        """End waiting by this function from now on; its argument is a delay in seconds (`Exchange.interrupt`)."""
        self._interrupt = interrupt
        if self.is_set:
            interrupt(INTERRUPT_AFTER_S)


@dataclass(frozen=True)
class Summary:
    """The result of a trainer."""

    name: str
    role: Role
    reason: str  # "budget", "steps", "drained" or "stopped"
    steps: int
    tokens: int  # trained by this learner
    run_tokens: int
    held_out_loss: float | None  # of the global model, nats per token; None: stopped while waiting for others
    seconds: float  # spent in the training loop
    step_s: float  # mean time of an inner step, without evaluation and checkpoints
    sample: str
    metrics: dict[str, Any]
