"""What `diloco train` looks at before it loads anything: its directory, and the run at its syncer."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.errors import AlreadyInitialisedError, CheckpointError, RunError, StoreError, UnreachableError, translated

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco.config import RunConfig

PATIENCE_S = 10.0
"""How long a syncer may take to answer a learner that no supervisor starts again."""

AGAIN_S = 0.5

LEFT_STEPS = 10
"""A run that lacks fewer steps than these, of all planned learners, is finished: each learner ends by an estimate of
what the others have trained since it heard of them."""


def check_directory(config: "RunConfig", name: str, checkpoints: Path, *, force: bool) -> Path | None:
    """A part that begins anew does so in a directory of its own.

    Arguments:
        force: set aside what an earlier start has written there.

    Returns:
        Where that is kept; None: there was nothing.

    Raises:
        CheckpointError: the directory is used. StoreError: it cannot be set aside.
    """
    from diloco.training.checkpoint import list_checkpoints

    directory = config.dir / name
    events, saved = directory / "events.jsonl", list_checkpoints(checkpoints)
    if not (saved or (events.exists() and events.stat().st_size)):
        return None
    if not force:
        how = "--resume goes on from its newest checkpoint, " if saved else ""
        raise CheckpointError(
            f"{directory} holds an earlier start of {name}; {how}--force begins anew and keeps it, and --name or "
            "another [run] dir leaves it alone."
        )
    number = 1
    while (kept := config.dir.parent / f"{config.dir.name}-before-{number}" / name).exists():
        number += 1
    with translated(OSError, StoreError, f"cannot set {directory} aside as {kept}", "move it yourself"):
        kept.parent.mkdir(parents=True, exist_ok=True)
        directory.rename(kept)
    return kept


def is_over(
    config: "RunConfig", name: str, *, initialise: bool, begins: bool, waits: bool, say: "Callable[[str], None]"
) -> bool:
    """Whether the run has nothing left for a learner to train.

    Arguments:
        begins: this learner does not go on from a checkpoint.
        waits: it waits itself for a syncer that does not answer, as long as it takes.
        say: tells people a sentence.

    Raises:
        AuthError: the syncer refuses this learner. UnknownRunError: it serves another run.
        UnreachableError: none answers. AlreadyInitialisedError: the run has a model.
        RunError: a learner of this name is in the run.
    """
    status = _status(config, waits, say)
    if status is None:
        return False
    tokens = config.run.tokens
    if not status["initialised"]:
        if not initialise:
            say(f"run {config.run.name!r} has no model yet: {name} waits for the learner with --initialise")
        return False
    left = tokens - status["tokens"]
    is_left = not any(member["live"] for member in status["learners"].values())
    if left <= 0 or (is_left and left < LEFT_STEPS * config.tokens_per_full_step):
        say(f"run {config.run.name!r} is finished: {status['tokens']:,} of its {tokens:,} tokens are trained; `diloco "
            "export` writes its model, and a larger run.tokens trains it further")  # fmt: skip
        return True
    if begins and initialise:
        raise AlreadyInitialisedError(
            f"run {config.run.name!r} has a model already and keeps it; join it without --initialise."
        )
    member = status["learners"].get(name)
    if begins and member is not None and member["live"]:
        raise RunError(
            f"{name} is in run {config.run.name!r} now, at step {member['step']:,}, heard {member['silent_s']:.1f} s "
            "ago; give this learner another --name, or let it take that one's place with --resume."
        )
    return False


def _status(config: "RunConfig", waits: bool, say: "Callable[[str], None]") -> dict[str, Any] | None:
    """What the syncer says of the run; None: it does not answer, and this learner waits for it itself."""
    from diloco.exchange.remote import fetch_status

    syncer, give_up_at, said = config.syncer, time.monotonic() + PATIENCE_S, ""
    while True:
        try:
            return fetch_status(syncer.address, run=config.run.name, keys=syncer.keys, insecure=syncer.insecure)
        except UnreachableError as error:
            if not waits and time.monotonic() >= give_up_at:
                raise
            if said != (said := f"waits for the syncer: {error}"):
                say(said)
            if waits:
                return None
        time.sleep(AGAIN_S)
