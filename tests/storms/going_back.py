"""Storms in which a run goes back under live learners: its state is restored from a backup, or repaired."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diloco.store.store import KEPT_VERSIONS
from tests.storms.accounts import Accounts
from tests.storms.drivers import RecordingStore
from tests.storms.invariants import Ledger
from tests.storms.learners import Process
from tests.storms.plans import GOINGS, Fault
from tests.storms.units import UnitLedger
from tests.storms.world import Storm

from diloco.core.global_fragment import GlobalFragment
from diloco.protocol.accounting import Key
from diloco.protocol.learner import LearnerCore
from diloco.protocol.lineage import Epoch
from diloco.protocol.records import rolled_back, without_members
from diloco.run.ports import SavedRun


@dataclass(frozen=True)
class Backup:
    """What was durable with a version.

    Attributes:
        saved: the state.
        merged, verdicts: as in `Ledger`.
        merges: of each fragment's units, as in `UnitLedger`.
    """

    saved: SavedRun[GlobalFragment]
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


class BackedUpStore(RecordingStore):
    """Has a backup of each version.

    Attributes:
        backups: oldest first.
    """

    def __init__(self, ledger: Ledger, units: UnitLedger, at: Callable[[str], None]) -> None:
        super().__init__(ledger, units, at)
        self.backups: list[Backup] = []

    def backed_up(self) -> None:
        assert self._saved is not None
        merges = [Counter(each) for each in self.units.merges]
        self.backups.append(Backup(self._saved, dict(self.ledger.merged), dict(self.ledger.verdicts), merges))

    def restore(self, backup: Backup) -> None:
        """Become the state of a backup, as `store.backup` does."""
        saved = backup.saved
        assert saved.record is not None
        self.ledger.merged, self.ledger.verdicts = dict(backup.merged), dict(backup.verdicts)
        epoch = Epoch(self._require().epochs[-1].number + 1, _versions(saved.fragments))
        self._become(saved, backup.merges, (saved.epochs[-1], epoch), without_members(saved.record))

    def repair(self, readable: Sequence[Backup], *, has_database: bool) -> None:
        """Go back, with each fragment, to the version of this backup, as `store.repair` does."""
        before = self._require()
        fragments = tuple(backup.saved.fragments[index] for index, backup in enumerate(readable))
        contributors = tuple(backup.saved.contributors[index] for index, backup in enumerate(readable))
        saved, versions = replace(before, fragments=fragments, contributors=contributors), _versions(fragments)
        if has_database:
            assert before.record is not None
            merges = [backup.merges[index] for index, backup in enumerate(readable)]
            self._become(saved, merges, before.epochs, rolled_back(before.record, versions))
        else:
            self.ledger.merged, self.ledger.verdicts = {}, {}
            epoch = Epoch(before.epochs[-1].number + 1, versions)
            self._become(saved, [Counter() for _ in fragments], (epoch,), None)

    def _become(
        self, saved: SavedRun[GlobalFragment], merges: Sequence[Counter[int]], epochs: tuple[Epoch, ...],
        record: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        self._saved = replace(saved, epochs=epochs, record=json.loads(json.dumps(record)))
        self.units.merges = [Counter(each) for each in merges]
        self.ledger.versions.went_back(_versions(saved.fragments))
        self.backups.clear()


def _versions(fragments: Sequence[GlobalFragment]) -> tuple[int, ...]:
    return tuple(held.version for held in fragments)


class GoingBackStorm(Storm):
    """As `Storm`, with faults after which the run goes back."""

    _store: BackedUpStore
    ledger_type, accounts_type, store_type = LedgerOfLines, AccountsOfLines, BackedUpStore

    def began(self, process: Process) -> None:
        assert isinstance(self.accounts, AccountsOfLines)
        self.accounts.began(process.name, process.incarnation)

    def _strike(self, fault: Fault) -> None:
        super()._strike(fault)
        backups = self._store.backups
        if fault.kind not in GOINGS or not backups:
            return
        assert isinstance(self.ledger, LedgerOfLines)
        self.ledger.void |= {(each.name, each.incarnation) for learner in self.learners for each in learner.processes}
        self._kill_syncer(fault.seconds)
        if fault.kind == "restore":
            self._store.restore(backups[fault.choice * (len(backups) - 1) // 3])
        else:
            readable = [self._readable(fragment) for fragment in range(len(self.plan.sizes))]
            self._store.repair(readable, has_database=fault.kind == "repair")

    def _readable(self, fragment: int) -> Backup:
        """With one of the versions of a fragment of which a disk has the files."""
        backups = self._store.backups
        oldest = backups[-1].saved.fragments[fragment].version - KEPT_VERSIONS + 1
        kept = [each for each in backups if each.saved.fragments[fragment].version >= oldest]
        return self.draws.of("readable", kept)
