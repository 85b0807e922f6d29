"""Storms in which a run goes back under live learners: its state is restored from a backup, or repaired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.storms.accounts import Accounts
from tests.storms.invariants import Ledger
from tests.storms.journals import StormJournal
from tests.storms.learners import Process
from tests.storms.places import Snapshot, StormFormat
from tests.storms.plans import GOINGS, Fault, Plan
from tests.storms.world import Storm

from diloco.protocol.accounting import Key
from diloco.protocol.learner import LearnerCore
from diloco.protocol.lineage import Epoch
from diloco.protocol.manifest import Manifest
from diloco.protocol.records import rolled_back, without_members
from diloco.run.ports import Json


@dataclass(frozen=True)
class Backup:
    """What was durable with a version.

    Attributes:
        snapshot: of the store.
        merged, verdicts: as in `Ledger`.
        merges: of each fragment's units, as in `UnitLedger`.
    """

    snapshot: Snapshot
    merged: dict[Key, int]
    verdicts: dict[Key, str | None]
    merges: list[Counter[int]]


@dataclass
class LedgerOfLines(Ledger):
    """Of a run that goes back.

    Attributes:
        void: incarnations of before, by learner and number, which have not heard of it.
    """

    void: set[tuple[str, int]] = field(default_factory=set)

    def listed(self, learner: str, incarnation: int, fragment: int, number: int, version: int) -> None:
        """As `Ledger`. What a void incarnation was told may be of versions that are gone."""
        if (learner, incarnation) not in self.void:
            super().listed(learner, incarnation, fragment, number, version)

    def rejected(self, learner: str, incarnation: int, fragment: int, number: int, reason: str) -> None:
        """As `Ledger`, with the same exception."""
        if (learner, incarnation) not in self.void:
            super().rejected(learner, incarnation, fragment, number, reason)


class AccountsOfLines(Accounts):
    """Of a run that goes back."""

    def began(self, learner: str, incarnation: int) -> None:
        """An incarnation begins, perhaps with the number of one that is void and gone."""
        self.void.discard((learner, incarnation))
        for key in [key for key in self._sent if key[:2] == (learner, incarnation)]:
            del self._sent[key]
        for each in (self._overwritten, self._undecided, self._confirmed):
            for one in [one for one in each if one[:2] == (learner, incarnation)]:
                del each[one]

    @property
    def void(self) -> set[tuple[str, int]]:
        assert isinstance(self._ledger, LedgerOfLines)
        return self._ledger.void

    def check_learner(self, name: str, incarnation: int, learner: LearnerCore) -> None:
        """As `Accounts`. The syncer knows nothing of the ledger of a void incarnation any more."""
        if (name, incarnation) not in self.void:
            super().check_learner(name, incarnation, learner)


class GoingBackStorm(Storm):
    """As `Storm`, with faults after which the run goes back.

    Attributes:
        backups: with each version, oldest first.
    """

    ledger_type, accounts_type = LedgerOfLines, AccountsOfLines

    def __init__(self, plan: Plan, faults: Sequence[Fault] | None = None, journal: StormJournal | None = None) -> None:
        self.backups: list[Backup] = []
        super().__init__(plan, faults, journal)

    def began(self, process: Process) -> None:
        assert isinstance(self.accounts, AccountsOfLines)
        for each in self.all_accounts:
            assert isinstance(each, AccountsOfLines)
            each.began(process.name, process.incarnation)

    def has_snapshot(self) -> None:
        merges = [Counter(each) for each in self.place.units.merges]
        verdicts = dict(self.ledger.verdicts)
        self.backups.append(Backup(self.place.snapshots[-1], dict(self.ledger.merged), verdicts, merges))

    def _strike(self, fault: Fault) -> None:
        super()._strike(fault)
        if fault.kind not in GOINGS or not self.backups:
            return
        assert isinstance(self.ledger, LedgerOfLines)
        self.ledger.void |= {(each.name, each.incarnation) for learner in self.learners for each in learner.processes}
        self._kill(self.nodes[0], fault.seconds)
        if fault.kind == "restore":
            self._restore(self.backups[fault.choice * (len(self.backups) - 1) // 3])
        else:
            readable = [self._readable(fragment) for fragment in range(len(self.plan.sizes))]
            self._repair(readable, has_record=fault.kind == "repair")

    def _readable(self, fragment: int) -> Backup:
        """With one of the versions of a fragment that the manifest names."""
        named = self._manifest.fragments[fragment]
        kept = [each for each in self.backups if each.snapshot.manifest.fragments[fragment][0] in named]
        return self.draws.of("readable", kept)

    @property
    def _manifest(self) -> Manifest:
        assert self.place.manifest is not None
        return self.place.manifest

    def _restore(self, backup: Backup) -> None:
        """Become the state of a backup, as `store.copying` does."""
        it = backup.snapshot
        self.ledger.merged, self.ledger.verdicts = dict(backup.merged), dict(backup.verdicts)
        record, epochs = it.record
        assert record is not None
        self._become(it.manifest, it.objects, backup.merges, without_members(record), epochs)

    def _repair(self, readable: Sequence[Backup], *, has_record: bool) -> None:
        """Go back, with each fragment, to the version of this backup, as `store.repair` does."""
        before = self._manifest
        named = [each.snapshot.manifest.fragments[index][0] for index, each in enumerate(readable)]
        objects = dict(self.place.objects)
        for each in readable:
            objects |= each.snapshot.objects
        manifest = replace(before, fragments=tuple((each,) for each in named))
        record, epochs = Snapshot(before, objects).record
        merges = [each.merges[index] for index, each in enumerate(readable)]
        if not has_record or record is None:
            self.ledger.merged, self.ledger.verdicts = {}, {}
            record, epochs, merges = None, (Epoch(before.epoch + 1, manifest.versions),), [Counter() for _ in named]
            manifest = replace(manifest, packs=())
        else:
            record = rolled_back(record, manifest.versions)
        self._become(manifest, objects, merges, record, epochs)

    def _become(
        self, manifest: Manifest, objects: Mapping[str, Any], merges: Sequence[Counter[int]], record: Json | None,
        epochs: Sequence[Epoch],
    ) -> None:  # fmt: skip
        epoch = self._manifest.epoch + 1
        blob = StormFormat().record(record, epochs)
        name = f"{epoch}/1-{blob.hash}"
        manifest = replace(manifest, epoch=epoch, boot=0, serial=self._manifest.serial + 1, record=name)
        self.place.become(manifest, {**objects, name: blob.parts[0]})
        self.place.units.merges = [Counter(each) for each in merges]
        self.group_book.went_back(record, manifest)
        self.ledger.versions.went_back(manifest.versions)
        self.backups.clear()
