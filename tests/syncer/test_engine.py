"""The engine on a disk that is slow, in a process that stands still, and after a restart: nobody is forgotten or given up for it."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.syncer.runs import RUN, Raw, layout, method, start, train
from tests.syncer.test_faults import syncer_process, until

import diloco
from diloco import events
from diloco.core.contribution import Contribution
from diloco.core.members import Deadlines
from diloco.exchange.remote import fetch_status
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import bytes_of
from diloco.syncer.engine import Engine
from diloco.syncer.metrics import SyncerMetrics
from diloco.syncer.spool import Spool
from diloco.syncer.store import Store

SIZE = layout().fragments[0].numel
ONES = diloco.FP32().encode(torch.ones(SIZE))


@contextmanager
def engine_in(directory: Path, at: Callable[[str], None] = lambda _: None) -> Iterator[tuple[Engine, Store]]:
    """A run with two learners, "a" and "b"; `at` is told every durable step from then on."""
    tells: list[Callable[[str], None]] = []
    with (
        Store(directory, at=lambda point: [tell(point) for tell in tells] and None) as store,
        events.EventLog(directory / "events.jsonl", who="syncer") as log,
    ):
        engine = Engine(
            RUN, method(), store, Spool(directory, 1 << 20), deadlines=Deadlines(), events_log=log, metrics=SyncerMetrics(RUN)
        )  # fmt: skip
        thetas = [torch.ones(fragment.numel) for fragment in layout().fragments]
        engine.initialise(layout(), thetas, b"", learner="a", source="test", step=0, tokens=0)
        assert engine.join("a", layout()) == engine.join("b", layout()) == 1
        tells.append(at)
        yield engine, store
        engine.stop()


def beat(raw: Raw, step: int, step_s: float = 1.0) -> pb.HeartbeatReply:
    """A learner's sign of life, at five tokens a step."""
    request = pb.HeartbeatRequest(
        run=RUN, learner=raw.name, incarnation=raw.incarnation, step=step, tokens=5 * step, step_s=step_s
    )
    return raw.connection.call("control", "Heartbeat", request, pb.HeartbeatReply)


def contribute(engine: Engine, learner: str, step: int = 2) -> str | None:
    slot = engine.allocate(0, 4 * SIZE)
    slot.buffer[:] = bytes_of(ONES)
    return engine.contribute(Contribution(learner, 1, 0, 0, 0, 5, 1, 5, step=step), slot)


def test_a_slow_disk_holds_up_no_sign_of_life(tmp_path: Path) -> None:
    """While a version is written, somebody joins and somebody leaves: both go to the same disk, the others do not wait for it."""
    writing, go_on = threading.Event(), threading.Event()

    def at(point: str) -> None:
        if point == "written":
            writing.set()
            assert go_on.wait(30)

    with engine_in(tmp_path, at) as (engine, _), ThreadPoolExecutor(2) as pool:
        contribute(engine, "a")
        assert writing.wait(30)
        joining = pool.submit(engine.join, "c", layout())
        until(lambda: "c" in engine.status()["learners"], "c does not join")
        engine.heartbeat("b", 1, step=1, tokens=5, step_s=0.1, waiting=False)
        engine.leave("b", 1, tokens=5)
        assert engine.position()[0] == 2
        assert not joining.done()  # it is told only when it would survive a crash
        go_on.set()
        assert joining.result(timeout=30) == 1
        engine.drain()
        assert engine.versions() == [1, 0]


def test_books_stored_at_any_moment_agree_with_the_versions(tmp_path: Path) -> None:
    """Somebody joins between the moment that a version is durable and the moment that it is visible."""
    with ThreadPoolExecutor(1) as pool:
        joins: list[Any] = []

        def at(point: str) -> None:
            if point == "committed" and not joins:
                joins.append(pool.submit(engine.join, "c", layout()))
                until(lambda: "c" in engine.status()["learners"], "c does not join")

        with engine_in(tmp_path, at) as (engine, store):
            contribute(engine, "a")
            until(lambda: bool(joins), "nothing is published")
            joins[0].result(timeout=30)
            engine.drain()
            saved = store.load()
    assert saved is not None
    assert saved.fragments[0].version == 1
    assert saved.ledgers["a"][0].merged == 5
    assert {row.learner for row in saved.roster if row.alive} == {"a", "b", "c"}


def test_a_syncer_that_was_suspended_gives_nobody_up_for_it(tmp_path: Path) -> None:
    """Two learners train; the syncer's process stands still for longer than their deadline, then goes on."""
    with syncer_process(tmp_path, lost_floor_s=2.0) as syncer, ThreadPoolExecutor(2) as pool:
        steps = [0, 0]

        def life(index: int) -> Any:
            exchange = diloco.connect(syncer.address, run=RUN, learner=f"learner-{index}", initialise=index == 0)
            return train(index, exchange, None, 100, lambda step: steps.__setitem__(index, step))

        lives = [pool.submit(life, index) for index in range(2)]
        until(lambda: min(steps) > 8, "they do not train")
        syncer.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, syncer.process.pid, os.WSTOPPED)
        threading.Event().wait(3.0)  # longer than the deadline: time itself is what is tested
        syncer.process.send_signal(signal.SIGCONT)
        results = [each.result(timeout=90) for each in lives]
    assert [metrics["incarnation"] for _, metrics in results] == [1, 1]
    assert "evicted" not in (tmp_path / "syncer.log").read_text()


