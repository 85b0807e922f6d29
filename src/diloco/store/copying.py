"""Copies of a run from one store to another, while it is served or not: by hand, or by a schedule.

A copy is one manifest with all objects that it names, each verified on the way. Objects keep their names, and those
that the target has whole, also from a copy that was cut off, are not sent again. The target begins a later epoch than
any that learners may have seen, without members: a syncer that opens it serves the run, and all learners join it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from diloco import events
from diloco.errors import ConfigError, DilocoError, NotInitialisedError, StoreError
from diloco.event_log import EventLog
from diloco.protocol.manifest import Manifest
from diloco.protocol.records import without_members
from diloco.run.objects import Blob, Objects
from diloco.store.directory import Directory
from diloco.store.format import TensorFormat
from diloco.store.objects import open_store, opened, read_manifest, repeated
from diloco.store.reading import NOT_WHOLE, ObjectReader
from diloco.store.repair import fresh_epoch

log = logging.getLogger("diloco.syncer")

COPIED = "to be copied"


@dataclass(frozen=True)
class CopyResult:
    """A copy that was made.

    Attributes:
        versions: of each fragment, the newest.
        num_objects, num_bytes: that the target lacked.
    """

    run: str
    versions: tuple[int, ...]
    num_objects: int
    num_bytes: int


def copy(source: Objects, target: Objects, progress: Callable[[int, int, int], None] = lambda *_: None) -> CopyResult:
    """Make the target a copy of the source, a target directory under its lock.

    Arguments:
        progress: called with the number of objects that are copied, of all that are to be copied, and of bytes.

    Raises:
        ConfigError: there is no run in the source, or both are the same store. NotInitialisedError: the run has no
            model. StoreError: an object is damaged; the target holds another run, or a later state of this one, or is
            served; or a place refuses. The target still holds what it held.
    """
    there, put = set(target.list()), set[str]()
    try:
        return repeated(lambda: _copy(source, target, there, put, progress))
    except DilocoError:
        with suppress(StoreError):
            target.delete(sorted(put - _held(target, "")[0].names))  # another copy may have put the same
        raise


def _copy(
    source: Objects, target: Objects, there: set[str], put: set[str], progress: Callable[[int, int, int], None]
) -> CopyResult:
    """As `copy`.

    Arguments:
        there: objects that the target had, also of copies that were cut off.
        put: objects that this copy has put; after an error no manifest names them because of it.
    """
    manifest = read_manifest(source)
    before, token = _held(target, manifest.run)  # in this order: the target may become newer meanwhile
    _require_follows(manifest, before, source, target)
    target.delete(sorted(put - manifest.names - before.names))
    put &= manifest.names
    epoch = max(fresh_epoch(manifest.epoch), before.epoch)
    assert manifest.record is not None
    packs = {name for _, name in manifest.packs}
    whole = put | _whole_names(target, manifest.names & there, packs)
    num_bytes, wanted = 0, sorted(manifest.names - {manifest.record} - whole)
    with ObjectReader(source) as reader:
        for number, name in enumerate(wanted, start=1):
            blob = _read(reader, name, packs)
            put.add(name)
            target.put(name, blob.parts)
            num_bytes += blob.num_bytes
            progress(number, len(wanted), num_bytes)
        record, epochs = reader.record(manifest.record, len(manifest.fragments))
    blob = TensorFormat().record(None if record is None else without_members(record), epochs)
    target.put(name := f"{epoch}/1-{blob.hash}", blob.parts)
    copied = replace(
        manifest, epoch=epoch, boot=0, serial=before.serial + 1, address="", record=name,
        origin=_position(manifest), copied_at=time.time(),
    )  # fmt: skip
    if not copied.names <= set(target.list()):
        raise StoreError(f"another copy to {target.name} has deleted objects of this one; make one at a time.")
    others = there if before.origin and isinstance(target, Directory) else set()  # in a bucket, perhaps another copy's
    replaced = sorted((before.names | others) - copied.names)
    put.clear()  # the manifest may name them from now on
    target.swap(copied.to_bytes(), token)
    target.delete(replaced)
    return CopyResult(manifest.run, copied.versions, len(wanted), num_bytes)


def _held(target: Objects, run: str) -> tuple[Manifest, str | None]:
    """The target's manifest, or an empty one of this run, and its token."""
    found = target.manifest()
    return (Manifest(run), None) if found is None else (Manifest.from_bytes(found.data, target.name), found.token)


