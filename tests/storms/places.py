"""The place of a storm's run: what is durable follows from each manifest as it takes its place, whoever is told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from tests.chaos.versions import require
from tests.run.simulated import CopyFormat, Place, SimulatedObjects
from tests.storms.units import UnitLedger
from torch import Tensor

from diloco.core.global_fragment import GlobalFragment
from diloco.core.update import Update
from diloco.protocol.accounting import Key
from diloco.protocol.contribution import Contribution
from diloco.protocol.lineage import Epoch
from diloco.protocol.manifest import Manifest, NamedVersion, epoch_of
from diloco.run.objects import Blob, Found
from diloco.run.ports import Json, MergedRound, SavedRun

if TYPE_CHECKING:
    from tests.storms.world import Storm

Merged = MergedRound[GlobalFragment, Tensor]

SLOWEST, FASTEST = 0.7, 1.5
"""Of a syncer's clock, in seconds a second."""


def copy_of(held: GlobalFragment) -> GlobalFragment:
    """As `copy.deepcopy`, faster."""
    residual = None if held.residual is None else held.residual.clone()
    outer_state = {name: value.clone() for name, value in held.outer_state.items()}
    return GlobalFragment(held.fragment, held.version, held.theta.clone(), outer_state, residual, held.digest)


class StormFormat(CopyFormat):
    """What one driver writes. A record is kept with the verdicts that become durable with it.

    Attributes:
        verdicts: of the next record.
    """

    def __init__(self) -> None:
        super().__init__(copy_of)
        self.verdicts: Mapping[Key, str | None] = {}

    def record(self, record: Json | None, epochs: Sequence[Epoch]) -> Blob:
        """As `ObjectFormat`."""
        text = json.dumps([record, [[each.number, each.versions] for each in epochs]])
        return Blob(blake2b(text.encode(), digest_size=32).hexdigest(), ((text, self.verdicts),))  # type: ignore[arg-type]

    def _record_of(self, value: Any) -> Any:
        return json.loads(value[0])


@dataclass(frozen=True)
class Snapshot:
    """A manifest, and the objects that it names."""

    manifest: Manifest
    objects: Mapping[str, Any]

    @property
    def record(self) -> tuple[Any, tuple[Epoch, ...]]:
        """The record that it names, and the epochs."""
        text, _ = self.objects[self.manifest.record or ""]
        record, epochs = json.loads(text)
        return record, tuple(Epoch(number, tuple(versions)) for number, versions in epochs)

    def read(self) -> SavedRun[GlobalFragment]:
        """The run."""
        place = Place()
        place.objects = dict(self.objects)
        return StormFormat().read(SimulatedObjects(place), self.manifest)