def test_a_full_disk_under_the_event_log_stops_no_decision(tmp_path: Path) -> None:
    """The log takes nothing any more while a learner falls silent: it is given up, and the round that waited for it is merged."""
    deadlines = Deadlines(lost_floor_s=2.5, lost_cap_s=2.5, stalled_floor_s=60.0, stalled_cap_s=60.0)
    path = tmp_path / "state" / "events.jsonl"
    with start(tmp_path, method(), deadlines=deadlines) as syncer:
        first, second = Raw(syncer.address, "first"), Raw(syncer.address, "second")
        first.initialise()
        for raw in (first, second):
            raw.join()
            beat(raw, 1)
        assert first.push(ONES).accepted
        with no_room_for(path):

            def is_given_up() -> bool:
                beat(first, 2)
                return "second" not in fetch_status(syncer.address, run=RUN)["learners"]

            until(is_given_up, "the silent learner is not given up", 20)
            until(lambda: syncer.engine.versions() == [1, 0], "the round is not merged")
            missing = fetch_status(syncer.address, run=RUN)["missing_events"]
            assert isinstance(missing, int)
            assert missing >= 3  # evicted, merged, published
        first.join()
        for raw in (first, second):
            raw.connection.close()
    told = events.read_events(path)
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
        limit = threading.Timer(20.0, stop.set)
        limit.start()
        with pytest.raises(ArithmeticError, match="a defect"):
            syncer.wait(stop)
        limit.cancel()
        raw.connection.close()


class BrokenMetrics(SyncerMetrics):
    """Every number of a learner or a round is a defect."""

    def evicted(self, learner: str) -> None:
        raise ArithmeticError(learner)

    def merged(self, fragment: int, **_: Any) -> None:
        raise ArithmeticError(fragment)

    def set_learners(self, _: Any) -> None:
        raise ArithmeticError("learners")


def test_a_defect_in_what_watches_stops_no_decision(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Store(tmp_path) as store, events.EventLog(tmp_path / "events.jsonl", who="syncer") as log:
        engine = Engine(
            RUN, method(), store, Spool(tmp_path, 1 << 20), deadlines=Deadlines(lost_floor_s=1.0), events_log=log,
            metrics=BrokenMetrics(RUN),
        )  # fmt: skip
        engine.initialise(
            layout(),
            [torch.ones(it.numel) for it in layout().fragments],
            b"",
            learner="a",
            source="t",
            step=0,
            tokens=0,
        )
        engine.join("a", layout())
        engine.join("silent", layout())
        contribute(engine, "a")
        until(lambda: engine.versions() == [1, 0], "nothing is merged")
        until(lambda: "silent" not in engine.status()["learners"], "it is not given up")
        engine.raise_failure()
        engine.stop()
    assert caplog.text.count("Journal.evicted failed; the run goes on without it") == 1


def test_measured_step_times_survive_a_restart(tmp_path: Path) -> None:
    """Deadlines are multiples of step times; after a restart they are known at once, before anybody is heard."""
    deadlines = Deadlines(lost_steps=20, lost_floor_s=2.0, lost_cap_s=500.0)
    with start(tmp_path, method(), deadlines=deadlines) as syncer:
        raw = Raw(syncer.address)
        raw.initialise()
        raw.join()
        beat(raw, 1, step_s=10.0)
        assert raw.push(ONES).accepted  # what is published brings the roster with it
        syncer.engine.drain()
        raw.connection.close()
    with start(tmp_path, method(), deadlines=deadlines) as syncer:
        it: Any = fetch_status(syncer.address, run=RUN)
        assert it["learners"]["raw"]["step_s"] == 10.0
        assert 100 < it["learners"]["raw"]["given_up_in_s"] <= 200


def test_a_store_of_the_first_format_is_upgraded(tmp_path: Path) -> None:
    with engine_in(tmp_path) as (engine, _):
        contribute(engine, "a")
        engine.drain()
    database = tmp_path / "store.sqlite"
    with sqlite3.connect(database) as db:
        db.executescript(
            "ALTER TABLE roster DROP COLUMN step_s; ALTER TABLE roster DROP COLUMN sent_steps; PRAGMA user_version = 1;"
        )
    db.close()
    with Store(tmp_path) as store:
        saved = store.load()
    assert saved is not None
    assert {row.learner: (row.alive, row.step_s) for row in saved.roster} == {"a": (True, None), "b": (True, None)}


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
            beat(each, 1)
        for each in (raw, other):
            beat(each, 6)  # the run clock is past the fragment's first turn
        push = {"tokens": 30, "steps": 6, "trained": 30, "step": 6}
        assert raw.push(ONES, **push).accepted
        syncer.engine.drain()
        assert syncer.engine.versions() == [1 if kind == "accepted and published" else 0, 0]
        for each in (raw, other):
            each.connection.close()
    with start(tmp_path, given) as syncer:
        raw.connection = Raw(syncer.address).connection
        versions = syncer.engine.versions()
        assert raw.push(ONES, **push).accepted
        syncer.engine.drain()
        assert syncer.engine.versions() == versions
        assert syncer.engine.status()["fragments"][0]["ledger"]["merged"] == 30 * versions[0]
        raw.connection.close()
