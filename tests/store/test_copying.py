"""Copies of a run to a directory and to a bucket, while it is published and after, and the way back."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.processes import until
from tests.bucket_server import BucketServer
from tests.store.small_run import (
    SmallRun,
    check_versions,
    contents,
    flip,
    make_run,
    objects_of,
    read_newest,
    record_at,
    started,
)

from diloco.cli import main
from diloco.demo.bucket_server import CREDENTIALS
from diloco.errors import ConfigError, DamagedObjectError, NotInitialisedError, StoreError
from diloco.event_log import EventLog, read_events
from diloco.events import Copied, CopyRefused
from diloco.protocol.manifest import Manifest
from diloco.run.objects import Blob, Objects
from diloco.store.copying import Copies, CopyPlan, CopyResult, copy, due_in_s
from diloco.store.directory import Directory
from diloco.store.inspection import check
from diloco.store.objects import is_url, open_store, opened, read_manifest


@pytest.fixture(scope="module")
def server() -> Iterator[BucketServer]:
    with BucketServer() as running:
        yield running


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "directory":
        return str(tmp_path / "copy")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    server: BucketServer = request.getfixturevalue("server")
    return server.url(re.sub(r"\W+", "-", request.node.name))


def copied(source: Path | str, place: Path | str) -> CopyResult:
    with opened(place, lock=True) as target:
        return copy(open_store(source), target)


def state_of(place: Path | str) -> tuple[tuple[int, ...], list[str]]:
    """The versions, and all objects."""
    objects = open_store(place)
    return read_manifest(objects).versions, objects.list()


def go_on(path: Path, change: Callable[[SmallRun], object]) -> None:
    with Directory(path) as objects:
        run = SmallRun(objects)
        run.claim()
        change(run)
        run.release()


def test_a_copy_is_the_run_in_a_later_epoch_without_its_members(place: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    before, state = read_manifest(open_store(tmp_path / "run")), contents(tmp_path / "run")
    assert copied(tmp_path / "run", place) == CopyResult("demo", (3, 0), 6, copied_bytes(place))
    assert contents(tmp_path / "run") == state
    objects = open_store(place)
    check_versions(objects, {0: 3, 1: 0})
    manifest, saved = read_manifest(objects), read_newest(objects)
    assert saved.record is not None
    assert (saved.record["step"], saved.record["members"]) == (3, {})
    assert record_at(3)["members"] != {}
    assert (manifest.boot, manifest.origin) == (0, (before.epoch, before.serial))
    assert (manifest.fragments, manifest.frozen) == (before.fragments, before.frozen)
    assert manifest.epoch > 1.7e9
    assert manifest.copied_at is not None
    assert abs(manifest.copied_at - time.time()) < 600
    assert check(objects).problems == []


def copied_bytes(place: str) -> int:
    """Of all objects but the record, which is made for the copy."""
    objects = open_store(place)
    return sum(len(objects.get(name)) for name in objects.list() if name != read_manifest(objects).record)


def test_the_next_copy_brings_what_is_new_and_deletes_what_it_replaces(place: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    copied(tmp_path / "run", place)
    again = copied(tmp_path / "run", place)
    assert (again.num_objects, again.num_bytes) == (0, 0)
    go_on(tmp_path / "run", lambda run: (run.publish(0, 4), run.publish(1, 1)))
    assert copied(tmp_path / "run", place).num_objects == 4
    versions, names = state_of(place)
    assert versions == (4, 1)
    assert set(names) == read_manifest(open_store(place)).names
    check_versions(open_store(place), {0: 4, 1: 1})


def test_a_copy_of_a_run_that_goes_on_is_one_record_with_its_versions(place: str, tmp_path: Path) -> None:
    """The run publishes as fast as it can meanwhile."""
    stop, begun = threading.Event(), threading.Event()

    def run() -> int:
        with Directory(tmp_path / "run") as objects:
            run = SmallRun(objects, deletes=False)
            run.initialise()
            version = 0
            while not stop.is_set():
                version += 1
                for fragment in (0, 1):
                    run.publish(fragment, version, record_at(2 * version + fragment))
                begun.set()
            return version

    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(run)
        try:
            assert begun.wait(300)
            for _ in range(4):
                first, second = copied(tmp_path / "run", place).versions
                saved = read_newest(open_store(place))
                assert tuple(each.version for each in saved.fragments) == (first, second)
                assert saved.record is not None
                assert saved.record["step"] == first + second + 1
        finally:
            stop.set()
        assert published.result() > 1
    assert check(open_store(place)).problems == []


def test_the_way_back_is_a_copy_too(place: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    copied(tmp_path / "run", place)
    copied(place, tmp_path / "restored")
    assert started(tmp_path / "restored") == {0: 3, 1: 0}
    origin, copy_ = (read_manifest(open_store(each)) for each in (tmp_path / "run", place))
    restored = read_manifest(open_store(tmp_path / "restored"))
    assert restored.epoch > copy_.epoch > origin.epoch  # `started` has claimed it


def test_objects_that_are_damaged_in_the_copy_are_brought_again(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    copied(tmp_path / "run", tmp_path / "copy")
    newest = read_manifest(open_store(tmp_path / "run")).fragments[0][0]
    flip(0.9)(tmp_path / "copy" / "objects" / newest.held)
    (tmp_path / "copy" / "objects" / str(newest.update)).unlink()
    assert copied(tmp_path / "run", tmp_path / "copy").num_objects == 2
    assert check(open_store(tmp_path / "copy")).problems == []


class Superseded(Directory):
    """A run that is published faster than it is read: the newest version of fragment 0 is superseded before a reader
    has its update, so many times."""

    def __init__(self, path: Path, times: float) -> None:
        super().__init__(path)
        self._times = times

    def get(self, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        manifest = read_manifest(self)
        newest = manifest.fragments[0][0]
        if self._times > 0 and name == newest.update:  # its version was read before
            self._times -= 1
            run = SmallRun(self)
            run.claim()
            for number in (1, 2):
                run.publish(0, newest.version + number)
            run.release()
        return super().get(name, start, stop)


def test_a_copy_that_is_slower_than_the_run_keeps_what_it_has_and_leaves_nothing_else(
    place: str, tmp_path: Path
) -> None:
    make_run(tmp_path / "run")
    put: list[str] = []
    with Superseded(tmp_path / "run", 2) as source, opened(place, lock=True) as target:
        write = target.put
        target.put = lambda name, parts: (put.append(name), write(name, parts))[1]  # type: ignore[method-assign]
        copy(source, target)
    versions, names = state_of(place)
    assert versions == (7, 0)
    assert set(names) == read_manifest(open_store(place)).names
    assert len(put) == len(set(put))
    go_on(tmp_path / "run", lambda run: run.publish(0, 8))
    with Superseded(tmp_path / "run", float("inf")) as source, opened(place, lock=True) as target:
        target.put(read_manifest(target).fragments[0][0].held, [b"damaged"])  # it is put again, and superseded
        with pytest.raises(StoreError, match="is missing"):
            copy(source, target)
    assert state_of(place) == (versions, names)


def test_a_copy_that_was_cut_off_is_continued_by_the_next(place: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run")

    def cut_off(number: int, *_: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    for version, num_missing in ((4, 4), (5, 2)):  # the first copy is to an empty place
        with opened(place, lock=True) as target, pytest.raises(KeyboardInterrupt):
            copy(open_store(tmp_path / "run"), target, cut_off)
        assert copied(tmp_path / "run", place).num_objects == num_missing
        go_on(tmp_path / "run", lambda run, it=version: [run.publish(index, it) for index in (0, 1)])  # type: ignore[misc]
    with opened(place, lock=True) as target, pytest.raises(KeyboardInterrupt):
        copy(open_store(tmp_path / "run"), target, cut_off)
    go_on(tmp_path / "run", lambda run: [run.publish(index, version) for version in (6, 7) for index in (0, 1)])
    copied(tmp_path / "run", place)
    versions, names = state_of(place)
    assert versions == (7, 7)
    left = set(names) - read_manifest(open_store(place)).names
    assert bool(left) == is_url(place)  # in a bucket another copy may be under way: the next syncer on it deletes them
    assert check(open_store(place)).problems == []


# --- refusals: one sentence, and the target is as it was --------------------------------------------------------------


def refused(source: Path | str, place: Path | str, words: str, error: type[Exception] = StoreError) -> None:
    before = state_of(place)
    with pytest.raises(error, match=words) as caught:
        copied(source, place)
    assert "\n" not in str(caught.value)
    assert state_of(place) == before


def test_a_place_is_of_one_run(place: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    make_run(tmp_path / "other", run_id="1" * 32)
    copied(tmp_path / "run", place)
    refused(tmp_path / "other", place, r"holds another run \('demo', id 0+\) than .*/other .*; use another place")


def test_a_later_state_is_not_replaced_by_an_earlier_one(place: str, tmp_path: Path) -> None:
    """The state of a syncer that was taken over, and was started again; or a copy that was served meanwhile."""
    make_run(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "left behind")
    go_on(tmp_path / "run", lambda run: run.publish(0, 4))
    copied(tmp_path / "run", place)
    refused(tmp_path / "left behind", place, r"holds a later state of the run, epoch \d+, than .*; move it away")
    with opened(place, lock=True) as objects:
        served = SmallRun(objects)
        served.claim()
        served.release()
    refused(tmp_path / "run", place, "holds a later state")
    refused(tmp_path / "left behind", tmp_path / "run", "holds a later state")
    copied(place, tmp_path / "run")
    assert started(tmp_path / "run") == {0: 4, 1: 0}


def test_a_copy_goes_back_only_in_the_place_of_an_earlier_state(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    copied(tmp_path / "run", tmp_path / "copy")
    go_on(tmp_path / "run", lambda run: run.publish(0, 4))
    refused(tmp_path / "copy", tmp_path / "run", "holds a later state of the run")
    copied(tmp_path / "run", tmp_path / "copy")
    copied(tmp_path / "copy", tmp_path / "copy of the copy")
    go_on(tmp_path / "run", lambda run: run.publish(0, 5))
    copied(tmp_path / "run", tmp_path / "copy of the copy")
    assert started(tmp_path / "copy of the copy") == {0: 5, 1: 0}


def test_a_target_that_is_served_is_refused(place: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    copied(tmp_path / "run", place)
    objects: Any = open_store(place, lock=True)
    if isinstance(objects, Directory):
        with objects:
            refused(tmp_path / "run", place, "is in use by process")
    else:
        manifest = replace(read_manifest(objects), boot=9, address="paris:7700")
        objects.swap(manifest.to_bytes(), objects.manifest().token)
        refused(tmp_path / "run", place, "is served by the syncer at paris:7700; stop it, or use another place")


def test_a_damaged_run_is_not_copied(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    copied(tmp_path / "run", tmp_path / "copy")
    go_on(tmp_path / "run", lambda run: run.publish(0, 4))
    newest = read_manifest(open_store(tmp_path / "run")).fragments[0][0]
    flip(0.9)(tmp_path / "run" / "objects" / newest.held)
    before = (tmp_path / "copy" / "manifest.json").read_bytes()
    with pytest.raises(DamagedObjectError, match=f"{newest.held} of .*; `diloco syncer check {tmp_path}/run`"):
        copied(tmp_path / "run", tmp_path / "copy")
    assert (tmp_path / "copy" / "manifest.json").read_bytes() == before
    assert started(tmp_path / "copy") == {0: 3, 1: 0}


def test_what_cannot_be_copied_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run in .*/absent; check the path"):
        copied(tmp_path / "absent", tmp_path / "copy")
    with Directory(tmp_path / "claimed") as objects:
        SmallRun(objects).claim()
    with pytest.raises(NotInitialisedError, match="no model yet"):
        copied(tmp_path / "claimed", tmp_path / "copy")
    make_run(tmp_path / "run")
    refused(tmp_path / "run", tmp_path / "run", "cannot be copied to itself", ConfigError)
    (tmp_path / "link").symlink_to("run")
    state = contents(tmp_path / "run")
    for same in (f"{tmp_path}/./run", tmp_path / "link"):
        refused(tmp_path / "run", same, "cannot be copied to itself", ConfigError)
    assert contents(tmp_path / "run") == state
    for url in ("nonsense://there", "s3:/bucket/run", "file:/tmp/run"):
        with pytest.raises(ConfigError, match=f"{url} is not the URL of a bucket"):
            copied(tmp_path / "run", url)


def test_a_swap_of_another_writer_refuses_the_copy(tmp_path: Path) -> None:
    """Between the read of the target's manifest and the swap: as two copies to one bucket."""
    make_run(tmp_path / "run")
    copied(tmp_path / "run", tmp_path / "copy")
    go_on(tmp_path / "run", lambda run: run.publish(0, 4))

    class Raced(Directory):
        def put(self, name: str, parts: Any) -> None:
            super().put(name, parts)
            found = self.manifest()
            assert found is not None
            manifest = Manifest.from_bytes(found.data, self.name)
            super().swap(replace(manifest, serial=manifest.serial + 1).to_bytes(), found.token)

    with Raced(tmp_path / "copy") as target, pytest.raises(StoreError, match="is not the one that was read"):
        copy(open_store(tmp_path / "run"), target)
    assert started(tmp_path / "copy") == {0: 3, 1: 0}


