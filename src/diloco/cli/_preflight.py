"""Checks of `diloco train` before it loads the model: its directory, the run at its syncer, its checkpoints."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import typer

from diloco.config import RunConfig
from diloco.errors import AlreadyInitialisedError, CheckpointError, RunError, StoreError, UnreachableError, translated
from diloco.whole_files import free_path

if TYPE_CHECKING:
    from diloco.training.rank_group import RankGroup
    from diloco.training.spec import LearnerSpec

ANSWER_TIMEOUT_S = 10.0
"""How long an unsupervised learner waits for the syncer's answer."""

RETRY_S = 0.5

LEFT_STEPS = 10
"""A run without live learners is finished if it lacks fewer steps than these, of all planned learners: each learner
ends by an estimate of the others' tokens."""


def check_directory(config: RunConfig, name: str, *, force: bool) -> None:
    """Refuse to begin a part anew in a directory that an earlier start has used.

    Arguments:
        force: move the earlier start to another directory instead.

    Raises:
        CheckpointError: the directory is used. StoreError: it cannot be moved.
    """
    from diloco.training.checkpoint import list_checkpoints
    from diloco.training.loop import CHECKPOINTS

    directory = config.dir / name
    events, checkpoints = directory / "events.jsonl", list_checkpoints(directory / CHECKPOINTS)
    if not (checkpoints or (events.exists() and events.stat().st_size)):
        return
    if not force:
        how = "--resume continues from its newest checkpoint, " if checkpoints else ""
        raise CheckpointError(
            f"{directory} holds an earlier start of {name}; {how}--force begins anew and keeps it, and --name or "
            "another [run] dir leaves it alone."
        )
    kept = free_path(lambda number: config.dir.with_name(f"{config.dir.name}-before-{number}") / name)
    with translated(OSError, StoreError, f"cannot move {directory} to {kept}", "move it yourself"):
        kept.parent.mkdir(parents=True, exist_ok=True)
        directory.rename(kept)
    typer.echo(f"{name}: the earlier start is kept as {kept}", err=True)


def look_at_run(
    config: RunConfig, part: "LearnerSpec", *, begins_anew: bool
) -> Literal["over", "has model", "empty", "unknown"]:
    """The run's state at its syncer: whether it has nothing left to train, or has a model.

    Raises:
        AuthError: the syncer refuses this learner. UnknownRunError: it serves another run.
        UnreachableError: no syncer answers. AlreadyInitialisedError: the run has a model.
        RunError: a learner of this name is live.
    """
    run, name = config.run, part.name
    status = _status(config, waits=not begins_anew)
    if status is None:
        return "unknown"
    if not status["initialised"]:
        if not part.initialise:
            typer.echo(f"run {run.name!r} has no model yet: {name} waits for a learner that initialises it", err=True)
        return "empty"
    left = run.tokens - status["tokens"]
    is_abandoned = not any(member["live"] for member in status["learners"].values())
    if left <= 0 or (is_abandoned and left < LEFT_STEPS * config.tokens_per_full_step):
        typer.echo(
            f"run {run.name!r} is finished: {status['tokens']:,} of its {run.tokens:,} tokens are trained; `diloco "
            "export` writes its model, and a larger run.tokens trains it further",
            err=True,
        )
        return "over"
    if part.initialise is True:
        raise AlreadyInitialisedError(
            f"run {run.name!r} has a model, which is never replaced; --initialise if-empty takes it."
        )
    member = status["learners"].get(name)
    if begins_anew and member is not None and member["live"]:
        raise RunError(
            f"{name} is live in run {run.name!r}, at step {member['step']:,}, last heard {member['silent_s']:.1f} s "
            "ago; give this learner another --name, or replace that one with --resume."
        )
    if part.initialise:
        typer.echo(f"run {run.name!r} has a model, at step {status['step']:,}: {name} takes it", err=True)
    return "has model"


def _status(config: RunConfig, *, waits: bool) -> dict[str, Any] | None:
    """The syncer's status of the run; None: it does not answer, and this learner waits for it later on (`waits`)."""
    from diloco.exchange.dialling import fetch_status

    syncer, give_up_at, printed = config.syncer, time.monotonic() + ANSWER_TIMEOUT_S, ""
    while True:
        try:
            return fetch_status(syncer.address, run=config.run.name, keys=syncer.keys, insecure=syncer.insecure)
        except UnreachableError as error:
            if not waits and time.monotonic() >= give_up_at:
                raise
            if printed != (printed := f"waiting for the syncer: {error}"):
                typer.echo(printed, err=True)
            if waits:
                return None
        time.sleep(RETRY_S)


def with_usable_checkpoint(config: RunConfig, part: "LearnerSpec", job: "RankGroup") -> "LearnerSpec":
    """The part with its newest usable checkpoint, or without a checkpoint if none is usable.

    The first rank tests the checkpoints and renames unusable ones; the other ranks list them afterwards.
    """
    from diloco.training.checkpoint import list_checkpoints, newest_usable
    from diloco.training.loop import CHECKPOINTS

    checkpoints = config.dir / part.name / CHECKPOINTS
    unusable = newest_usable(checkpoints)[1] if job.is_first else ()
    job.any(False)  # a barrier
    usable = list_checkpoints(checkpoints)
    if not usable and part.initialise and not part.supervised:
        raise CheckpointError(
            f"no checkpoint in {checkpoints} is usable (they are kept there as unusable-*), so there is no model to "
            "give the run; a start without --resume begins with a new one, and one without --initialise joins the run."
        )
    # A part that has trained before never begins the run anew: without its checkpoint it waits for the run's model.
    initialise = part.initialise if usable else False
    return replace(part, resume_from=usable[-1] if usable else None, unusable=unusable, initialise=initialise)
