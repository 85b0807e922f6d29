"""Every file of a state directory is damaged in every way, alone and in pairs: a start serves verified bits or refuses
in a sentence, nothing is deleted, and a repair loses no version that is whole."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.store.small_run import LAYOUT, METHOD, STATIC, flip, held_of, merged_of, record_at, started

from diloco.cli import main
from diloco.errors import ConfigError, DilocoError, StoreError
from diloco.run.ports import InitialModel
from diloco.store.inspection import NO_STATIC, inspect
from diloco.store.records import DATABASE
from diloco.store.repair import repair
from diloco.store.store import Store

NEWEST = {0: 3, 1: 1}


def make_run(path: Path, static: bytes) -> None:
    """A run at the versions NEWEST, once as a clean stop leaves it and once as a kill does, with SQLite's log."""
    store = Store(path / "running")
    model = InitialModel(
        LAYOUT, (held_of(0, 0), held_of(1, 0)), static, "site-a", "seed 17", "0" * 32, step=3, tokens=5
    )
    store.initialise("demo", METHOD, model)
    for step, (fragment, version) in enumerate([(0, 1), (1, 1), (0, 2), (0, 3)], start=4):
        store.publish(merged_of(fragment, version), record_at(step))
    shutil.copytree(path / "running", path / "killed")
    (path / "killed" / f"{DATABASE}-shm").unlink()
    store.close()
    (path / "running").rename(path / "stopped")


@pytest.fixture(scope="module", params=["frozen", pytest.param("nothing frozen", marks=pytest.mark.slow)])
def healthy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("healthy")
    make_run(root, STATIC if request.param == "frozen" else NO_STATIC)
    return root


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3]),
    "first": flip(0.0),
    "early": flip(0.03),
    "middle": flip(0.5),
    "late": flip(0.9),
    "last": flip(1.0),
}


def contents(path: Path) -> set[bytes]:
    """Of all files, but for the lock, whose holder writes its name there, and SQLite's index of its log."""
    files = [each for each in path.rglob("*") if each.is_file() and each.name not in ("store.lock", f"{DATABASE}-shm")]
    return {each.read_bytes() for each in files} - {b""}


def tensors_of(path: Path) -> set[bytes]:
    return {each.read_bytes() for each in path.rglob("*.safetensors*")} - {b""}


def try_to_start(path: Path) -> dict[int, int] | None:
    """`started`, or None where it refuses, which it must do in one sentence and without a change."""
    before, tensors = contents(path), tensors_of(path)
    sentence = ""
    try:
        versions = started(path)
    except StoreError as error:
        sentence = str(error)
    if not sentence:
        assert tensors_of(path) >= tensors
        return versions
    assert contents(path) >= before
    assert "\n" not in sentence
    assert f"diloco syncer check {path}" in sentence
    assert re.search(rf"{path}/(store\.sqlite|run\.json|tensors/\S+\.safetensors)", sentence), sentence
    return None


def whole_versions(healthy: Path, damaged: Path) -> dict[int, int | None]:
    """The newest version of each fragment whose file is as it was."""
    same = [
        path.name for path in (healthy / "tensors").glob("f*")
        if (damaged / "tensors" / path.name).exists()
        and (damaged / "tensors" / path.name).read_bytes() == path.read_bytes()
    ]  # fmt: skip
    versions = [(int(name[1:6]), int(name[8:17])) for name in same]
    return {fragment: max((v for f, v in versions if f == fragment), default=None) for fragment in NEWEST}


def is_same(healthy: Path, damaged: Path, name: str) -> bool:
    return (damaged / name).exists() and (damaged / name).read_bytes() == (healthy / name).read_bytes()


