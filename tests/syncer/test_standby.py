"""Two syncers of a run in a bucket, as processes: kills, freezes, partitions of either from the bucket, the bucket
away, promotion, clean stops and restarts. No version is lost, and never do two publish."""

from __future__ import annotations

import itertools
import re
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from benchmarks.processes import until
from tests.chaos.relay import Relay
from tests.following.published import METHODS, published_run
from tests.syncer.runs import RUN, LearnerThreads, Raw, layout, method, train
from tests.syncer.standbys import Pair, SharingSyncer

import diloco
from diloco import events
from diloco.cli import main
from diloco.errors import StandbyError
from diloco.exchange.dialling import fetch_status
from diloco.store.objects import open_store
from diloco.syncer.server import BOOT

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


@pytest.mark.slow
def test_a_first_that_sleeps_in_the_middle_of_a_swap_is_refused(world: World, undisturbed: Any) -> None:
    """Its request lands after the standby's claim."""
    server = world.pair.server
    server.fault("late")
    until(lambda: server.num_waiting == 1, "it does not swap")
    world.a.freeze()
    world.learners.open(0)
    world.pair.until_serving(world.b)
    server.release()
    until(lambda: server.num_waiting == 0, "the request does not land")
    world.learners.until_at(1)
    world.a.thaw()
    until(lambda: world.a.standing() == "waiting", "it does not become the standby")
    assert "fenced" in [each.standing for each in world.a.told(events.StandingChanged)]
    world.end(undisturbed, world.b)
    assert world.pair.manifest().epoch == 2


