"""Two syncers of a run in a bucket, as processes: kills, freezes, partitions of either from the bucket, the bucket
away, promotion, clean stops and restarts. No version is lost, and never do two publish."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.processes import until
from tests.syncer.runs import RUN, LearnerThreads, method, train
from tests.syncer.standbys import Pair, SharingSyncer

import diloco
from diloco import events
from diloco.cli import main
from diloco.exchange.dialling import fetch_status

pytestmark = pytest.mark.timeout(900)

STEPS, GATES = 16, (3, 7, 11)
"""Inner steps of the learners, and those before which they wait until they are told to go on."""


class Learners:
    """Two learners that train, with gates between steps."""

    def __init__(self, pair: Pair, pool: LearnerThreads) -> None:
        self.steps = [0, 0]
        self._gates = {step: threading.Event() for step in GATES}
        self.lives: list[Future[Any]] = [
            pool.submit(
                train, index, pool.connect(pair.addresses, learner=f"learner-{index}", initialise=index == 0), None,
                STEPS, lambda step, index=index: self._at(index, step),
            )
            for index in range(2)
        ]  # fmt: skip

    def _at(self, index: int, step: int) -> None:
        self.steps[index] = step
        if step in self._gates:
            self._gates[step].wait(300)

    def until_at(self, gate: int) -> None:
        """Both are there, or one has failed."""
        until(lambda: min(self.steps) >= GATES[gate] or any(it.done() for it in self.lives), "no learner gets there")

    def open(self, *gates: int) -> None:
        """Go on."""
        for gate in gates or range(len(GATES)):
            self._gates[GATES[gate]].set()

    def results(self) -> list[Any]:
        """Open all gates; the learners' ends."""
        self.open()
        return [life.result(timeout=300) for life in self.lives]


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    """The same run in one process, without faults."""
    given = diloco.Method.from_dict(method(at_least=2, codec="e3m0").to_dict())
    return diloco.run_local(lambda index, exchange: train(index, exchange, given, STEPS), learners=2)


