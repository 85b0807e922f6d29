"""Readers of a run's own directories: its store, and the journal that a replay reads."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

import torch
from tests.fuzz.examining import Target, contents, unchanged
from tests.fuzz.files import directory_of, fill
from tests.fuzz.mutations import JOURNAL, JSON, MANIFEST, SAFETENSORS, UNREADABLE, Form, joined, mutated_parts, parted
from tests.syncer.runs import RUN, Raw, layout, method, start

import diloco
from diloco.cli.replay import _numbers, _replay
from diloco.errors import AlreadyInitialisedError, DilocoError, UnknownRunError
from diloco.event_log import EventLog
from diloco.protocol.members import Deadlines
from diloco.run.journal.payloads import TensorFormats
from diloco.run.journal.replay import Replay
from diloco.store.copying import copy
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


def _below(prefix: str) -> dict[str, bytes]:
    return {
        name.removeprefix(prefix): data for name, data in sorted(healthy().items()) if name.startswith(prefix)
    }  # fmt: skip


# --- the store --------------------------------------------------------------------------------------------------------


def _store() -> dict[str, bytes]:
    """The manifest, and the objects that it names and has named."""
    return {name: data for name, data in _below("state/").items() if name.split("/")[0] in ("manifest.json", "objects")}


def _named(data: bytes) -> dict[str, bytes]:
    """The files of an input: objects whose header has changed have names, here and in the manifest, that say so. A
    record that has changed is damaged: only its writer could name it, who has the run."""
    files = dict(zip(_store(), parted(data), strict=False))
    manifest = files.get("manifest.json", b"")
    for name, content in list(files.items()):
        length = 8 + int.from_bytes(content[:8], "little")
        own = hashlib.sha256(content[:length]).hexdigest()
        place, _, before = name.rpartition("-")
        if place and before != own and content[:1] != b"{":
            files[f"{place}-{own}"] = files.pop(name)
            manifest = manifest.replace(before.encode(), own.encode())
    if "manifest.json" in files:
        files["manifest.json"] = manifest
        with suppress(*UNREADABLE):
            plain = MANIFEST.load(manifest)
            if manifest != _store()["manifest.json"] and plain.keys() >= {"sha256"}:
                files["manifest.json"] = MANIFEST.dump(plain)
    return files


def _mutate_store(data: bytes, random: Random) -> bytes:
    names, parts = list(_store()), parted(data)

    def form_of(index: int) -> Form | None:
        if index < len(names) and names[index] == "manifest.json":
            return MANIFEST
        return JSON if index < len(parts) and parts[index][:1] == b"{" else SAFETENSORS

    return mutated_parts(data, form_of, random)


def state() -> Target:
    """A state directory: `diloco syncer check`, then a start, and a repair, which loses no byte."""

    def read(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as root:
            path = Path(root) / "state"
            path.mkdir()
            fill(path, _named(data))
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

    return Target("state", (joined(list(_store().values())),), read, _mutate_store)


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
        with directory_of({f"state/{name}": content for name, content in _named(data).items()}) as path:
            with tempfile.TemporaryDirectory() as other:
                try:
                    with opened(Path(other) / "within" / "state", lock=True) as target:
                        copy(open_store(path / "state"), target)
                finally:
                    written = {name for name in contents(Path(other)) if not name.startswith("within/state/")}
                    assert not written, f"{written} were written"

    return Target("copy", (joined(list(_store().values())),), read, _mutate_store)


# --- the journal ------------------------------------------------------------------------------------------------------


def journal() -> Target:
    """The parts of a journal, as `diloco replay` reads and replays them, with payloads."""
    files = {name: data for name, data in _below("state/").items() if name.startswith("journal/")}
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
