"""A syncer starts on a damaged state directory: whatever it answers, no byte of a model is gone, and what is wrong is
named."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.syncer.runs import Raw, layout, method, start, status_of, versions_of
from tests.syncer.test_faults import RUN_FILE

import diloco
from diloco.cli import main
from diloco.errors import StoreError
from diloco.protocol.manifest import Manifest

ONES = diloco.FP32().encode(torch.ones(layout().fragments[0].numel))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory at version 3 of fragment 0, and beside it the manifest as it was at versions 1 and 2."""
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
        shutil.copy(root / "state" / "manifest.json", root / f"at-{version + 1}.json")
    return root


def manifest_of(root: Path) -> Manifest:
    return Manifest.from_bytes((root / "state" / "manifest.json").read_bytes(), str(root))


def truncate(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


def object_of(root: Path, kind: str) -> Path:
    manifest = manifest_of(root)
    names = {"frozen": manifest.frozen, "record": manifest.record, "version": manifest.fragments[0][0].held}
    return root / "state" / "objects" / str(names[kind])


def restored(version: int) -> Callable[[Path], object]:
    return lambda root: shutil.copy(root / f"at-{version}.json", root / "state" / "manifest.json")


def change(**values: object) -> Callable[[Path], object]:
    """The manifest is whole, and what it says is not."""

    def damage(root: Path) -> None:
        changed: Manifest = replace(manifest_of(root), **values)  # type: ignore[arg-type]
        (root / "state" / "manifest.json").write_bytes(changed.to_bytes())

    return damage


def without_newest(root: Path) -> None:
    object_of(root, "version").unlink()
    restored(2)(root)


HASH = "0" * 64

REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "manifest deleted": (lambda root: (root / "state" / "manifest.json").unlink(),
        r"the manifest of \S+ is missing, and it has \d+ objects of a run"),
    "manifest of no bytes": (lambda root: truncate(root / "state" / "manifest.json", 0),
        r"the manifest of \S+ is damaged"),
    "manifest cut in half": (lambda root: truncate(root / "state" / "manifest.json", 0.5),
        r"the manifest of \S+ is damaged"),
    "a bit of the manifest": (lambda root: flip(root / "state" / "manifest.json"), r"the manifest of \S+ is damaged"),
    "a name of no object": (change(record=f"1/99-{HASH}"), r"object 1/99-0+ of .* \(the record .*\) is missing"),
    "objects of another run": (change(run_id="f" * 32), "names objects of two runs"),
    "version damaged": (lambda root: flip(object_of(root, "version")),
        r"object \S+ of .* \(fragment 0, version 3\) is damaged"),
    "version missing": (lambda root: object_of(root, "version").unlink(),
        r"object \S+ of .* \(fragment 0, version 3\) is missing"),
    "frozen damaged": (lambda root: flip(object_of(root, "frozen")), r"\(the layout .*\) is damaged"),
    "record damaged": (lambda root: flip(object_of(root, "record")), r"\(the record .*\) is damaged"),
    "an earlier format": (lambda root: (
        (root / "state" / "manifest.json").unlink(), (root / "state" / "store.sqlite").write_text("mine")),
        r"before the first release \(it has store.sqlite\)"),
}  # fmt: skip

SERVED: dict[str, tuple[Callable[[Path], object], list[int]]] = {
    "unknown files": (lambda root: (root / "state" / "objects" / "1" / "mine").write_text("mine"), [3, 0]),
    "manifest of the version before": (restored(2), [2, 0]),
    "manifest of two versions ago": (restored(1), [1, 0]),
    "manifest of the version before, without the newest": (without_newest, [2, 0]),
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
    objects, before = contents(damaged / "state" / "objects"), contents(damaged / "state")
    for _ in range(2):  # the second start finds what the first has left
        with pytest.raises(StoreError, match=words) as caught:
            start(damaged, method())
        assert "\n" not in str(caught.value)
        assert contents(damaged / "state" / "objects") == objects
        assert contents(damaged / "state") >= before
        assert log.read_bytes().endswith(b"no event")


@pytest.mark.parametrize("kind", SERVED)
def test_what_the_manifest_does_not_name_is_left_alone(kind: str, damaged: Path) -> None:
    """Objects of earlier epochs for `keep_s`, and files with other names for good."""
    damage, versions = SERVED[kind]
    damage(damaged)
    objects = contents(damaged / "state" / "objects")
    with start(damaged, method()) as syncer:
        assert versions_of(syncer) == versions
    assert contents(damaged / "state" / "objects") >= objects


def test_the_command_says_it_in_a_sentence(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (damaged / "state" / "manifest.json").unlink()
    (damaged / "run.toml").write_text(RUN_FILE.format(at_least=1, lost_floor_s=60.0, more=""))
    objects = contents(damaged / "state" / "objects")
    monkeypatch.chdir(damaged)
    with pytest.raises(SystemExit, match="1"):
        main(["syncer", "run.toml", "--address", "127.0.0.1:0", "--state-dir", "state"])
    said = capsys.readouterr().err
    assert "the manifest of state is missing" in said
    assert "Traceback" not in said
    assert contents(damaged / "state" / "objects") == objects


def test_a_killed_syncers_state_is_served(tmp_path: Path) -> None:
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
    killed = subprocess.run([sys.executable, "-c", script], timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert manifest_of(tmp_path).boot != 0
    shutil.copytree(tmp_path / "state", tmp_path / "refused" / "state")
    flip(object_of(tmp_path / "refused", "version"))
    with pytest.raises(StoreError, match="fragment 0, version 0"):
        start(tmp_path / "refused", method())
    with start(tmp_path, method()) as syncer:
        assert versions_of(syncer) == [0, 0]
        assert "raw" in status_of(syncer)["learners"]
