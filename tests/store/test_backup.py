"""Snapshots of a run while it is published, and restoring them."""

from __future__ import annotations

import json
import shutil
import threading
import tracemalloc
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from benchmarks.processes import until
from tests.store.small_run import flip, initialise, lengthen, merged_of, record_at, started

from diloco.cli import main
from diloco.errors import ConfigError, NotInitialisedError, StoreError
from diloco.store.backup import back_up, restore, taken_last_at
from diloco.store.store import Store
from diloco.store.targets import open_target
from diloco.whole_files import hidden_name


def make(path: Path, versions: int = 3, run_id: str = "0" * 32) -> None:
    with Store(path) as store:
        initialise(store, run_id=run_id)
        for version in range(1, versions + 1):
            store.publish(merged_of(0, version), record_at(version))


@pytest.fixture(params=["directory", "fsspec"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "backups") if request.param == "directory" else f"memory://{uuid.uuid4().hex}/run"


def test_a_snapshot_of_a_run_that_goes_on_is_one_record_with_its_versions(place: str, tmp_path: Path) -> None:
    """The run publishes as fast as it can meanwhile."""
    stop, target = threading.Event(), open_target(place)

    def run() -> int:
        with Store(tmp_path / "run") as store:
            initialise(store)
            version = 0
            while not stop.is_set():
                version += 1
                for fragment in (0, 1):
                    store.publish(merged_of(fragment, version), record_at(2 * version + fragment))
            return version

    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(run)
        until(lambda: (tmp_path / "run" / "run.json").exists() and target_works(tmp_path, place), "no first snapshot")
        snapshots = [back_up(tmp_path / "run", target, 20) for _ in range(5)]
        stop.set()
        assert published.result() > 1
    different = {snapshot.name: snapshot for snapshot in snapshots}  # two in one second may have the same versions
    for number, snapshot in enumerate(different.values()):
        restored = tmp_path / f"restored-{number}"
        assert restore(target, restored, snapshot.name) == snapshot
        first, second = (each.update.version for each in snapshot.versions)
        assert started(restored) == {0: first, 1: second}
        assert snapshot.record is None or snapshot.record["step"] == first + second + 1
        shutil.rmtree(restored)


def target_works(tmp_path: Path, place: str) -> bool:
    try:
        back_up(tmp_path / "run", open_target(place), 20)
    except NotInitialisedError:
        return False
    return True


def test_the_newest_are_kept_with_the_files_that_they_need(place: str, tmp_path: Path) -> None:
    target = open_target(place)
    make(tmp_path / "run")
    names = []
    for version in range(4, 9):
        with Store(tmp_path / "run") as store:
            store.publish(merged_of(0, version), record_at(version))
        names.append(back_up(tmp_path / "run", target, 2).name)
    assert target.names("snapshots") == names[-2:]
    assert [name.split("-")[0] for name in target.names("tensors")] == ["f00000", "f00000", "f00001", "static"]
    assert restore(target, tmp_path / "older", names[-2]).name == names[-2]
    assert started(tmp_path / "older") == {0: 7, 1: 0}
    assert started(shutil.copytree(tmp_path / "older", tmp_path / "again")) == {0: 7, 1: 0}


def test_a_snapshot_takes_as_much_memory_however_long_the_history_is(tmp_path: Path) -> None:
    """A server that takes one now and then would come to hold the memory of the largest."""
    make(tmp_path / "run")

    def peak_bytes() -> int:
        tracemalloc.start()
        back_up(tmp_path / "run", open_target(str(tmp_path / "backups")), 3)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes()  # imports
    few, num_versions = peak_bytes(), 2000
    lengthen(tmp_path / "run", num_versions)
    assert peak_bytes() < few + 50 * num_versions  # a row that is read takes more than 500 bytes


def test_a_place_for_backups_is_of_one_run(place: str, tmp_path: Path) -> None:
    make(tmp_path / "run")
    first = back_up(tmp_path / "run", open_target(place), 1)
    make(tmp_path / "other", run_id="1" * 32)
    with pytest.raises(StoreError, match="has backups of another run"):
        back_up(tmp_path / "other", open_target(place), 1)
    assert open_target(place).names("snapshots") == [first.name]
    assert not list((tmp_path / "other").glob(".backup*"))


def test_a_damaged_record_is_left_there_and_stops_no_later_backup(tmp_path: Path) -> None:
    place, run, names = tmp_path / "backups", tmp_path / "run", []
    target = open_target(str(place))
    make(run)
    for version in range(4, 8):
        names.append(back_up(run, target, 2).name)
        if version == 5:
            flip(0.5)(place / "snapshots" / names[-1])
        with Store(run) as store:
            store.publish(merged_of(0, version), record_at(version))
    assert target.names("snapshots") == names[1:]
    for name, newest in ((names[2], 5), (names[3], 6)):
        restore(target, tmp_path / name, name)
        assert started(tmp_path / name) == {0: newest, 1: 0}


def test_a_state_that_the_run_has_left_behind_takes_no_place_of_its_backups(place: str, tmp_path: Path) -> None:
    """As that of a syncer which was taken over, and was started again."""
    make(tmp_path / "run")
    target = open_target(place)
    shutil.copytree(tmp_path / "run", tmp_path / "left behind")
    first = back_up(tmp_path / "run", target, 2)
    restore(target, tmp_path / "newer")  # begins a later epoch
    newer = back_up(tmp_path / "newer", target, 2)
    with Store(tmp_path / "left behind") as store:
        store.publish(merged_of(0, 4), record_at(4))
    with pytest.raises(StoreError, match=rf"has backups of epoch {newer.epoch.number} of this run, which is in epoch"):
        back_up(tmp_path / "left behind", target, 2)
    assert target.names("snapshots") == [first.name, newer.name]


def test_files_of_other_names_are_no_snapshots(tmp_path: Path) -> None:
    """They take no place of those that are, whatever they sort behind."""
    target = open_target(str(tmp_path / "backups"))
    make(tmp_path / "run")
    first = back_up(tmp_path / "run", target, 1)
    snapshots = tmp_path / "backups" / "snapshots"
    for name in ("20991101T000000Z-000000000003.json", "x.json", f"{first.name}.before"):
        shutil.copy(snapshots / first.name, snapshots / name)
    with Store(tmp_path / "run") as store:
        store.publish(merged_of(0, 4), record_at(4))
    second = back_up(tmp_path / "run", target, 1)
    assert (snapshots / second.name).exists()
    assert not (snapshots / first.name).exists()
    assert taken_last_at(target) == int(second.taken_at)
    assert restore(target, tmp_path / "new").name == second.name


def test_what_cannot_be_a_snapshot_or_a_way_back_is_said(tmp_path: Path) -> None:
    place, run = tmp_path / "backups", tmp_path / "run"
    target = open_target(str(place))
    with pytest.raises(ConfigError, match="is not the state directory"):
        back_up(run, target, 1)
    Store(run).close()
    with pytest.raises(NotInitialisedError):
        back_up(run, target, 1)
    with pytest.raises(StoreError, match="there is no snapshot in .*; name the place"):
        restore(target, tmp_path / "new")
    shutil.rmtree(run)
    make(run)
    first = back_up(run, target, 3)
    with Store(run) as store:
        store.publish(merged_of(0, 4), record_at(4))
    back_up(run, target, 3)
    flip(0.5)(next((place / "tensors").glob("f00000-v000000004-*")))
    with pytest.raises(
        StoreError, match=rf"f00000-v000000004-\S+ is damaged.*--snapshot {first.name}` is the one before"
    ):
        restore(target, tmp_path / "new")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["backups", "run"]
    (tmp_path / hidden_name("new") / "tensors").mkdir(parents=True)  # a restore that was killed
    with pytest.raises(ConfigError, match="exists already"):
        restore(target, run)
    back_up(run, target, 3)  # writes the damaged file again
    restore(target, tmp_path / "new")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["backups", "new", "run"]
    flip(0.5)(next((run / "tensors").glob("f00000-v000000004-*")))
    names = target.names("snapshots")
    with pytest.raises(StoreError, match=r"f00000-v000000004-\S+ .*is damaged"):
        back_up(run, target, 3)
    assert target.names("snapshots") == names
    with pytest.raises(ConfigError, match="backups cannot go to nonsense://"):
        open_target("nonsense://there")


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "run")

    def call(*arguments: object) -> Any:
        with pytest.raises(SystemExit) as ended:
            main(["syncer", *map(str, arguments), "--json"])
        assert not ended.value.code
        return json.loads(capsys.readouterr().out)

    taken = call("backup", tmp_path / "run", tmp_path / "backups", "--keep", 1)
    restored = call("restore", tmp_path / "backups", tmp_path / "new")
    assert taken["versions"] == restored["versions"] == [3, 0]
    assert call("check", tmp_path / "new")["starts"]