class StormPlace(Place):
    """Of one storm.

    Attributes:
        units: of leased data that is durable.
        written: versions that were put, by epoch and update.
        verdicts_at: those that were durable when an epoch was claimed.
        snapshots: with each version, oldest first, where the storm has use for them.
        era: how often a person has replaced all that is here.
        is_littered: what may be left here for long, since a request to delete it has failed, or it was put late.
    """

    def __init__(self, storm: Storm) -> None:
        super().__init__(self._swapped)
        self.units = UnitLedger(len(storm.plan.sizes))
        self.written: dict[tuple[int, Update], Merged] = {}
        self.verdicts_at: dict[int, dict[Key, str | None]] = {}
        self.snapshots: list[Snapshot] = []
        self.era = 0
        self.is_littered = False
        self._storm = storm
        self._unnamed_s: dict[str, float] = {}
        self._claimed_s: dict[int, float] = {}

    def become(self, manifest: Manifest, objects: Mapping[str, Any]) -> None:
        """Hold this, as a person who has put a copy here."""
        self.objects = dict(objects)
        self.found = Found(manifest.to_bytes(), f"by hand, {manifest.serial}")
        self.history.append(manifest)
        self.era += 1
        self.snapshots.clear()
        self._unnamed_s.clear()

    def put(self, name: str, value: Any) -> None:
        """As `Place`."""
        self.is_littered |= self.manifest is not None and epoch_of(name) < self.manifest.epoch
        super().put(name, value)

    def check_deleted(self) -> None:
        """What is not named any more is gone after a while."""
        manifest, now_s, claimed_s = self.manifest, self._storm.now_s, max(self._claimed_s.values(), default=0.0)
        kept_s = self._storm.plan.keep_s / SLOWEST + 10.0
        if manifest is None or self.is_littered or now_s - claimed_s <= kept_s:
            return
        for name in self.objects.keys() - manifest.names:
            since_s = self._unnamed_s.get(name, claimed_s if epoch_of(name) < manifest.epoch else now_s)
            require(now_s - since_s <= kept_s, f"{name} is there since {since_s} s, and not named")

    def delete(self, names: Sequence[str]) -> None:
        """As `Place`. What a manifest has named stays for a while; nothing else of the newest epoch goes."""
        plan, now_s, manifest = self._storm.plan, self._storm.now_s, self.manifest
        for name in names:
            if (since_s := self._unnamed_s.get(name)) is not None:
                is_old = now_s - since_s >= plan.keep_s / FASTEST - 1e-6
                require(is_old, f"{name} is deleted, and was named {now_s - since_s} s ago")
            else:
                is_of_earlier = manifest is not None and epoch_of(name) < manifest.epoch
                require(is_of_earlier, f"{name} is deleted before it is named")
        super().delete(names)

    def _swapped(self, before: Manifest | None, after: Manifest) -> None:
        epoch, serial = (0, 0) if before is None else (before.epoch, before.serial)
        require(after.serial == serial + 1, f"serial {after.serial} follows {serial}")
        if before is None or after.boot not in (before.boot, 0):
            require(after.epoch == epoch + 1, f"epoch {after.epoch} is claimed after {epoch}")
            names = frozenset[str]() if before is None else before.names
            require(after.names == names, f"epoch {after.epoch} is claimed with other names")
            self.verdicts_at[after.epoch] = dict(self._storm.ledger.verdicts)
            self._claimed_s[after.epoch] = self._storm.now_s
            return
        require(after.epoch == epoch, f"epoch {after.epoch} follows {epoch} without a claim")
        if after.run_id and not before.run_id:
            self._storm.ledger.initial(tuple(self.objects[first.held][0] for first, *_ in after.fragments))
        elif after.record != before.record:
            self._publishes(before, after)
        else:
            require(after.names == before.names, "versions are published without a record")
        for name in before.names - after.names:
            self._unnamed_s[name] = self._storm.now_s

    def _publishes(self, before: Manifest, after: Manifest) -> None:
        new = list[Merged]()
        for old, versions in zip(before.fragments, after.fragments, strict=True):
            if versions != old:
                require(versions[1:] == old[: after.keep - 1], f"{versions} follows {old}")
                new.append(self._version(after.epoch, versions[0]))
        text, verdicts = self.objects[after.record or ""]
        for merged in new:
            self._storm.ledger.durable(merged, after.epoch)
        self._storm.ledger.recorded(verdicts)
        record = json.loads(text)[0]
        self.units.durable([c for merged in new for c in _kept(merged)], record)
        self._storm.group_book.durable(record, after, self.objects, self.units.merges)
        if new and self._storm.plan.looks_back:
            self.snapshots.append(Snapshot(after, {name: self.objects[name] for name in after.names}))
            self._storm.has_snapshot()

    def _version(self, epoch: int, named: NamedVersion) -> Merged:
        held, update = self.objects[named.held]
        merged = self.written[epoch, update]
        require(
            (held.version, held.digest) == (named.version, update.digest) == (update.version, merged.held.digest),
            f"{named} is version {held.version}",
        )
        require((named.update is None) == update.lossless, f"the update of {named} is not there")
        return merged


def _kept(merged: Merged) -> list[Contribution]:
    return [c for c in merged.action.contributions if c.learner not in merged.refused]
