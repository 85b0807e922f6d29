"""A hosted driver on a disk that is slow, in a process that stands still, and after a restart: no learner is forgotten
or evicted for it."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from tests.store.small_run import read_newest
from tests.syncer.runs import (
    RUN,
    LearnerThreads,
    Raw,
    fall_silent,
    layout,
    method,
    num_live,
    start,
    status_of,
    train,
    versions_of,
)
from tests.syncer.test_faults import syncer_process, until

import diloco
from diloco import events
from diloco.errors import DilocoError, RestartedError, UnreachableError
from diloco.event_log import EventLog, read_events
from diloco.exchange.dialling import fetch_status
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.rpc import path
from diloco.exchange.wire.tensors import bytes_of
from diloco.protocol.contribution import Contribution
from diloco.protocol.members import Claim, Deadlines, Report
from diloco.store.directory import Directory
from diloco.syncer.door.admission import LIMITS
from diloco.syncer.hosting import HostedDriver, SyncerDriver
from diloco.syncer.journal import Journal
from diloco.syncer.metrics import SyncerMetrics
from diloco.syncer.spool import Spool

SIZE = layout().fragments[0].numel
ONES = diloco.FP32().encode(torch.ones(SIZE))


@contextmanager
def driver_in(directory: Path, at: Callable[[str], None] = lambda _: None) -> Iterator[tuple[HostedDriver, Directory]]:
    """A run with two learners, "a" and "b"; `at` is told every durable step from then on."""
    tells: list[Callable[[str], None]] = []
    with (
        Directory(directory, at=lambda point: [tell(point) for tell in tells] and None) as store,
        EventLog(directory / "events.jsonl", who="syncer") as log,
    ):
        driver = HostedDriver(
            RUN,
            method(),
            store,
            Spool(directory, 1 << 20),
            deadlines=Deadlines(lost_floor_s=100.0),
            journal=Journal(log, SyncerMetrics(RUN)),
        )
        driver.start()
        initialise(driver)
        assert join(driver, "a") == join(driver, "b") == 1
        tells.append(at)
        yield driver, store
        driver.stop()


def initialise(driver: HostedDriver) -> None:
    thetas = [torch.ones(fragment.numel) for fragment in layout().fragments]
    model = driver.jobs.initial(layout(), thetas, b"", learner="a", source="test", run_id="0" * 32)

    def event(it: SyncerDriver, done: Callable[[DilocoError | None], None]) -> None:
        it.initialise(model, done)

    assert driver.wait_for(event) is None


def join(driver: HostedDriver, learner: str) -> int:
    def event(it: SyncerDriver, done: Callable[[int], None]) -> None:
        it.join(Claim(learner), layout(), done)

    return driver.wait_for(event)


def contribute(driver: HostedDriver, learner: str, step: int = 2) -> None:
    c = Contribution(learner, 1, 0, 1, 0, 0, 5, 1, 5, step=step)
    push = driver.ask(lambda it: it.begin_push(c, 4 * SIZE, boot=it.boot))
    push.slot.buffer[:] = bytes_of(ONES)

    def event(it: SyncerDriver, done: Callable[[DilocoError | None], None]) -> None:
        it.complete_push(push, done)

    assert driver.wait_for(event) is None


def test_a_stop_goes_on_past_a_call_that_was_answered_just_before(tmp_path: Path) -> None:
    with driver_in(tmp_path) as (driver, _):
        driver._ticker.stop()  # a tick would wait for the event below, and that for the tick

        def answered(_: SyncerDriver, done: Callable[[int], None]) -> None:
            done(7)
            driver.stop()  # before the caller has taken the answer

        assert driver.wait_for(answered) == 7


def test_a_stop_goes_on_past_a_call_that_ends_at_the_same_time(tmp_path: Path) -> None:
    """The call ends after the stop has found it open."""
    with driver_in(tmp_path) as (driver, _), driver.asking(lambda _, __: None) as future:

        def done() -> bool:
            is_done = Future.done(future)
            future.set_exception(UnreachableError("the call has ended."))
            return is_done

        future.done = done  # type: ignore[method-assign]
        driver.stop()
        assert isinstance(future.exception(), UnreachableError)


def test_a_slow_disk_holds_up_no_sign_of_life(tmp_path: Path) -> None:
    """While a version is written, one learner joins and another leaves: both go to the same disk, the others do not
    wait for it."""
    writing, go_on = threading.Event(), threading.Event()

    def at(point: str) -> None:
        if point == "written":
            writing.set()
            assert go_on.wait(300)

    with driver_in(tmp_path, at) as (driver, _), ThreadPoolExecutor(2) as pool:
        contribute(driver, "a")
        assert writing.wait(300)
        joining = pool.submit(join, driver, "c")
        until(lambda: "c" in driver.ask(lambda it: it.status())["learners"], "c does not join")
        driver.ask(lambda it: it.heartbeat(Claim("b", 1), Report(step=1, steps=1, tokens=5, step_s=0.1)))
        gone = threading.Event()
        driver.ask(lambda it: it.leave(Claim("b", 1), Report(tokens=5), gone.set))
        assert driver.ask(lambda it: it.state.step) == 2
        assert not joining.done()  # it is told only when it would survive a crash
        assert not gone.is_set()
        go_on.set()
        assert joining.result(timeout=300) == 1
        driver.drain()
        assert gone.is_set()
        assert driver.ask(lambda it: it.state.versions) == (1, 0)


def test_callers_that_wait_for_a_full_disk_leave_the_threads_of_heartbeats(tmp_path: Path) -> None:
    """More ask to join than control calls have threads, while the kernel lets the syncer's files grow no further."""
    num_callers, num_waiting = 2 * LIMITS["control"].threads, LIMITS["writes"].threads
    with syncer_process(tmp_path, at_least=1) as syncer, ExitStack() as stack:
        raw = Raw(syncer.address)
        stack.callback(raw.connection.close)
        raw.initialise()
        raw.join()
        resource.prlimit(syncer.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        join = stack.enter_context(grpc.insecure_channel(syncer.address)).unary_unary(
            path("Join"), pb.JoinRequest.SerializeToString, pb.JoinReply.FromString
        )
        text = json.dumps(layout().to_dict())
        callers = [
            join.future(pb.JoinRequest(run=RUN, learner=f"caller-{number}", layout=text))
            for number in range(num_callers)
        ]
        until(
            lambda: len(fetch_status(syncer.address, run=RUN)["learners"]) == 1 + num_waiting,  # type: ignore[arg-type]
            "they do not wait for the disk",
        )
        raw.beat()
        assert not any(caller.done() for caller in callers)
        resource.prlimit(syncer.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert [caller.result(timeout=300).incarnation for caller in callers] == [1] * num_callers


def test_ledgers_stored_at_any_moment_agree_with_the_versions(tmp_path: Path) -> None:
    """A learner joins between the moment that a version is durable and the moment that it is visible."""
    with ThreadPoolExecutor(1) as pool:
        joins: list[Any] = []

        def at(point: str) -> None:
            if point == "committed" and not joins:
                joins.append(pool.submit(join, driver, "c"))
                until(lambda: "c" in driver.ask(lambda it: it.status())["learners"], "c does not join")

        with driver_in(tmp_path, at) as (driver, store):
            contribute(driver, "a")
            until(lambda: bool(joins), "nothing is published")
            joins[0].result(timeout=300)
            driver.drain()
            saved = read_newest(store)
    assert saved.record is not None
    assert saved.fragments[0].version == 1
    assert saved.record["accounts"]["a"]["ledgers"][0][:2] == [5, 5]  # trained, merged
    assert set(saved.record["members"]) == {"a", "b", "c"}


def test_a_syncer_that_was_suspended_gives_nobody_up_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By its clock it stood still for longer than the deadlines of its learners."""
    with driver_in(tmp_path) as (driver, _):
        driver._ticker._clock = lambda: time.monotonic() + 1000.0
        until(lambda: "was suspended for" in caplog.text, "it does not notice")
        assert list(driver.ask(lambda it: it.core.members)) == ["a", "b"]


def test_learners_go_on_with_a_syncer_that_was_suspended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its process stands still until a learner notices."""
    with syncer_process(tmp_path) as syncer, LearnerThreads(2) as pool:
        steps = [0, 0]

        def life(index: int) -> Any:
            exchange = pool.connect(syncer.address, learner=f"learner-{index}", initialise=index == 0)
            return train(index, exchange, None, 100, lambda step: steps.__setitem__(index, step))

        lives = [pool.submit(life, index) for index in range(2)]
        until(lambda: min(steps) > 8, "they do not train")
        os.kill(syncer.pid, signal.SIGSTOP)
        until(lambda: psutil.Process(syncer.pid).status() == psutil.STATUS_STOPPED, "it does not stop")
        caplog.clear()
        until(lambda: "cannot be reached, trying again" in caplog.text, "no learner notices")
        os.kill(syncer.pid, signal.SIGCONT)
        results = [each.result(timeout=300) for each in lives]
    assert [metrics["incarnation"] for _, metrics in results] == [1, 1]
    assert "evicted" not in (tmp_path / "syncer.log").read_text()


def test_a_full_disk_under_the_event_log_stops_no_decision(tmp_path: Path) -> None:
    """The log takes nothing any more while a learner falls silent: it is given up, and the round that waited for it is
    merged."""
    path = tmp_path / "state" / "events.jsonl"
    with start(tmp_path, method()) as syncer:
        first, second = Raw(syncer.address, "first"), Raw(syncer.address, "second")
        first.initialise()
        for raw in (first, second):
            raw.join()
            raw.beat(1, 5)
        assert first.push(ONES)
        with no_room_for(path):
            fall_silent(syncer, "second")
            assert num_live(syncer) == 1
            until(lambda: versions_of(syncer) == [1, 0], "the round is not merged")
            missing = fetch_status(syncer.address, run=RUN)["missing_events"]
            assert isinstance(missing, int)
            assert missing >= 3  # evicted, merged, published
        first.join()
        for raw in (first, second):
            raw.connection.close()
    told = read_events(path)
    assert sum(event.missing for event in told if isinstance(event, events.Gap)) >= missing
    assert isinstance(told[-1], events.Finished)


@contextmanager
def no_room_for(path: Path) -> Iterator[None]:
    """This process's open file at `path` is one on a full disk."""
    number = next(int(fd.name) for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd) == str(path))
    kept, full = os.dup(number), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)
        os.close(full)