class World:
    def __init__(self, pair: Pair, learners: Learners) -> None:
        self.pair, self.learners = pair, learners
        self.a, self.b = pair.a, pair.b

    def end(self, undisturbed: Any, serves: SharingSyncer) -> None:
        """The learners end with the bits of a run without faults, as members that were never evicted."""
        results = self.learners.results()
        assert serves.standing() == "serving"
        assert self.pair.check() == (STEPS // 4,) * 2
        for (mine, metrics), (theirs, _) in zip(results, undisturbed, strict=True):
            assert metrics["incarnation"] == 1
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Two syncers and two learners, which wait at the first gate."""
    with ExitStack() as stack:
        pair = stack.enter_context(Pair(tmp_path))
        learners = Learners(pair, stack.enter_context(LearnerThreads(2)))
        learners.until_at(0)
        try:
            yield World(pair, learners)
        finally:
            learners.open()


def test_kill_9_of_the_first_and_then_of_the_second(world: World, undisturbed: Any) -> None:
    """The old first comes back as the standby, and takes over from its successor."""
    world.a.kill()
    world.learners.open(0)
    world.pair.until_serving(world.b)
    world.learners.until_at(1)
    world.a.start()
    until(lambda: world.a.standing() == "waiting", "the old first does not wait")
    world.b.kill()
    world.learners.open(1)
    world.pair.until_serving(world.a)
    world.learners.until_at(2)
    world.b.start()
    world.end(undisturbed, world.a)


@pytest.mark.slow
def test_a_first_that_sleeps_through_its_lease_is_fenced_when_it_wakes(world: World, undisturbed: Any) -> None:
    world.a.freeze()
    world.learners.open(0)
    world.pair.until_serving(world.b)
    world.learners.until_at(1)
    before = len(world.a.told(events.Published))
    world.a.thaw()
    until(lambda: world.a.standing() == "waiting", "it does not become the standby")
    assert "fenced" in [each.standing for each in world.a.told(events.StandingChanged)]
    world.end(undisturbed, world.b)
    assert len(world.a.told(events.Published)) == before


def test_a_first_that_does_not_reach_the_bucket_is_suspended_and_its_learners_go_to_the_standby(
    world: World, undisturbed: Any
) -> None:
    world.a.cut_off()
    until(lambda: world.a.standing() == "suspended", "it is not suspended")
    world.learners.open(0)
    world.pair.until_serving(world.b)
    world.learners.until_at(1)
    world.a.heal()
    until(lambda: world.a.standing() == "waiting", "it does not become the standby")
    world.end(undisturbed, world.b)


@pytest.mark.slow
def test_a_standby_that_does_not_reach_the_bucket_changes_nothing(world: World, undisturbed: Any) -> None:
    world.b.cut_off()
    world.learners.open(0, 1)
    world.learners.until_at(2)
    assert world.b.standing() == "waiting"
    world.b.heal()
    epoch = world.pair.manifest().epoch
    world.end(undisturbed, world.a)
    assert world.pair.manifest().epoch == epoch == 1


@pytest.mark.slow
def test_without_its_bucket_a_run_publishes_nothing_and_goes_on_when_it_returns(world: World, undisturbed: Any) -> None:
    for syncer in (world.a, world.b):
        syncer.cut_off()
    world.learners.open(0)
    until(lambda: world.a.standing() == "suspended", "it is not suspended")
    before = world.pair.manifest()
    status = fetch_status(world.a.address, run=RUN)
    assert len(status["learners"]) == 2, "heartbeats are answered"  # type: ignore[arg-type]
    assert world.pair.manifest() == before
    for syncer in (world.b, world.a):
        syncer.heal()
    until(lambda: "serving" in (world.a.standing(), world.b.standing()), "neither serves")
    world.learners.until_at(1)
    serves = world.a if world.a.standing() == "serving" else world.b
    world.end(undisturbed, serves)


def test_a_clean_stop_gives_the_run_up_at_once(tmp_path: Path) -> None:
    """The lease is longer than the test."""
    with Pair(tmp_path, lease_s=3600.0) as pair:
        pair.a.terminate()
        pair.until_serving(pair.b)
        pair.a.start()
        until(lambda: pair.a.standing() == "waiting", "it does not wait")
        pair.b.terminate()
        pair.until_serving(pair.a)
        assert pair.manifest().epoch == 3


def test_a_first_that_is_started_again_goes_on_at_once(tmp_path: Path) -> None:
    """Both are killed. The first knows that the manifest's claim was its own; the lease is longer than the test."""
    with Pair(tmp_path, lease_s=3600.0) as pair:
        for syncer in (pair.a, pair.b):
            syncer.kill()
        for syncer in (pair.b, pair.a):
            syncer.start()
        pair.until_serving(pair.a)
        assert pair.b.standing() == "waiting"
        assert pair.manifest().epoch == 2


def test_promotion_by_hand(world: World, undisturbed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """While the first works; then back, while the one that serves is cut off from the bucket."""
    with pytest.raises(SystemExit) as refused:
        main(["syncer", "promote", world.a.address, "--run", RUN])
    assert refused.value.code == 2
    assert "this syncer is serving, so it cannot be promoted" in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        main(["syncer", "promote", world.b.address, "--run", RUN])
    assert done.value.code == 0
    assert f"{world.b.address} serves run 'tiny' in epoch 2" in capsys.readouterr().out
    world.learners.open(0)
    until(lambda: world.a.standing() == "waiting", "the first is not fenced")
    world.learners.until_at(1)
    world.b.cut_off()
    with pytest.raises(SystemExit) as done:
        main(["syncer", "promote", world.a.address, "--run", RUN])
    assert done.value.code == 0
    world.learners.open(1)
    world.learners.until_at(2)
    world.b.heal()
    world.end(undisturbed, world.a)


def test_a_start_that_is_no_standby_is_refused_where_another_syncer_serves(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        third = pair.start("c", standby=False)
        until(third.has_ended, "it does not end")
        said = (tmp_path / "c" / "syncer.log").read_text()
        assert f"is served by another syncer at {pair.a.address}, in epoch 1; stop that one, or start this" in said
        assert "Traceback" not in said
        assert pair.a.standing() == "serving"
        assert pair.manifest().epoch == 1


@pytest.mark.slow
def test_a_standby_that_holds_the_model_takes_over_without_reading_it(tmp_path: Path) -> None:
    """The bucket answers no request for a version any more."""
    with ExitStack() as stack:
        pair = stack.enter_context(Pair(tmp_path, more="hold = true"))
        learners = Learners(pair, stack.enter_context(LearnerThreads(2)))
        learners.until_at(0)

        def holds_all() -> bool:
            store: Any = fetch_status(pair.b.address, run=RUN)["store"]
            return bool(store["holds"]) and tuple(store["versions"]) == pair.manifest().versions

        until(holds_all, "it does not hold the model")
        pair.a.kill()
        names = [versions[0].held for versions in pair.manifest().fragments]
        for name in names:
            pair.server.fault("status", method="GET", path=name, num=1 << 30)
        pair.until_serving(pair.b)
        learners.results()
        pair.check()
