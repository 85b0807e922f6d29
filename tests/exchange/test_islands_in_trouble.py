"""An island of two ranks in trouble, beside single processes: real processes over gloo, and a real syncer."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.processes import until
from tests.bucket_server import BucketServer
from tests.chaos.relay import Link, Relay
from tests.exchange import troubled_life
from tests.exchange.island_life import Net
from tests.exchange.scenarios import Result
from tests.exchange.troubled_life import ATTACHES, JOINS, LIVES, STEPS, WORLD_SIZE, Life
from tests.exchange.worlds import TIMEOUT_S, read, start_processes
from tests.syncer.runs import PATIENT, fall_silent, status_of, versions_of
from torch.distributed import FileStore

import diloco
from diloco.core.quorum import Called
from diloco.demo.bucket_server import CREDENTIALS
from diloco.exchange.base import Exchange
from diloco.following.follower import newest_model
from diloco.store.blobs import ObjectHead
from diloco.store.bucket import Bucket
from diloco.syncer.hosting import SyncerDriver
from diloco.syncer.server import Options, Syncer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # includes a world of processes

STREAMING = diloco.StreamingDiLoCo(
    sync_every=4, overlap=2, fragments=diloco.ByLayer(layers=1), codec="fp32", error_feedback=False
)
METHODS = {
    "given up": diloco.DiLoCo(sync_every=3, overlap=2),
    "replaced": STREAMING,
    "cut": STREAMING,
    "moves": STREAMING,
    "decoupled": diloco.DecoupledDiLoCo(
        sync_every=3, overlap=1, fragments=diloco.Balanced(3), codec="int4", error_feedback=True, quorum=Called()
    ),
    "asynchronous": diloco.AsyncDiLoCo(learners=2, sync_every=3, wait=True),
    "calls": STREAMING,
    "fails": diloco.DiLoCo(sync_every=4, overlap=2),
    "stages": diloco.DiLoCo(sync_every=3),
    "refused": diloco.DiLoCo(sync_every=3),
    **dict.fromkeys(JOINS, STREAMING),
}
CUT_AFTER_BYTES = 40_000
"""In the middle of the first part that rank 1 uploads."""


class World:
    """The island's processes go through all lives; meanwhile the test does to them what each life is about.

    Attributes:
        facts: what the test saw, by life.
    """

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.bucket = stack.enter_context(BucketServer())
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in CREDENTIALS.items():
            environment.setenv(name, value)
        self.syncers = {
            name: stack.enter_context(Syncer(name, method, self._options(name))) for name, method in METHODS.items()
        }
        self.is_stuck = threading.Event()
        self.relay = stack.enter_context(Relay(self.syncers["cut"].port, self._before_up))
        addresses = {name: [syncer.address] * WORLD_SIZE for name, syncer in self.syncers.items()}
        addresses["cut"][1] = self.relay.address
        self.first = stack.enter_context(Relay(self.syncers["moves"].port))
        addresses["moves"] = [f"{self.first.address},{self.syncers['moves'].address}"] * WORLD_SIZE
        (directory / "lives.json").write_text(
            json.dumps({name: addresses[name] for name in (*LIVES, *ATTACHES, *JOINS)})
        )
        pool = stack.enter_context(ThreadPoolExecutor(4))
        self.processes = pool.submit(start_processes, troubled_life.__name__, directory, WORLD_SIZE)
        self.facts: dict[str, Any] = {}

    def _options(self, name: str) -> Options:
        store = self.bucket.url(name) if name in JOINS else None
        return Options("127.0.0.1:0", self.directory / f"syncer {name}", deadlines=PATIENT, store=store)

    def _before_up(self, link: Link) -> None:
        if link.up_bytes >= CUT_AFTER_BYTES and not self.is_stuck.is_set():
            link.may_flow.clear()
            self.is_stuck.set()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        until(lambda: condition() or self.processes.done(), what)
        if self.processes.done():
            self.processes.result()
            assert condition(), what

    def store(self, name: str) -> FileStore:
        return FileStore(str(self.directory / f"{name}.store"), -1)

    def give_up(self) -> None:
        """Once rank 0 has the news of version 1, and waits for rank 1."""
        name, store = "given up", self.store("given up")
        syncer = self.syncers[name]

        def island() -> dict[str, Any]:
            return status_of(syncer)["learners"].get("island", {})

        def is_up_to_date() -> bool:
            return island().get("versions_behind") == 0 and versions_of(syncer) == [1]

        self.until(is_up_to_date, "it does not get version 1")
        store.set("version 1 is here", "")
        self.until(lambda: store.check(["goes on, rank 0"]), "rank 0 does not step")
        fall_silent(syncer, "island")
        self.until(lambda: island().get("incarnation") == 2 and island()["live"] and is_up_to_date(), "it is not back")
        store.set("a new incarnation has started", "")

    def replace(self) -> None:
        store, syncer = self.store("replaced"), self.syncers["replaced"]
        self.until(lambda: store.check([f"trains, rank {rank}" for rank in range(WORLD_SIZE)]), "it does not train")
        exchange = diloco.connect(syncer.address, run="replaced", learner="island", join_timeout_s=TIMEOUT_S)
        other = Life(Net(seed=2), exchange)
        with other.learner:
            store.set("replaced", "")
            other.train(STEPS + other.learner.steps)
            self.facts["replaced"] = other.result().facts

    def cut(self) -> None:
        """Rank 1's connection, when rank 0's part of the contribution is there already."""
        syncer = self.syncers["cut"]
        self.until(self.is_stuck.is_set, "rank 1 does not upload")
        self.until(lambda: bool(syncer.driver.ask(fragments_with_a_part)), "rank 0 does not upload")
        [fragment] = syncer.driver.ask(fragments_with_a_part)
        self.facts["cut"] = status_of(syncer)["fragments"][fragment]["contributed"]
        for link in self.relay.links:
            if not link.may_flow.is_set():
                link.hang_up()

    def move(self) -> None:
        store = self.store("moves")
        self.until(lambda: store.check([f"trains, rank {rank}" for rank in range(WORLD_SIZE)]), "it does not train")
        self.facts["moves"] = len(self.first.links)
        self.first.close()
        store.set("the first address is gone", "")

    def harm(self, name: str) -> None:
        """An object of a run that a single process has trained: the shard of rank 1 is not what was published."""
        syncer, bucket = self.syncers[name], Bucket(self.bucket.url(name))
        exchange = diloco.connect(syncer.address, run=name, learner="single", initialise=True)
        single = Life(Net(seed=2), exchange)
        with single.learner:
            single.train(STEPS)
            single.result()
        syncer.driver.drain()
        self.facts[name] = newest_model(syncer.address, run=name).state_dict()
        with Life(Net(seed=2), diloco.connect(syncer.address, run=name, learner="before")).learner:
            pass  # the syncer knows now where tensors are in the objects, and reads none of them for the island
        largest = max(syncer.driver.ask(lambda driver: driver.state.model.layout.fragments), key=lambda it: it.numel)
        held = syncer.driver.manifest.fragments[largest.index][0].held
        data = bytearray(bucket.get(held))
        head = ObjectHead.from_bytes(bytes(data[: 8 + int.from_bytes(data[:8], "little")]))
        last = len(head.data) + head.entries["theta"].last - 1
        data[last] ^= 1
        bucket.delete([held])
        if name != "gone":
            bucket.put(held, [data if name == "damaged" else data[:last]])
        self.store(name).set("an object is not whole", "")

    def beside(self, name: str) -> None:
        """A single process trains before the island does, as long as it does, and until both have been merged."""
        address = self.syncers[name].address
        single = Life(Net(seed=2), diloco.connect(address, run=name, learner="single", join_timeout_s=TIMEOUT_S))
        with single.learner:
            single.step()
            self.store(name).set("the other learner trains", "")
            while not self.has_ended(name) or single.learner.metrics()["merges"] == 0:
                single.step()
            self.facts[name] = single.learner.metrics()

    def has_ended(self, name: str) -> bool:
        return (self.directory / f"{name}.1.json").exists() or self.processes.done()


def fragments_with_a_part(driver: SyncerDriver) -> list[int]:
    return [each.contribution.fragment for each in driver._uploads.assemblies.values() if each.here]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        world = World(tmp_path_factory.mktemp("trouble"), stack)
        world.give_up()
        world.replace()
        world.cut()
        world.move()
        for name in ("decoupled", "asynchronous"):
            world.beside(name)
        for name in JOINS:
            world.harm(name)
        world.processes.result()
        yield world


def results(world: World, name: str) -> list[Result]:
    return [read(world.directory, name, rank) for rank in range(WORLD_SIZE)]


def require_one_learner(world: World, name: str) -> Result:
    """All ranks say the same, and every token that the run has counted is somewhere. Returns rank 0's result."""
    first, *others = results(world, name)
    for other in others:
        different = [key for key, value in first.tensors.items() if not torch.equal(value, other.tensors[key])]
        assert not different
        for key in ("learner", "incarnation", "steps", "tokens", "versions", "merges", "ledger"):
            assert first.facts[key] == other.facts[key], key
    status = status_of(world.syncers[name])
    for fragment in status["fragments"]:
        ledger = dict(fragment["ledger"])
        assert ledger.pop("trained") == status["tokens"]
        assert sum(ledger.pop("discarded").values()) + sum(ledger.values()) == status["tokens"]
    return first