def test_a_syncer_that_cannot_watch_deadlines_any_more_ends(tmp_path: Path) -> None:
    class Broken(Deadlines):
        def passed(self, now: float, member: Any) -> str | None:
            raise ArithmeticError("a defect")

    with start(tmp_path, method(), deadlines=Broken()) as syncer:
        raw = Raw(syncer.address)
        raw.initialise()
        raw.join()
        stop = threading.Event()
        limit = threading.Timer(300.0, stop.set)
        limit.start()
        with pytest.raises(ArithmeticError, match="a defect"):
            syncer.wait(stop)
        limit.cancel()
        raw.connection.close()


def test_an_event_that_ends_in_a_defect_is_the_last_one(tmp_path: Path) -> None:
    """It may be executed in part. The learner is told to ask the next process."""

    class Broken(Deadlines):
        def ends_at(self, member: Any) -> float:
            if member.step == 666:
                raise ArithmeticError("a defect")
            return super().ends_at(member)

    with start(tmp_path, method(), deadlines=Broken()) as syncer:
        raw = Raw(syncer.address)
        raw.initialise()
        raw.join()
        for step in (666, 667):
            with pytest.raises(UnreachableError, match="the syncer stops"):
                raw.beat(step=step)
        with pytest.raises(ArithmeticError, match="a defect"):
            syncer.wait(threading.Event())
        raw.connection.close()


