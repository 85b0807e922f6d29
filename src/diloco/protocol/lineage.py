"""The identity of the state that a syncer serves: run id, epoch, and process.

A run has an id from its initialisation on. Its epoch increases, durably, with every start of a syncer on its state. A
learner follows one sequence of epochs: it remembers the highest one that it has adopted, and refuses a lower epoch,
which is an older copy of the state, and the same epoch of another process, since then two syncers were started from the
same state. So two copies of a run cannot both change one learner.

A start may also roll back on purpose, to versions that a repair could still read. A learner with a later version from
before must not continue from it, even when the run reaches the same number again (`lost`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.errors import DilocoError, LineageError, UnknownRunError


@dataclass(frozen=True)
class Lineage:
    """Identifies the state that a syncer serves.

    Attributes:
        run_id: 32 hexadecimal digits, drawn when the run is initialised; "": not yet.
        epoch: number of the start on this state, from 1.
        boot: a random number of the syncer's process, other than 0.
    """

    run_id: str
    epoch: int
    boot: int


@dataclass(frozen=True)
class Epoch:
    """A start of a syncer: its number, and the version of each fragment at that time."""

    number: int
    versions: tuple[int, ...]


def refusal(seen: Lineage | None, offered: Lineage) -> DilocoError | None:
    """Return why a learner that has adopted `seen` does not follow a syncer that serves `offered`; None: it does.

    Returns:
        UnknownRunError: another run of the same name.
        LineageError: an older or a second state of the same run.
    """
    if seen is None or seen == offered:
        return None
    if offered.run_id == "":
        return LineageError(
            f"the syncer has no model of this run, which learners have trained in at epoch {seen.epoch}; is its state "
            "directory the right one?"
        )
    if seen.run_id != offered.run_id:
        return UnknownRunError(
            f"the syncer serves another run of the same name (id {offered.run_id}) than the run of this learner (id "
            f"{seen.run_id}); start the learner afresh to join it."
        )
    if offered.epoch < seen.epoch:
        return LineageError(
            f"the syncer serves epoch {offered.epoch} of the run, which has been at epoch {seen.epoch}: an older copy "
            "of its state; stop that syncer and start the newest one, or serve what `diloco copy` makes of the copy."
        )
    if offered.epoch == seen.epoch:
        return LineageError(
            f"two syncers were started on copies of the run's state: both serve epoch {seen.epoch}; stop the wrong one."
        )
    return None


def lost(epochs: Sequence[Epoch], seen: int, versions: Sequence[int]) -> tuple[int, int] | None:
    """Return the first fragment whose version the run has discarded, and the version to which the run was rolled back;
    None: none is discarded.

    Arguments:
        epochs: all starts, ascending.
        seen: the epoch in which `versions` were adopted, by fragment.
    """
    later = [epoch.versions for epoch in epochs if epoch.number > seen]
    for fragment, version in enumerate(versions):
        back = min((at[fragment] for at in later), default=version)
        if back < version:
            return fragment, back
    return None
