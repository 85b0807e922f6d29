"""Transfers that are cut off on the way go on at the chunk that they had reached, over another connection."""

from __future__ import annotations

import itertools
import json
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from benchmarks.processes import until
from safetensors.torch import save
from tests.chaos.relay import Link, Relay
from tests.frames import frames
from tests.syncer.runs import RUN, Net, Raw, fall_silent, method, start, status_of

from diloco import events
from diloco.core.fragments import Layout, make_layout
from diloco.errors import AlreadyInitialisedError, CorruptPayloadError, StaleIncarnationError, UnreachableError
from diloco.event_log import read_events
from diloco.exchange.base import FlatModel
from diloco.exchange.connection import Connection
from diloco.exchange.dialling import Dialler
from diloco.exchange.remote.entry import Entry, Initial, describe, model_parts
from diloco.exchange.remote.transfers import Payload, Receiver, Sender
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import FIRST_BYTES, MAX_UNACKNOWLEDGED, SHORTEST_CHUNK_BYTES
from diloco.exchange.wire.incoming import start_of
from diloco.exchange.wire.tensors import bytes_of
from diloco.protocol.members import Claim, Deadlines
from diloco.protocol.session import requests
from diloco.syncer.server import Syncer

T = TypeVar("T")

CUT_AT = 3 * FIRST_BYTES
"""So many bytes cross only if some of them were acknowledged."""


def wide() -> Layout:
    """Fragment 0 has 4 MB."""
    return make_layout(Net(width=200_000), method().fragments)


SIZE = wide().fragments[0].numel


class Cutter:
    """Cuts a connection off once so many bytes have crossed it in one direction, as often as it is told."""

    def __init__(self, times: int, how: Callable[[Link], None] = Link.hang_up, at: int = CUT_AT) -> None:
        self.left, self._how, self._at, self._cut = times, how, at, set[Link]()
        self._lock = threading.Lock()

    def __call__(self, link: Link) -> None:
        with self._lock:
            if self.left and link not in self._cut and max(link.up_bytes, link.down_bytes) >= self._at:
                self.left -= 1
                self._cut.add(link)
                self._how(link)


@contextmanager
def behind(tmp_path: Path, cutter: Cutter, **options: Any) -> Iterator[tuple[Syncer, Relay, Raw]]:
    """A syncer whose run has a wide model, with a learner at its door, and a relay before it."""
    with start(tmp_path, method(at_least=2), **options) as syncer:
        raw = Raw(syncer.address, held=wide())
        with closing(raw.connection), Relay(syncer.port, cutter, cutter) as relay:
            raw.initialise()
            raw.join()
            yield syncer, relay, raw


def in_spite_of_cuts(transfer: Callable[[], T]) -> tuple[T, int]:
    """Repeat a transfer until it is not cut off; how often it was."""
    for times in range(100):
        with suppress(UnreachableError):
            return transfer(), times
    raise AssertionError("it never comes through")


def received(syncer: Syncer) -> torch.Tensor:
    """The one contribution that waits for its round."""
    [slot] = syncer.driver.ask(lambda driver: list(driver._uploads._slots.values()))
    return slot.tensor


def resumed(tmp_path: Path) -> list[tuple[str, int]]:
    log = read_events(tmp_path / "state" / "events.jsonl")
    return [(event.what, event.num_bytes) for event in log if isinstance(event, events.Resumed)]


def without_a_word(link: Link) -> None:
    """The learner's end breaks, and the syncer is not told."""
    link.is_half_open = True
    Relay.hang_up_end(link.ends[0])


@pytest.mark.parametrize("how", [Link.hang_up, without_a_word])
def test_a_push_goes_on_where_it_was_cut_off(how: Callable[[Link], None], tmp_path: Path) -> None:
    values = bytes_as_tensor(torch.randn(SIZE, generator=torch.Generator().manual_seed(1)))
    with behind(tmp_path, Cutter(2, how)) as (syncer, relay, raw), closing(Connection(relay.address)) as connection:
        sender, header = Sender(Dialler([connection]), RUN), raw.header(values.numel())
        payload = Payload(lambda: values)
        _, times = in_spite_of_cuts(lambda: sender.upload(header, payload))
        assert times  # the second cut may come while the first is told, or when all is there
        assert torch.equal(received(syncer), values)
        assert sender.num_bytes == len(values)
        told = [num_bytes for _, num_bytes in resumed(tmp_path)]
        assert told == sorted(told)  # the second cut may come before another chunk is there
        assert 0 < told[0] <= told[-1] <= len(values)
        assert sender.resumed_bytes == sum(told)
        until(lambda: status_of(syncer)["spooled_bytes"] == len(values), "room is lost")


