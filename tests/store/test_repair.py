"""Every object of a store is damaged in every way, alone and in pairs, and each of its bytes: a start serves verified
bits or refuses in a sentence, nothing is deleted, and a repair loses no version that is whole."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.store.small_run import (
    RUN_ID,
    SmallRun,
    contents,
    flip,
    held_of,
    make_run,
    read_newest,
    record_at,
    started,
    update_of,
)

from diloco.cli import main
from diloco.errors import ConfigError, DilocoError, StoreError
from diloco.protocol.manifest import Manifest
from diloco.store.directory import Directory
from diloco.store.inspection import StoreState, check
from diloco.store.objects import open_store, opened
from diloco.store.repair import fresh_epoch, repair, require_unserved

NEWEST = {0: 3, 1: 1}
FEW = 4
"""Elements of a fragment of the run whose bytes are damaged one by one."""


def make(path: Path, num_elements: int) -> None:
    """A run at the versions NEWEST, with three versions of fragment 0, as a stopped syncer leaves it."""
    with Directory(path) as objects:
        run = SmallRun(objects, num_elements, deletes=False)
        run.initialise()
        for step, (fragment, version) in enumerate([(0, 1), (1, 1), (0, 2), (0, 3)], start=4):
            run.publish(fragment, version, record_at(step))
        run.release()


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("healthy") / "run"
    make(path, 1000)
    return path


def mended(root: Path) -> StoreState:
    with opened(root, lock=True) as objects:
        return repair(objects)[0]


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


def manifest_of(path: Path) -> Manifest:
    return Manifest.from_bytes((path / "manifest.json").read_bytes(), str(path))


def path_of(root: Path, what: str) -> Path:
    """ "f0 v3" is a version, "f0 u3" its update."""
    manifest = manifest_of(root)
    names = {"frozen": manifest.frozen, "record": manifest.record}
    for fragment, versions in enumerate(manifest.fragments):
        for each in versions:
            names |= {f"f{fragment} v{each.version}": each.held, f"f{fragment} u{each.version}": each.update}
    return root / "manifest.json" if what == "manifest" else root / "objects" / str(names[what])


def kept(path: Path) -> set[bytes]:
    """The contents of all files but of the lock, whose holder writes its name there."""
    return {data for name, data in contents(path).items() if name != "store.lock"} - {b""}


def try_to_start(path: Path, num_elements: int) -> dict[int, int] | None:
    """`started`, or None where it refuses, which it must do in one sentence and without a change."""
    before = kept(path)
    sentence = ""
    try:
        return started(path, num_elements)
    except (ConfigError, StoreError) as error:
        sentence = str(error)
    assert kept(path) == before
    assert "\n" not in sentence
    assert f"diloco syncer check {path}" in sentence or f"there is no run in {path}" in sentence
    return None


def whole_versions(healthy: Path, damaged: Path) -> dict[int, int | None]:
    """The newest version of each fragment whose object is as it was."""
    found: dict[int, int | None] = {}
    with Directory(healthy, lock=False) as objects:
        for fragment, (low, high) in enumerate(((0, 3), (0, 1))):
            for version in range(low, high + 1):
                held = held_of(fragment, version)
                blob = SmallRun.format.version(RUN_ID, held, update_of(held), 96 if version else 0)
                name = next(name for name in objects.list() if name.endswith(blob.hash))
                path = damaged / "objects" / name
                if path.is_file() and path.read_bytes() == (healthy / "objects" / name).read_bytes():
                    found[fragment] = version
    return {fragment: found.get(fragment) for fragment in NEWEST}


def check_and_repair(healthy: Path, damaged: Path, scratch: Path) -> str:
    """All that must hold of a damaged store; returns what became of it."""
    before, whole = kept(damaged), whole_versions(healthy, damaged)
    found = check(open_store(damaged))
    assert kept(damaged) == before, "a check has changed something"
    versions = try_to_start(shutil.copytree(damaged, scratch), 1000)
    assert found.starts == (versions is not None), (found.problems, versions)
    assert versions in (None, NEWEST)
    assert json.dumps(found.to_dict())
    if not found.can_be_repaired:
        with (
            opened(damaged, lock=True) as objects,
            pytest.raises(StoreError, match="cannot be repaired .*; `diloco copy`"),
        ):
            repair(objects)
        assert kept(damaged) == before
        assert found.frozen is None or None in whole.values()
        return "lost"
    mended(damaged)
    assert kept(damaged) >= before - {(healthy / "manifest.json").read_bytes()}
    assert check(open_store(damaged)).problems == []
    repaired = started(damaged)
    assert repaired == whole, (found, repaired)
    with Directory(damaged) as objects:
        run = SmallRun(objects)
        run.claim()
        for fragment, version in repaired.items():
            run.publish(fragment, version + 1)
    assert started(damaged) == {fragment: version + 1 for fragment, version in repaired.items()}
    return "whole" if found.starts else "repaired"


DAMAGED = ("manifest", "frozen", "record", "f0 v3", "f0 v2", "f0 u3", "f1 v1", "f1 v0", "f1 u1")


def damaged_runs(healthy: Path, tmp_path: Path, num_files: int, damages: list[str]) -> Iterator[tuple[str, Path]]:
    number = 0
    for names in itertools.combinations(DAMAGED, num_files):
        for kinds in itertools.product(damages, repeat=num_files):
            number += 1
            root = shutil.copytree(healthy, tmp_path / f"run-{number}")
            for name, kind in zip(names, kinds, strict=True):
                DAMAGES[kind](root / path_of(healthy, name).relative_to(healthy))
            yield str(dict(zip(names, kinds, strict=True))), root


@pytest.mark.parametrize(
    ("num_files", "damages"),
    [
        (1, ["missing", "middle"]),
        pytest.param(1, list(DAMAGES), marks=pytest.mark.slow),
        pytest.param(2, ["missing", "middle"], marks=pytest.mark.slow),
    ],
)
def test_whatever_is_damaged(healthy: Path, tmp_path: Path, num_files: int, damages: list[str]) -> None:
    outcomes: dict[str, int] = {}
    for what, damaged in damaged_runs(healthy, tmp_path, num_files, damages):
        try:
            outcome = check_and_repair(healthy, damaged, tmp_path / "scratch")
        except (AssertionError, DilocoError) as error:
            raise AssertionError(f"{what}: {error!r}") from error
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        shutil.rmtree(damaged)
        shutil.rmtree(tmp_path / "scratch", ignore_errors=True)
    # the object with the layout, of which there is one; and both versions of fragment 1
    assert outcomes["lost"] == (len(damages) if num_files == 1 else len(damages) ** 2 * (len(DAMAGED) - 1 + 1))
    assert min(outcomes["repaired"], outcomes["whole"]) > len(damages)


@pytest.mark.parametrize("step", [97, pytest.param(17, marks=pytest.mark.slow)])
def test_every_byte(tmp_path: Path, step: int) -> None:
    """Of each object that the manifest names, and of the manifest, every few bytes: a check finds a flipped bit, and
    a repair goes back to the newest whole version of what is damaged, to the bit."""
    make(tmp_path / "healthy", FEW)
    names = {str(path_of(tmp_path / "healthy", what).relative_to(tmp_path / "healthy")): what for what in DAMAGED}
    whole = contents(tmp_path / "healthy")
    root = shutil.copytree(tmp_path / "healthy", tmp_path / "run")
    num_found = 0
    for name, what in names.items():
        for place in range(num_found % step, len(whole[name]), step):
            damaged = bytearray(whole[name])
            damaged[place] ^= 1 << (place % 8)
            (root / name).write_bytes(damaged)
            found = check(open_store(root))
            (problem,) = found.problems
            assert problem.name == name.removeprefix("objects/"), (what, place, problem)
            assert found.starts == (what in ("f0 v2", "f0 u3", "f1 v0", "f1 u1"))
            if num_found % 5 == 0 and what != "frozen":
                mended(root)
                expected = {**NEWEST, **{"f0 v3": {0: 2}, "f1 v1": {1: 0}}.get(what, {})}
                assert started(root, FEW) == expected, (what, place)
                assert bytes(damaged) in kept(root)
                shutil.rmtree(root)
                shutil.copytree(tmp_path / "healthy", root)
            (root / name).write_bytes(whole[name])
            num_found += 1
    assert num_found * step > 5000


# --- cases ------------------------------------------------------------------------------------------------------------


def test_what_is_no_file_in_the_place_of_one_is_set_aside(healthy: Path, tmp_path: Path) -> None:
    for kind in ("directory", "link"):
        root = shutil.copytree(healthy, tmp_path / kind)
        path = path_of(root, "f0 v3")
        path.unlink()
        if kind == "directory":
            path.mkdir()
        else:
            path.symlink_to(root / "nowhere")
        mended(root)
        assert started(root) == {**NEWEST, 0: 2}
        assert os.path.lexists(root / "set-aside" / f"1-{path.name}")


def test_without_a_manifest_the_newest_objects_make_up_the_run(healthy: Path, tmp_path: Path) -> None:
    """A later epoch comes before a higher version: the run may have been taken back."""
    root = shutil.copytree(healthy, tmp_path / "run")
    with Directory(root) as objects:
        run = SmallRun(objects, deletes=False)
        fragments = (run.manifest.fragments[0][1:], run.manifest.fragments[1])
        run.swap(replace(run.manifest, epoch=6, fragments=fragments))
        run.publish(0, 3)
        run.publish(0, 4, record_at(20))
        epoch = run.manifest.epoch
        run.swap(replace(run.manifest, epoch=7, fragments=(run.manifest.fragments[0][1:], fragments[1])))
        run._num_names = 0
        run.publish(1, 2, record_at(21))  # epoch 7 has no version of fragment 0
    (root / "manifest.json").unlink()
    assert epoch == 6
    found = mended(root)
    assert [(each.published, each.serves) for each in found.fragments] == [(4, 4), (2, 2)]
    assert started(root) == {0: 4, 1: 2}
    with Directory(root, lock=False) as objects:
        saved = read_newest(objects)
        assert saved.record is not None
        assert (saved.record["step"], saved.record["members"]) == (21, {})


def test_objects_of_another_initialisation_are_of_another_run(tmp_path: Path) -> None:
    """A learner that initialised the run was killed with its syncer in the middle, and another one came."""
    with Directory(tmp_path) as objects:
        killed = SmallRun(objects, deletes=False)
        killed.claim()
        for version in (8, 9):
            held = held_of(0, version)
            killed.put(killed.format.version("f" * 32, held, update_of(held), 1))
        run = SmallRun(objects, deletes=False)
        run.claim()
        run.initialise()
        run.publish(0, 1)
        run.release()
    flip(0.9)(path_of(tmp_path, "f0 v1"))
    found = mended(tmp_path)
    assert [(each.published, each.serves) for each in found.fragments] == [(1, 0), (0, 0)]
    (tmp_path / "manifest.json").unlink()
    mended(tmp_path)
    assert started(tmp_path) == {0: 0, 1: 0}


def test_a_version_that_was_never_published_is_not_served(healthy: Path, tmp_path: Path) -> None:
    """Its contributions are sent again, so that it would count them twice. With the manifest lost, nobody can tell."""
    root = shutil.copytree(healthy, tmp_path / "run")
    with Directory(root) as objects:
        run = SmallRun(objects, deletes=False)
        run._num_names = 100
        run.put(run.format.version(RUN_ID, held_of(0, 4), update_of(held_of(0, 4)), 96))
    flip(0.5)(path_of(root, "f0 v3"))
    found = mended(root)
    assert (found.fragments[0].lost, found.fragments[0].lost_tokens) == ((3,), 96)
    assert started(root) == {**NEWEST, 0: 2}


def test_earlier_versions_that_the_manifest_does_not_name_are_tried(healthy: Path, tmp_path: Path) -> None:
    root = shutil.copytree(healthy, tmp_path / "run")
    for what in ("f0 v3", "f0 v2"):
        flip(0.9)(path_of(root, what))
    found = mended(root)
    assert (found.fragments[0].lost, found.fragments[0].lost_tokens) == ((2, 3), 2 * 96)
    assert started(root) == {**NEWEST, 0: 1}
    assert [each.version for each in manifest_of(root).fragments[0]] == [1, 0]


def test_an_epoch_after_a_repair_is_later_than_all_and_members_join_again(healthy: Path, tmp_path: Path) -> None:
    root = shutil.copytree(healthy, tmp_path / "run")
    flip(0.5)(path_of(root, "record"))
    before = manifest_of(root)
    mended(root)
    after = manifest_of(root)
    assert (after.boot, after.serial) == (0, before.serial + 1)
    assert after.epoch > 1.7e9
    assert fresh_epoch(10**12) == 10**12 + 1
    assert after.fragments == before.fragments
    with Directory(root, lock=False) as objects:
        saved = read_newest(objects)
        assert saved.record is not None
        assert (saved.record["step"], saved.record["members"]) == (6, {})  # the record before


def test_a_repair_of_an_earlier_version_leaves_the_members(healthy: Path, tmp_path: Path) -> None:
    root = shutil.copytree(healthy, tmp_path / "run")
    flip(0.5)(path_of(root, "f0 v2"))
    before = manifest_of(root)
    found = mended(root)
    assert found.starts
    after = manifest_of(root)
    assert after == replace(before, serial=before.serial + 1, fragments=(before.fragments[0][:1], before.fragments[1]))


def test_a_repair_that_is_broken_off_can_begin_again(healthy: Path, tmp_path: Path) -> None:
    """The power is cut at each durable step, and at each rename, of a repair that makes a new manifest."""

    class CutError(BaseException):
        pass

    def cut_at(number: int) -> Callable[..., None]:
        seen = itertools.count(1)

        def at(*_: object) -> None:
            if next(seen) == number:
                raise CutError

        return at

    rename, num_cuts = Path.rename, 0
    for kind, count in itertools.product(("step", "rename"), range(1, 7)):
        root = shutil.copytree(healthy, tmp_path / f"{kind}-{count}")
        flip(0.5)(path_of(root, "f0 v3"))
        flip(0.0)(root / "manifest.json")
        before, cut = kept(root), cut_at(count)

        def cut_rename(path: Path, target: Path, cut: Callable[..., None] = cut) -> Path:
            cut()
            return rename(path, target)

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(CutError):
            if kind == "rename":
                patch.setattr(Path, "rename", cut_rename)
            with Directory(root, **({"at": cut} if kind == "step" else {})) as objects:
                repair(objects)
            num_cuts -= 1
        num_cuts += 1
        mended(root)
        assert started(root) == {**NEWEST, 0: 2}
        assert kept(root) >= before
    assert num_cuts == 6 + 2


def test_a_served_bucket_is_not_repaired(healthy: Path, tmp_path: Path) -> None:
    """As a bucket, which has no lock: by its manifest, which its syncer changes within every lease."""

    class Bucket:
        def __init__(self, run: SmallRun, *, is_served: bool) -> None:
            self.name, self._run, self._is_served = run.objects.name, run, is_served

        def manifest(self) -> object:
            if self._is_served:
                self._run.save_record(record_at(9))
            return self._run.objects.manifest()

    with Directory(shutil.copytree(healthy, tmp_path / "run")) as objects:
        run = SmallRun(objects)
        released: object = Bucket(run, is_served=False)
        require_unserved(released, lease_s=1e9)  # type: ignore[arg-type]
        run.claim()
        require_unserved(released, lease_s=0.01)  # type: ignore[arg-type]
        served: object = Bucket(run, is_served=True)
        with pytest.raises(StoreError, match="a syncer serves the run in .*; stop it first"):
            require_unserved(served, lease_s=1e9)  # type: ignore[arg-type]


def test_a_repair_that_is_refused_leaves_the_directory_as_it_was(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(healthy, tmp_path / "run")
    (root / "store.lock").unlink()
    for path in (path_of(root, "f1 v1"), path_of(root, "f1 v0")):
        flip(0.5)(path)
    before = contents(root)
    with pytest.raises(SystemExit, match="1"):
        main(["syncer", "check", str(root), "--repair"])
    assert "cannot be repaired (no version of fragment 1 is whole)" in capsys.readouterr().err
    assert contents(root) == before


def test_the_command_says_what_is_lost_and_repairs_it(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(healthy, tmp_path / "run")

    def command(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["syncer", "check", str(root), *arguments])
        return ended.value.code or 0, *capsys.readouterr()

    assert command()[0] == 0
    newest = path_of(root, "f0 v3")
    flip(0.9)(newest)
    code, out, err = command()
    assert code == 1
    assert "fragment 0: version 2 is whole; lost: 3 (96 tokens)\nfragment 1: version 1 is whole\n" in out
    assert f"1/{newest.name} is damaged" in out
    assert err.count("\n") == 1
    assert "--repair goes back to version 2 of fragment 0, version 1 of fragment 1" in err
    code, out, _ = command("--json")
    assert (code, json.loads(out)["fragments"][0]["lost"]) == (1, [3])
    with Directory(root):
        assert command("--json")[0] == 1  # reads, also while a syncer runs
        code, _, err = command("--repair")
        assert code == 1
        assert re.search(r"is in use by process \d+", err)
    code, out, _ = command("--repair")
    assert code == 0
    assert f"set aside: {root}/set-aside/1-{newest.name}" in out
    code, out, _ = command("--json")
    assert (code, json.loads(out)["problems"]) == (0, [])
    root = tmp_path / "absent"
    assert command()[0] == 2
    assert not root.exists()


def test_a_run_without_a_model_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Directory(tmp_path) as objects:
        SmallRun(objects).claim()
    assert check(open_store(tmp_path)).starts
    with pytest.raises(SystemExit):
        main(["syncer", "check", str(tmp_path)])
    assert "no model yet" in capsys.readouterr().out


def test_a_check_reads_a_run_that_goes_on(tmp_path: Path) -> None:
    """What the manifest named is deleted whenever an object has been read."""
    make_run(tmp_path, versions=1)
    with Directory(tmp_path) as objects:
        run = SmallRun(objects)

        class Publishing(Directory):
            version = 1

            def get(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
                found = super().get(name, start, stop)
                if self.version < 8:
                    self.version += 1
                    run.publish(0, self.version)
                return found

        found = check(Publishing(tmp_path, lock=False))
        assert found.starts
        assert found.problems == []
        assert found.fragments[0].serves == 8


def test_a_command_that_is_none_is_no_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["syncer", "repair", "state"])
    assert "no command 'repair' of `diloco syncer`; commands: check, promote." in capsys.readouterr().err
