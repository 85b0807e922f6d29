"""The part of a run that a process plays: its clock, a request to stop it, and its result."""

import time
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from diloco.training.checkpoint import UnusableCheckpoint
from diloco.training.data.corpus import Corpus

STOP_AFTER_S = 0.2
"""How long a learner that is told to stop waits for others, if it does."""

Role = Literal["learner", "baseline", "isolated"]


@dataclass(frozen=True)
class LearnerSpec:
    """The part of a run that this process plays.

    learner: trains its shard and exchanges; the one that initialises the run first makes the warm start.
    baseline: every shard in one process, the full batch at every step. isolated: as a learner, exchanging nothing.
    """

    name: str
    role: Role = "learner"
    shard: int = 0
    initialise: bool = False
    resume_from: Path | None = None  # a checkpoint directory
    supervised: bool = False  # a supervisor starts it again whenever it ends otherwise than done
    unusable: tuple[UnusableCheckpoint, ...] = ()  # checkpoints that were set aside before


@dataclass(frozen=True)
class Clock:
    """The time that a trainer measures by; real time by default.

    Attributes:
        stamp: the time that events carry, in seconds.
        seconds: what durations are differences of.
        stepped_alone: called after every step of a learner that has no exchange, whose time no exchange measures.
    """

    stamp: Callable[[], float] = time.time
    seconds: Callable[[], float] = time.perf_counter
    stepped_alone: Callable[[], None] = lambda: None


@dataclass
class SharedInputs:
    """Loaded once, found once.

    Attributes:
        corpus: what all read from.
        losses: held-out loss of a global model by its digest.
    """

    corpus: Corpus
    losses: dict[Hashable, float] = field(default_factory=dict)


class StopRequest:
    """Whether a part of a run is to stop. Signal handlers and any thread may call any method.

    Attributes:
        is_asked: it is.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._interrupt: Callable[[float], None] | None = None

    def ask(self) -> None:
        """Stop after the current step, or where the part waits for others."""
        self.is_asked = True
        if self._interrupt is not None:
            self._interrupt(STOP_AFTER_S)

    def interrupts(self, interrupt: Callable[[float], None]) -> None:
        """What ends the waiting of this part from now on, after so many seconds (`Exchange.interrupt`)."""
        self._interrupt = interrupt
        if self.is_asked:
            interrupt(STOP_AFTER_S)


@dataclass(frozen=True)
class Summary:
    """The result of a finished part."""

    name: str
    role: Role
    reason: str  # "budget", "steps", "drained" or "stopped"
    steps: int
    tokens: int  # trained by this learner
    run_tokens: int
    held_out_loss: float | None  # of the global model, nats per token; None: it was stopped while it waited
    seconds: float  # spent in the loop
    step_s: float  # mean time of an inner step, without evaluation and checkpoints
    sample: str
    metrics: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)