def bytes_as_tensor(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)


def test_a_pull_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    with behind(tmp_path, Cutter(2)) as (_, relay, raw), closing(Connection(relay.address)) as connection:
        receiver = Receiver(Dialler([connection]), RUN, raw.layout, method())
        request = pb.PullRequest(
            run=RUN, learner=raw.name, incarnation=raw.incarnation, fragment=0, base=-1, joining=True
        )
        download, times = in_spite_of_cuts(lambda: receiver.pull(request))
        assert times  # the second cut may come while the first is told, or when all is there
        assert download.advanced is not None
        assert torch.equal(download.advanced.held.theta, torch.ones(SIZE))
        assert receiver.num_bytes["joins"] == 4 * SIZE
        told = resumed(tmp_path)
        assert {what for what, _ in told} == {"joins"}
        assert receiver.resumed_bytes == sum(num_bytes for _, num_bytes in told) > 0


@pytest.mark.parametrize("how", [Link.hang_up, without_a_word])
def test_the_upload_of_the_model_goes_on_where_it_was_cut_off(how: Callable[[Link], None], tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer, Relay(syncer.port) as relay:
        relay._before_up = Cutter(2, how)
        thetas = [torch.randn(it.numel, generator=torch.Generator().manual_seed(1)) for it in wide().fragments]
        with closing(Connection(relay.address)) as connection:
            entry = Entry(
                Dialler([connection]), RUN, wide(), Initial(0, 0, "test"), FlatModel(tuple(thetas), {}), model_parts,
                overlap=None, tokens_per_step=None, held=None, is_dealt=False,
            )  # fmt: skip
            _, times = in_spite_of_cuts(lambda: entry.initialise(requests.Initialise(Claim("raw", process=1))))
        assert times  # the second cut may come while the first is told, or when all is there
        told = resumed(tmp_path)
        assert {what for what, _ in told} == {"joins"}
        assert entry.resumed_bytes == sum(num_bytes for _, num_bytes in told) > 0
        held = syncer.driver.ask(lambda driver: [driver.state.model.held(index).theta for index in (0, 1)])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(thetas, held, strict=True))


def test_another_model_does_not_go_on_with_what_is_here_of_one(tmp_path: Path) -> None:
    """Nor does the same header with other values behind it; and a run that has a model keeps it."""
    with start(tmp_path, method()) as syncer, closing(Connection(syncer.address)) as connection:
        raw = Raw(syncer.address, held=wide())
        parts = [bytes_of(torch.ones(it.numel)) for it in wide().fragments]
        sizes = [*map(len, parts), len(save({}))]
        header = pb.InitialiseHeader(
            run=RUN, learner="raw", layout=json.dumps(wide().to_dict()), part_bytes=sizes, source="test"
        )
        messages, taken = frames(header, *parts, memoryview(save({}))), threading.Event()

        def first_chunks() -> Iterator[bytes]:
            yield from itertools.islice(messages, 1 + MAX_UNACKNOWLEDGED)
            taken.wait()

        def hear(received: pb.Received) -> None:
            raw.connection.close_channel("joins")
            taken.set()

        with pytest.raises(UnreachableError):
            raw.connection.upload("joins", "Initialise", first_chunks(), pb.InitialiseReply, heard=hear)
        zeros = FlatModel(tuple(torch.zeros(it.numel) for it in wide().fragments), {})
        entry = Entry(
            Dialler([connection]), RUN, wide(), Initial(0, 0, "test"), zeros, model_parts, overlap=None,
            tokens_per_step=None, held=None, is_dealt=False,
        )  # fmt: skip
        entry._has_uploaded = True  # as if it had sent the ones
        in_spite_of_cuts(lambda: entry.initialise(requests.Initialise(Claim("raw", process=1))))
        assert entry.resumed_bytes == 0
        held = syncer.driver.ask(lambda driver: [driver.state.model.held(index).theta for index in (0, 1)])
        assert not any(theta.any() for theta in held)
        with pytest.raises(AlreadyInitialisedError):
            raw.initialise()
        raw.connection.close()


