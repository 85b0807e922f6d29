"""Repair of a damaged store so that a syncer can serve it: each fragment goes back to its newest whole version.

Nothing is deleted: the manifest is replaced by one that names whole objects only. In a directory, what is not whole
moves to `set-aside/`. All learners join again.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from diloco.errors import StoreError
from diloco.protocol.lineage import Epoch
from diloco.protocol.manifest import KEPT_VERSIONS, Manifest
from diloco.protocol.records import rolled_back
from diloco.run.objects import Objects
from diloco.store.directory import MANIFEST, OBJECTS, Directory
from diloco.store.format import TensorFormat
from diloco.store.inspection import StoreState, check

LEASE_S = 10.0
"""A bucket whose manifest does not change for so long is not served; as `syncer.lease_s`."""


def repair(objects: Objects, *, lease_s: float = LEASE_S) -> tuple[StoreState, tuple[str, ...]]:
    """Repair a store, a directory under its lock. Returns its state before, and the files that were set aside.

    Raises:
        ConfigError: as `check`. StoreError: a syncer serves it; too little of the run is left, and nothing was changed;
            or the place refused, and the repair can be repeated.
    """
    found = check(objects)
    if not found.problems:
        return found, ()
    require_repairable(found)
    require_unserved(objects, lease_s)
    token, aside = None if found.read is None else found.read.token, tuple[str, ...]()
    if isinstance(objects, Directory) and found.manifest is None:
        token, aside = None, objects.set_aside([MANIFEST])
    objects.swap(_mended(objects, found).to_bytes(), token)
    if isinstance(objects, Directory):
        unknown = (each.name for each in (*found.problems, *found.notes) if each.name != MANIFEST)
        aside += objects.set_aside([f"{OBJECTS}/{name}" for name in unknown])
    return found, aside


def _mended(objects: Objects, found: StoreState) -> Manifest:
    """The manifest after the repair; the record that it names is put."""
    fragments = tuple(each.whole for each in found.fragments)
    before = found.manifest
    if found.starts and before is not None:  # earlier versions or updates are not whole
        return replace(before, serial=before.serial + 1, fragments=fragments)
    assert found.frozen is not None
    versions = tuple(each[0].version for each in fragments)
    epoch = fresh_epoch(found.newest_epoch)
    record = None if found.record is None else rolled_back(found.record, versions)
    blob = TensorFormat().record(record, found.epochs or (Epoch(epoch, versions),))
    objects.put(name := f"{epoch}/1-{blob.hash}", blob.parts)
    return Manifest(
        found.frozen.run, found.frozen.run_id, epoch, serial=1 if before is None else before.serial + 1,
        frozen=found.frozen_name, record=name, fragments=fragments, keep=max(KEPT_VERSIONS, *map(len, fragments)),
        packs=() if before is None or record is None else before.packs,
    )  # fmt: skip


def require_repairable(found: StoreState) -> None:
    """Raise StoreError if too little is whole to continue the run."""
    if found.can_be_repaired:
        return
    missing = "no object with the layout and the frozen parameters is whole"
    if found.frozen is not None:
        lost = ", ".join(str(each.fragment) for each in found.fragments if not each.whole)
        missing = f"no version of fragment {lost} is whole"
    raise StoreError(f"{found.place} cannot be repaired ({missing}); `diloco copy` brings a copy of the run back.")


def require_unserved(objects: Objects, lease_s: float = LEASE_S) -> None:
    """Raise StoreError if a syncer serves a bucket: its manifest changes within a lease. A directory is locked."""
    found = objects.manifest()
    if isinstance(objects, Directory) or found is None:
        return
    with suppress(StoreError):  # it is damaged
        if Manifest.from_bytes(found.data, objects.name).boot == 0:
            return
    until = time.monotonic() + lease_s
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(min(left_s, 1.0))
        if objects.manifest() != found:
            raise StoreError(f"a syncer serves the run in {objects.name}; stop it first.")


def fresh_epoch(newest: int) -> int:
    """An epoch that is later than `newest` and, as Unix time, than all that learners may have seen."""
    return max(newest + 1, int(time.time()))
