"""The store of a driver whose run may have a standby: durable is what both syncers have."""

from __future__ import annotations

from torch import Tensor

from diloco.core.held import HeldFragment
from diloco.protocol.pair.writes import PairedWrites, WriteKey
from diloco.run.ports import InitialModel, Json, MergedRound, RunMethod
from diloco.syncer.standby.pairing import Pairing
from diloco.syncer.standby.replica import Replica


class ReplicatedStore:
    """As `ports.StorePort`. While the standby has not confirmed a write, it is refused, as by a full disk."""

    def __init__(self, store: Replica, pairing: Pairing) -> None:
        self._store, self._pairing = store, pairing
        self._writes = PairedWrites()

    def initialise(self, run: str, method: RunMethod, model: InitialModel[HeldFragment]) -> None:
        """Version 0 of every fragment."""
        self._store.initialise(run, method, model)
        self._pairing.written(self._store.serial)

    def publish(self, merged: MergedRound[HeldFragment, Tensor], record: Json) -> None:
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
