"""The pair core in a syncer's process: a lock, a clock, and writes that wait for the standby's confirmation.

Lock order: this lock is taken before those of the driver and of the store, never while one of them is held.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from diloco.core.global_fragment import GlobalFragment
from diloco.protocol.pair.pair_core import PairCore
from diloco.protocol.pair.values import PairedWrites, StandbyConnection, StandingObserver, WriteKey
from diloco.protocol.succession import ElectorVote, Proposal, Standing, Succession
from diloco.run.ports import InitialModel, Json, MergedRound, RunMethod
from diloco.run.validation import check_epoch, check_word
from diloco.syncer.standby.replica import Replica, read_position

TICK_S = 0.2

MAX_EPOCHS_AHEAD = 10**6

T = TypeVar("T")


class Pairing:
    """Hosts the `PairCore` of a syncer, which may be alone. Any thread may call any method.

    Arguments:
        store: the state directory's.
        other, waits_for_both, silence_s, observer: as in `PairCore`.

    Attributes:
        changed: the lock of `core`; notified after every event.
        core: makes the decisions.
        engaged: set once there is a second syncer.

    Raises:
        StoreError: the state directory is damaged.
    """

    def __init__(
        self, store: Replica, *, other: str | None, waits_for_both: bool, silence_s: float,
        observer: StandingObserver,
    ) -> None:  # fmt: skip
        self.changed = threading.Condition(threading.RLock())
        self.engaged = threading.Event()
        self.core = PairCore(
            store, read_position(store.path), other=other, waits_for_both=waits_for_both,
            silence_s=silence_s, new_boot=lambda: secrets.randbits(63) + 1, observer=observer, now=time.monotonic(),
        )  # fmt: skip
        if not self.core.is_single:
            self.engaged.set()

    def event(self, do: Callable[[float], T]) -> T:
        """Execute one event of the core, which gets the time; returns its result. Waiting threads are woken."""
        with self.changed:
            try:
                return do(time.monotonic())
            finally:
                if not self.core.is_single:
                    self.engaged.set()
                self.changed.notify_all()

    # --- queries ------------------------------------------------------------------------------------------------------

    @property
    def succession(self) -> Succession:
        """As in `PairCore`."""
        return self.core.succession

    @property
    def standing(self) -> Standing:
        """As in `Succession`."""
        return self.core.standing

    @property
    def most_epoch(self) -> int:
        """The highest plausible epoch from others: a repaired state begins the epoch of its Unix time."""
        return max(self.succession.highest, int(time.time())) + MAX_EPOCHS_AHEAD

    def heard(self, learner: str, word: ElectorVote) -> Proposal | None:
        """Take a learner's message about the pair; returns the proposal that it should vote on.

        Raises:
            PayloadError: a value is out of range.
        """
        with self.changed:
            check_word(learner, word, self.most_epoch)
            return self.core.heard(time.monotonic(), word)

    def note_epoch(self, epoch: int) -> None:
        """Note the first's epoch: this syncer begins only later ones, even before it has the first's state.

        Raises:
            PayloadError: the epoch is out of range.
        """
        with self.changed:
            check_epoch("the first", epoch, self.most_epoch)
            self.succession.next_epoch_is_after(epoch)

    def status(self) -> dict[str, Any] | None:
        """As `PairCore.status`."""
        with self.changed:
            return self.core.status(time.monotonic())

    # --- writes -------------------------------------------------------------------------------------------------------

    def before_write(self, record: Mapping[str, Any]) -> None:
        """Wait until a write of the run may begin.

        Raises:
            StoreError: no version may be published now.
        """
        with self.changed:
            self._wait(self.core.may_write)
            self.core.write_begins(record)

    def written(self, serial: int) -> None:
        """Wait until a write that is durable here is durable at the standby too, if there is one.

        Raises:
            StoreError: the standby has not confirmed it, so it must not be published.
        """
        with self.changed:
            self.changed.notify_all()
            self._wait(lambda waited_s: self.core.is_confirmed(serial, waited_s))

    def _wait(self, holds: Callable[[float], bool]) -> None:
        began = time.monotonic()
        while not holds(time.monotonic() - began):
            self.changed.wait(TICK_S)

    # --- other events -------------------------------------------------------------------------------------------------

    def unlink(self, link: StandbyConnection) -> None:
        """Note that a standby's connection has ended."""
        self.event(lambda _: self.core.unlink(link))

    def promote(self, *, force: bool) -> tuple[int, tuple[int, ...]]:
        """As `PairCore.promote`."""
        return self.event(lambda now: self.core.promote(now, force=force))

    def tick(self) -> None:
        """Execute a tick of the core.

        Raises:
            StoreError: the disk refused; the next tick tries again.
        """
        self.event(self.core.tick)

    def close(self) -> None:
        """End all waits of writes."""
        self.event(lambda _: self.core.close())


class ReplicatedStore:
    """A `ports.StorePort` that refuses a write, like a full disk, until the standby has confirmed it."""

    def __init__(self, store: Replica, pairing: Pairing) -> None:
        self._store, self._pairing = store, pairing
        self._writes = PairedWrites()

    def initialise(self, run: str, method: RunMethod, model: InitialModel[GlobalFragment]) -> None:
        """As `StorePort`."""
        self._store.initialise(run, method, model)
        self._pairing.written(self._store.serial)

    def publish(self, merged: MergedRound[GlobalFragment, Tensor], record: Json) -> None:
        """As `StorePort`. An earlier try may have written the version here already; then only the record is written."""
        update = merged.update
        key = WriteKey(update.fragment, update.version, update.digest)
        is_stored = self._writes.begins(key)
        self._pairing.before_write(record)
        if is_stored:
            self._store.save_record(record)
        else:
            self._store.publish(merged, record)
            self._writes.wrote(key)
        self._confirm()

    def save_record(self, record: Json) -> None:
        """As `StorePort`."""
        self._writes.begins(None)
        self._pairing.before_write(record)
        self._store.save_record(record)
        self._confirm()

    def _confirm(self) -> None:
        self._pairing.written(self._store.serial)
        self._writes.confirmed()