# --- the schedule -----------------------------------------------------------------------------------------------------


def run_copies(
    plan: CopyPlan, source: Objects, log: Path, kind: type[Copied | CopyRefused], standings: Iterable[bool] = ()
) -> Any:
    """The first event of a kind. `standings`: whether the process serves the run at each time; then it does."""
    serves = itertools.chain(standings, itertools.repeat(True))

    def found() -> list[Any]:
        return [each for each in read_events(log) if isinstance(each, kind)] if log.exists() else []

    with EventLog(log, who="syncer") as events:
        copies = Copies(plan, source, events)
        copies.start(lambda: next(serves))
        until(found, f"no {kind.__name__}")
        copies.close()
    return found()[0]


def test_a_process_that_waits_copies_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    asked: list[int] = []

    def standing() -> Iterator[bool]:
        for number in range(3):
            assert not (tmp_path / "copy").exists()
            asked.append(number)
            yield False

    with Directory(tmp_path / "run") as source:
        plan = CopyPlan(str(tmp_path / "copy"), 0.01)
        run_copies(plan, source, tmp_path / "events.jsonl", Copied, standing())
    assert asked == [0, 1, 2]


def test_a_schedule_copies_and_goes_on_after_a_refusal(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    make_run(tmp_path / "other", run_id="1" * 32)
    with Directory(tmp_path / "run") as source:
        plan = CopyPlan(str(tmp_path / "other"), 0.01)
        event = run_copies(plan, source, tmp_path / "refused.jsonl", CopyRefused)
        assert (event.place, "holds another run" in event.error) == (plan.place, True)
        plan = CopyPlan(str(tmp_path / "copy"), 3600.0)
        event = run_copies(plan, source, tmp_path / "events.jsonl", Copied)
        assert (event.place, event.versions) == (plan.place, (3, 0))
        assert event.num_bytes == copied_bytes(plan.place)
    assert started(tmp_path / "copy") == {0: 3, 1: 0}
    with EventLog(tmp_path / "x", who="syncer") as events:
        with pytest.raises(ConfigError, match="is not the URL of a bucket"):
            Copies(CopyPlan("nonsense://there", 1.0), open_store(tmp_path / "run"), events)


def test_the_first_copy_is_due_by_the_newest_one() -> None:
    assert due_in_s(None, 1000.0, 60.0) == 0.0
    assert due_in_s(990.0, 1000.0, 60.0) == 50.0
    assert due_in_s(900.0, 1000.0, 60.0) == 0.0
    assert due_in_s(5000.0, 1000.0, 60.0) == 60.0  # a clock that was set back


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")

    def call(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["copy", *map(str, arguments)])
        return ended.value.code or 0, *capsys.readouterr()

    code, out, _ = call(tmp_path / "run", place, "--json")
    assert code == 0
    value = json.loads(out)
    assert (value["run"], value["versions"], value["num_objects"]) == ("demo", [3, 0], 6)
    code, out, _ = call(place, tmp_path / "restored")
    assert (code, out) == (
        0,
        f"{tmp_path}/restored has versions [3, 0] of run 'demo' ({1e-6 * value['num_bytes']:.1f} MB copied)\n",
    )
    code, _, err = call(tmp_path / "absent", tmp_path / "nothing")
    assert (code, err.count("\n")) == (2, 1)
    assert not (tmp_path / "nothing").exists()
    assert objects_of(tmp_path / "restored")


@pytest.mark.slow
def test_packs_of_groups_are_copied_and_checked(tmp_path: Path) -> None:
    data = b"groups of completions" * 100
    make_run(tmp_path / "run")
    with Directory(tmp_path / "run") as objects:
        run = SmallRun(objects)
        run.claim()
        name = run.put(Blob(hashlib.sha256(data).hexdigest(), (data[:50], data[50:])))
        run.swap(replace(run.manifest.with_packs({4: name}, {4}, keep=5), boot=0))
        assert (run.manifest.packs, run.manifest.keep) == (((4, name),), 5)
    with opened(str(tmp_path / "run")) as source, Directory(tmp_path / "copy") as target:
        copy(source, target)
        assert bytes(target.get(name)) == data
        assert read_manifest(target).packs == ((4, name),)
        assert check(target).notes == []
    flip(0.5)(tmp_path / "run" / "objects" / name)
    with opened(str(tmp_path / "run")) as source, Directory(tmp_path / "other") as target:
        found = check(source)
        assert found.starts
        assert [(each.name, each.what) for each in found.notes] == [
            (name, "is damaged: groups of completions, which end as refused")
        ]
        with pytest.raises(DamagedObjectError, match="groups of completions"):
            copy(source, target)
