"""kill -9, of learners and of the syncer, with real processes: the run goes on and nothing published is lost."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.processes import until
from tests.processes import ForkedSyncer, start_module
from tests.syncer.runs import (
    PATIENT,
    RUN,
    LearnerThreads,
    Raw,
    fall_silent,
    method,
    num_live,
    start,
    status_of,
    train,
    versions_of,
)

import diloco
from diloco import errors, events
from diloco.event_log import read_events
from diloco.exchange.dialling import fetch_status
from diloco.following.follower import newest_model
from diloco.protocol.contribution import UNMERGED

RUN_FILE = """
[run]
name = "tiny"
tokens = 1_000_000
[method]
preset = "StreamingDiLoCo"
sync_every = 4
overlap = 1
mix = 0.0
codec = "e3m0"
fragments = {{type = "Named", patterns = [["layers.0.*"], ["layers.1.*"]]}}
quorum = {{type = "AllLive", at_least = {at_least}}}
[syncer]
lost_floor_s = {lost_floor_s}
{more}
"""


@contextmanager
def syncer_process(
    directory: Path, *, at_least: int = 2, lost_floor_s: float = 60.0, more: str = ""
) -> Iterator[ForkedSyncer]:
    it = ForkedSyncer(directory, RUN_FILE.format(at_least=at_least, lost_floor_s=lost_floor_s, more=more))
    try:
        yield it
    finally:
        it.kill()


def test_a_killed_syncer_comes_back_and_the_run_has_the_same_bits(tmp_path: Path) -> None:
    """Killed twice at whatever moment it is; compared with a run in one process without faults."""
    steps, kill_at = 40, (5, 22)
    given = diloco.Method.from_dict(method(at_least=2, codec="e3m0").to_dict())
    undisturbed = diloco.run_local(lambda index, exchange: train(index, exchange, given, steps), learners=2)
    reached = [threading.Event() for _ in kill_at]
    again = [threading.Event() for _ in kill_at]

    def at_step(step: int) -> None:
        if step in kill_at:
            reached[kill_at.index(step)].set()
            again[kill_at.index(step)].wait(1.0)  # so that the kill falls somewhere in the next steps

    with syncer_process(tmp_path) as syncer, LearnerThreads(2) as pool:
        lives = [
            pool.submit(
                train, index,
                pool.connect(syncer.address, learner=f"learner-{index}", initialise=index == 0), None, steps,
                at_step if index == 0 else None,
            )
            for index in range(2)
        ]  # fmt: skip
        for event, go in zip(reached, again, strict=True):
            until(
                lambda event=event: event.is_set() or any(life.done() for life in lives),  # type: ignore[misc]
                "no learner gets there",
            )
            go.set()
            before = published(tmp_path)
            syncer.kill()
            assert published(tmp_path) >= before
            syncer.start()
        results = [life.result(timeout=300) for life in lives]
    for (mine, metrics), (theirs, _) in zip(results, undisturbed, strict=True):
        assert metrics["incarnation"] == 1
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert published(tmp_path) == (steps // 4, steps // 4) or min(published(tmp_path)) >= steps // 4 - 1


def published(directory: Path) -> tuple[int, int]:
    """The newest version of each fragment that the syncer's events name."""
    newest = [0, 0]
    path = directory / "state" / "events.jsonl"
    for event in read_events(path) if path.exists() else []:
        if isinstance(event, events.Published):
            newest[event.fragment] = max(newest[event.fragment], event.version)
    return newest[0], newest[1]


