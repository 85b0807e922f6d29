"""Copies of a run's state under live learners: an older one is refused, and of two only one is followed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.processes import until
from tests.syncer.runs import PATIENT, RUN, LearnerThreads, Net, Raw, method, train

import diloco
from diloco.errors import LineageError, StaleIncarnationError, UnknownRunError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.protocol.lineage import Lineage
from diloco.store.copying import copy
from diloco.store.objects import open_store, opened, read_manifest
from diloco.syncer.server import Options, Syncer

pytestmark = pytest.mark.timeout(900)

GIVEN = diloco.Method.from_dict(method(at_least=2, codec="e3m0").to_dict())


def serve(state: Path, port: int = 0) -> Syncer:
    return Syncer(RUN, GIVEN, Options(f"127.0.0.1:{port}", state, deadlines=PATIENT))


class Run:
    """Two learners over a syncer, which stop, each at a step of its own, until they are told to go on."""

    def __init__(
        self, pool: LearnerThreads, address: str, steps: int, stops: tuple[tuple[int, int], ...],
        life: Callable[..., Any] = train,
    ) -> None:  # fmt: skip
        self._stops = stops
        self.here = [[threading.Event() for _ in range(2)] for _ in stops]
        self.go = [threading.Event() for _ in stops]
        self.lives: list[Future[Any]] = [
            pool.submit(
                life, index, pool.connect(address, learner=f"learner-{index}", initialise=index == 0), None,
                steps, lambda step, index=index: self._at(index, step),
            )
            for index in range(2)
        ]  # fmt: skip

    def _at(self, index: int, step: int) -> None:
        for stop, steps in enumerate(self._stops):
            if step == steps[index] and not self.here[stop][index].is_set():
                self.here[stop][index].set()
                self.go[stop].wait(300)

    def reaches(self, stop: int) -> None:
        until(lambda: all(each.is_set() for each in self.here[stop]), "the learners do not get there")


def test_an_older_copy_of_the_state_is_refused_and_the_newest_goes_on_with_the_same_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = 24
    undisturbed = diloco.run_local(lambda index, exchange: train(index, exchange, GIVEN, steps), learners=2)
    state, copy = tmp_path / "state", tmp_path / "copy"
    with LearnerThreads(2) as pool:
        with serve(state) as syncer:
            port = syncer.port
            run = Run(pool, syncer.address, steps, ((9, 9), (17, 17)))
            run.reaches(0)
        shutil.copytree(state, copy)
        with serve(state, port):
            run.go[0].set()
            run.reaches(1)
            newest = syncer_versions(state)
        with serve(copy, port) as older:
            run.go[1].set()
            until(lambda: "older copy" in caplog.text or "two syncers" in caplog.text, "no learner says it")
            assert all(not life.done() for life in run.lives)
            assert older.driver.ask(lambda driver: driver.state.versions) < newest
        with serve(state, port):
            results = [life.result(timeout=300) for life in run.lives]
    for (mine, metrics), (theirs, _) in zip(results, undisturbed, strict=True):
        assert metrics["incarnation"] == 1
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def syncer_versions(state: Path) -> tuple[int, ...]:
    """The newest version of each fragment on the disk."""
    return read_manifest(open_store(state)).versions


def test_epochs_grow_with_every_start_and_the_run_keeps_its_id(tmp_path: Path) -> None:
    served: list[Lineage] = []
    for _ in range(3):
        with serve(tmp_path / "state") as syncer:
            raw = Raw(syncer.address)
            if not served:
                raw.initialise()
            served.append(syncer.driver.ask(lambda driver: driver.lineage))
            raw.connection.close()
    assert [each.epoch for each in served] == [1, 2, 3]
    assert len({each.run_id for each in served}) == 1
    assert len({each.boot for each in served}) == 3
    assert read_manifest(open_store(tmp_path / "state")).epoch == 3


def test_a_syncer_refuses_a_learner_that_has_seen_a_later_state_or_another_run(tmp_path: Path) -> None:
    """Only that learner: one that lies about what it has seen does not stop the run."""
    with serve(tmp_path / "state") as syncer:
        raw = Raw(syncer.address)
        raw.initialise()
        raw.join()
        mine = syncer.driver.ask(lambda driver: driver.lineage)
        later = pb.Lineage(run_id=mine.run_id, epoch=mine.epoch + 3, boot=5)
        second = pb.Lineage(run_id=mine.run_id, epoch=mine.epoch, boot=5)
        other = pb.Lineage(run_id="f" * 32, epoch=mine.epoch, boot=mine.boot)
        for seen, kind in ((later, LineageError), (second, LineageError), (other, UnknownRunError)):
            with pytest.raises(kind):
                raw.beat(seen=seen)
            with pytest.raises(kind):
                raw.leave(seen=seen)
            with pytest.raises(kind):  # which incarnations are out it learns from the syncer that it follows
                raw.beat(seen=seen, incarnation=9)
            with pytest.raises(kind):
                raw.leave(seen=seen, incarnation=0)
        raw.beat(seen=pb.Lineage(run_id=mine.run_id, epoch=mine.epoch, boot=mine.boot))
        raw.connection.close()


def test_a_learner_that_holds_a_version_that_the_run_went_back_from_joins_again(tmp_path: Path) -> None:
    with serve(tmp_path / "state") as syncer:
        raw = Raw(syncer.address)
        raw.initialise()
        raw.join()
        raw.connection.close()
    with serve(tmp_path / "state") as syncer:
        again = Raw(syncer.address)
        again.incarnation = raw.incarnation
        mine = syncer.driver.ask(lambda driver: driver.lineage)
        before = pb.Lineage(run_id=mine.run_id, epoch=mine.epoch - 1, boot=5)
        with pytest.raises(StaleIncarnationError, match="went back to version 0"):
            again.beat(seen=before, versions=[1, 0])
        again.beat(seen=before, versions=[0, 0])
        again.connection.close()


def train_to(
    index: int, exchange: diloco.Exchange, given: diloco.Method | None, steps: int, at_step: Callable[[int], None]
) -> diloco.Learner:
    """A learner's life up to this step of the run."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with diloco.Learner(model, optimizer, method=given, exchange=exchange) as learner:
        while learner.steps < steps:
            model(torch.ones(5, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=5)
            at_step(learner.steps)
    return learner


def test_learners_that_all_wait_for_each_other_go_on_from_where_the_run_went_back_to(tmp_path: Path) -> None:
    """Each one begins at the run's step, and not at its own: they would be at different steps of a round for good."""
    state, steps = tmp_path / "state", 40
    with LearnerThreads(2) as pool:
        with serve(state) as syncer:
            port = syncer.port
            run = Run(pool, syncer.address, steps, ((9, 9), (17, 18)), train_to)
            run.reaches(0)
            with opened(tmp_path / "restored", lock=True) as target:
                copy(open_store(state), target)
            run.go[0].set()
            run.reaches(1)
        newest = syncer_versions(state)
        with serve(tmp_path / "restored", port) as syncer:
            assert syncer_versions(tmp_path / "restored") < newest
            run.go[1].set()
            learners = [life.result(timeout=300) for life in run.lives]
    assert [learner.metrics()["incarnation"] for learner in learners] == [2, 2]
    assert [learner.steps for learner in learners] == [steps, steps]


def test_a_learner_that_goes_on_from_a_checkpoint_joins_no_older_copy_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It pulls nothing of it, and joins the newest state once that is served."""
    state, copy, saved = tmp_path / "state", tmp_path / "copy", list[dict[str, Any]]()
    given = method(at_least=1)

    def learner_of(exchange: diloco.Exchange) -> diloco.Learner:
        model = Net()
        return diloco.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=exchange)

    with Syncer(RUN, given, Options("127.0.0.1:0", state)) as syncer:
        port, address = syncer.port, syncer.address
        with learner_of(diloco.connect(address, run=RUN, learner="a", initialise=True)):
            pass
    shutil.copytree(state, copy)
    for _ in range(2):
        with Syncer(RUN, given, Options(f"127.0.0.1:{port}", state)):
            with learner_of(diloco.connect(address, run=RUN, learner="a")) as learner:
                saved.append(learner.state_dict())
    exchange = diloco.connect(address, run=RUN, learner="a", lineage=saved[-1]["lineage"])
    with ThreadPoolExecutor(1) as pool:
        with Syncer(RUN, given, Options(f"127.0.0.1:{port}", copy)) as older:
            coming = pool.submit(learner_of, exchange)
            until(lambda: "older copy of its state" in caplog.text or coming.done(), "it does not say so")
            raw = Raw(address, "b")
            with pytest.raises(LineageError, match="older copy of its state"):  # also where it only asks to join
                raw.join(seen=pb.Lineage(**saved[-1]["lineage"]))
            raw.connection.close()
            assert older.driver.ask(lambda driver: driver.core.accounting.accounts["a"].incarnation) == 1
            assert exchange.num_bytes["joins"] == 0
        with Syncer(RUN, given, Options(f"127.0.0.1:{port}", state)):
            with coming.result(timeout=300) as learner:
                assert learner.load_state_dict(saved[-1])
                assert exchange.num_bytes["joins"] > 0
                assert learner.state_dict()["lineage"]["epoch"] == 4
