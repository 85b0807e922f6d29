"""A syncer starts on a damaged state directory: whatever it answers, no byte of a model is gone, and what is wrong is
named."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from diloco.store.store import Store
from tests.syncer.runs import Raw, layout, method, start, status_of, versions_of
from tests.syncer.test_faults import RUN_FILE

import diloco
from diloco.cli import main
from diloco.errors import StoreError

ONES = diloco.FP32().encode(torch.ones(layout().fragments[0].numel))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory at version 3 of fragment 0, and beside it the database as it was at versions 1 and 2."""
    root = tmp_path_factory.mktemp("healthy")
    for version in range(3):
        with start(root, method()) as syncer:
            raw = Raw(syncer.address)
            if version == 0:
                raw.initialise()
            raw.join()
            assert raw.push(ONES, round=version, base=version, step=2 + 4 * version)
            raw.connection.close()
            syncer.driver.drain()
            assert versions_of(syncer) == [version + 1, 0]
        shutil.copy(root / "state" / "store.sqlite", root / f"at-{version + 1}.sqlite")
    return root


def truncate(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


def empty_run(root: Path) -> None:
    """A database of ours, without a run."""
    Store(root / "other").close()
    shutil.copy(root / "other" / "store.sqlite", root / "state" / "store.sqlite")


def no_tables(root: Path) -> None:
    (root / "state" / "store.sqlite").unlink()
    with closing(sqlite3.connect(root / "state" / "store.sqlite")) as db:
        db.execute("VACUUM")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


def newest(root: Path) -> Path:
    return next((root / "state" / "tensors").glob("f00000-v000000003-*"))


def restored(version: int) -> Callable[[Path], object]:
    return lambda root: shutil.copy(root / f"at-{version}.sqlite", root / "state" / "store.sqlite")


def change(statement: str) -> Callable[[Path], object]:
    """The pages of the database are whole, and what is in them is not."""

    def damage(root: Path) -> None:
        with closing(sqlite3.connect(root / "state" / "store.sqlite")) as db:
            db.execute(statement)
            db.commit()

    return damage


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "database deleted": (lambda root: (root / "state" / "store.sqlite").unlink(), "store.sqlite is missing or empty"),
    "database of no bytes": (lambda root: truncate(root / "state" / "store.sqlite", 0),
        "store.sqlite is missing or empty"),
    "database cut in half": (lambda root: truncate(root / "state" / "store.sqlite", 0.5),
        "store.sqlite could not be opened"),
    "database without tables": (no_tables, "store.sqlite is missing or empty"),
    "database without a run": (empty_run, "store.sqlite holds no run"),
    "no version of a fragment": (change("DELETE FROM versions WHERE fragment = 1"),
        r"store.sqlite is damaged: .*KeyError\(1\)"),
    "record that is no JSON": (change("UPDATE run SET record = substr(record, 9)"),
        "store.sqlite is damaged: .*JSONDecodeError"),
    "record of something else": (change("UPDATE run SET record = '{}'"),
        r"store.sqlite is damaged: .*KeyError\('step'\)"),
    "method that is none": (change("UPDATE run SET method = '[]'"),
        "store.sqlite and .*run.json describe different runs"),
    "tensors damaged": (lambda root: flip(newest(root)), r"f00000-v000000003-\w+.safetensors .* is damaged"),
    "tensors missing": (lambda root: newest(root).unlink(), r"f00000-v000000003-\w+.safetensors .* is missing"),
    "database of two versions ago": (restored(1), r"f00000-v000000001-\w+.safetensors .* is missing"),
}  # fmt: skip

SET_ASIDE: dict[str, tuple[Callable[[Path], object], list[int], str]] = {
    "unknown files": (
        lambda root: (root / "state" / "tensors" / "f00000-backup").write_text("mine"), [3, 0], "f00000-backup",
    ),
    "database of the version before": (restored(2), [2, 0], r"f00000-v000000003-\w+.safetensors"),
}  # fmt: skip


def contents(directory: Path) -> set[bytes]:
    return {path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def damaged(healthy: Path, tmp_path: Path) -> Path:
    return shutil.copytree(healthy, tmp_path / "run")


@pytest.mark.parametrize("kind", REFUSED)
def test_a_damaged_state_directory_is_refused_and_left_as_it_is(kind: str, damaged: Path) -> None:
    damage, words = REFUSED[kind]
    damage(damaged)
    (damaged / "state" / "store.lock").unlink()
    log = damaged / "state" / "events.jsonl"
    log.write_bytes(log.read_bytes() + b"no event")
    tensors, before = contents(damaged / "state" / "tensors"), contents(damaged / "state")
    for _ in range(2):  # the second start finds what the first has left
        with pytest.raises(StoreError, match=words) as caught:
            start(damaged, method())
        assert "\n" not in str(caught.value)
        assert contents(damaged / "state" / "tensors") == tensors
        assert contents(damaged / "state") >= before
        assert log.read_bytes().endswith(b"no event")


@pytest.mark.parametrize("kind", SET_ASIDE)
def test_what_no_version_names_is_set_aside_and_named(
    kind: str, damaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage, versions, words = SET_ASIDE[kind]
    damage(damaged)
    tensors = contents(damaged / "state" / "tensors")
    with start(damaged, method()) as syncer:
        assert versions_of(syncer) == versions
    assert contents(damaged / "state") >= tensors
    assert re.search(f"no version names {words}: set aside in .*set-aside", caplog.text)
    assert any(re.fullmatch(words, path.name) for path in (damaged / "state" / "set-aside").iterdir())


def test_the_command_says_it_in_a_sentence(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (damaged / "state" / "store.sqlite").unlink()
    (damaged / "run.toml").write_text(RUN_FILE.format(at_least=1, lost_floor_s=60.0, more=""))
    tensors = contents(damaged / "state" / "tensors")
    monkeypatch.chdir(damaged)
    with pytest.raises(SystemExit, match="1"):
        main(["syncer", "run.toml", "--address", "127.0.0.1:0", "--state-dir", "state"])
    said = capsys.readouterr().err
    assert "store.sqlite is missing or empty" in said
    assert "Traceback" not in said
    assert contents(damaged / "state" / "tensors") == tensors


def test_a_killed_syncers_log_of_transactions_is_read_and_kept(tmp_path: Path) -> None:
    """What SQLite has not yet brought into the database itself is part of the run, also for a start that is refused."""
    script = f"""
import os, signal
from pathlib import Path
from tests.syncer.runs import Raw, method, start
syncer = start(Path({str(tmp_path)!r}), method())
raw = Raw(syncer.address)
raw.initialise()
raw.join()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], timeout=300, check=False)
    state = tmp_path / "state"
    assert (state / "store.sqlite-wal").stat().st_size > 0
    shutil.copytree(state, tmp_path / "refused" / "state")
    flip(next((tmp_path / "refused" / "state" / "tensors").glob("f00000-*")))
    with pytest.raises(StoreError, match="fragment 0, version 0"):
        start(tmp_path / "refused", method())
    with start(tmp_path, method()) as syncer:
        assert versions_of(syncer) == [0, 0]
        assert "raw" in status_of(syncer)["learners"]
