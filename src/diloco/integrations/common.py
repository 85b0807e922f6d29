"""Shared by all integrations: the arguments of the learner, its part of a checkpoint, and a schedule that follows the
run."""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from diloco.core.method import Method
from diloco.errors import CheckpointError
from diloco.exchange.base import Exchange
from diloco.learner import Learner
from diloco.learner.roles import Buffers, Static
from diloco.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint

DIRECTORY = "diloco"
"""Directory of the learner's state in a checkpoint of a library, which has a directory for each rank; and key of
`TrainerState.stateful_callbacks` of transformers for the id of the training."""

log = logging.getLogger("diloco")


class LearnerOptions(TypedDict, total=False):
    """Arguments of `Learner` that callbacks and loops pass on, with its defaults."""

    method: Method | None
    trains: Sequence[str] | None
    overlap: int | None
    buffers: Buffers | Mapping[str, Buffers]
    static: Static
    rewarm_steps: int | None


def learner_with(exchange: Exchange, **options: Unpack[LearnerOptions]) -> Callable[..., Learner]:
    """`Learner` with these arguments, for the start of training. Raises TypeError for an argument that it lacks, or
    that is the integration's own to set."""
    if others := options.keys() - LearnerOptions.__annotations__.keys():
        raise TypeError(f"{sorted(others)} are unknown arguments; pass {', '.join(LearnerOptions.__annotations__)}.")
    return partial(Learner, exchange=exchange, **options)


def save_part(checkpoint: Path, rank: int, learner: Learner, **more: int) -> None:
    """Save the state of a learner, and `more` beside it, as a rank's part of a checkpoint."""
    steps = learner.steps
    saved = {**more, "steps": steps, "learner": learner.state_dict()}
    save_checkpoint(checkpoint / DIRECTORY / f"rank-{rank}", steps, saved, keep=1)


def load_part(checkpoint: Path, rank: int, num_ranks: int) -> dict[str, Any]:
    """What `save_part` has saved.

    Raises:
        CheckpointError: the checkpoint has parts of fewer ranks or none, or the part is damaged.
    """
    own = checkpoint / DIRECTORY / f"rank-{rank}"
    if not own.is_dir() and (saved := list(own.parent.glob("rank-*"))):
        raise CheckpointError(
            f"the checkpoint is of a job of {len(saved)} ranks, and this one has {num_ranks}; use the same number."
        )
    return load_checkpoint(latest_checkpoint(own))


def steps_missed(learner: Learner, saved_steps: int) -> int:
    """The steps that the run has taken since a checkpoint, which are logged if the learner has resumed from it."""
    if learner.resumed is False:
        log.warning(
            "the run has advanced since step %d, where this checkpoint was saved; %s continues at step %d with the "
            "run's newest model", saved_steps, learner.name, learner.steps,
        )  # fmt: skip
    return learner.steps - saved_steps


def forward_schedule(scheduler: object, num_steps: int) -> None:
    """Advance a learning rate schedule by steps that the run took without this learner.

    A schedule that follows a metric does not change.
    """
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for _ in range(num_steps):
            scheduler.step()
