"""The store against real disks, real limits and real kills."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.store.small_run import (
    LAYOUT,
    METHOD,
    STATIC,
    check,
    files,
    initialise,
    lengthen,
    merged_of,
    newest_file,
    publish,
    theta_of,
)

from diloco.core.layout import digest
from diloco.errors import AlreadyInitialisedError, NotInitialisedError, StoreError, VersionError
from diloco.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "run") as store:
        initialise(store)
        yield store


def contents(path: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {str(each): each.read_bytes() for each in path.rglob("*") if each.is_file()}


# what goes in comes out


def test_nothing_is_there_before_initialise(tmp_path: Path) -> None:
    with Store(tmp_path / "deep" / "run") as store:
        assert store.load() is None
        with pytest.raises(NotInitialisedError, match="initialise the run first"):
            publish(store, 0, 1)


def test_a_run_comes_back_after_reopening(store: Store) -> None:
    record = {"members": {"site-a": {"step": 40, "step_s": 0.5}}, "accounts": [1, None, "x"]}
    store.publish(merged_of(1, 1), record)
    store.close()
    with Store(store.path) as again:
        saved = again.load()
        assert saved is not None
        assert (saved.run, saved.method, saved.layout, saved.source) == ("demo", METHOD, LAYOUT, "seed 17")
        assert (saved.step, saved.tokens, saved.record, saved.static) == (3, 5, record, STATIC)
        assert saved.contributors == ((), ("site-a", "site-b"))
        assert saved.fragments[0].outer_state == {}
        assert saved.fragments[0].residual is None
        check(again, {0: 0, 1: 1})


def test_a_record_can_be_saved_between_publications(store: Store) -> None:
    for step in (1, 2):
        store.save_record({"step": step})
    saved = store.load()
    assert saved is not None
    assert saved.record == {"step": 2}
    check(store, {0: 0, 1: 0})


def test_there_is_no_record_before_the_model(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        with pytest.raises(NotInitialisedError, match="initialise the run first"):
            store.save_record({"step": 1})
        initialise(store)
        saved = store.load()
        assert saved is not None
        assert saved.record is None


def test_a_publication_takes_as_long_however_long_the_history_is(store: Store) -> None:
    """By the steps of SQLite's machine."""

    def steps_of(version: int) -> int:
        steps = Counter[str]()
        store._db.set_progress_handler(lambda: steps.update("1"), 1)
        publish(store, 0, version)
        store._db.set_progress_handler(None, 1)
        return steps.total()

    publish(store, 0, 1)
    few = steps_of(2)
    lengthen(store.path, 2000)
    assert few > 0
    assert steps_of(3) == few


def test_a_run_is_initialised_once(store: Store) -> None:
    publish(store, 0, 1)
    before = files(store)
    with pytest.raises(AlreadyInitialisedError, match="'demo'"):
        initialise(store, "other")
    assert files(store) == before
    check(store, {0: 1, 1: 0})


def test_two_versions_of_a_fragment_are_kept(store: Store) -> None:
    for version in range(1, 6):
        publish(store, 0, version)
    assert [name.split("-")[:2] for name in files(store)[:-1]] == [
        ["f00000", "v000000004"],
        ["f00000", "v000000005"],
        ["f00001", "v000000000"],
    ]


@pytest.mark.parametrize("version", [0, 1, 3])
def test_versions_follow_one_another(store: Store, version: int) -> None:
    publish(store, 0, 1)
    with pytest.raises(VersionError, match="publish version 2 next"):
        publish(store, 0, version)
    check(store, {0: 1, 1: 0})


def test_writers_and_readers_may_share_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    initialise(store)
    failures: list[BaseException] = []

    def work(fragment: int) -> None:
        try:
            for version in range(1, 11):
                publish(store, fragment, version)
                saved = store.load()
                assert saved is not None
                assert saved.fragments[fragment].version == version
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(fragment,)) for fragment in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    check(store, {0: 10, 1: 10})
    store.close()


# one syncer per directory


def test_a_second_syncer_cannot_open_the_directory(store: Store) -> None:
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()} on "):
        Store(store.path)
    store.close()
    with Store(store.path) as again:
        check(again, {0: 0, 1: 0})


@pytest.mark.parametrize(("format_", "words"), [(99, "upgrade diloco"), (3, "before the first release")])
def test_another_format_is_refused_and_left_as_it_is(store: Store, format_: int, words: str) -> None:
    store.close()
    with sqlite3.connect(store.path / "store.sqlite") as db:
        db.execute(f"PRAGMA user_version = {format_}")
    db.close()
    before = contents(store.path)
    with pytest.raises(StoreError, match=f"format {format_}.* {words}"):
        Store(store.path)
    assert contents(store.path) == before  # SQLite leaves no log behind either


