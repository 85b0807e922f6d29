"""The store of a driver whose run may have a standby: durable is what both syncers have."""

from __future__ import annotations

from torch import Tensor

from diloco.core.held import HeldFragment
from diloco.errors import StoreError
from diloco.run.ports import InitialModel, Json, MergedRound, RunMethod
from diloco.syncer.pairing import Pairing
from diloco.syncer.replica import Replica


class ReplicatedStore:
    """As `ports.StorePort`. A write is durable here first, then at the standby; while the standby has not confirmed it,
    it is refused, as by a full disk, and tried again."""

    def __init__(self, store: Replica, pairing: Pairing) -> None:
        self._store, self._pairing = store, pairing
        self._unconfirmed: tuple[int, int, str] | None = None  # fragment, version and digest that are here already

    def initialise(self, run: str, method: RunMethod, model: InitialModel[HeldFragment]) -> None:
        """Version 0 of every fragment."""
        self._store.initialise(run, method, model)
        self._pairing.written(self._store.serial)

    def publish(self, merged: MergedRound[HeldFragment, Tensor], record: Json) -> None:
        """A version together with its record, which a try before this one may have written here already."""
        update = merged.update
        key = update.fragment, update.version, update.digest
        self._begin(key, record)
        if self._unconfirmed == key:
            self._store.save_record(record)
        else:
            self._store.publish(merged, record)
            self._unconfirmed = key
        self._pairing.written(self._store.serial)
        self._unconfirmed = None

    def save_record(self, record: Json) -> None:
        """A record alone."""
        self._begin(None, record)
        self._store.save_record(record)
        self._pairing.written(self._store.serial)

    def _begin(self, key: tuple[int, int, str] | None, record: Json) -> None:
        if self._unconfirmed not in (None, key):  # the record that goes with that version is the newest one that may be
            fragment, version, _ = self._unconfirmed
            raise StoreError(
                f"version {version} of fragment {fragment} comes first, which the standby has not confirmed."
            )
        self._pairing.before_write(record)
