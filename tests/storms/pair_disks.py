"""The disks of two syncers: what is durable on each, and what is durable on all that must have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.chaos.versions import require
from tests.storms.accounts import Accounts
from tests.storms.invariants import Ledger
from tests.storms.units import UnitLedger
from torch import Tensor

from diloco.core.global_fragment import GlobalFragment
from diloco.errors import StoreError
from diloco.protocol.accounting import Key
from diloco.protocol.contribution import Contribution
from diloco.protocol.lineage import Epoch
from diloco.protocol.pair.values import Contents, PairedWrites, Position, WriteKey
from diloco.run.memory import MemoryStore
from diloco.run.ports import InitialModel, Json, MergedRound, RunMethod, SavedRun

Merged = MergedRound[GlobalFragment, Tensor]


@dataclass(frozen=True)
class DiskState:
    """What is durable of a run on one disk. `verdicts`: that its record has, or one before it."""

    saved: SavedRun[GlobalFragment]
    verdicts: Mapping[Key, str | None]


@dataclass
class Published:
    """What two syncers have published, as one line.

    Attributes:
        ledger: of it.
        units: of leased data in it.
        written: versions that were written on any disk, by fragment, version and digest.
        by_epoch: which process has published in each epoch.
        begun: the highest epoch in which a driver has begun.
        num_published: writes that both have where both must.
    """

    ledger: Ledger
    units: UnitLedger
    written: dict[tuple[int, int, str], Merged] = field(default_factory=dict)
    by_epoch: dict[int, int] = field(default_factory=dict)
    begun: int = 0
    num_published: int = 0

    def confirmed(self, epoch: int, boot: int, merged: Merged | None, state: DiskState) -> None:
        """A write of this process may be seen."""
        publisher = self.by_epoch.setdefault(epoch, boot)
        require(publisher == boot, f"processes {publisher} and {boot} both publish in epoch {epoch}")
        newest = max(self.by_epoch)
        require(epoch == newest, f"process {boot} publishes in epoch {epoch}, after epoch {newest}")
        self.num_published += 1
        self._take([] if merged is None else [merged], state)

    def begins(self, state: DiskState) -> None:
        """A driver begins with what is on its disk: no version that was published is lost, no verdict either. What is
        there besides is published from here on.

        One that has lost the run, and does not know it, may begin with less: `confirmed` is never told of its writes.
        """
        epoch = state.saved.epochs[-1].number
        if epoch < self.begun:
            return
        self.begun = epoch
        ledger, beyond = self.ledger, list[Merged]()
        for held in state.saved.fragments:
            newest = ledger.versions.newest(held.fragment)
            require(held.version >= newest, f"version {newest} of fragment {held.fragment} is lost")
            require(held.version <= newest + 1, f"version {held.version} of fragment {held.fragment} follows {newest}")
            if held.version > newest:
                beyond.append(self.written[held.fragment, held.version, held.digest])
        lost = {key: reason for key, reason in ledger.verdicts.items() if state.verdicts.get(key, "none") != reason}
        require(not lost, f"verdicts that were published are lost: {lost}")
        self._take(beyond, state)
        ledger.restored(state.saved)

    def _take(self, versions: Sequence[Merged], state: DiskState) -> None:
        new = list[Merged]()
        for merged in versions:
            it = merged.update
            if self.ledger.versions.digests.get((it.fragment, it.version)) != it.digest:  # another one began with it
                self.ledger.durable(merged)
                new.append(merged)
        self.ledger.recorded(dict(state.verdicts))
        if state.saved.record is not None:
            self.units.durable([c for merged in new for c in _kept(merged)], state.saved.record)


def _kept(merged: Merged) -> list[Contribution]:
    return [c for c in merged.action.contributions if c.learner not in merged.refused]


class NodeAccounts(Accounts):
    """Of one driver of two. What learners have sent is known to all.

    Arguments:
        others: of both syncers, to which this is added; the newest come last.
    """

    def __init__(self, ledger: Ledger, others: list[NodeAccounts]) -> None:
        super().__init__(ledger)
        if others:
            self._sent, self._overwritten = others[0]._sent, others[0]._overwritten
        self._others = others
        others.append(self)
        del others[1:-4]  # older ones are of drivers that are gone

    def sent(self, c: Contribution, payload: Tensor) -> None:
        super().sent(c, payload)
        for each in self._others:
            each._undecided[c.learner, c.incarnation, c.fragment][c.number] = c


class NodeStore(MemoryStore[GlobalFragment, Tensor]):
    """The disk of one of two syncers: the run (`ports.StorePort`), and its part in the pair (`Durable`).

    Attributes:
        position: as in `Durable.keep`.
        serial: as in `Durable`.
        verdicts: that become durable with the write which is under way.
        refusal: what the write which is under way is refused with before it begins; None: it may begin.
    """

    def __init__(self, published: Published, at: Callable[[str], None]) -> None:
        super().__init__(at)
        self.position: Position | None = None
        self.serial = 0
        self.verdicts: dict[Key, str | None] = {}
        self.refusal: StoreError | None = None
        self.writes = PairedWrites()
        self.under_way: Merged | None = None
        self._published = published
        self._recorded: dict[Key, str | None] = {}
        self._begins: Callable[[Json], None] = lambda record: None

    def started(self, begins: Callable[[Json], None]) -> None:
        """A driver writes here from now on. `begins`: told the record of each write."""
        self.writes, self.refusal, self.under_way, self._begins = PairedWrites(), None, None, begins

    @property
    def state(self) -> DiskState | None:
        """All that is durable of the run."""
        return None if self._saved is None else DiskState(self._saved, dict(self._recorded))

    # --- the driver's writes ------------------------------------------------------------------------------------------

    def initialise(self, run: str, method: RunMethod, model: InitialModel[GlobalFragment]) -> None:
        """As `ports.StorePort`."""
        before = self._saved
        try:
            super().initialise(run, method, model)
        finally:
            if self._saved is not before:
                self.serial += 1
                self._published.ledger.initial(model.fragments)

    def publish(self, merged: Merged, record: Json) -> None:
        """As `syncer.standby.pairing.ReplicatedStore.publish`, but for the waiting."""
        update = merged.update
        key = WriteKey(update.fragment, update.version, update.digest)
        is_here = self.writes.begins(key)
        self.under_way = merged
        self._begin(record)
        if is_here:
            self._record(record)
            return
        self._published.written[update.fragment, update.version, update.digest] = merged
        before = self._saved
        try:
            super().publish(merged, record)
        finally:
            self._wrote(before)
        self.writes.wrote(key)

    def save_record(self, record: Json) -> None:
        """As `syncer.standby.pairing.ReplicatedStore.save_record`, but for the waiting."""
        self.writes.begins(None)
        self.under_way = None
        self._begin(record)
        self._record(record)

    def _begin(self, record: Json) -> None:
        if self.refusal is not None:
            raise self.refusal
        self._begins(record)

    def _record(self, record: Json) -> None:
        before = self._saved
        try:
            super().save_record(record)
        finally:
            self._wrote(before)

    def _wrote(self, before: SavedRun[GlobalFragment] | None) -> None:
        if self._saved is not before:
            self.serial += 1
            self._recorded |= self.verdicts

    # --- its part in the pair -----------------------------------------------------------------------------------------

    def contents(self) -> Contents:
        """As `Durable`."""
        if self._saved is None:
            return Contents()
        held = {each.fragment: (each.version, each.digest) for each in self._saved.fragments}
        return Contents(self._saved.run_id, self.epoch(), held)

    def epoch(self) -> int:
        """As `Durable`."""
        return 0 if self._saved is None else self._saved.epochs[-1].number

    def versions(self) -> tuple[int, ...]:
        """As `Durable`."""
        return () if self._saved is None else tuple(each.version for each in self._saved.fragments)

    def record(self) -> Mapping[str, Any] | None:
        """As `Durable`."""
        return None if self._saved is None else self._saved.record

    def begin(self, saved: SavedRun[GlobalFragment]) -> SavedRun[GlobalFragment]:
        self.serial += 1
        return super().begin(saved)

    def begin_epoch(self, number: int) -> None:
        """As `Durable`."""
        saved = self._require()
        if any(each.number == number for each in saved.epochs):
            return
        self._disk("committed")
        epochs = sorted((*saved.epochs, Epoch(number, self.versions())), key=lambda each: each.number)
        self._saved = replace(saved, epochs=tuple(epochs))
        self.serial += 1

    def keep(self, position: Position) -> None:
        """As `Durable`."""
        self._disk("renamed")
        self.position = position

    def take(self, state: DiskState) -> None:
        """Become this state of the run, as a standby."""
        self._disk("inserted")
        self._saved, self._recorded = state.saved, dict(state.verdicts)
        self.serial += 1

    def _disk(self, point: str) -> None:
        try:
            self._at(point)
        except OSError as error:
            raise StoreError(f"the simulated disk refused ({error}); try again.") from error
