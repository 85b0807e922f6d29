"""A store in a directory against real disks, real limits, real kills and real races."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.store.small_run import (
    SmallRun,
    check_versions,
    contents,
    make_run,
    objects_of,
    started,
)

from diloco.errors import MissingObjectError, StoreError, SwapRefusedError
from diloco.protocol.manifest import FORMAT, Manifest
from diloco.store import directory
from diloco.store.directory import Directory, lock_directory, network_type
from diloco.store.repair import repair

POINTS = ("written", "synced", "renamed", "names synced", "swapped", "committed")
"""The durable steps of a put and of a swap. A version exists from "swapped" on."""

NAME, OTHER = (f"1/{number}-{str(number) * 64}" for number in (1, 2))


# --- objects ----------------------------------------------------------------------------------------------------------


def test_parts_of_objects_come_back(tmp_path: Path) -> None:
    with Directory(tmp_path / "deep" / "run") as objects:
        objects.put(NAME, [b"ab", memoryview(b"cdef"), b""])
        objects.put(OTHER, [])
        assert objects.list() == [NAME, OTHER]
        assert bytes(objects.get(NAME)) == b"abcdef"
        assert bytes(objects.get(NAME, 2)) == b"cdef"
        assert bytes(objects.get(NAME, 1, 4)) == b"bcd"
        assert bytes(objects.get(NAME, 4, 99)) == b"ef"
        assert bytes(objects.get(NAME, 99, 100)) == bytes(objects.get(OTHER)) == b""
        objects.delete([NAME, NAME, "7/1-" + "0" * 64])
        assert objects.list() == [OTHER]
        with pytest.raises(MissingObjectError, match=f"{NAME} is missing"):
            objects.get(NAME)
        objects.delete([OTHER])
        assert list((objects.path / "objects").iterdir()) == []  # also of the epoch
        objects.put(NAME, [b"again"])
        assert bytes(objects.get(NAME)) == b"again"


def test_a_large_object_is_in_memory_of_its_own(tmp_path: Path) -> None:
    data = bytes(range(256)) * (5 << 12)
    with Directory(tmp_path) as objects:
        objects.put(NAME, [data])
        found = objects.get(NAME, 1)
        assert found == data[1:]
        found[0] = 255
        assert bytes(objects.get(NAME, 0, 2)) == b"\0\1"


def test_files_with_other_names_are_left_alone(tmp_path: Path) -> None:
    with Directory(tmp_path) as objects:
        objects.put(NAME, [b"x"])
    for name in ("mine", "1/mine", f"x/{NAME.partition('/')[2]}"):
        (tmp_path / "objects" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "objects" / name).write_text("mine")
    leftovers = tmp_path / ".tmp-manifest.json", tmp_path / "objects" / "1" / ".tmp-half"
    for leftover in leftovers:
        leftover.write_text("half")
    with Directory(tmp_path) as objects:
        assert objects.list() == [NAME]
        assert not any(leftover.exists() for leftover in leftovers)
    assert objects_of(tmp_path) == sorted([NAME, "1/mine", f"x/{NAME.partition('/')[2]}"])
    assert (tmp_path / "objects" / "mine").read_text() == "mine"


def test_what_is_no_file_is_no_object(tmp_path: Path) -> None:
    with Directory(tmp_path) as objects:
        (tmp_path / "objects" / NAME).mkdir(parents=True)
        (tmp_path / "objects" / OTHER).symlink_to(tmp_path / "nowhere")
        for name in (NAME, OTHER, "9/1-" + "0" * 64):
            with pytest.raises(MissingObjectError):
                objects.get(name)


# --- the manifest -----------------------------------------------------------------------------------------------------


def test_a_manifest_is_swapped_only_for_the_one_that_was_read(tmp_path: Path) -> None:
    with Directory(tmp_path) as objects:
        assert objects.manifest() is None
        with pytest.raises(SwapRefusedError):
            objects.swap(b"first", "another")
        first = objects.swap(b"first", None)
        with pytest.raises(SwapRefusedError):
            objects.swap(b"second", None)
        second = objects.swap(b"second", first)
        with pytest.raises(SwapRefusedError):
            objects.swap(b"third", first)
        found = objects.manifest()
        assert found is not None
        assert (found.data, found.token) == (b"second", second)


def test_a_directory_can_be_read_while_it_is_locked_and_reading_changes_nothing(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    before = contents(tmp_path)
    with Directory(tmp_path / "run"):
        reader = Directory(tmp_path / "run", lock=False)
        check_versions(reader, {0: 3, 1: 0})
        assert len(reader.list()) == len(objects_of(tmp_path / "run"))
    absent = Directory(tmp_path / "absent", lock=False)
    assert (absent.manifest(), absent.list()) == (None, [])
    assert contents(tmp_path) == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run"]


def test_everything_is_on_the_disk_before_the_manifest_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order of the calls: a power cut cannot be tried here."""
    calls: list[tuple[str, str]] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        calls.append(("sync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))

    def renamed(path: Path, target: Path) -> Path:
        calls.append(("rename", f"{path} {target}"))
        return replace(path, target)

    with Directory(tmp_path / "run") as objects:
        run = SmallRun(objects, deletes=False)
        run.initialise()
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(Path, "replace", renamed)
        run.publish(0, 1)
        run.claim()
        run.publish(0, 2)
    root = tmp_path / "run"
    swaps = [
        at for at, (kind, what) in enumerate(calls) if kind == "rename" and what.endswith(" " + f"{root}/manifest.json")
    ]
    assert len(swaps) == 3
    for at, (kind, what) in enumerate(calls):
        if kind != "rename":
            continue
        temporary, target = what.split(" ")
        assert ("sync", temporary) in calls[:at]
        swap = next(place for place in swaps if place >= at)
        names = [str(root)] if swap == at else [str(Path(target).parent)]
        names += [f"{root}/objects"] if target.startswith(f"{root}/objects/2/") and swap == swaps[2] else []
        for name in names:  # those of the manifest after its rename, those of objects between theirs and the manifest's
            assert ("sync", name) in (calls[at + 1 :] if swap == at else calls[at + 1 : swap]), (name, calls)


# --- one syncer per directory -----------------------------------------------------------------------------------------


def test_a_second_process_cannot_lock_the_directory(tmp_path: Path) -> None:
    with Directory(tmp_path):
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()} on .*; stop that syncer"):
            Directory(tmp_path)
    Directory(tmp_path).close()


@pytest.mark.parametrize("name", ["store.sqlite", "tensors", "run.json"])
def test_an_earlier_format_is_refused_and_left_as_it_is(tmp_path: Path, name: str) -> None:
    if name == "tensors":
        (tmp_path / name).mkdir()
        (tmp_path / name / "static").write_text("x")
    else:
        (tmp_path / name).write_text("x")
    before = contents(tmp_path)
    for lock in (True, False):
        with pytest.raises(
            StoreError, match=rf"first release \(it has {name}\).*; start a new run in another"
        ) as caught:
            Directory(tmp_path, lock=lock)
        assert "\n" not in str(caught.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("by", "advice"), [(1, "upgrade diloco to open it"), (-1, "use the version of diloco that wrote it")]
)
def test_another_format_is_refused_and_repaired_by_nobody(tmp_path: Path, by: int, advice: str) -> None:
    make_run(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = Manifest.from_bytes(path.read_bytes(), "here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diloco.protocol.manifest.FORMAT", FORMAT + by)
        path.write_bytes(data := manifest.to_bytes())
    says = f"format {FORMAT + by} and this version reads {FORMAT}; {advice}"
    with pytest.raises(StoreError, match=says):
        started(tmp_path)
    with Directory(tmp_path) as objects, pytest.raises(StoreError, match=says):
        repair(objects)
    assert path.read_bytes() == data


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="could not be opened"):
        Directory(tmp_path / "file" / "run")
    with pytest.raises(StoreError, match="is a file; name a directory"):
        Directory(tmp_path / "file")


MOUNTS = r"""/dev/vda / ext4 rw,relatime 0 0
server:/export /mnt/shared nfs4 rw,vers=4.2 0 0
/dev/vdb /mnt/shared/local xfs rw 0 0
//server/share /mnt/with\040space cifs rw 0 0
me@server:/all /mnt/ssh fuse.sshfs rw 0 0
mfs#server:9421 /workspace fuse rw 0 0
/dev/fuse /mnt/ntfs fuseblk rw 0 0
overlay /mnt/covered overlay rw 0 0
server:/x /mnt/covered nfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", None), ("/srv/run", None), ("/mnt/shared", "nfs4"), ("/mnt/shared/a/b", "nfs4"), ("/mnt/shared2", None),
        ("/mnt/shared/local/a", None), ("/mnt/with space/a", "cifs"), ("/mnt/ssh/run", "fuse.sshfs"),
        ("/workspace/run", "fuse"), ("/mnt/ntfs/run", None), ("/mnt/covered/run", "nfs"),
    ],
)  # fmt: skip
def test_network_file_systems_are_recognised(path: str, kind: str | None) -> None:
    assert network_type(MOUNTS, path) == kind


def test_a_directory_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounts").write_text(f"/dev/vda / ext4 rw 0 0\nserver:/export {tmp_path.resolve()}/nfs nfs4 rw 0 0\n")
    monkeypatch.setattr(directory, "MOUNTS", tmp_path / "mounts")
    (tmp_path / "nfs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nfs")
    for place in ("nfs", "nfs/deep/run", "link/run"):
        with pytest.raises(StoreError, match=r"network file system \(nfs4\).*a disk of this machine, or a bucket"):
            Directory(tmp_path / place)
    assert list((tmp_path / "nfs").iterdir()) == []
    assert Directory(tmp_path / "nfs" / "run", lock=False).manifest() is None  # to read from there is fine
    lock_directory(tmp_path / "local").close()


# --- faults that the disk reports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
def test_an_error_at_any_point_leaves_the_previous_version_or_the_new_one(tmp_path: Path, point: str) -> None:
    failing: list[str] = []

    def at(reached: str) -> None:
        if reached in failing:
            raise OSError(5, "Input/output error")

    with Directory(tmp_path, at=at) as objects:
        run = SmallRun(objects)
        run.initialise()
        failing.append(point)
        # the last points lie behind what can fail
        with pytest.raises((StoreError, OSError), match=r"Input/output error"):
            run.publish(0, 1)
        newest = 1 if point in ("swapped", "committed") else 0
        failing.clear()
        check_versions(objects, {0: newest, 1: 0})
        run = SmallRun(objects)
        run.publish(0, newest + 1)
        check_versions(objects, {0: newest + 1, 1: 0})
    assert not list(tmp_path.rglob(".tmp-*"))


def test_an_error_is_one_sentence_with_the_free_space(tmp_path: Path) -> None:
    def at(point: str) -> None:
        raise OSError(28, "No space left on device")

    with Directory(tmp_path, at=at) as objects:
        with pytest.raises(
            StoreError, match=r"written \(objects/1/1-1+\) \(No space left on device\); .* MB free; free"
        ):
            objects.put(NAME, [b"x"])
        assert objects.list() == []


def test_a_name_that_could_not_be_synced_is_synced_by_the_next_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swap has happened, but its sender cannot know; when it is sent again, it is refused, and durable."""
    fsync = os.fsync
    failed: list[str] = []

    def failing(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if is_directory and (tmp_path / "manifest.json").exists() and not failed:
            failed.append("once")
            raise OSError(5, "Input/output error")
        if is_directory and failed:
            failed.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    with Directory(tmp_path) as objects:
        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(StoreError, match="Input/output error"):
            objects.swap(b"first", None)
        with pytest.raises(SwapRefusedError):
            objects.swap(b"first", None)
        assert failed == ["once", str(tmp_path)]
        found = objects.manifest()
        assert found is not None
        assert found.data == b"first"


CHILD = """
import os, resource, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
from pathlib import Path
from tests.store.small_run import SmallRun, check_versions, objects_of
from diloco.errors import StoreError
from diloco.store.directory import Directory
torch.set_num_threads(1)
"""


def run_child(script: str, *arguments: object, wrapper: tuple[str, ...] = ()) -> str:
    command = [*wrapper, sys.executable, "-c", CHILD + script, str(Path(__file__).parents[2]), *map(str, arguments)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout


@pytest.mark.slow
def test_files_may_not_grow_and_later_may(tmp_path: Path) -> None:
    """The kernel refuses writes beyond a size: of a version, then of the record."""
    script = """
def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
with Directory(sys.argv[2]) as objects:
    run = SmallRun(objects)
    run.initialise()
    for version, num_bytes, record in ((1, 5000, None), (2, 20000, {"long": "x" * 30000})):
        limit(num_bytes)
        try:
            run.publish(0, version, record)
        except StoreError as error:
            print(error)
        check_versions(objects, {0: version - 1, 1: 0})
        limit(resource.RLIM_INFINITY)
        run.publish(0, version, record)
        check_versions(objects, {0: version, 1: 0})
"""
    first, second = run_child(script, tmp_path).splitlines()
    for line in (first, second):
        assert "File too large" in line
        assert "MB free" in line


def test_a_full_disk(tmp_path: Path) -> None:
    """A file system of 1 MiB in a mount namespace of the child's own."""
    unshare = shutil.which("unshare")
    wrapper = (unshare or "", "--user", "--map-root-user", "--mount")
    if unshare is None or subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets no ordinary user make a mount namespace")
    script = """
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", sys.argv[2]], check=True)
place = Path(sys.argv[2]) / "run"
with Directory(place) as objects:
    run = SmallRun(objects)
    run.initialise()
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
            run.publish(0, done + 1)
            done += 1
        except StoreError as error:
            print(error)
        check_versions(objects, {0: done, 1: 0})
        ballast.unlink()
        run.publish(0, done + 1)
        done += 1
with Directory(place) as objects:
    check_versions(objects, {0: done, 1: 0})
"""
    lines = run_child(script, tmp_path, wrapper=wrapper).splitlines()
    assert len(lines) >= 3
    assert all("No space left on device" in line for line in lines)


# --- kills ------------------------------------------------------------------------------------------------------------


def test_kill_at_every_point_of_a_publication(tmp_path: Path) -> None:
    """At each time that the point is reached: for the version, its update, its record."""
    script = """
def at_time(point, number):
    reached = []
    def at(name):
        reached.append(name)
        if reached.count(point) == number:
            os.kill(os.getpid(), signal.SIGKILL)
    return at

def killed(path, at, work):
    pid = os.fork()
    if not pid:
        work(SmallRun(Directory(path, at=at)))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, "the point was never reached"

for point in sys.argv[3:]:
    for number in (1, 2, 3) if point in ("written", "synced", "renamed") else (1,):
        path = Path(sys.argv[2]) / f"{point}-{number}"
        killed(path, at_time(point, number + (point in ("names synced", "swapped", "committed"))), SmallRun.initialise)
        with Directory(path) as objects:
            run = SmallRun(objects)
            assert bool(run.manifest.fragments) == (point in ("swapped", "committed"))
            if not run.manifest.fragments:
                run.initialise()
            run.publish(0, 1)
        killed(path, at_time(point, number), lambda run: run.publish(0, 2))
        with Directory(path) as objects:
            newest = 2 if point in ("swapped", "committed") else 1
            check_versions(objects, {0: newest, 1: 0})
            run = SmallRun(objects)
            run.claim()
            run.publish(0, newest + 1)
            check_versions(objects, {0: newest + 1, 1: 0})
        print(point)
"""
    assert len(run_child(script, tmp_path, *POINTS).splitlines()) == 3 * 3 + 3


@pytest.mark.slow
def test_kill_at_any_moment(tmp_path: Path) -> None:
    """A publisher is killed while it runs at full speed; whatever it had reported as published is there."""
    script = """
with Directory(sys.argv[2]) as objects:
    SmallRun(objects).initialise()
newest = 0
for round_ in range(12):
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        run = SmallRun(Directory(sys.argv[2]))
        run.claim()
        for version in range(newest + 1, newest + 1000):
            run.publish(0, version)
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
    with Directory(sys.argv[2]) as objects:
        newest = SmallRun(objects).manifest.versions[0]
        assert newest in (reported, reported + 1), (newest, reported)
        check_versions(objects, {0: newest, 1: 0})
print(newest >= 30)
"""
    assert run_child(script, tmp_path) == "True\n"


@pytest.mark.slow
def test_two_processes_that_race_never_lose_a_swap(tmp_path: Path) -> None:
    """Each opens the directory, reads a number, and swaps in the next one, as often as it gets the lock."""
    script = """
pids = []
for _ in range(2):
    pid = os.fork()
    if not pid:
        done = 0
        while done < 100:
            try:
                objects = Directory(sys.argv[2])
            except StoreError as error:
                assert "is in use by" in str(error), error
                continue
            with objects:
                found = objects.manifest()
                number = 0 if found is None else int(found.data)
                objects.swap(str(number + 1).encode(), None if found is None else found.token)
                done += 1
        os._exit(0)
    pids.append(pid)
print(*(os.waitpid(pid, 0)[1] for pid in pids), Directory(sys.argv[2], lock=False).manifest().data.decode())
"""
    assert run_child(script, tmp_path) == "0 0 200\n"
