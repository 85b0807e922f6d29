"""Snapshots of a run that goes on, the way back from them, and learners that live through that."""

from __future__ import annotations

import json
import shutil
import threading
import tracemalloc
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.processes import until
from safetensors.torch import load_file
from tests.syncer.runs import RUN, Raw, layout, method, start, train
from tests.syncer.test_lineage import syncer_versions
from tests.syncer.test_repair import flip, record_at, started
from tests.syncer.test_store import initialise, lengthen, merged_of

import diloco
from diloco.cli import main
from diloco.errors import ConfigError, NotInitialisedError, StoreError
from diloco.event_log import read_events
from diloco.events import BackedUp, BackupRefused, Event
from diloco.store.backup import BackupPlan, back_up, due_in_s, restore, taken_last_at
from diloco.store.repair import repair
from diloco.store.store import Store
from diloco.store.targets import open_target
from diloco.syncer.server import Options, Syncer
from diloco.whole_files import hidden_name


def make(path: Path, versions: int = 3) -> None:
    with Store(path) as store:
        initialise(store)
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
    with start(tmp_path, method()) as syncer:
        raw = Raw(syncer.address)
        raw.initialise()
        raw.connection.close()
    with pytest.raises(StoreError, match="has backups of another run"):
        back_up(tmp_path / "state", open_target(place), 1)
    assert open_target(place).names("snapshots") == [first.name]
    assert not list((tmp_path / "state").glob(".backup*"))


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


def test_the_first_backup_is_due_by_the_newest_one_that_is_there(tmp_path: Path) -> None:
    """A syncer that is started again more often than it takes snapshots takes them all the same."""
    plan, log = BackupPlan(str(tmp_path / "backups"), 3600.0, 2), tmp_path / "state" / "events.jsonl"
    with start(tmp_path, method()) as syncer:
        raw = Raw(syncer.address)
        raw.initialise()
        raw.connection.close()
    with start(tmp_path, method(), backup=plan):
        until(lambda: any(isinstance(each, BackedUp) for each in read_events(log)), "no first backup")
    taken_at = taken_last_at(open_target(plan.place))
    assert taken_at is not None
    assert [due_in_s(taken_at, taken_at + later_s, 3600.0) for later_s in (-5, 0, 600, 9000)] == [3600, 3600, 3000, 0]


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
    with pytest.raises(ConfigError, match="is there already"):
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


def test_a_syncer_takes_snapshots_on_its_own_and_a_place_that_refuses_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    for place, kind in ((tmp_path / "file", BackupRefused), (tmp_path / "backups", BackedUp)):
        with start(tmp_path, method(), backup=BackupPlan(str(place), 0.05, 2)) as syncer:
            raw = Raw(syncer.address)
            if kind is BackupRefused:
                raw.initialise()
            raw.connection.close()
            until(partial(has_several, tmp_path / "state" / "events.jsonl", kind), "no such event")
    assert len(open_target(str(tmp_path / "backups")).names("snapshots")) <= 2
    restore(open_target(str(tmp_path / "backups")), tmp_path / "restored" / "state")
    with start(tmp_path / "restored", method()) as syncer:
        assert syncer.driver.ask(lambda driver: driver.state.versions) == (0, 0)


def has_several(log: Path, kind: type[Event]) -> bool:
    return sum(isinstance(each, kind) for each in read_events(log)) > 3


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


def serve(state: Path, port: int = 0) -> Syncer:
    return Syncer(RUN, method(codec="e3m0"), Options(f"127.0.0.1:{port}", state))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["restored from a backup", "repaired"])
def test_a_learner_that_has_seen_later_versions_goes_on_with_what_is_left(how: str, tmp_path: Path) -> None:
    state, target = tmp_path / "state", open_target(str(tmp_path / "backups"))
    here, go = {9: threading.Event(), 25: threading.Event()}, {9: threading.Event(), 25: threading.Event()}

    def at_step(step: int) -> None:
        if step in here:
            here[step].set()
            go[step].wait(60)

    with ThreadPoolExecutor(1) as pool:
        with serve(state) as syncer:
            port = syncer.port
            exchange = diloco.connect(syncer.address, run=RUN, learner="site-a", initialise=True)
            life = pool.submit(train, 0, exchange, None, 40, at_step)
            until(here[9].is_set, "it does not get to step 9")
            back_up(state, target, 1)
            go[9].set()
            until(here[25].is_set, "it does not get to step 25")
        lost = syncer_versions(state)
        if how == "repaired":
            for fragment in (0, 1):
                flip(0.5)(max((state / "tensors").glob(f"f{fragment:05d}-*")))
            (state / "store.sqlite").unlink()
            repair(state)
        else:
            shutil.rmtree(state)
            restore(target, state)
        left = syncer_versions(state)
        assert all(mine < theirs for mine, theirs in zip(left, lost, strict=True))
        with serve(state, port) as syncer:
            go[25].set()
            model, metrics = life.result(timeout=60)
            versions = syncer.driver.ask(lambda driver: driver.state.versions)
            fragments = syncer.driver.ask(lambda driver: driver.status())["fragments"]
    assert all(mine > theirs for mine, theirs in zip(versions, left, strict=True))
    assert metrics["incarnation"] == 2
    for fragment in layout().fragments:  # the last round is merged after its last step
        held = torch.cat([model[name].flatten() for name in fragment.names])
        files = (state / "tensors").glob(f"f{fragment.index:05d}-*")
        assert any(torch.equal(held, load_file(file)["theta"]) for file in files)
    for fragment in fragments:
        ledger = fragment["ledger"]
        spent = ledger["merged"] + ledger["lost"] + ledger["pending"] + sum(ledger["discarded"].values())
        assert spent == ledger["trained"]