def test_an_island_that_was_given_up_is_one_learner_again(world: World) -> None:
    """Version 1 is fetched by both incarnations, before the ranks take in either."""
    island = require_one_learner(world, "given up")
    assert island.facts["incarnation"] == 2
    assert island.facts["merges"] > 0
    assert island.facts["versions"] > [1]
    # The step in which it heard of that is counted, of all ranks.
    assert island.facts["tokens"] < status_of(world.syncers["given up"])["tokens"] == 10 * island.facts["num_steps"]
    log = (world.directory / "rank0.log").read_text()
    assert re.search(r"rank 0 of 2 has waited \d+ s for other ranks in learner\.step\(\)", log)


def test_an_island_whose_name_another_process_takes_is_told_so_on_every_rank(world: World) -> None:
    for result in results(world, "replaced"):
        kind, text = result.facts["error"]
        assert kind == "StaleIncarnationError"
        assert re.match("another process has joined .* as 'island'; give every learner its own name", text)
    assert world.facts["replaced"]["incarnation"] == 2
    assert world.facts["replaced"]["tokens"] == 5 * STEPS


def test_a_contribution_of_which_a_part_was_cut_off_counts_once_it_is_whole(world: World) -> None:
    island = require_one_learner(world, "cut")
    assert world.facts["cut"] == []
    single = require_same_bits_as_one_process(island)
    sent = [result.facts["num_bytes"]["contributions"] for result in results(world, "cut")]
    assert sum(sent) == single.facts["num_bytes"]["contributions"]