class BrokenMetrics(SyncerMetrics):
    """Every number of a learner or a round is a defect."""

    def __init__(self, run: str) -> None:
        super().__init__(run)
        del self.evictions

    def merged(self, fragment: int, **_: Any) -> None:
        raise ArithmeticError(fragment)

    def set_learners(self, members: Any) -> None:
        if members:
            raise ArithmeticError("learners")


def test_a_defect_in_what_watches_stops_no_decision(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Directory(tmp_path) as store, EventLog(tmp_path / "events.jsonl", who="syncer") as log:
        driver = HostedDriver(
            RUN, method(), store, Spool(tmp_path, 1 << 20), deadlines=Deadlines(lost_floor_s=1.0),
            journal=Journal(log, BrokenMetrics(RUN)),
        )  # fmt: skip
        driver.start()
        initialise(driver)
        join(driver, "a")
        driver.ask(lambda it: it.heartbeat(Claim("a", 1), Report(step=1, steps=1, tokens=5, step_s=10.0)))
        join(driver, "silent")
        contribute(driver, "a")
        until(lambda: driver.ask(lambda it: it.state.versions) == (1, 0), "nothing is merged")
        until(lambda: "silent" not in driver.ask(lambda it: it.status())["learners"], "it is not given up")
        driver.raise_failure()
        driver.stop()
    assert caplog.text.count("Journal.evicted failed; the run continues") == 1


def test_measured_step_times_survive_a_restart(tmp_path: Path) -> None:
    """Deadlines are multiples of step times; after a restart they are known at once, before any heartbeat."""
    deadlines = Deadlines(lost_steps=20, lost_floor_s=60.0, lost_cap_s=500.0)
    with start(tmp_path, method(), deadlines=deadlines) as syncer:
        raw = Raw(syncer.address)
        raw.initialise()
        raw.join()
        raw.beat(1, 5, step_s=10.0)
        assert raw.push(ONES)  # what is published brings the roster with it
        syncer.driver.drain()
        raw.connection.close()
    with start(tmp_path, method(), deadlines=deadlines) as syncer:
        it: Any = fetch_status(syncer.address, run=RUN)
        assert it["learners"]["raw"]["step_s"] == 10.0
        assert 100 < it["learners"]["raw"]["given_up_in_s"] <= 200


@pytest.mark.parametrize("kind", ["accepted and published", "accepted"])
def test_what_was_acknowledged_before_a_restart_counts_once(kind: str, tmp_path: Path) -> None:
    """A called round: the learner offers its work again to the new process, whether or not it was published before."""
    given = diloco.DecoupledDiLoCo(
        sync_every=4, fragments=diloco.Named([["layers.0.*"], ["layers.1.*"]]), codec="fp32",
        quorum=diloco.Called(at_least=1 if kind == "accepted and published" else 2, grace=0.0),
    )  # fmt: skip
    with start(tmp_path, given) as syncer:
        raw, other = Raw(syncer.address), Raw(syncer.address, "other")
        raw.initialise()
        for each in (raw, other):
            each.join()
            each.beat(1, 5, step_s=1.0)
        for each in (raw, other):
            each.beat(6, 30, step_s=1.0)  # the run clock is past the fragment's first turn
        push = {"tokens": 30, "steps": 6, "trained": 30, "step": 6}
        assert raw.push(ONES, **push)
        syncer.driver.drain()
        assert versions_of(syncer) == [1 if kind == "accepted and published" else 0, 0]
        for each in (raw, other):
            each.connection.close()
    with start(tmp_path, given) as syncer:
        raw.connection = Raw(syncer.address).connection
        versions = versions_of(syncer)
        with pytest.raises(RestartedError):
            raw.push(ONES, number=1, **push)
        raw.beat(6, 30, step_s=1.0)
        assert raw.push(ONES, number=1, **push)
        syncer.driver.drain()
        assert versions_of(syncer) == versions
        assert status_of(syncer)["fragments"][0]["ledger"]["merged"] == 30 * versions[0]
        raw.connection.close()
