"""One suite for the real disk and the simulated one: at each durable step of each write the disk refuses, or the power
is cut.

What was acknowledged is there afterwards, whole; of what was under way all is there or nothing; and the run goes on.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
import torch
from diloco.store.store import Store
from tests.store.small_run import LAYOUT, METHOD, STATIC, held_of, merged_of, theta_of

from diloco.errors import AlreadyInitialisedError, NotInitialisedError, StoreError, VersionError
from diloco.run.memory import POINTS, MemoryStore
from diloco.run.ports import InitialModel, SavedRun


class Cut(BaseException):
    """The power is gone: nothing that the process would still do is done."""


@dataclass
class Fault:
    """What happens when a durable step is reached for the n-th time."""

    point: str
    kind: Literal["refused", "cut", "torn"]
    countdown: int = 1

    def is_due(self, point: str) -> bool:
        self.countdown -= point == self.point
        return point == self.point and self.countdown == 0


class Disk(Protocol):
    """A disk that a store is opened on, again and again."""

    fault: Fault | None

    def open(self) -> Any: ...
    def close(self) -> None: ...


class RealDisk:
    """A directory. Where the power is cut, the next store opens a copy made at that moment; torn: its unsynced file is
    half there."""

    def __init__(self, root: Path) -> None:
        self.fault: Fault | None = None
        self._root, self._number = root, 0
        self._store: Store | None = None

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def open(self) -> Store:
        self.close()
        self._store = Store(self._path, at=self._at)
        self._store.tidy(self._store.load())
        return self._store

    @property
    def _path(self) -> Path:
        return self._root / str(self._number)

    def _at(self, point: str) -> None:
        if self.fault is None or not self.fault.is_due(point):
            return
        if self.fault.kind == "refused":
            raise OSError(errno.ENOSPC, "No space left on device")
        before = self._path
        self._number += 1
        shutil.copytree(before, self._path)
        for file in (self._path / "tensors").glob(".tmp-*") if self.fault.kind == "torn" else ():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        raise Cut


class SimulatedDisk:
    """Memory that outlives the process."""

    def __init__(self, _: Path) -> None:
        self.fault: Fault | None = None
        self._store: MemoryStore[Any, Any] = MemoryStore(self._at)

    def close(self) -> None:
        return

    def open(self) -> MemoryStore[Any, Any]:
        return self._store

    def _at(self, point: str) -> None:
        if self.fault is not None and self.fault.is_due(point):
            raise OSError(errno.ENOSPC, "No space left on device") if self.fault.kind == "refused" else Cut


@pytest.fixture(params=[RealDisk, SimulatedDisk], ids=["real", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    it: Disk = request.param(tmp_path)
    yield it
    it.close()


MODEL = InitialModel(LAYOUT, (held_of(0, 0), held_of(1, 0)), STATIC, "site-a", "seed 17", "0" * 32, step=3, tokens=5)

State = tuple[tuple[int, int], int | None] | None
"""Versions of both fragments, and the number in the record; None: no run."""

WRITES: list[tuple[Callable[[Any], None], State]] = [
    (lambda store: store.initialise("demo", METHOD, MODEL), ((0, 0), None)),
    (lambda store: store.save_record({"step": 1}), ((0, 0), 1)),
    (lambda store: store.publish(merged_of(0, 1), {"step": 2}), ((1, 0), 2)),
    (lambda store: store.publish(merged_of(1, 1), {"step": 3}), ((1, 1), 3)),
    (lambda store: store.save_record({"step": 4}), ((1, 1), 4)),
    (lambda store: store.publish(merged_of(0, 2), {"step": 5}), ((2, 1), 5)),
    (lambda store: store.publish(merged_of(0, 3), {"step": 6}), ((3, 1), 6)),
]
"""Each write, and what is durable after it."""


def state_of(store: Any) -> State:
    saved: SavedRun[Any] | None = store.load()
    if saved is None:
        return None
    for index, held in enumerate(saved.fragments):  # whole, and what was written
        assert torch.equal(held.theta, theta_of(index, held.version))
        assert held.digest == held_of(index, held.version).digest
        assert saved.contributors[index] == (("site-a", "site-b") if held.version else ())
    assert (saved.run, saved.step, saved.tokens, saved.static) == ("demo", 3, 5, STATIC)
    first, second = saved.fragments
    return (first.version, second.version), None if saved.record is None else saved.record["step"]


CASES = [
    (number, point)
    for number in (0, 1, 2, 5)  # the run's beginning, a record, a version, and one that supersedes an older one
    for point in POINTS
    if point in POINTS[-2:] or number != 1  # a record has no file
]


@pytest.mark.parametrize(("number", "point"), [case for case in CASES if case[1] != "committed"])
def test_a_disk_that_refuses_has_what_it_had_and_takes_the_same_write_later(
    number: int, point: str, disk: Disk
) -> None:
    store = disk.open()
    for write, _ in WRITES[:number]:
        write(store)
    before = state_of(store)
    disk.fault = Fault(point, "refused")
    with pytest.raises(StoreError, match="No space left on device"):
        WRITES[number][0](store)
    assert state_of(store) == before
    assert state_of(disk.open()) == before
    store = disk.open()
    for write, after in WRITES[number:]:
        write(store)
        assert state_of(store) == after


@pytest.mark.parametrize(
    ("number", "point", "kind"),
    [*((*case, "cut") for case in CASES), *((*case, "torn") for case in CASES if case[1] == "written")],
)
def test_what_was_acknowledged_survives_a_power_cut(
    number: int, point: str, kind: Literal["cut", "torn"], disk: Disk
) -> None:
    store = disk.open()
    for write, _ in WRITES[:number]:
        write(store)
    before, after = state_of(store), WRITES[number][1]
    disk.fault = Fault(point, kind)
    with pytest.raises(Cut):
        WRITES[number][0](store)
    store = disk.open()
    found = state_of(store)
    assert found == (after if point == "committed" else before)
    for write, then in WRITES[number + (found == after) :]:
        write(store)
        assert state_of(store) == then
    assert state_of(disk.open()) == WRITES[-1][1]


def test_wrong_use_is_refused_alike(disk: Disk) -> None:
    store = disk.open()
    for write in (WRITES[1][0], WRITES[2][0]):
        with pytest.raises(NotInitialisedError):
            write(store)
    WRITES[0][0](store)
    with pytest.raises(AlreadyInitialisedError, match="'demo'"):
        WRITES[0][0](store)
    with pytest.raises(VersionError):
        store.publish(merged_of(0, 2), {"step": 1})
    with pytest.raises(TypeError):
        store.save_record({"step": object()})
    assert state_of(store) == ((0, 0), None)
