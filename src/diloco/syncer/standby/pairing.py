"""One of two syncers in its process: a lock around `protocol.pair`, its clock, its disk, and writes that wait.

Its lock is taken before those of the driver and of the store, never while one of them is held.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from diloco.core.global_fragment import GlobalFragment
from diloco.errors import StandbyError
from diloco.protocol.lineage import Epoch
from diloco.protocol.pair.pair_core import PairCore
from diloco.protocol.pair.values import Contents, PairedWrites, Position, StandbyConnection, StandingObserver, WriteKey
from diloco.protocol.succession import Proposal, Standing, Succession, Word
from diloco.run.ports import InitialModel, Json, MergedRound, RunMethod
from diloco.run.validation import check_epoch, check_word
from diloco.syncer.standby.replica import Replica, read_position, write_position

TICK_S = 0.2

MAX_EPOCHS_AHEAD = 10**6

T = TypeVar("T")


class PairDisk:
    """The state directory of one of two syncers, as `Durable`."""

    def __init__(self, store: Replica) -> None:
        self._store = store

    @property
    def serial(self) -> int:
        """As `Store.serial`."""
        return self._store.serial

    def contents(self) -> Contents:
        """As `Replica.contents`."""
        return self._store.contents()

    def epoch(self) -> int:
        """As `Replica.epoch`."""
        return self._store.epoch()

    def versions(self) -> tuple[int, ...]:
        """As `Replica.versions`."""
        return self._store.versions()

    def record(self) -> Mapping[str, Any] | None:
        """As `Replica.record`."""
        return self._store.record()

    def begin_epoch(self, number: int) -> None:
        """As `Replica.begin_epoch`, now."""
        self._store.begin_epoch(Epoch(number, self._store.versions()), time.time())

    def keep(self, position: Position) -> None:
        """As `write_position`."""
        write_position(self._store.path, position)


class Pairing:
    """A syncer's part in a pair, or alone. Any thread may call any method.

    Arguments:
        store: of the state directory.
        other, waits_for_both, patience_s, observer: as in `PairCore`.

    Attributes:
        changed: the lock; notified at every change.
        core: decides.
        engaged: set once there is a second syncer.

    Raises:
        StoreError: the state directory is damaged.
    """

    def __init__(
        self, store: Replica, *, other: str | None, waits_for_both: bool, patience_s: float,
        observer: StandingObserver,
    ) -> None:  # fmt: skip
        self.changed = threading.Condition(threading.RLock())
        self.engaged = threading.Event()
        self.core = PairCore(
            PairDisk(store), read_position(store.path), other=other, waits_for_both=waits_for_both,
            patience_s=patience_s, new_boot=lambda: secrets.randbits(63) + 1, observer=observer, now=time.monotonic(),
        )  # fmt: skip
        if not self.core.is_single:
            self.engaged.set()

    def event(self, do: Callable[[float], T]) -> T:
        """One event of the core, given the time; returns what it does. What waits looks again."""
        with self.changed:
            try:
                return do(time.monotonic())
            finally:
                if not self.core.is_single:
                    self.engaged.set()
                self.changed.notify_all()

    # --- what others ask ----------------------------------------------------------------------------------------------

    @property
    def succession(self) -> Succession:
        """As in `PairCore`."""
        return self.core.succession

    @property
    def boot(self) -> int:
        """Of this syncer as it serves the run."""
        return self.core.succession.boot

    @property
    def standing(self) -> Standing:
        """As in `Succession`."""
        return self.core.standing

    @property
    def link(self) -> StandbyConnection | None:
        """As in `PairCore`."""
        return self.core.link

    @property
    def other(self) -> str | None:
        """The address of the other syncer."""
        return self.core.other

    @property
    def patience_s(self) -> float:
        """As in `PairCore`."""
        return self.core.patience_s

    @property
    def had_position(self) -> bool:
        """As in `PairCore`."""
        return self.core.had_position

    @property
    def is_single(self) -> bool:
        """As in `PairCore`."""
        return self.core.is_single

    @property
    def most_epoch(self) -> int:
        """Beyond this, an epoch that others name makes no sense: a repaired state begins the one of its Unix time."""
        return max(self.succession.highest, int(time.time())) + MAX_EPOCHS_AHEAD

    def heard(self, learner: str, word: Word) -> Proposal | None:
        """A learner's word; returns what it is asked for.

        Raises:
            PayloadError: its numbers make no sense.
        """
        with self.changed:
            check_word(learner, word, self.most_epoch)
            return self.core.heard(time.monotonic(), word)

    def knows_of(self, epoch: int) -> None:
        """The first knows of this epoch: one that this syncer begins is later, also before it is brought up to date.

        Raises:
            PayloadError: it makes no sense.
        """
        with self.changed:
            check_epoch("the first", epoch, self.most_epoch)
            self.succession.next_epoch_is_after(epoch)

    def refusal(self) -> StandbyError:
        """Why this syncer does not serve the run now."""
        return self.core.refusal()

    def status(self) -> dict[str, Any] | None:
        """As `PairCore.status`."""
        with self.changed:
            return self.core.status(time.monotonic())

    # --- writes -------------------------------------------------------------------------------------------------------

    def before_write(self, record: Mapping[str, Any]) -> None:
        """A write of the run begins, once it may.

        Raises:
            StoreError: nothing may be published now.
        """
        with self.changed:
            self._wait(self.core.may_write)
            self.core.write_begins(record)

    def written(self, serial: int) -> None:
        """A write is durable here: wait until it is at the standby too, where there is one.

        Raises:
            StoreError: it is not, and may not be seen.
        """
        with self.changed:
            self.changed.notify_all()
            self._wait(lambda waited_s: self.core.is_confirmed(serial, waited_s))

    def _wait(self, holds: Callable[[float], bool]) -> None:
        began = time.monotonic()
        while not holds(time.monotonic() - began):
            self.changed.wait(TICK_S)

    def hurry(self) -> None:
        """As `PairCore.hurry`."""
        self.core.hurry()

    # --- the rest -----------------------------------------------------------------------------------------------------

    def unlink(self, link: StandbyConnection) -> None:
        """A connection has ended."""
        self.event(lambda _: self.core.unlink(link))

    def promote(self, *, force: bool) -> tuple[int, tuple[int, ...]]:
        """As `PairCore.promote`."""
        return self.event(lambda now: self.core.promote(now, force=force))

    def tick(self) -> None:
        """Time has passed.

        Raises:
            StoreError: the disk refuses what is to be durable; it is tried again at the next tick.
        """
        self.event(self.core.tick)

    def close(self) -> None:
        """Writes wait no more."""
        self.event(lambda _: self.core.close())


class ReplicatedStore:
    """As `ports.StorePort`. While the standby has not confirmed a write, it is refused, as by a full disk."""

    def __init__(self, store: Replica, pairing: Pairing) -> None:
        self._store, self._pairing = store, pairing
        self._writes = PairedWrites()

    def initialise(self, run: str, method: RunMethod, model: InitialModel[GlobalFragment]) -> None:
        """Version 0 of every fragment."""
        self._store.initialise(run, method, model)
        self._pairing.written(self._store.serial)

    def publish(self, merged: MergedRound[GlobalFragment, Tensor], record: Json) -> None:
        """A version together with its record, which a try before this one may have written here already."""
        update = merged.update
        key = WriteKey(update.fragment, update.version, update.digest)
        is_here = self._writes.begins(key)
        self._pairing.before_write(record)
        if is_here:
            self._store.save_record(record)
        else:
            self._store.publish(merged, record)
            self._writes.wrote(key)
        self._confirm()

    def save_record(self, record: Json) -> None:
        """A record alone."""
        self._writes.begins(None)
        self._pairing.before_write(record)
        self._store.save_record(record)
        self._confirm()

    def _confirm(self) -> None:
        self._pairing.written(self._store.serial)
        self._writes.confirmed()
