"""Which state of which run a syncer serves: run id, epoch, and process.

A run has an id from its initialisation on. Its epoch grows, durably, with every start of a syncer on its state. A
learner follows one line of epochs: it keeps the highest that it has adopted, and refuses whatever is lower, since that
is an older copy of the state, and whatever has the same epoch in another process, since two syncers were started from
the same state. So two copies of a run cannot both change one learner.

A start may also have gone back on purpose, to versions that a repair could still read. Then a learner that holds a
later version of before must not train on from it, even where the run has reached the same number again (`lost`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.errors import DilocoError, LineageError, UnknownRunError


@dataclass(frozen=True)
class Lineage:
    """What a syncer serves.

    Attributes:
        run_id: 32 hexadecimal digits, drawn when the run got its model; "": it has none yet.
        epoch: 1, 2, 3, … of the starts on this state.
        boot: a random number of the syncer's process, other than 0.
    """

    run_id: str
    epoch: int
    boot: int


@dataclass(frozen=True)
class Epoch:
    """A start: its number, and the version that each fragment had then."""

    number: int
    versions: tuple[int, ...]


def refusal(seen: Lineage | None, offered: Lineage) -> DilocoError | None:
    """Why a learner that has adopted `seen` does not follow a syncer that serves `offered`; None: it does.

    Returns:
        UnknownRunError: another run of the same name. LineageError: an older or a second state of the same run.
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
            f"the syncer serves another run of the same name (id {offered.run_id}) than the one that was trained in "
            f"(id {seen.run_id}); start the learner afresh to join that one."
        )
    if offered.epoch < seen.epoch:
        return LineageError(
            f"the syncer serves epoch {offered.epoch} of the run, which has been at epoch {seen.epoch}: an older copy "
            "of its state; stop that syncer and start the newest one, or restore the copy with `diloco syncer restore`."
        )
    if offered.epoch == seen.epoch:
        return LineageError(
            f"two syncers were started on copies of the run's state: both serve epoch {seen.epoch}; stop the one that "
            "is not meant to."
        )
    return None


def lost(epochs: Sequence[Epoch], seen: int, versions: Sequence[int]) -> tuple[int, int] | None:
    """The first fragment of which a version is not part of the run any more, and the version that the run went back to;
    None: all are.

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
