"""Readers of a run's own directories: its state, its backups, and the journal that a replay reads."""

from __future__ import annotations

import functools
import json
import sqlite3
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from diloco.store.backup import SNAPSHOTS, back_up, restore
from diloco.store.records import DATABASE, FORMAT, SCHEMA
from diloco.store.store import Store
from diloco.store.targets import open_target
from tests.fuzz.examining import Target, contents, unchanged
from tests.fuzz.files import directory_of, fill
from tests.fuzz.mutations import (
    DESCRIPTION,
    JOURNAL,
    SAFETENSORS,
    SNAPSHOT,
    Form,
    joined,
    mutated_parts,
    parted,
)
from tests.syncer.runs import RUN, Raw, layout, method, start

import diloco
from diloco.cli.replay import _numbers, _replay
from diloco.errors import DilocoError
from diloco.event_log import EventLog
from diloco.protocol.members import Deadlines
from diloco.run.journal.payloads import ReadPayloads, tensor_formats
from diloco.run.journal.replay import Replay
from diloco.store.inspection import inspect
from diloco.store.journal_reader import JournalReader
from diloco.syncer.hosting import HostedDriver
from diloco.syncer.journal import Journal
from diloco.syncer.metrics import SyncerMetrics
from diloco.syncer.spool import Spool


@functools.cache
def healthy() -> dict[str, bytes]:
    """The files of a run that was stopped twice: three versions of a fragment, a journal with payloads, a backup."""
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
        back_up(Path(root) / "state", open_target(f"{root}/backups"), keep=1)
        return contents(Path(root))


def _below(prefix: str) -> dict[str, bytes]:
    return {
        name.removeprefix(prefix): data for name, data in sorted(healthy().items()) if name.startswith(prefix)
    }  # fmt: skip


# --- the state directory ----------------------------------------------------------------------------------------------

_KEPT = (DATABASE, "run.json", "tensors/")
_TABLES = ("run", "epochs", "versions", "contributors")
_AS_JSON = {("run", "method"), ("run", "layout"), ("run", "record"), ("epochs", "versions")}


def _load_database(data: bytes) -> Any:
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / DATABASE).write_bytes(data)
        with closing(sqlite3.connect(Path(root) / DATABASE)) as db:
            tables: dict[str, list[Any]] = {}
            for table in _TABLES:
                cursor = db.execute(f"SELECT * FROM {table}")
                columns = [each[0] for each in cursor.description]
                tables[table] = [
                    [_from_json(it) if (table, name) in _AS_JSON else it for name, it in zip(columns, row, strict=True)]
                    for row in cursor.fetchall()
                ]
    return tables


def _from_json(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _dump_database(tables: Any) -> bytes:
    with tempfile.TemporaryDirectory() as root:
        with closing(sqlite3.connect(Path(root) / DATABASE)) as db:
            db.executescript(f"{SCHEMA} PRAGMA user_version = {FORMAT};")
            for table in _TABLES:
                for row in tables.get(table, ()):
                    values = [json.dumps(it) if isinstance(it, list | dict) else it for it in row]
                    try:
                        db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)
                    except (sqlite3.Error, OverflowError, UnicodeError):
                        continue
            db.commit()
        return (Path(root) / DATABASE).read_bytes()


SQLITE = Form(_load_database, _dump_database)


def state() -> Target:
    """A state directory: `diloco syncer check`, and then a start, which removes no byte of a model."""
    files = {
        name: data for name, data in _below("state/").items() if name in (DATABASE, "run.json") or "tensors" in name
    }
    names = list(files)

    def read(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as root:
            path = Path(root) / "state"
            (path / "tensors").mkdir(parents=True)
            fill(path, dict(zip(names, parted(data), strict=False)))
            with unchanged(path):
                found = inspect(path)
            json.dumps(found.to_dict())
            before = contents(path / "tensors")
            refusal, serves = None, False
            try:
                serves = _serves(path)
            except DilocoError as error:
                refusal = error
            assert found.starts == serves, f"a check says that it starts: {found.starts}, and: {serves}, {refusal}"
            kept = set(contents(path).values())
            lost = [name for name, content in before.items() if content not in kept]
            assert not lost or (serves and _are_superseded(lost)), f"{lost} are gone"
            if refusal is not None:
                raise refusal

    return Target("state", (joined(list(files.values())),), read, _mutate_state(names))


def _are_superseded(names: list[str]) -> bool:
    """Two versions of a fragment are kept."""
    return all(name.startswith(("f00000-v000000000-", "f00000-v000000001-")) for name in names)


def _serves(path: Path) -> bool:
    """Start without a port; returns whether there is a run."""
    with ExitStack() as stack:
        store = stack.enter_context(Store(path))
        log = stack.enter_context(EventLog(path / "events.jsonl", who="syncer"))
        journal = Journal(log, SyncerMetrics(RUN))
        driver = HostedDriver(RUN, method(), store, Spool(path, 1 << 20), deadlines=Deadlines(), journal=journal)
        stack.callback(driver.stop)
        driver.ask(lambda it: it.status())
        return driver.ask(lambda it: it.state.is_initialised)


def _mutate_state(names: list[str]) -> Any:
    def form_of(index: int) -> Form | None:
        name = names[index] if index < len(names) else ""
        return SQLITE if name == DATABASE else DESCRIPTION if name == "run.json" else SAFETENSORS

    return lambda data, random: mutated_parts(data, form_of, random)


# --- backups ----------------------------------------------------------------------------------------------------------


def backup() -> Target:
    """A place with a backup, as `diloco syncer restore` reads it: nothing is written but the new state directory."""
    files = _below("backups/")
    names = list(files)

    def read(data: bytes) -> None:
        named = dict(zip(names, parted(data), strict=False))
        with directory_of({"backups/x": b"", **{f"backups/{name}": data for name, data in named.items()}}) as path:
            with tempfile.TemporaryDirectory() as other:
                (Path(other) / "within").mkdir()
                try:
                    restore(open_target(str(path / "backups")), Path(other) / "within" / "state")
                finally:
                    written = {name for name in contents(Path(other)) if not name.startswith("within/state/")}
                    assert not written, f"{written} were written"

    def form_of(index: int) -> Form | None:
        return SNAPSHOT if index < len(names) and names[index].startswith(SNAPSHOTS) else SAFETENSORS

    return Target(
        "backup", (joined(list(files.values())),), read, lambda data, random: mutated_parts(data, form_of, random)
    )


# --- the journal ------------------------------------------------------------------------------------------------------


def journal() -> Target:
    """The parts of a journal, as `diloco replay` reads and replays them, with payloads."""
    files = {name: data for name, data in _below("state/").items() if name.startswith("journal/")}
    parts = [name for name in files if name.endswith(".gz")]
    kept = {name: data for name, data in files.items() if name not in parts}

    def read(data: bytes) -> None:
        with directory_of({**kept, **dict(zip(parts, parted(data), strict=False))}) as path:
            reader = JournalReader(path)
            replay = Replay(tensor_formats(ReadPayloads(reader.payload)))
            json.dumps(_numbers(replay, _replay(reader, replay, None)))

    return Target(
        "journal", (joined([files[name] for name in parts]),), read,
        lambda data, random: mutated_parts(data, lambda index: JOURNAL, random),
    )  # fmt: skip
