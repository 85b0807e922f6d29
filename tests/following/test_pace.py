"""Followers share the syncer's link with learners and do not delay them."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.following.published import METHODS, RUN, published_run

import diloco
from diloco.exchange.connection import Connection
from diloco.exchange.local import Local, Lost, run_virtual
from diloco.exchange.virtual.delivery import Arrival, Direction
from diloco.exchange.virtual.run import VirtualRun
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import LONGEST_CHUNK_BYTES, SHORT_QUEUE_S, Window, filling, read_header
from diloco.exchange.wire.incoming import ArrivalReports
from diloco.exchange.wire.outgoing import LEARNERS_SHARE, MOST_SPARE_BYTES, LearnersFirst
from diloco.following.sources import READ_BYTES
from diloco.planning.network import Network, Route
from diloco.run.ports import NullObserver

# --- the order --------------------------------------------------------------------------------------------------------


def test_followers_have_a_small_part_while_learners_download() -> None:
    link, learner, other = LearnersFirst(), ExitStack(), ExitStack()
    assert link.take(1000) == 1000
    learner.enter_context(link.download())
    other.enter_context(link.download())
    assert link.take(1000) == 0
    link.sent(1000 * LEARNERS_SHARE)
    assert [link.take(1000), link.take(1000)] == [1000, 0]
    learner.close()
    assert link.take(1000) == 0
    other.close()
    assert link.take(1000) == 1000
    link.sent(1000 * LEARNERS_SHARE)
    with link.download():  # nothing was saved for it
        assert link.take(1000, 0.01) == 1000
        assert link.take(1000, 0.01) == 0


def test_what_followers_did_not_take_is_not_theirs_later() -> None:
    """In virtual time, over a link that the learner fills all the time. A follower that comes after hours slows the
    learner for a moment, and then by the followers' part."""
    link, network = LearnersFirst(), Network({"down": BIT_PER_S}, [Route((), ("down",))] * 2)
    num_bytes, now_s = LONGEST_CHUNK_BYTES, 0.0

    def download(num_chunks: int, *, follower: bool) -> float:
        """The learner downloads; returns seconds."""
        nonlocal now_s
        began_s = now_s
        for _ in range(num_chunks):
            while follower and link.take(num_bytes):
                network.send(now_s, 1, "down", num_bytes)
            number = network.send(now_s, 0, "down", num_bytes)
            while number not in [each.number for each in network.arrived(now_s)]:
                now_s = network.next_s
            link.sent(num_bytes)
        return now_s - began_s

    with link.download():
        alone_s = download(1000, follower=False)
        download(40_000, follower=False)
        most_s = 8 * MOST_SPARE_BYTES / BIT_PER_S
        first_s = download(1000, follower=True)
        assert alone_s < first_s <= alone_s * (1 + 1 / LEARNERS_SHARE) + most_s
        assert download(1000, follower=True) <= alone_s * (1 + 1 / LEARNERS_SHARE) + 8 * num_bytes / BIT_PER_S


# --- a syncer ---------------------------------------------------------------------------------------------------------


def test_a_read_waits_until_no_learner_downloads(tmp_path: Path) -> None:
    """The learner holds its download back, by acknowledging nothing."""
    with published_run(tmp_path, METHODS["4 bits"], width=400_000) as run:
        run.publish(0)
        newest = run.syncer.driver.manifest.fragments[0][0]
        pull = pb.PullRequest(
            run=RUN, learner=run.raw.name, incarnation=run.raw.incarnation, process=run.raw.process, fragment=0, base=-1
        )
        read = pb.PullRequest(run=RUN, object=pb.ObjectRange(name=newest.held, start=0, stop=READ_BYTES), direct=True)
        with stream(run.raw.connection, "Pull", pull) as learner, stream(run.raw.connection, "Read", read) as follower:
            num_bytes = read_header(learner.replies, pb.PullHeader).num_bytes
            assert read_header(follower.replies, pb.PullHeader).num_bytes == READ_BYTES
            assert [next(follower.replies) for _ in range(2)] == [b"", b""]  # it waits, and goes on waiting
            learner.receive(num_bytes)
            follower.receive(READ_BYTES)


@dataclass
class Stream:
    """A download: the syncer's messages, and acknowledgements."""

    replies: Iterator[bytes]
    acknowledgements: queue.SimpleQueue[bytes | None]

    def receive(self, num_bytes: int) -> None:
        """The payload, whole and undamaged."""
        progress = ArrivalReports()
        for filled in filling(self.replies, memoryview(bytearray(num_bytes))):
            if progress.is_due():
                self.acknowledgements.put(pb.Received(num_bytes=filled).SerializeToString())


@contextmanager
def stream(connection: Connection, method: str, request: pb.PullRequest) -> Iterator[Stream]:
    messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    messages.put(request.SerializeToString())
    with connection.stream(method, method, iter(messages.get, None)) as (replies, moved):

        def heard() -> Iterator[bytes]:
            for message in replies:
                moved()
                yield message

        yield Stream(heard(), messages)
        messages.put(None)


# --- in virtual time --------------------------------------------------------------------------------------------------

LEARNERS, STEPS = 4, 300
NUM_PARAMETERS, UPDATE_BYTES, BIT_PER_S, LATENCY_S = 1000, 25_000_000, 50e6, 0.02
METHOD = diloco.DiLoCo(sync_every=100, codec="int4", outer=diloco.SGD(lr=1.0))
SCALE = UPDATE_BYTES / METHOD.up.encoded_bytes(NUM_PARAMETERS)
"""Learners have few parameters, and each of their bytes counts for so many on the links: 50M parameters of 4 bits."""