def check_and_repair(healthy: Path, damaged: Path, scratch: Path) -> str:
    """All that must hold of a damaged directory; returns what became of it."""
    before, tensors = contents(damaged), tensors_of(damaged)
    whole = whole_versions(healthy, damaged)
    try:
        found = inspect(damaged)
    except ConfigError:
        assert not any((damaged / name).exists() for name in (DATABASE, "run.json"))
        return "nothing left"
    assert contents(damaged) == before, "a check has changed something"
    versions = try_to_start(shutil.copytree(damaged, scratch))
    assert found.starts == (versions is not None), (found.problems, versions)
    assert json.dumps(found.to_dict())
    if versions is not None and versions != NEWEST:  # SQLite's log is cut: it cannot be told from one that was shorter
        assert not is_same(healthy, damaged, f"{DATABASE}-wal")
    if not found.can_be_repaired:
        with pytest.raises(StoreError, match="cannot be repaired .*; `diloco syncer restore`"):
            repair(damaged)
        assert contents(damaged) >= before
        static = next((healthy / "tensors").glob("static-*"))
        has_row = is_same(healthy, damaged, "run.json") or is_same(healthy, damaged, DATABASE)
        has_static = static.read_bytes() == NO_STATIC or is_same(healthy, damaged, f"tensors/{static.name}")
        assert not has_row or not has_static or None in whole.values() or healthy.name == "killed"
        return "lost" if not found.starts else "whole"
    repair(damaged)
    repaired = started(damaged)
    if not found.starts:
        assert repaired == whole, (found, repaired)
    assert tensors_of(damaged) >= tensors
    with Store(damaged) as store:
        for fragment, version in repaired.items():
            store.publish(merged_of(fragment, version + 1), record_at(9))
    assert started(damaged) == {fragment: version + 1 for fragment, version in repaired.items()}
    return "whole" if found.starts else "repaired"


DAMAGED = (
    "store.sqlite", "store.sqlite-wal", "run.json", "store.lock", "static", "f0 new", "f0 old", "f1 new", "f1 old",
)  # fmt: skip


def path_of(root: Path, name: str) -> Path | None:
    patterns = {
        "static": "static-*", "f0 new": "f00000-v000000003-*", "f0 old": "f00000-v000000002-*",
        "f1 new": "f00001-v000000001-*", "f1 old": "f00001-v000000000-*",
    }  # fmt: skip
    if name in patterns:
        return next((root / "tensors").glob(patterns[name]))
    return root / name if (root / name).exists() and (root / name).stat().st_size else None


def damaged_runs(healthy: Path, tmp_path: Path, num_files: int, damages: list[str]) -> Iterator[tuple[str, Path, Path]]:
    number = 0
    for ended in ("stopped", "killed"):
        for names in itertools.combinations(DAMAGED, num_files):
            for kinds in itertools.product(damages, repeat=num_files):
                paths = [path_of(healthy / ended, name) for name in names]
                if None in paths:
                    continue
                number += 1
                root = shutil.copytree(healthy / ended, tmp_path / f"run-{number}")
                for path, kind in zip(paths, kinds, strict=True):
                    assert path is not None
                    DAMAGES[kind](root / path.relative_to(healthy / ended))
                yield f"{ended}: {dict(zip(names, kinds, strict=True))}", healthy / ended, root


@pytest.mark.parametrize(
    ("num_files", "damages"),
    [(1, list(DAMAGES)), pytest.param(2, ["missing", "middle"], marks=pytest.mark.slow)],
)
def test_whatever_is_damaged(healthy: Path, tmp_path: Path, num_files: int, damages: list[str]) -> None:
    outcomes: dict[str, int] = {}
    for what, whole, damaged in damaged_runs(healthy, tmp_path, num_files, damages):
        try:
            outcome = check_and_repair(whole, damaged, tmp_path / "scratch")
        except (AssertionError, DilocoError) as error:
            raise AssertionError(f"{what}: {error!r}") from error
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        shutil.rmtree(damaged)
        shutil.rmtree(tmp_path / "scratch", ignore_errors=True)
    assert min(outcomes["repaired"], outcomes["whole"]) > 10


def test_what_is_no_file_in_the_place_of_one_is_set_aside(healthy: Path, tmp_path: Path) -> None:
    for kind in ("directory", "link"):
        root = shutil.copytree(healthy / "stopped", tmp_path / kind)
        path = path_of(root, "f0 new")
        assert path is not None
        path.unlink()
        if kind == "directory":
            path.mkdir()
        else:
            path.symlink_to(root / "nowhere")
        repair(root)
        assert started(root) == {**NEWEST, 0: NEWEST[0] - 1}
        assert os.path.lexists(root / "set-aside" / path.name)


