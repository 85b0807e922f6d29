"""A peer that is gone without a word is noticed in every call by the deadline that is configured: what either end sends
over the connection is taken on the way and goes nowhere."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.processes import until
from safetensors.torch import save
from tests.chaos.relay import Link, Relay
from tests.frames import frames
from tests.syncer.runs import RUN, Net, Raw, connection_to, method, start, train

import diloco
from diloco.core.fragments import Layout, make_layout
from diloco.errors import DilocoError, UnreachableError
from diloco.exchange.connection import Connection
from diloco.exchange.dialling import Dialler, found
from diloco.exchange.probe import probe
from diloco.exchange.remote.entry import Entry, describe, model_parts
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import (
    FIRST_BYTES,
    LONGEST_CHUNK_BYTES,
    MAX_UNACKNOWLEDGED,
    SHORTEST_CHUNK_BYTES,
    read_header,
)
from diloco.exchange.wire.tensors import bytes_of
from diloco.protocol.manifest import Manifest
from diloco.protocol.members import Claim, Deadlines
from diloco.protocol.session import requests
from diloco.run.uploads import KEPT_S
from diloco.syncer.door.open_calls import CallDeadlines
from diloco.syncer.door.receiving import IncomingModel
from diloco.syncer.server import Syncer

LOST_S = 1.5
SWALLOWED_AT = FIRST_BYTES
WIDTH = 1_000_000
"""Its first fragment has 20 MB, more than is on its way before the connection is dead."""


def serve(tmp_path: Path) -> Syncer:
    return start(tmp_path, method(), deadlines=Deadlines(lost_floor_s=LOST_S))


def swallow(link: Link) -> None:
    link.is_swallowed = True


def swallow_at_length(link: Link) -> None:
    if max(link.up_bytes, link.down_bytes) >= SWALLOWED_AT:
        link.is_swallowed = True


def swallow_before_acknowledgements(link: Link) -> None:
    """Not a whole chunk arrives before, so that a sender's window stays as it was: the 4 MB of a Read are not all on
    their way."""
    if max(link.up_bytes, link.down_bytes) >= SHORTEST_CHUNK_BYTES:
        link.is_swallowed = True


# ------------------------------------------------------------------------------------------------------ a caller's end


def status(syncers: Dialler) -> None:
    syncers.current.call("control", "Status", pb.StatusRequest(run=RUN), pb.StatusReply)


def join(syncers: Dialler) -> None:
    layout = make_layout(Net(), method().fragments)
    entry = Entry(
        syncers, RUN, layout, None, None, model_parts, overlap=None, tokens_per_step=None, held=None, is_dealt=False
    )
    entry.join(requests.Join(Claim("a", process=1)))


def again(call: Callable[[], object]) -> None:
    """Until it is not given up; it has more time after each try, as much as a busy machine needs."""
    while True:
        with suppress(UnreachableError):
            call()
            return


def initialise_small(syncer: Syncer) -> None:
    raw = Raw(syncer.address)
    with closing(raw.connection):
        again(raw.initialise)


def limit_s(text: str, name: str) -> float:
    """By which time a call was to be answered, as its error says."""
    found = re.search(rf"has not answered {name} within (\d+\.\d) s", text)
    assert found is not None, text
    return float(found[1])


CALLS: dict[str, Callable[[Dialler], object]] = {
    "Describe": lambda it: describe(it, RUN, 0.0), "Status": status, "Join": join,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_that_does_not_come_is_given_up_by_the_lost_deadline_of_the_run(name: str, tmp_path: Path) -> None:
    """And the next one comes over another connection."""
    with serve(tmp_path) as syncer, Relay(syncer.port) as relay, closing(Connection(relay.address)) as connection:
        syncers = Dialler([connection])
        initialise_small(syncer)
        found(syncers, RUN)
        for channel in ("control", "joins"):
            again(partial(connection.call, channel, "Status", pb.StatusRequest(run=RUN), pb.StatusReply))
        relay.swallow()
        with pytest.raises(UnreachableError) as lost:
            CALLS[name](syncers)
        assert connection._answers.floor_s == LOST_S <= limit_s(str(lost.value), name)
        num_links = len(relay.links)
        again(lambda: CALLS[name](syncers))
        assert len(relay.links) > num_links


@pytest.mark.parametrize("name", CALLS)
def test_before_anything_is_known_of_a_run_its_caller_says_how_long_it_waits(name: str, tmp_path: Path) -> None:
    with serve(tmp_path) as syncer, Relay(syncer.port, before_up=swallow) as relay:
        with closing(connection_to(relay.address, 0.4)) as connection:
            with pytest.raises(UnreachableError, match=rf"has not answered {name} within 0\.4 s"):
                CALLS[name](Dialler([connection]))


def test_the_usual_lost_deadline_holds_where_that_of_the_run_is_not_known() -> None:
    with closing(Connection("127.0.0.1:1")) as connection:
        assert connection._answers.limit_s == connection._timeouts["updates"].limit_s == Deadlines().lost_floor_s
        connection.expect_answers_within(17.0)
        assert connection._answers.limit_s == connection._timeouts["updates"].limit_s == 17.0


class Swallowed:
    """Connections by their numbers."""

    relay: Relay | None = None

    def __init__(self, numbers: Collection[int]) -> None:
        self._numbers = numbers

    def __call__(self, link: Link) -> None:
        assert self.relay is not None
        if self.relay.links.index(link) in self._numbers:
            link.is_swallowed = True


def test_a_learner_whose_first_connections_are_dead_joins_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Over the first one it learns the method, and the deadline. The first one that it would join over is dead, and so
    is the first one for bulk."""
    swallowed = Swallowed({1, 3})
    with serve(tmp_path) as syncer, Relay(syncer.port, before_up=swallowed) as relay:
        swallowed.relay = relay
        initialise_small(syncer)
        _, metrics = train(1, diloco.connect(relay.address, run=RUN, learner="a"), None, 8)
        assert sum(link.is_swallowed for link in relay.links) == 2
    assert metrics["merges"] > 0
    warned = [record.message for record in caplog.records if "has not answered" in record.message]
    assert warned
    assert all(limit_s(text, r"\w+") >= LOST_S for text in warned)


