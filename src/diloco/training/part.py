"""The part of a run that a process plays, and its result."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from diloco.training.checkpoint import UnusableCheckpoint

Role = Literal["learner", "baseline", "isolated"]


@dataclass(frozen=True)
class Part:
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