def test_ranks_without_a_part_of_a_fragment_do_not_end_each_others_pulls(tmp_path: Path) -> None:
    """They ask for the same nothing at the same time."""
    with start(tmp_path, method()) as syncer, ThreadPoolExecutor(4) as ranks:
        raw = Raw(syncer.address)
        raw.initialise()
        raw.join()

        def pulls(_: int) -> int:
            with closing(Connection(syncer.address)) as connection:
                for _ in range(30):
                    request = pb.PullRequest(
                        run=RUN, learner=raw.name, incarnation=raw.incarnation, fragment=0, base=-1,
                        segments=pb.Segments(first=1, stop=1),
                    )  # fmt: skip
                    connection.pull("updates", request)
            return 30

        assert sum(ranks.map(pulls, range(4))) == 120
        raw.connection.close()


def stalled(link: Link) -> None:
    """Nothing arrives at either end, and neither is told."""
    link.may_flow.clear()


@pytest.mark.parametrize("up", [True, False])
def test_a_transfer_in_which_nothing_moves_is_given_up_within_the_lost_deadline(up: bool, tmp_path: Path) -> None:
    """The learner's end; it is the syncer that says what the deadline is. On the next connection it goes on."""
    with (
        behind(tmp_path, Cutter(1, stalled), deadlines=Deadlines(lost_floor_s=1.5)) as (_, relay, raw),
        closing(Connection(relay.address)) as connection,
    ):
        raw.beat(1, 5, step_s=60.0)  # the deadline of a learner with such steps is 120 s
        describe(Dialler([connection]), RUN, None)
        sender, receiver = (
            Sender(Dialler([connection]), RUN),
            Receiver(Dialler([connection]), RUN, raw.layout, method()),
        )
        payload, header = Payload(lambda: torch.zeros(4 * SIZE, dtype=torch.uint8)), raw.header(4 * SIZE)
        request = pb.PullRequest(run=RUN, learner=raw.name, incarnation=raw.incarnation, fragment=0, base=-1)

        def transfer() -> None:
            if up:
                sender.upload(header, payload)
            else:
                receiver.pull(request)

        with pytest.raises(UnreachableError, match=r"neither sent nor accepted bytes for [\d.]+ s"):
            transfer()
        in_spite_of_cuts(transfer)
        assert sender.resumed_bytes + receiver.resumed_bytes > 0


@pytest.mark.parametrize("up", [True, False])
def test_the_transfer_of_a_learner_that_is_gone_ends_with_it(up: bool, tmp_path: Path) -> None:
    """The syncer's end: heartbeats have stopped, and no end of the connection is told."""
    cutter = Cutter(1, stalled, SHORTEST_CHUNK_BYTES)  # before the rest is on its way
    with (
        behind(tmp_path, cutter) as (syncer, relay, raw),
        ThreadPoolExecutor(1) as pool,
        closing(Connection(relay.address)) as connection,
    ):
        sender, receiver = (
            Sender(Dialler([connection]), RUN),
            Receiver(Dialler([connection]), RUN, raw.layout, method()),
        )
        payload, header = Payload(lambda: torch.zeros(4 * SIZE, dtype=torch.uint8)), raw.header(4 * SIZE)
        request = pb.PullRequest(run=RUN, learner=raw.name, incarnation=raw.incarnation, fragment=0, base=-1)
        lost = pool.submit(sender.upload, header, payload) if up else pool.submit(receiver.pull, request)
        until(lambda: cutter.left == 0 and bool(syncer.transfers._open), "it does not begin")
        fall_silent(syncer, raw.name)
        assert not status_of(syncer)["learners"]
        until(lambda: not syncer.transfers._open, "its transfer is still open")
        assert status_of(syncer)["spooled_bytes"] == 0
        relay.cut()
        assert isinstance(lost.exception(), UnreachableError | StaleIncarnationError)