def test_something_else_under_the_name_of_the_database_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="could not be opened"):
        Store(tmp_path)


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="could not be opened"):
        Store(tmp_path / "file" / "run")


# damage is found, never skipped


@pytest.mark.parametrize("damage", ["truncated", "one bit", "missing"])
def test_a_damaged_version_is_named_and_nothing_older_takes_its_place(store: Store, damage: str) -> None:
    publish(store, 1, 1)
    path = newest_file(store, 1)
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[:-1])
    else:
        data[-7] ^= 1
        path.write_bytes(data)
    store.close()
    with Store(store.path) as again:
        with pytest.raises(StoreError, match=rf"{path.name} \(fragment 1, version 1\) is (damaged|missing)"):
            again.load()
        assert len(list((store.path / "tensors").glob("f00001-v000000000-*"))) == 1  # still there to be repaired


@pytest.mark.parametrize("place", ["length", "header", "outer.steps", "outer.momentum", "residual", "theta"])
def test_a_flipped_bit_anywhere_in_a_version_is_found(store: Store, place: str) -> None:
    publish(store, 1, 1)
    path = newest_file(store, 1)
    data = bytearray(path.read_bytes())
    end_of_header = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:end_of_header])
    tensors = {name: entry["data_offsets"][0] for name, entry in entries.items() if name != "__metadata__"}
    positions = {"length": 0, "header": 12} | {name: end_of_header + first + 1 for name, first in tensors.items()}
    data[positions[place]] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=rf"{path.name} \(fragment 1, version 1\) is damaged"):
        store.load()


def test_a_versions_file_is_bound_to_the_digest_it_is_published_with(store: Store) -> None:
    other = digest(theta_of(0, 2))
    merged = merged_of(0, 1)
    merged = replace(merged, held=replace(merged.held, digest=other), update=replace(merged.update, digest=other))
    store.publish(merged, {})
    with pytest.raises(StoreError, match=r"\(fragment 0, version 1\) is damaged"):
        store.load()


def test_a_versions_file_is_plain_safetensors(store: Store) -> None:
    publish(store, 0, 1)
    tensors = safetensors.torch.load_file(newest_file(store, 0))
    assert sorted(tensors) == ["outer.momentum", "outer.steps", "residual", "theta"]
    assert torch.equal(tensors["theta"], theta_of(0, 1))


def test_a_start_removes_what_a_write_left_and_sets_aside_what_no_version_names(store: Store) -> None:
    publish(store, 0, 1)
    before = files(store)
    store.close()
    unknown = "f00000-v000000002-0123abcd.safetensors"
    for round_ in range(2):
        for leftover in (".tmp-f00000-v000000002", unknown):
            (store.path / "tensors" / leftover).write_text(f"half a version {round_}")
        with Store(store.path) as again:
            (aside,) = again.tidy(again.load())
            assert aside.read_text() == f"half a version {round_}"
            assert files(again) == before
            check(again, {0: 1, 1: 0})
    with Store(store.path) as again:
        publish(again, 0, 2)
        assert sorted(path.name for path in (store.path / "set-aside").iterdir()) == [unknown, f"{unknown}.1"]


# faults that the disk reports


@pytest.mark.parametrize("point", ["written", "synced", "renamed", "directory synced", "inserted"])
def test_an_error_at_any_point_leaves_the_previous_version_and_can_be_retried(tmp_path: Path, point: str) -> None:
    failing: list[str] = []

    def at(reached: str) -> None:
        if reached in failing:
            raise OSError(5, "Input/output error")

    with Store(tmp_path, at=at) as store:
        initialise(store)
        failing.append(point)
        with pytest.raises(StoreError, match=r"version 1 of fragment 0 \(.*Input/output error\).* MB free"):
            publish(store, 0, 1)
        check(store, {0: 0, 1: 0})
        failing.clear()
        publish(store, 0, 1)
        check(store, {0: 1, 1: 0})
        assert len(files(store)) == 4  # fragment 0 twice, fragment 1, static


CHILD = """
import os, resource, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
from tests.store.small_run import check, files, initialise, publish
from diloco.errors import StoreError
from diloco.store.store import Store
torch.set_num_threads(1)
"""


