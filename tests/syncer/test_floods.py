"""Hostile senders on real sockets: what they take is bounded, and other callers are served."""

from __future__ import annotations

import itertools
import json
import os
import resource
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest
import torch
from benchmarks.hostile import END_HEADERS, HEADERS, Http2, Target, frame, headers
from benchmarks.processes import until
from safetensors.torch import save
from tests.syncer.runs import RUN, Raw, layout, method, start, status_of

import diloco
from diloco.errors import AlreadyInitialisedError, BusyError, UnreachableError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import frames
from diloco.syncer.admission import Limits, Shares
from diloco.syncer.call_deadlines import CallDeadlines
from diloco.syncer.callers import UNKNOWN, Caller
from diloco.syncer.guard import Guard
from diloco.syncer.handles import RESERVE, connections_for
from diloco.syncer.sockets import SocketLedger
from diloco.syncer.tcp import is_available

ONES = diloco.FP32().encode(torch.ones(layout().fragments[0].numel))
needs_counts = pytest.mark.skipif(not is_available(), reason="the kernel's byte counts are read on Linux only")


def idle_streams(address: str, method_name: str, num_streams: int) -> Http2:
    connection = Http2(Target(address))
    block = headers(method_name)
    connection.send(b"".join(frame(HEADERS, END_HEADERS, 2 * i + 1, block) for i in range(num_streams)))
    return connection