def test_all_ranks_of_an_island_go_on_over_another_address(world: World) -> None:
    assert world.facts["moves"] >= 2
    require_same_bits_as_one_process(require_one_learner(world, "moves"))


def require_same_bits_as_one_process(island: Result) -> Result:
    def life(_: int, exchange: Exchange) -> Result:
        single = Life(Net(seed=1), exchange, method=STREAMING)
        single.train(STEPS)
        return single.result()

    [single] = diloco.run_local(life, learners=1)
    different = [key for key, value in single.tensors.items() if not torch.equal(value, island.tensors[key])]
    assert not different
    return single


@pytest.mark.parametrize("name", ["decoupled", "asynchronous"])
def test_an_island_runs_asynchronously_beside_a_single_process(name: str, world: World) -> None:
    island, single = require_one_learner(world, name), world.facts[name]
    assert status_of(world.syncers[name])["tokens"] == island.facts["tokens"] + single["tokens"]
    assert island.facts["merges"] >= 2
    assert single["merges"] > 0


def test_ranks_that_call_different_methods_are_told_which(world: World) -> None:
    first, second = (result.facts for result in results(world, "calls"))
    assert first == second
    for key, calls in (
        ("state", "state_dict() on 1 and load_state_dict() on 1 of them"),
        ("model", "global_state_dict() on 1 and state_dict() on 1 of them"),
        ("step", "step() on 1 and distributed_state_dict() on 1 of them"),
    ):
        kind, text = first[key]
        assert kind == "ConfigError"
        assert calls in text
    assert min(first["versions"]) > 1  # they go on


def test_a_rank_that_fails_ends_the_others_and_leaves_nothing_behind(world: World) -> None:
    first, second = (result.facts for result in results(world, "fails"))
    assert (first["error"], second["error"]) == ("ExchangeError", "UsersError")
    assert first["threads"] == second["threads"] == []
    # Rank 0 does not wait for what rank 1 will never offer.
    assert "leaves before its last contribution was acknowledged" not in (world.directory / "rank0.log").read_text()


def test_a_rank_may_train_nothing(world: World) -> None:
    first, second = results(world, "stages")
    assert first.facts["versions"] == second.facts["versions"] == [STEPS // 3]
    assert first.facts["ledger"] == second.facts["ledger"]
    assert {key for key in second.tensors if not key.startswith("own.")} == {"frozen.weight", "frozen.bias"}


def test_ranks_that_could_not_join_leave_nothing_behind(world: World) -> None:
    for result in results(world, "stages"):
        assert result.facts["again"][0] == "AlreadyInitialisedError"
        assert result.facts["threads"] == []


@pytest.mark.parametrize(
    ("name", "rank", "said"),
    [
        ("damaged", 0, "Fetching it again from the syncer itself"),
        ("short", 1, "It was read from the store; fetching it again from the syncer itself"),
        ("gone", 1, "cannot read from the store at .*404.*; the bytes come from the syncer itself"),
    ],
)
def test_an_island_joins_where_an_object_of_the_bucket_is_not_whole(
    name: str, rank: int, said: str, world: World
) -> None:
    """Both ranks have what was published, and end with the same bits."""
    island = require_one_learner(world, name)
    assert all(torch.equal(island.tensors[f"joined.{key}"], value) for key, value in world.facts[name].items())
    assert re.search(said, (world.directory / f"rank{rank}.log").read_text())


def test_what_is_wrong_with_one_rank_is_an_error_on_every_rank(world: World) -> None:
    """None of them waits for one that cannot attach."""
    first, second = (result.facts for result in results(world, "refused"))
    assert first["pattern"] == second["pattern"]
    assert "'froze.*': …} matches no buffer and no frozen parameter of the model" in first["pattern"][1]
    assert second["answer"][0] == first["answer"][0] == "ConfigError"
    assert first["answer"][1] == "rank 1 of this learner: " + second["answer"][1]