def test_a_lock_that_cannot_be_read_is_one_sentence(healthy: Path, tmp_path: Path) -> None:
    root = shutil.copytree(healthy / "stopped", tmp_path / "run")
    (root / "store.lock").unlink(missing_ok=True)
    (root / "store.lock").mkdir()
    with pytest.raises(StoreError, match=r"cannot read .*/store\.lock .*; check the disk"):
        inspect(root)


def cut_off(data: bytes, num_frames: int, frame_bytes: int = 24 + 4096) -> bytes:
    """SQLite's log with a flipped bit in the frame that comes this many before its end."""
    damaged = bytearray(data)
    damaged[len(data) - num_frames * frame_bytes + 100] ^= 1
    return bytes(damaged)


def test_what_sqlite_does_not_read_of_its_log_is_kept(healthy: Path, tmp_path: Path) -> None:
    """The newest transaction is damaged: the run is served at the version before, and the log is copied first."""
    root = shutil.copytree(healthy / "killed", tmp_path / "run")
    log = root / f"{DATABASE}-wal"
    damaged = cut_off(log.read_bytes(), 1)
    log.write_bytes(damaged)
    assert started(root) == {**NEWEST, 0: 2}
    assert (root / "set-aside" / log.name).read_bytes() == damaged
    assert any(each.name.startswith("f00000-v000000003-") for each in (root / "set-aside").iterdir())


def test_a_repair_that_is_broken_off_can_begin_again(
    healthy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power is cut at each rename of a repair that makes a new database."""

    class CutError(BaseException):
        pass

    rename = Path.rename
    for count in range(1, 5):
        root = shutil.copytree(healthy / "stopped", tmp_path / f"run-{count}")
        flip(0.0)(root / DATABASE)
        flip(0.5)(path_of(root, "f0 new") or root)
        tensors, seen = tensors_of(root), itertools.count(1)

        def cut(path: Path, target: Path, at: int = count, seen: Iterator[int] = seen) -> Path:
            if next(seen) == at:
                raise CutError
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", cut)
            with contextlib.suppress(CutError):
                repair(root)
        repair(root)
        assert started(root) == {**NEWEST, 0: 2}
        assert tensors_of(root) >= tensors


def test_a_repair_that_is_refused_leaves_the_directory_as_it_was(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(healthy / "stopped", tmp_path / "run")
    (root / "store.lock").unlink()
    for path in (root / "tensors").glob("f00001-*"):
        flip(0.5)(path)

    def files() -> dict[Path, bytes]:
        return {each: each.read_bytes() for each in root.rglob("*") if each.is_file()}

    before = files()
    with pytest.raises(SystemExit, match="1"):
        main(["syncer", "check", str(root), "--repair"])
    assert "cannot be repaired (no version of fragment 1 is whole)" in capsys.readouterr().err
    assert files() == before


def test_the_command_says_what_is_lost_and_repairs_it(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(healthy / "stopped", tmp_path / "run")

    def command(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["syncer", "check", str(root), *arguments])
        return ended.value.code or 0, *capsys.readouterr()

    assert command()[0] == 0
    newest = path_of(root, "f0 new")
    assert newest is not None
    flip(0.9)(newest)
    code, out, err = command()
    assert code == 1
    assert "fragment 0: version 2 is whole; lost: 3 (96 tokens)\nfragment 1: version 1 is whole\n" in out
    assert f"tensors/{newest.name}: is damaged" in out
    assert err.count("\n") == 1
    assert "--repair goes back to version 2 of fragment 0, version 1 of fragment 1" in err
    code, out, _ = command("--json")
    assert (code, json.loads(out)["fragments"][0]["lost"]) == (1, [3])
    assert command("--repair")[0] == 0
    code, out, _ = command("--json")
    assert (code, json.loads(out)["problems"]) == (0, [])
    with Store(root):
        code, _, err = command()
        assert code == 1
        assert "is in use by process" in err
    root = tmp_path
    assert command()[0] == 2


def test_a_command_that_is_none_is_no_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["syncer", "repair", "state"])
    assert (
        "no command 'repair' of `diloco syncer`; commands: check, backup, restore, promote." in capsys.readouterr().err
    )