def run_child(script: str, *arguments: object, wrapper: tuple[str, ...] = ()) -> str:
    command = [*wrapper, sys.executable, "-c", CHILD + script, str(Path(__file__).parents[2]), *map(str, arguments)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_files_may_not_grow_and_later_may(tmp_path: Path) -> None:
    """The kernel refuses writes beyond a size: first those of the tensors, then those of SQLite's log."""
    script = """
from pathlib import Path
def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
with Store(sys.argv[2]) as store:
    initialise(store)
    for version, num_bytes in ((1, 5000), (2, (store.path / "store.sqlite-wal").stat().st_size + 14000)):
        limit(num_bytes)
        try:
            publish(store, 0, version)
        except StoreError as error:
            print(error)
        check(store, {0: version - 1, 1: 0})
        limit(resource.RLIM_INFINITY)
        publish(store, 0, version)
        check(store, {0: version, 1: 0})
    names = files(store)
with Store(sys.argv[2]) as store:
    check(store, {0: 2, 1: 0})
    assert files(store) == names
"""
    first, second = run_child(script, tmp_path).splitlines()
    assert "version 1 of fragment 0" in first
    assert "File too large" in first
    assert "version 2 of fragment 0" in second
    assert "disk" in second


def test_a_full_disk(tmp_path: Path) -> None:
    """A file system of 1 MiB in a mount namespace of the child's own."""
    unshare = shutil.which("unshare")
    wrapper = (unshare or "", "--user", "--map-root-user", "--mount")
    if unshare is None or subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets no ordinary user make a mount namespace")
    script = """
import subprocess
from pathlib import Path
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", sys.argv[2]], check=True)
with Store(Path(sys.argv[2]) / "run") as store:
    initialise(store)
    ballast = Path(sys.argv[2]) / "ballast"
    done = 0
    for spare in (0, 4096, 8192, 12288, 16384, 20480, 24576, 32768):
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                file.truncate(max(0, file.tell() - spare))
        try:
            publish(store, 0, done + 1)
            done += 1
        except StoreError as error:
            print(error)
        check(store, {0: done, 1: 0})
        ballast.unlink()
        publish(store, 0, done + 1)
        done += 1
    names = files(store)
with Store(Path(sys.argv[2]) / "run") as store:
    check(store, {0: done, 1: 0})
    assert files(store) == names
"""
    lines = run_child(script, tmp_path, wrapper=wrapper).splitlines()
    assert len(lines) >= 3
    assert any("No space left on device" in line for line in lines)
    assert any("disk is full" in line or "disk I/O error" in line for line in lines)


# kills


def test_kill_at_every_point_of_a_publication(tmp_path: Path) -> None:
    script = """
def at_first(point):
    def at(reached):
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)
    return at

def killed(path, at, work):
    pid = os.fork()
    if not pid:
        work(Store(path, at=at))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, "the point was never reached"

points = ("written", "synced", "renamed", "directory synced", "inserted", "committed")
for number, point in enumerate(points):
    path = f"{sys.argv[2]}/{number}"
    if point != "inserted":
        killed(path, at_first(point), initialise)
        with Store(path) as store:
            if point == "committed":
                check(store, {0: 0, 1: 0})
            else:
                assert store.load() is None
                store.tidy(None)
                assert files(store) == []
    with Store(path) as store:
        if store.load() is None:
            initialise(store)
        publish(store, 0, 1)
    killed(path, at_first(point), lambda store: publish(store, 0, 2))
    with Store(path) as store:
        newest = 2 if point == "committed" else 1
        check(store, {0: newest, 1: 0})
        store.tidy(store.load())
        assert len(files(store)) == 4, files(store)
        publish(store, 0, newest + 1)
        check(store, {0: newest + 1, 1: 0})
    print(point)
"""
    assert run_child(script, tmp_path).splitlines() == [
        "written",
        "synced",
        "renamed",
        "directory synced",
        "inserted",
        "committed",
    ]


def test_kill_at_any_moment(tmp_path: Path) -> None:
    """A publisher is killed while it runs at full speed; whatever it had reported as published is there."""
    script = """
with Store(sys.argv[2]) as store:
    initialise(store)
newest = 0
for round_ in range(12):
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        store = Store(sys.argv[2])
        for version in range(newest + 1, newest + 1000):
            publish(store, 0, version)
            os.write(writing, version.to_bytes(4, "big"))
        os._exit(0)
    os.close(writing)
    reported = newest
    for _ in range(1 + round_ % 5):
        reported = int.from_bytes(os.read(reading, 4), "big")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while rest := os.read(reading, 4):
        reported = int.from_bytes(rest, "big")
    os.close(reading)
    with Store(sys.argv[2]) as store:
        newest = store.load().fragments[0].version
        assert newest in (reported, reported + 1), (newest, reported)
        check(store, {0: newest, 1: 0})
print(newest >= 30)
"""
    assert run_child(script, tmp_path) == "True\n"