# ---------------------------------------------------------------------------------------------------- the syncer's end


def wide() -> Layout:
    return make_layout(Net(WIDTH), method().fragments)


def pull(connection: Connection) -> None:
    """A viewer's, of an object of the model."""
    found = connection.call("control", "Manifest", pb.ManifestRequest(run=RUN), pb.ManifestReply)
    (newest, *_), *_ = Manifest.from_bytes(found.manifest, "here").fragments
    wanted = pb.ObjectRange(name=newest.held, start=0, stop=1 << 22)
    connection.pull("joins", pb.PullRequest(run=RUN, object=wanted, direct=True), method="Read")


def probe_up(connection: Connection) -> None:
    probe(connection, pb.ProbeHeader(run=RUN, learner="a", up_bytes=1 << 25))


def probe_down(connection: Connection) -> None:
    probe(connection, pb.ProbeHeader(run=RUN, learner="a", down_bytes=1 << 25))


def initial_model() -> Iterator[bytes]:
    """The messages of its upload."""
    parts = [bytes_of(torch.ones(it.numel)) for it in wide().fragments]
    static = memoryview(save({}))
    header = pb.InitialiseHeader(
        run=RUN, learner="a", layout=json.dumps(wide().to_dict()), part_bytes=[*map(len, parts), len(static)]
    )
    return frames(header, *parts, static)


def initialise(connection: Connection) -> None:
    connection.upload("joins", "Initialise", initial_model(), pb.InitialiseReply)