def _read(reader: ObjectReader, name: str, packs: Collection[str]) -> Blob:
    """An object, every byte of which is verified."""
    return reader.pack(name) if name in packs else reader.read(name, reader.head(name, COPIED), COPIED).blob


def _whole_names(target: Objects, names: Iterable[str], packs: Collection[str]) -> set[str]:
    """Those of the names whose objects are whole."""
    found = set[str]()
    with ObjectReader(target) as reader:
        for name in names:
            with suppress(*NOT_WHOLE):
                _read(reader, name, packs)
                found.add(name)
    return found


def _require_follows(manifest: Manifest, before: Manifest, source: Objects, target: Objects) -> None:
    """Raise StoreError unless `before`, which the target holds, may be replaced by a copy of `manifest`."""
    if before == manifest:  # by whatever path or URL: a copy has a later epoch
        raise ConfigError(
            f"{source.name} cannot be copied to itself ({target.name} has the same manifest); name another place."
        )
    if (before.run, before.run_id) not in ((manifest.run, ""), (manifest.run, manifest.run_id)):
        raise StoreError(
            f"{target.name} holds another run ({before.run!r}, id {before.run_id or 'none'}) than {source.name} "
            f"({manifest.run!r}, id {manifest.run_id}); use another place."
        )
    if _position(before) > _position(manifest):
        raise StoreError(
            f"{target.name} holds a later state of the run, epoch {before.epoch}, than {source.name}, epoch "
            f"{manifest.epoch}; move it away, or use another place."
        )
    if before.boot != 0 and not isinstance(target, Directory):
        raise StoreError(
            f"{target.name} is served by the syncer at {before.address or 'another address'}; stop it, or use another "
            "place."
        )


def _position(manifest: Manifest) -> tuple[int, int]:
    """The order of a state in its run: epoch and serial of the manifest that it is a copy of, or its own."""
    return manifest.origin or (manifest.epoch, manifest.serial)


@dataclass(frozen=True)
class CopyPlan:
    """Where the run is copied to, and how often (seconds)."""

    place: str
    every_s: float


class Copies:
    """Copies a run by a schedule, on a thread, until it is closed.

    Raises:
        ConfigError, StoreError: as `open_store`, for the place.
    """

    def __init__(self, plan: CopyPlan, source: Objects, events_log: EventLog) -> None:
        open_store(plan.place)
        self._plan, self._source, self._events = plan, source, events_log
        self._is_closing = threading.Event()

    def start(self, serves: Callable[[], bool]) -> None:
        """Start. The first copy is due `every_s` after the one in the place, whichever process made that.

        Arguments:
            serves: whether this process serves the run; it copies nothing while another one does.
        """
        self._thread = threading.Thread(target=self._run, args=(serves,), name="syncer-copy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish the copy in progress, and stop."""
        self._is_closing.set()
        self._thread.join()

    def _run(self, serves: Callable[[], bool]) -> None:
        copied_at = None
        with suppress(DilocoError):  # there is none yet; or the first copy reports it
            copied_at = read_manifest(open_store(self._plan.place)).copied_at
        wait_s = due_in_s(copied_at, time.time(), self._plan.every_s)
        while not self._is_closing.wait(wait_s):
            if serves():
                self._copy()
            wait_s = self._plan.every_s

    def _copy(self) -> None:
        started, place = time.monotonic(), self._plan.place
        try:
            with opened(place, lock=True) as target:
                result = copy(self._source, target)
        except NotInitialisedError:
            return
        except DilocoError as error:
            log.error("the run is not copied: %s", error)
            self._events.append(events.CopyRefused(place=place, error=str(error)))
            return
        seconds = time.monotonic() - started
        self._events.append(
            events.Copied(place=place, versions=result.versions, num_bytes=result.num_bytes, seconds=seconds)
        )


def due_in_s(copied_at: float | None, now: float, every_s: float) -> float:
    """Seconds from `now` to the next copy; `copied_at`: time of the newest one, None: there is none."""
    return 0.0 if copied_at is None else min(max(0.0, copied_at + every_s - now), every_s)
