"""Readers of a run's own directories: its store, and the journal that a replay reads."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

import torch
from tests.fuzz.examining import Target, contents, unchanged
from tests.fuzz.files import directory_of, fill
from tests.fuzz.mutations import (
    JOURNAL,
    JSON,
    MANIFEST,
    SAFETENSORS,
    UNREADABLE,
    Form,
    joined,
    mutated,
    mutated_parts,
    parted,
)
from tests.syncer.runs import RUN, Raw, layout, method, start

import diloco
from diloco.cli.replay import _numbers, _replay
from diloco.errors import AlreadyInitialisedError, DilocoError, UnknownRunError
from diloco.event_log import EventLog
from diloco.following.follower import Follower
from diloco.following.sources import RunSource
from diloco.protocol.manifest import Manifest
from diloco.protocol.members import Deadlines
from diloco.protocol.publishing import Publisher, RefuseStart, Stand, Swap
from diloco.run.journal.payloads import TensorFormats
from diloco.run.journal.replay import Replay
from diloco.store.copying import copy
from diloco.store.directory import MANIFEST as NAME
from diloco.store.directory import Directory
from diloco.store.inspection import check
from diloco.store.journal_reader import JournalReader
from diloco.store.objects import open_store, opened, require_manifest
from diloco.store.repair import repair
from diloco.syncer.hosting import HostedDriver
from diloco.syncer.journal import Journal
from diloco.syncer.metrics import SyncerMetrics
from diloco.syncer.spool import Spool


@functools.cache
def healthy() -> dict[str, bytes]:
    """The files of a run that was stopped twice: three versions of a fragment, a journal with payloads."""
    with tempfile.TemporaryDirectory() as root:
        payload = diloco.FP32().encode(torch.ones(layout().fragments[0].numel))
        for version in range(3):
            with start(Path(root), method(), record_contributions=True) as syncer:
                raw = Raw(syncer.address)
                if version == 0:
                    raw.initialise()
                raw.join()
                raw.push(payload, round=version, base=version, step=2 + 4 * version)
                syncer.driver.drain()
                raw.connection.close()
        return contents(Path(root))


@functools.cache
def lossy() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The store of a run with encoded updates, at two moments: after its first version and after its second."""
    given = method(codec="e3m0")
    payload = given.for_fragment(0).up.encode(torch.ones(layout().fragments[0].numel))
    with tempfile.TemporaryDirectory() as root, start(Path(root), given) as syncer:
        raw, moments = Raw(syncer.address), list[dict[str, bytes]]()
        raw.initialise()
        raw.join()
        for version in range(2):
            raw.push(payload, round=version, base=version, step=2 + 4 * version, trained=5 + 5 * version)
            syncer.driver.drain()
            moments.append(_store_in(contents(Path(root))))
        raw.connection.close()
    return moments[0], moments[1]