class SharedLinks(NullObserver):  # type: ignore[misc]
    """The links of a run (`delivery.Links`): the syncer's, each way, are shared by all learners and followers."""

    def __init__(self, num_followers: int, order: LearnersFirst) -> None:
        routes = [Route(("up",), ("down",), LATENCY_S)] * (LEARNERS + num_followers)
        self._network = Network({"up": BIT_PER_S, "down": BIT_PER_S}, routes)
        self._order, self._downloads = order, dict[int, tuple[int, ExitStack]]()
        self.followers = [SimulatedFollower(LEARNERS + index, order) for index in range(num_followers)]
        self.drop, self.latency_s = self._network.drop, self._network.latency_s

    @property
    def next_s(self) -> float:
        return self._network.next_s

    def send(self, now_s: float, learner: int, direction: Direction, num_bytes: float) -> int:
        if learner >= LEARNERS:
            return self._network.send(now_s, learner, direction, num_bytes)
        number = self._network.send(now_s, learner, direction, num_bytes * SCALE)
        if direction == "down":
            download = ExitStack()
            download.enter_context(self._order.download())
            self._downloads[number] = round(num_bytes * SCALE), download
        return number

    def arrived(self, now_s: float) -> Sequence[Arrival]:
        found = self._network.arrived(now_s)
        for each in found:
            if each.number in self._downloads:
                num_bytes, download = self._downloads.pop(each.number)
                self._order.sent(num_bytes)
                download.close()
        for follower in self.followers:
            follower.go_on()
        return found

    def published(self, *_: object) -> None:
        for follower in self.followers:
            follower.newest += 1
            follower.go_on()


class SimulatedFollower:
    """Reads the update of each version once the syncer has published it, or of the newest one if there are several, in
    one read after the other.

    Attributes:
        newest: version of the syncer.
        versions: that it has read.
    """

    def __init__(self, index: int, order: LearnersFirst) -> None:
        self.newest, self.versions = 0, [0]
        self.run: VirtualRun | None = None
        self._index, self._order = index, order
        self._wanted = 0
        self._sent = self._received = self._start = self._stop = 0
        self._window = Window(queue_s=SHORT_QUEUE_S)

    def go_on(self) -> None:
        if self._received == self._stop:
            self._next_read()
        assert self.run is not None
        while self._sent < self._stop and self._window.has_room:
            num_bytes = self._order.take(min(self._window.chunk_bytes, self._stop - self._sent))
            if not num_bytes:
                return
            self._sent += num_bytes
            self._window.sent(self.run.time.now, num_bytes)
            self.run.delivery.send(self._index, "down", num_bytes, partial(self._arrived, self._sent))

    def _next_read(self) -> None:
        if self._received == UPDATE_BYTES:
            self.versions.append(self._wanted)
        if self._received in (0, UPDATE_BYTES):
            if self.versions[-1] == self.newest:
                self._sent = self._received = self._stop = 0
                return
            self._wanted, self._sent, self._received, self._stop = self.newest, 0, 0, 0
        self._start, self._stop = self._stop, min(UPDATE_BYTES, self._stop + READ_BYTES)
        self._window = Window(queue_s=SHORT_QUEUE_S)

    def _arrived(self, num_bytes: int) -> None:
        assert self.run is not None
        self._received = num_bytes
        self._window.arrived(self.run.time.now, num_bytes - self._start)
        self.go_on()


def life(index: int, exchange: Local) -> tuple[float, float]:
    """When the learner began and ended its training."""
    model = torch.nn.Linear(NUM_PARAMETERS, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diloco.Learner(model, optimizer, method=METHOD, exchange=exchange) as learner:
        began_s = exchange.now_s
        while learner.steps < STEPS:
            model.weight.grad = torch.full_like(model.weight, 1.0 + index)
            optimizer.step()
            learner.step(tokens=10)
        return began_s, exchange.now_s


def training_s(num_followers: int, order: LearnersFirst) -> tuple[float, list[list[int]]]:
    """Seconds from the first learner's first step to the last one's last, and the versions of each follower."""
    links = SharedLinks(num_followers, order)
    names = [f"learner-{index}" for index in range(LEARNERS)]
    run = VirtualRun(names, lambda *_: 1.0, [0.0] * LEARNERS, links, observer=links)
    for follower in links.followers:
        follower.run = run
    began, ended = zip(*(each for each in run_virtual(life, run) if not isinstance(each, Lost)), strict=True)
    return max(ended) - min(began), [follower.versions for follower in links.followers]


class AllAtOnce(LearnersFirst):
    """No order."""

    def take(self, num_bytes: int, wait_s: float = 0.0) -> int:
        return num_bytes


@pytest.fixture(scope="module")
def undisturbed_s() -> float:
    return training_s(0, LearnersFirst())[0]


@pytest.mark.parametrize("num_followers", [1, pytest.param(32, marks=pytest.mark.slow)])
def test_learners_keep_their_pace_within_2_percent(num_followers: int, undisturbed_s: float) -> None:
    """Of a method that waits for its updates. Every follower begins to read before the learners do."""
    seconds, versions = training_s(num_followers, LearnersFirst())
    assert undisturbed_s <= seconds <= 1.02 * undisturbed_s, (seconds, undisturbed_s)
    assert versions == [[0, 1, 2, 3]] * num_followers


def test_without_an_order_followers_would_halve_the_pace(undisturbed_s: float) -> None:
    seconds, _ = training_s(32, AllAtOnce())
    assert seconds > 1.5 * undisturbed_s
