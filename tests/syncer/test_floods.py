"""Hostile senders on real sockets: what they take is bounded, and other callers are served."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from benchmarks.hostile import END_HEADERS, HEADERS, Http2, Target, frame, headers
from benchmarks.processes import until
from safetensors.torch import save
from tests.frames import frames
from tests.syncer.runs import RUN, Raw, layout, method, start, status_of

import diloco
from diloco.errors import AlreadyInitialisedError, BusyError, UnreachableError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.rpc import SERVER_OPTIONS
from diloco.syncer.door.admission import Limits, Shares
from diloco.syncer.door.open_calls import CallDeadlines
from diloco.syncer.keys.certificates import UNKNOWN, Caller
from diloco.syncer.page.live_page import MOST_CONNECTIONS as MOST_PAGE_CONNECTIONS
from diloco.syncer.ports import RESERVE, connections_for


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


def test_the_error_of_a_check_of_open_calls_ends_the_syncer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: CallDeadlines) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(CallDeadlines, "check", broken)
    with start(tmp_path, method()) as syncer, pytest.raises(ZeroDivisionError):
        syncer.wait(threading.Event())


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
        deadlines.check()
        now[0] = 4.9
        deadlines.check()
        assert not ended

        def is_cancelled() -> bool:
            now[0] = 5.1
            deadlines.check()
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


def test_a_connection_that_does_not_finish_its_handshake_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "grpc.server_handshake_timeout_ms"
    assert name in dict(SERVER_OPTIONS)
    monkeypatch.setattr("diloco.syncer.server.SERVER_OPTIONS", [*dict(SERVER_OPTIONS, **{name: 500}).items()])
    with start(tmp_path, method()) as syncer, ExitStack() as stack:
        host, _, port = syncer.address.rpartition(":")
        for says in (b"", b"PRI * HTTP/2.0", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            stranger = stack.enter_context(socket.create_connection((host, int(port)), 300))
            stranger.sendall(says)
            while stranger.recv(1 << 16):  # settings, which it does not answer
                pass


def test_connections_leave_handles_for_the_store_and_the_page() -> None:
    assert RESERVE > 2 * MOST_PAGE_CONNECTIONS
    for num_files in (1024, 4096, 1 << 20):
        assert connections_for(num_files) <= num_files - RESERVE