TRANSFERS: dict[str, Callable[[Connection], object]] = {
    "pull": pull, "probe up": probe_up, "probe down": probe_down, "initialise": initialise,
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFERS)
def test_the_syncer_ends_the_transfer_of_a_peer_that_no_heartbeat_speaks_for(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def ended() -> list[str]:
        return [record.message for record in caplog.records if "nothing has moved" in record.message]

    caplog.set_level(logging.INFO, "diloco.syncer")
    with (
        serve(tmp_path) as syncer,
        Relay(syncer.port, swallow_before_acknowledgements, swallow_before_acknowledgements) as relay,
        closing(connection_to(relay.address, 300.0)) as patient,
        ThreadPoolExecutor(1) as pool,
    ):
        if name != "initialise":
            raw = Raw(syncer.address, held=wide())
            again(raw.initialise)
            raw.connection.close()
        lost = pool.submit(TRANSFERS[name], patient)
        try:
            until(lambda: any(link.is_swallowed for link in relay.links), "nothing crosses")
            until(lambda: bool(ended()), "the call is still open")
            until(lambda: not syncer._calls._calls, "the call is still open")
            assert float(ended()[-1].split()[-2]) >= LOST_S
        finally:
            relay.cut()
        assert isinstance(lost.exception(), UnreachableError)
        with closing(connection_to(syncer.address, 300.0)) as another:
            again(lambda: TRANSFERS[name](another))  # nothing of the other one is in its way


@pytest.mark.parametrize("name", ["probe up", "probe down"])
def test_a_learner_gives_up_a_probe_in_which_nothing_moves(name: str, tmp_path: Path) -> None:
    with (
        start(tmp_path, method(), deadlines=Deadlines(lost_floor_s=300.0, lost_cap_s=300.0)) as syncer,
        Relay(syncer.port, swallow_at_length, swallow_at_length) as relay,
        closing(connection_to(relay.address, LOST_S)) as connection,
    ):
        with pytest.raises(UnreachableError, match=r"neither sent nor accepted bytes for [\d.]+ s"):
            TRANSFERS[name](connection)


class Call:
    """Of gRPC, as far as a deadline sees it."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def test_a_caller_that_was_given_up_has_twice_the_time_and_a_member_has_no_such_limit() -> None:
    now = [0.0]
    deadlines = CallDeadlines(6.0, first_s=20.0, next_s=300.0, clock=lambda: now[0])

    def waits(caller: str, seconds: float, *, is_member: bool = False) -> bool:
        """Whether a call is cancelled whose second message takes so long."""
        call: Any = Call()

        def stream() -> Iterator[bytes]:
            yield b""
            now[0] += seconds
            deadlines.check()

        messages = deadlines.messages(stream(), caller, call)
        next(messages)
        if is_member:
            with deadlines.member(call):
                assert list(messages) == []
        else:
            assert list(messages) == []
        return bool(call.is_cancelled)

    assert not waits("a", 5.9)
    assert [waits("b", 100.0) for _ in range(6)] == [True] * 5 + [False]  # 6, 12, 24, 48, 96, 192 s
    assert not waits("c", 299.0, is_member=True)
    assert waits("c", 300.0, is_member=True)
    assert waits("c", 6.1)


# ------------------------------------------------------------------------------- what is kept of a run's initial model


def cut_short(incoming: IncomingModel, header: pb.InitialiseHeader, num_chunks: int) -> list[int]:
    """What the receiver says of an upload that ends after some chunks."""
    messages = frames(header, *(memoryview(bytes(num_bytes)) for num_bytes in header.part_bytes))
    read_header(messages, pb.InitialiseHeader)

    def stream() -> Iterator[bytes]:
        if header.resumes:
            yield pb.Resume(start=0).SerializeToString()
        for _ in range(num_chunks):
            yield next(messages)

    said = list[int]()
    with suppress(DilocoError):
        for reply in incoming.receive(header, stream(), lambda n: memoryview(bytearray(n)), lambda _: None):
            said.append(reply.received.num_bytes)
    return said


def test_what_came_of_the_initial_model_waits_as_long_as_what_came_of_a_contribution() -> None:
    now = [0.0]
    incoming = IncomingModel(clock=lambda: now[0])
    header = pb.InitialiseHeader(run=RUN, learner="a", part_bytes=[1 << 24])
    cut_short(incoming, header, MAX_UNACKNOWLEDGED)
    assert incoming._kept is not None
    assert len(incoming._kept.buffer) == 1 << 24
    now[0] = KEPT_S - 1.0
    incoming.drop_expired()
    header.resumes = True
    assert cut_short(incoming, header, MAX_UNACKNOWLEDGED)[0] == MAX_UNACKNOWLEDGED * LONGEST_CHUNK_BYTES
    now[0] += KEPT_S
    incoming.drop_expired()
    assert incoming._kept is None
    assert cut_short(incoming, header, MAX_UNACKNOWLEDGED)[0] == 0


def test_a_syncer_releases_what_came_of_a_model_that_does_not_go_on(tmp_path: Path) -> None:
    arrived, is_cut = threading.Event(), threading.Event()

    def interrupted() -> Iterator[bytes]:
        *most, last = initial_model()
        yield from most
        is_cut.wait(300.0)
        yield last

    with (
        start(tmp_path, method()) as syncer,
        Relay(syncer.port) as relay,
        ThreadPoolExecutor(1) as pool,
        closing(connection_to(relay.address, 300.0)) as connection,
    ):
        lost = pool.submit(
            connection.upload, "joins", "Initialise", interrupted(), pb.InitialiseReply, heard=lambda _: arrived.set()
        )
        assert arrived.wait(300.0)
        relay.cut()
        is_cut.set()
        assert isinstance(lost.exception(), UnreachableError)
        until(lambda: syncer._incoming._kept is not None, "nothing is kept")
        syncer._incoming._clock = lambda: time.monotonic() + KEPT_S
        until(lambda: syncer._incoming._kept is None, "it is kept for good")