def resumed_push(raw: Raw, start: int | None) -> pb.Received:
    """A bare push of the contribution that goes on at `start` (None: where it was), and ends without a payload."""
    header = raw.header(4 * SIZE, resumes=True)
    kept: list[pb.Received] = []
    heard = threading.Event()

    def stream() -> Iterator[bytes]:
        yield header.SerializeToString()
        heard.wait()
        yield pb.Resume(start=kept[0].num_bytes if start is None else start).SerializeToString()

    def hear(received: pb.Received) -> None:
        kept.append(received)
        heard.set()

    with pytest.raises(CorruptPayloadError):
        raw.connection.upload("contributions", "Push", stream(), pb.PushReply, heard=hear)
    return kept[0]


def cut_short(raw: Raw, payload: torch.Tensor) -> None:
    """The first chunks of a contribution, and then the end of the connection."""
    messages = frames(raw.header(4 * SIZE), bytes_of(payload))
    taken = threading.Event()

    def stream() -> Iterator[bytes]:
        yield from itertools.islice(messages, 1 + MAX_UNACKNOWLEDGED)
        taken.wait()

    def hear(received: pb.Received) -> None:
        raw.connection.close_channel("contributions")
        taken.set()

    with pytest.raises(UnreachableError):
        raw.connection.upload("contributions", "Push", stream(), pb.PushReply, heard=hear)


def test_what_a_sender_says_of_what_is_here_is_not_believed(tmp_path: Path) -> None:
    with start(tmp_path, method(at_least=2)) as syncer:
        raw, other = Raw(syncer.address, held=wide()), Raw(syncer.address, "other", held=wide())
        with closing(raw.connection), closing(other.connection):
            raw.initialise()
            raw.join()
            other.join()
            assert resumed_push(raw, 0).num_bytes == 0  # nothing is here
            values = bytes_as_tensor(torch.ones(SIZE))
            cut_short(raw, values)
            assert resumed_push(other, None).num_bytes == 0  # it is of another learner
            here = resumed_push(raw, 7).num_bytes  # within what is here
            assert here > 0
            assert resumed_push(raw, 1 << 60).num_bytes == here
            assert resumed_push(raw, None).num_bytes == here
            raw.push(values)
            assert torch.equal(received(syncer), values)


def test_what_is_here_has_other_bits_and_is_sent_again(tmp_path: Path) -> None:
    """As after damage in the spool."""
    with start(tmp_path, method(at_least=2)) as syncer:
        raw = Raw(syncer.address, held=wide())
        with closing(raw.connection), closing(Connection(syncer.address)) as connection:
            raw.initialise()
            raw.join()
            cut_short(raw, bytes_as_tensor(torch.ones(SIZE)))
            values = bytes_as_tensor(torch.zeros(SIZE))
            sender, payload, header = Sender(Dialler([connection]), RUN), Payload(lambda: values), raw.header(4 * SIZE)
            payload.bytes()
            payload.boot = header.boot  # as if it had sent the ones
            sender.upload(header, payload)
            assert torch.equal(received(syncer), values)
            assert sender.resumed_bytes == 0


def test_a_download_goes_on_only_with_the_same_payload() -> None:
    payload = memoryview(bytes(range(100)))
    header = pb.PullHeader(version=3, digest="d", lossless=True, num_bytes=100)
    kept = pb.Kept(version=3, digest="d", lossless=True, payload_bytes=100, num_bytes=40)
    kept.checksum = zlib.crc32(payload[:40])
    assert start_of(kept, header, payload) == 40
    for field, value in {
        "version": 4, "digest": "e", "lossless": False, "payload_bytes": 101, "num_bytes": 41, "checksum": 1,
    }.items():  # fmt: skip
        other = pb.Kept()
        other.CopyFrom(kept)
        setattr(other, field, value)
        assert start_of(other, header, payload) == 0, field
    kept.num_bytes = 1 << 60
    assert start_of(kept, header, payload) == 0