@pytest.mark.parametrize("called", ["Push", "Watch"])
def test_calls_that_say_nothing_leave_the_threads_of_others(called: str, tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer, ExitStack() as stack:
        raw = Raw(syncer.address)
        stack.callback(raw.connection.close)
        raw.initialise()
        raw.join()
        for _ in range(6):  # 600 of them, where 256 or 512 are served
            stack.callback(idle_streams(syncer.address, called, 100).close)

        def is_full() -> bool:
            try:
                if called == "Push":
                    raw.push_frames(iter([]))
                else:
                    next(iter(raw.connection.watch("control", pb.WatchRequest(run=RUN, learner="raw"))))
            except UnreachableError as error:
                return "as many calls as it can" in str(error)
            except diloco.errors.DilocoError:
                pass
            return False

        until(is_full, f"the idle calls of {called} are not there")
        raw.beat()  # a call of another kind
        assert raw.connection.call("control", "Status", pb.StatusRequest(run=RUN), pb.StatusReply).status


def test_an_idle_control_call_reads_nothing_and_is_cancelled_at_its_deadline() -> None:
    now = [0.0]
    deadlines = CallDeadlines(6.0, first_s=5.0, next_s=50.0, clock=lambda: now[0])
    begun, ended = [], []

    def behaviour(stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        begun.append(1)
        try:
            messages = deadlines.messages(stream, "a", context)
            yield from deadlines.replies((message for message in messages), "a", context)
        finally:
            ended.append(1)

    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("x", {"y": grpc.stream_stream_rpc_method_handler(behaviour)}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        hold = ExitStack()
        call = channel.stream_stream("/x/y")(_silent(hold))
        until(lambda: bool(begun), "the call does not arrive")
        deadlines.look()
        now[0] = 4.9
        deadlines.look()
        assert not ended

        def is_cancelled() -> bool:
            now[0] = 5.1
            deadlines.look()
            return bool(ended)

        now[0] = 0.0
        until(is_cancelled, "the call is not cancelled")
        with pytest.raises(grpc.RpcError) as refusal:
            next(call)
        assert refusal.value.code() is grpc.StatusCode.CANCELLED  # type: ignore[attr-defined]
        hold.close()
    server.stop(None).wait()


def _silent(hold: ExitStack) -> Iterator[bytes]:
    """A stream that brings nothing until `hold` is closed."""
    receiver, sender = socket.socketpair()
    hold.callback(receiver.close)
    hold.callback(sender.close)
    hold.callback(sender.shutdown, socket.SHUT_RDWR)
    receiver.recv(1)
    yield from ()


def test_a_caller_has_its_share_and_others_have_theirs() -> None:
    shares = Shares({kind: Limits(8, 8) for kind in ("control", "watches", "transfers")})
    bound, viewer = Caller("a", "learner", learner="a"), Caller("v", "viewer")
    for caller, most in ((bound, 2), (viewer, 4), (UNKNOWN, 8)):
        with ExitStack() as stack:
            for _ in range(most):
                stack.enter_context(shares.take("transfers", caller))
            with pytest.raises(UnreachableError, match=f"{most} transfers open"):
                stack.enter_context(shares.take("transfers", caller))
            stack.enter_context(shares.take("control", caller))
            stack.enter_context(shares.take("transfers", Caller("other", "learner", learner="other")))
        with shares.take("transfers", caller):
            pass


# --- a run's model


def test_a_model_is_taken_from_one_learner_at_a_time(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer, ExitStack() as stack:
        first, second = Raw(syncer.address, "first"), Raw(syncer.address, "second")
        stack.callback(first.connection.close)
        stack.callback(second.connection.close)
        slow = Http2(Target(syncer.address))
        header = _initialise_header().SerializeToString()
        body = b"\0" + len(header).to_bytes(4, "big") + header
        streams = itertools.count(1, 2)

        def is_busy() -> bool:
            """Once the slow one is the first; what is offered meanwhile takes turns with it."""
            number = next(streams)
            slow.send(frame(HEADERS, END_HEADERS, number, headers("Initialise")) + frame(0, 0, number, body))
            stream = frames(_initialise_header("second", source="x" * 300))  # refused in any case, for what it says
            try:
                second.connection.upload("joins", "Initialise", stream, pb.InitialiseReply)
            except BusyError:
                return True
            except diloco.errors.DilocoError:
                pass
            return False

        until(is_busy, "the first model is not on its way")
        slow.close()

        def is_given() -> bool:
            try:
                second.initialise()
            except BusyError:
                return False
            return True

        until(is_given, "the model of a broken call holds up the next")
        with pytest.raises(AlreadyInitialisedError):  # before any of its bytes is waited for
            first.connection.upload("joins", "Initialise", frames(_initialise_header()), pb.InitialiseReply)
        assert status_of(syncer)["initialised"]


def _initialise_header(learner: str = "first", **fields: str) -> pb.InitialiseHeader:
    sizes = [*(4 * fragment.numel for fragment in layout().fragments), len(save({}))]
    return pb.InitialiseHeader(
        run=RUN, learner=learner, layout=json.dumps(layout().to_dict()), part_bytes=sizes, **fields
    )


# --- connections


Guarded = tuple[SocketLedger, list[socket.socket], Callable[[], socket.socket]]


@contextmanager
def guarded(guard: Guard, clock: Callable[[], float] = lambda: 0.0) -> Iterator[Guarded]:
    """A ledger, the accepted ends, and what dials."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ledger = stack.enter_context(SocketLedger(listener.getsockname()[1], guard, clock))
        accepted: list[socket.socket] = []

        def dial() -> socket.socket:
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
            client.settimeout(30)
            accepted.append(stack.enter_context(listener.accept()[0]))
            ledger.sample()
            return client

        yield ledger, accepted, dial


def know(ledger: SocketLedger, client: socket.socket) -> Iterator[bytes]:
    """A call of a known caller, whose messages are taken by `next`."""
    host, port = client.getsockname()
    messages = ledger.taken(iter([b"first", *[b"more"] * 9]), f"ipv4:{host}:{port}")
    next(messages)
    return messages


def is_open(accepted: socket.socket) -> bool:
    accepted.setblocking(False)
    try:
        return bool(accepted.recv(1 << 20, socket.MSG_PEEK))
    except BlockingIOError:
        return True


@needs_counts
def test_the_oldest_of_too_many_unknown_connections_is_ended() -> None:
    with guarded(Guard(num_unknown=2)) as (ledger, accepted, dial):
        known = dial()
        know(ledger, known)
        for _ in range(4):
            dial()
        ledger.sample()
        assert [is_open(each) for each in accepted] == [True, False, False, True, True]
        assert ledger.num_ended == 2


@needs_counts
def test_a_connection_without_a_known_caller_ends_after_a_time() -> None:
    now = [0.0]
    with guarded(Guard(unknown_s=20.0), lambda: now[0]) as (ledger, accepted, dial):
        know(ledger, dial())
        stranger = dial()
        now[0] = 20.0
        ledger.sample()
        assert all(map(is_open, accepted))
        now[0] = 20.1
        ledger.sample()
        assert [is_open(each) for each in accepted] == [True, False]
        assert stranger.recv(1) == b""


@needs_counts
def test_bytes_that_no_call_takes_end_a_connection() -> None:
    with guarded(Guard(unknown_bytes=1000, untaken_bytes=5000)) as (ledger, accepted, dial):
        client, stranger = dial(), dial()
        messages = know(ledger, client)
        for _ in range(4):  # a transfer: what arrives is taken
            client.sendall(b"x" * 4000)
            next(messages)
            ledger.sample()
        assert is_open(accepted[0])
        client.sendall(b"x" * 5001)
        stranger.sendall(b"x" * 1001)
        ledger.sample()
        assert stranger.recv(1) == b""
        assert client.recv(1) == b""
        assert ledger.num_ended == 2


def test_a_connection_with_many_refused_calls_is_ended(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer, ExitStack() as stack:
        hostile = Http2(Target(syncer.address))
        stack.callback(hostile.close)
        block, body = headers("Status"), b"\0\0\0\0\4\xff\xff\xff\xff"
        streams = iter(range(1, 10_000, 2))

        def is_ended() -> bool:
            number = next(streams)
            try:
                hostile.send(frame(HEADERS, END_HEADERS, number, block) + frame(0, 1, number, body))
            except OSError:
                return True
            return not hostile.answer()

        if is_available():
            until(is_ended, "the connection stays")
        raw = Raw(syncer.address)
        stack.callback(raw.connection.close)
        raw.initialise()
        raw.join()
        assert raw.push(ONES) == 1


@needs_counts
def test_a_ledger_outlives_a_lack_of_file_handles() -> None:
    with guarded(Guard()) as (ledger, accepted, dial):
        client = dial()
        know(ledger, client)
        client.sendall(b"x" * 100)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
        fillers = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        try:
            with suppress(OSError):  # until there is none left
                while True:
                    fillers.append(os.dup(client.fileno()))
            with pytest.raises(OSError, match="Too many open files"):
                os.listdir("/proc/self/fd")  # noqa: PTH208 - as the ledger lists them
            ledger.sample()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for filler in fillers:
                os.close(filler)
        ledger.label(f"ipv4:127.0.0.1:{client.getsockname()[1]}", "control", "a")
        ledger.sample()
        assert ledger.totals()["a", "control", "received"] == 100
        assert is_open(accepted[0])


def test_connections_leave_handles_for_the_store() -> None:
    for num_files in (1024, 4096, 1 << 20):
        assert 2 * connections_for(num_files) <= num_files - RESERVE