@pytest.mark.slow
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
def test_a_standby_that_fails_or_whose_disk_is_full_changes_nothing(world: World, undisturbed: Any) -> None:
    """Nor does what is between the two: they do not speak to each other."""
    world.b.kill()
    world.learners.open(0)
    world.learners.until_at(1)
    world.b.start()
    until(lambda: world.b.standing() == "waiting", "it does not wait")
    resource.prlimit(world.b.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    world.learners.open(1)
    world.learners.until_at(2)
    assert world.b.standing() == "waiting"
    for syncer in (world.a, world.b):
        assert port_of(world.pair.other(syncer)) not in {
            each.raddr.port for each in psutil.Process(syncer.pid).net_connections("tcp") if each.raddr
        }
    world.end(undisturbed, world.a)
    assert world.pair.manifest().epoch == 1


def port_of(syncer: SharingSyncer) -> int:
    return int(syncer.address.rpartition(":")[2])


@pytest.mark.slow
def test_learners_that_do_not_reach_the_first_are_evicted_and_go_on_once_the_standby_is_promoted(
    tmp_path: Path,
) -> None:
    """One of two. The standby does not take over by itself, since the first reaches the bucket."""
    with ExitStack() as stack:
        pair = stack.enter_context(Pair(tmp_path, at_least=1, lost_floor_s=2.5))
        way = stack.enter_context(Relay(port_of(pair.a)))
        pool, is_over = stack.enter_context(LearnerThreads(2)), threading.Event()

        def steps() -> Iterator[int]:
            return itertools.takewhile(lambda _: not is_over.is_set(), itertools.count(1))

        def is_told(syncer: SharingSyncer, kind: type[events.Event], learner: str) -> bool:
            return learner in [each.learner for each in syncer.told(kind)]

        def publishes() -> None:
            before = sum(pair.manifest().versions)
            until(lambda: sum(pair.manifest().versions) > before, "nothing is published")

        addresses = pair.a.address, f"{way.address},{pair.b.address}"
        near, far = (
            pool.connect(f"{address},{pair.b.address}" if index == 0 else address, learner=f"learner-{index}",
                         initialise=index == 0)
            for index, address in enumerate(addresses)
        )  # fmt: skip
        lives = [pool.submit(train, index, exchange, None, steps()) for index, exchange in enumerate((near, far))]
        until(lambda: is_told(pair.a, events.Joined, "learner-1"), "it does not join")
        publishes()
        way.refuse()
        way.cut()
        until(lambda: is_told(pair.a, events.Evicted, "learner-1"), "it is not evicted")
        publishes()
        assert (pair.b.standing(), pair.manifest().epoch) == ("waiting", 1)
        with pytest.raises(SystemExit) as done:
            main(["syncer", "promote", pair.b.address, "--run", RUN])
        assert done.value.code == 0
        until(lambda: is_told(pair.b, events.Joined, "learner-1"), "it does not go to the other syncer")
        merged = lambda: [name for each in pair.b.told(events.Merged) for name in each.contributors]  # noqa: E731
        until(lambda: {"learner-0", "learner-1"} <= set(merged()), "they do not train on together")
        is_over.set()
        for life in lives:
            life.result(timeout=300)
        pair.check()


@pytest.mark.slow
def test_all_learners_fail_together_with_the_first(tmp_path: Path) -> None:
    """The standby serves a run that no learner is in; one that comes back goes on from the last version."""
    given = method(codec="e3m0").for_fragment(0)
    payload = given.up.encode(torch.ones(layout().fragments[0].numel))
    with Pair(tmp_path, at_least=1) as pair:
        raw = Raw(pair.a.address)
        raw.initialise()
        raw.join()
        raw.push(payload)
        until(lambda: pair.manifest().versions == (1, 0), "nothing is published")
        pair.a.kill()
        raw.connection.close()
        pair.until_serving(pair.b)
        assert pair.manifest().versions == (1, 0)
        raw = come_back(pair.b)
        raw.push(payload, round=1, base=1, step=6)
        until(lambda: pair.manifest().versions == (2, 0), "nothing is published")
        raw.connection.close()
        pair.check()


def come_back(syncer: SharingSyncer) -> Raw:
    """A learner that joins again, as another process."""
    raw = Raw(syncer.address)

    def has_joined() -> bool:
        with suppress(StandbyError):  # it has still to load the run
            raw.join(process=1)
        return raw.incarnation > 0

    until(has_joined, "no learner can join")
    return raw


@pytest.mark.slow
def test_a_swap_whose_answer_is_lost_is_no_swap_of_another(tmp_path: Path, undisturbed: Any) -> None:
    """Three times, for swaps of versions or of the lease, which is longer than the test."""
    with ExitStack() as stack:
        pair = stack.enter_context(Pair(tmp_path, lease_s=3600.0))
        learners = Learners(pair, stack.enter_context(LearnerThreads(2)))
        stack.callback(learners.open)
        learners.until_at(0)
        pair.server.fault("lost", num=3)
        learners.open(0)
        until(lambda: pair.server.num_pending == 0, "no answer is lost")
        World(pair, learners).end(undisturbed, pair.a)
        assert pair.manifest().epoch == 1


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_of_two_that_are_started_again_and_know_nothing_one_serves_after_the_lease(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        both = pair.a, pair.b
        for syncer in both:
            syncer.kill()
        (tmp_path / "a" / "state" / BOOT).unlink()
        for syncer in both:
            syncer.start()
        until(lambda: sorted(str(it.standing()) for it in both) == ["serving", "waiting"], "not one of them serves")
        assert pair.manifest().epoch == 2


@pytest.mark.slow
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
def test_a_standby_refuses_a_manifest_that_names_objects_of_two_runs_and_gives_up_the_lease(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pair = stack.enter_context(Pair(tmp_path, at_least=1))
        other = stack.enter_context(published_run(tmp_path / "other", METHODS["4 bits"], joins=False))
        raw = Raw(pair.a.address)
        raw.initialise()
        raw.connection.close()
        pair.a.kill()
        bucket, theirs = pair.bucket(), other.syncer.driver.manifest.frozen
        assert theirs is not None
        bucket.put(theirs, [open_store(tmp_path / "other" / "state").get(theirs)])
        found = bucket.manifest()
        assert found is not None
        damaged = replace(pair.manifest(), frozen=theirs)
        bucket.swap(damaged.to_bytes(), found.token)
        before = {name: bytes(bucket.get(name)) for name in bucket.list()}
        until(pair.b.has_ended, "the standby does not end")
        [*_, said] = (tmp_path / "b" / "syncer.log").read_text().splitlines()
        words = r"diloco: the manifest of (\S+) names objects of two runs; `diloco syncer check \1` says what can .*\."
        assert re.fullmatch(words, said)
        assert {name: bytes(bucket.get(name)) for name in bucket.list()} == before
        assert pair.manifest() == replace(damaged, epoch=2, serial=damaged.serial + 2, boot=0, address="")


@pytest.mark.slow
def test_a_standby_takes_over_while_it_loads_the_model_that_it_is_to_hold(tmp_path: Path) -> None:
    """The bucket answers its first read of a version only after the takeover. What that brings is dropped."""
    payload = method(codec="e3m0").for_fragment(0).up.encode(torch.ones(layout().fragments[0].numel))
    with Pair(tmp_path, at_least=1, more="hold = true") as pair:
        raw = Raw(pair.a.address)
        raw.initialise()
        raw.connection.close()
        pair.b.kill()
        pair.server.fault("slow", method="GET", path=pair.manifest().fragments[0][0].held)
        pair.b.start()
        until(lambda: pair.server.num_waiting == 1, "it does not load the model")
        pair.a.kill()
        pair.until_serving(pair.b)
        raw = come_back(pair.b)
        raw.push(payload)
        until(lambda: pair.manifest().versions == (1, 0), "nothing is published")
        assert pair.server.num_waiting == 1
        pair.server.release()
        until(lambda: pair.server.num_waiting == 0, "the read does not end")
        raw.push(payload, round=1, base=1, step=6, trained=10)
        until(lambda: pair.manifest().versions == (2, 0), "nothing is published")
        store: Any = fetch_status(pair.b.address, run=RUN)["store"]
        assert not store["holds"]
        raw.connection.close()
        pair.check()


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