def test_a_full_disk_under_the_spool_holds_learners_up_and_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel lets the syncer's files grow no further for a while, as a full disk."""
    given = diloco.Method.from_dict(method(at_least=2, codec="e3m0").to_dict())
    undisturbed = diloco.run_local(lambda index, exchange: train(index, exchange, given, 24), learners=2)

    begun, is_full = [threading.Event(), threading.Event()], threading.Event()

    def life(index: int) -> Any:
        def at_step(step: int) -> None:
            begun[index].set()  # it has joined, and has sent nothing yet
            is_full.wait(300)

        exchange = pool.connect(syncer.address, learner=f"learner-{index}", initialise=index == 0)
        return train(index, exchange, None, 24, at_step)

    with syncer_process(tmp_path, more="spool_bytes = 1") as syncer, LearnerThreads(2) as pool:
        lives = [pool.submit(life, index) for index in range(2)]
        until(lambda: all(event.is_set() for event in begun), "they do not begin")
        resource.prlimit(syncer.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        is_full.set()

        def is_said() -> bool:
            assert not any(life.done() for life in lives), [life.result() for life in lives if life.done()]
            return "spool_bytes" in str(fetch_status(syncer.address, run=RUN).get("waits_for"))

        until(is_said, "the syncer does not say that it has no room")
        until(lambda: "the syncer has no room yet, trying again" in caplog.text, "no learner says it")
        resource.prlimit(syncer.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        results = [each.result(timeout=300) for each in lives]
        until(lambda: fetch_status(syncer.address, run=RUN)["waits_for"] is None, "it still says that it has no room")
        status: dict[str, Any] = fetch_status(syncer.address, run=RUN)
    assert [metrics["incarnation"] for _, metrics in results] == [1, 1]
    assert caplog.text.count("the syncer has no room yet") <= 4, "said at every try"
    for fragment in status["fragments"]:
        ledger = fragment["ledger"]
        assert fragment["version"] == 6
        assert ledger["lost"] == 0
        assert "overlap" in ledger["discarded"].keys() <= {"overlap", UNMERGED}
        assert ledger["merged"] + sum(ledger["discarded"].values()) == ledger["trained"] == 2 * 24 * 5
    for (mine, _), (theirs, _) in zip(results, undisturbed, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kill_at", [1, 2, 7])
def test_a_killed_learner_is_given_up_and_comes_back(kill_at: int, tmp_path: Path) -> None:
    deadlines = replace(PATIENT, reconnect_floor_s=1.0)
    with start(tmp_path, method(), deadlines=deadlines) as syncer, LearnerThreads(1) as pool:
        stop = threading.Event()

        def keep_going(step: int) -> None:
            if stop.is_set():
                raise StopIteration

        first = pool.submit(
            _until_stopped, pool.connect(syncer.address, learner="survivor", initialise=True), keep_going
        )
        victim = start_module("tests.syncer.runs", syncer.address, str(kill_at))
        victim.join(timeout=300)
        exitcode = victim.exitcode
        victim.kill()  # where it is late, nothing else ends it
        assert exitcode == -signal.SIGKILL
        versions = versions_of(syncer)
        until(lambda: "victim" not in status_of(syncer)["learners"], "the victim is not given up")
        seen = read_events(tmp_path / "state" / "events.jsonl")
        assert any("its connection broke" in e.reason for e in seen if isinstance(e, events.Evicted))
        until(lambda: min(versions_of(syncer)) > max(versions) + 2, "the survivor does not go on")
        _, metrics = train(2, diloco.connect(syncer.address, run=RUN, learner="victim"), None, 12)
        assert metrics["incarnation"] == 2
        assert metrics["merges"] > 0
        stop.set()
        first.result(timeout=300)
        syncer.driver.drain()
        status: dict[str, Any] = fetch_status(syncer.address, run=RUN)
        for fragment in status["fragments"]:
            ledger = fragment["ledger"]
            settled = ledger["merged"] + ledger["lost"] + sum(ledger["discarded"].values())
            assert ledger["trained"] == ledger["pending"] + settled
            assert ledger["trained"] == status["tokens"]
        model = newest_model(syncer.address, run=RUN).state_dict()
        assert all(value.isfinite().all() for value in model.values())


def _until_stopped(exchange: Any, at_step: Callable[[int], None]) -> None:
    try:
        train(0, exchange, None, 1_000_000, at_step)
    except StopIteration:
        return


def test_a_learner_given_up_while_it_waits_for_the_others_joins_again(tmp_path: Path) -> None:
    """It waits for a second learner before its first step, and is stopped until it is evicted."""
    with start(tmp_path, method(at_least=2)) as syncer:
        raw = Raw(syncer.address)
        raw.initialise()
        waiting = start_module("tests.syncer.runs", syncer.address, "1000000")
        assert waiting.pid is not None

        def incarnation() -> int:
            return int(status_of(syncer)["learners"].get("victim", {}).get("incarnation", 0))

        try:
            until(lambda: incarnation() == 1, "it does not join")
            until(lambda: num_live(syncer) == 1, "it does not listen")
            os.kill(waiting.pid, signal.SIGSTOP)
            fall_silent(syncer, "victim")
            assert incarnation() == 0
            os.kill(waiting.pid, signal.SIGCONT)
            until(lambda: incarnation() >= 2 or not waiting.is_alive(), "it does not join again")
            assert waiting.is_alive()
            _, metrics = train(2, diloco.connect(syncer.address, run=RUN, learner="other"), None, 12)
            assert metrics["merges"] == 6
        finally:
            waiting.kill()
            waiting.join()
            raw.connection.close()


def test_a_second_process_with_the_same_name_replaces_the_first(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer, LearnerThreads(1) as pool:
        first = pool.submit(train, 0, pool.connect(syncer.address, learner="twin", initialise=True), None, 1_000_000)
        until(lambda: min(versions_of(syncer) or [0]) > 1, "the first does not train")
        second = Raw(syncer.address, "twin")
        second.join()
        with pytest.raises(errors.StaleIncarnationError, match="its own name"):
            first.result(timeout=300)
        second.connection.close()