def _below(prefix: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {name.removeprefix(prefix): data for name, data in sorted(files.items()) if name.startswith(prefix)}


# --- the store --------------------------------------------------------------------------------------------------------


def _store_in(files: dict[str, bytes]) -> dict[str, bytes]:
    """The manifest, and the objects that it names and has named."""
    return {name: it for name, it in _below("state/", files).items() if name.split("/")[0] in (NAME, "objects")}


def _store() -> dict[str, bytes]:
    return _store_in(healthy())


def _named(store: dict[str, bytes], data: bytes) -> dict[str, bytes]:
    """The files of an input, as one who may write to the store makes them: an object that has changed has a name, here
    and in the manifest, that says so."""
    files = dict(zip(store, parted(data), strict=False))
    manifest = files.get(NAME, b"")
    for name, content in list(files.items()):
        length = len(content) if content[:1] == b"{" else 8 + int.from_bytes(content[:8], "little")
        own = hashlib.sha256(content[:length]).hexdigest()
        place, _, before = name.rpartition("-")
        if place and before != own:
            files[f"{place}-{own}"] = files.pop(name)
            manifest = manifest.replace(before.encode(), own.encode())
    if NAME in files:
        files[NAME] = manifest
        with suppress(*UNREADABLE):
            plain = MANIFEST.load(manifest)
            if manifest != store[NAME] and plain.keys() >= {"sha256"}:
                files[NAME] = MANIFEST.dump(plain)
    return files


def _mutate_store(store: dict[str, bytes]) -> Callable[[bytes, Random], bytes]:
    names = list(store)

    def mutate(data: bytes, random: Random) -> bytes:
        parts = parted(data)

        def form_of(index: int) -> Form | None:
            if index < len(names) and names[index] == NAME:
                return MANIFEST
            return JSON if index < len(parts) and parts[index][:1] == b"{" else SAFETENSORS

        return mutated_parts(data, form_of, random)

    return mutate


def manifest() -> Target:
    """The one object that a syncer reads again and again: as a start reads it, and as a standby does before its
    claim, which others can read."""

    def read(data: bytes) -> None:
        found = Manifest.from_bytes(data, "s3://bucket/run")
        assert Manifest.from_bytes(found.to_bytes(), "a copy") == found
        refusals = list[DilocoError]()
        for is_standby in (False, True):
            publisher = Publisher(RUN, boot=7, is_standby=is_standby, lease_s=10.0)
            publisher.start(0.0)
            for now_s, token in ((0.0, "before"), (1.0, "now"), (12.0, "now")):
                for act in publisher.read(now_s, found, token):
                    match act:
                        case RefuseStart(error=error):
                            refusals.append(error)
                        case Stand(why=why):
                            assert why.isprintable()
                        case Swap(data=claim):
                            assert Manifest.from_bytes(claim, "the claim").epoch == found.epoch + 1
        if refusals:
            raise refusals[0]

    data = _store()[NAME]
    served = {**MANIFEST.load(data), "boot": 5, "address": "a.example.org:7700"}
    return Target(
        "manifest", (data,), read, lambda it, random: mutated(it, MANIFEST, random), others=(MANIFEST.dump(served),)
    )


def followed() -> Target:
    """A store that one who may write to it has changed: before a follower that holds the version before, and before a
    new one."""
    older, newer = lossy()

    def read(data: bytes) -> None:
        refusals = list[DilocoError]()
        with tempfile.TemporaryDirectory() as root:
            path = Path(root) / "state"
            path.mkdir()
            fill(path, older)
            with (
                Follower(RunSource(open_store(path)), RUN) as old,
                Follower(RunSource(open_store(path)), RUN) as new,
            ):
                assert old.newer() is not None
                shutil.rmtree(path)
                path.mkdir()
                fill(path, _named(newer, data))
                with unchanged(path):
                    for follower in (old, new):
                        try:
                            if (model := follower.newer()) is not None:
                                json.dumps(model.describe())
                                assert str(model).isprintable()
                                assert model.state_dict()
                        except DilocoError as error:
                            refusals.append(error)
        if refusals:
            raise refusals[-1]

    return Target("follow", (joined(list(newer.values())),), read, _mutate_store(newer))


def state() -> Target:
    """A state directory: `diloco syncer check`, then a start, and a repair, which loses no byte."""

    def read(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as root:
            path = Path(root) / "state"
            path.mkdir()
            fill(path, _named(_store(), data))
            with unchanged(path):
                found = check(open_store(path))
            json.dumps(found.to_dict())
            before, refusal = contents(path), None
            try:
                serves = _serves(path)
            except DilocoError as error:
                serves, refusal = False, error
            is_of_another = isinstance(refusal, UnknownRunError | AlreadyInitialisedError)
            assert found.starts == serves or is_of_another, f"a check says: {found.starts}, a start: {refusal}"
            if found.problems and found.can_be_repaired:
                with opened(path, lock=True) as objects:
                    repair(objects)
                assert check(open_store(path)).problems == []
            lost = {name for name, content in before.items() if content not in set(contents(path).values())}
            assert lost <= {"store.lock", "events.jsonl", "manifest.json"}, f"{lost} are gone"
            if refusal is not None:
                raise refusal

    return Target("state", (joined(list(_store().values())),), read, _mutate_store(_store()))


def _serves(path: Path) -> bool:
    """Start without a port; returns whether the run is served."""
    with ExitStack() as stack:
        objects = stack.enter_context(Directory(path))
        require_manifest(objects)
        log = stack.enter_context(EventLog(path / "events.jsonl", who="syncer"))
        journal = Journal(log, SyncerMetrics(RUN))
        driver = HostedDriver(RUN, method(), objects, Spool(path, 1 << 20), deadlines=Deadlines(), journal=journal)
        stack.callback(driver.stop)
        driver.start()
        driver.ask(lambda it: it.status())
        return True


def copied() -> Target:
    """A store that is copied: it stays as it is, and nothing is written but the copy."""

    def read(data: bytes) -> None:
        with directory_of({f"state/{name}": content for name, content in _named(_store(), data).items()}) as path:
            with tempfile.TemporaryDirectory() as other:
                try:
                    with opened(Path(other) / "within" / "state", lock=True) as target:
                        copy(open_store(path / "state"), target)
                finally:
                    written = {name for name in contents(Path(other)) if not name.startswith("within/state/")}
                    assert not written, f"{written} were written"

    return Target("copy", (joined(list(_store().values())),), read, _mutate_store(_store()))


# --- the journal ------------------------------------------------------------------------------------------------------


def journal() -> Target:
    """The parts of a journal, as `diloco replay` reads and replays them, with payloads."""
    files = {name: data for name, data in _below("state/", healthy()).items() if name.startswith("journal/")}
    parts = [name for name in files if name.endswith(".gz")]
    kept = {name: data for name, data in files.items() if name not in parts}

    def read(data: bytes) -> None:
        with directory_of({**kept, **dict(zip(parts, parted(data), strict=False))}) as path:
            reader = JournalReader(path)
            replay = Replay(TensorFormats(reader.payload))
            json.dumps(_numbers(replay, _replay(reader, replay, None)))

    return Target(
        "journal", (joined([files[name] for name in parts]),), read,
        lambda data, random: mutated_parts(data, lambda index: JOURNAL, random),
    )  # fmt: skip
