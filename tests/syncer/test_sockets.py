"""Byte counts of real connections: gRPC over TLS and plain, bare sockets, and clients that are killed."""

from __future__ import annotations

import datetime as dt
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from diloco.errors import ConfigError
from diloco.exchange.key_pair import KeyPair
from diloco.syncer.certificates import Authority
from diloco.syncer.sockets import UNLABELLED, SocketLedger
from diloco.syncer.tcp import defer_accepts, is_available, parse_peer

CHUNK_BYTES = 1 << 20
PUSH_BYTES = 10 * CHUNK_BYTES
AUTHORITY = Authority.new("x")
SIGNED = AUTHORITY.sign("x", "standby", "syncer", hosts=["127.0.0.1", "::1"], lifetime=dt.timedelta(days=1))
KEYS = KeyPair(AUTHORITY.cert, SIGNED.cert, SIGNED.key)

pytestmark = pytest.mark.skipif(not is_available(), reason="the kernel's byte counts are read on Linux only")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited 30 s for {what}"
        time.sleep(0.005)


def count_of(ledger: SocketLedger, learner: str, kind: str, direction: str) -> int:
    ledger.sample()
    return {tuple(key): value for key, value in ledger.totals().items()}.get((learner, kind, direction), 0)


class Service(grpc.GenericRpcHandler):
    """Takes streams at /x/push and gives as many bytes as asked for at /x/pull; every call labels its connection."""

    def __init__(self) -> None:
        self.ledger: SocketLedger | None = None
        self.arrived = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        if handler_call_details.method.endswith("push"):
            return grpc.stream_unary_rpc_method_handler(self.push)
        return grpc.unary_stream_rpc_method_handler(self.pull)

    def _label(self, context: grpc.ServicerContext, kind: str) -> None:
        assert self.ledger is not None
        learner = dict(context.invocation_metadata())["learner"]
        self.ledger.label(context.peer(), kind, str(learner))

    def push(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        self._label(context, "contributions")
        for chunk in chunks:
            self.arrived += len(chunk)
        return b"done"

    def pull(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        self._label(context, "updates")
        for _ in range(int(request) // CHUNK_BYTES):
            yield os.urandom(CHUNK_BYTES)


@contextmanager
def serving(keys: KeyPair | None, host: str = "127.0.0.1") -> Iterator[tuple[Service, SocketLedger, str]]:
    service = Service()
    server = grpc.server(ThreadPoolExecutor(4), handlers=(service,), options=[("grpc.so_reuseport", 0)])
    if keys is None:
        port = server.add_insecure_port(f"{host}:0")
    else:
        credentials = grpc.ssl_server_credentials([(keys.key, keys.cert)])
        port = server.add_secure_port(f"{host}:0", credentials)
    server.start()
    with SocketLedger(port) as ledger:
        service.ledger = ledger
        yield service, ledger, f"{host}:{port}"
        server.stop(None).wait()


@contextmanager
def dialling(address: str, keys: KeyPair | None) -> Iterator[grpc.Channel]:
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own for every channel
    if keys is None:
        channel = grpc.insecure_channel(address, options)
    else:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(keys.ca), options)
    with channel:
        yield channel


def push(channel: grpc.Channel, learner: str, num_bytes: int = PUSH_BYTES) -> None:
    chunks = (os.urandom(CHUNK_BYTES) for _ in range(num_bytes // CHUNK_BYTES))
    assert channel.stream_unary("/x/push")(chunks, metadata=[("learner", learner)], timeout=60) == b"done"


def pull(channel: grpc.Channel, learner: str, num_bytes: int = PUSH_BYTES) -> None:
    answer = channel.unary_stream("/x/pull")(str(num_bytes).encode(), metadata=[("learner", learner)], timeout=60)
    assert sum(map(len, answer)) == num_bytes


@pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "tls"])
def test_a_transfer_is_counted_with_its_framing(keys: KeyPair | None) -> None:
    with serving(keys) as (_, ledger, address):
        with dialling(address, keys) as pushing, dialling(address, keys) as pulling:
            push(pushing, "site-a")
            pull(pulling, "site-b")
            # TLS records (22 bytes in 16 KiB) and HTTP/2 frames (9 bytes in 16 KiB) add 0.2 %; window updates come back
            assert PUSH_BYTES < count_of(ledger, "site-a", "contributions", "received") < 1.01 * PUSH_BYTES
            assert 0 < count_of(ledger, "site-a", "contributions", "sent") < 0.02 * PUSH_BYTES
            sent = count_of(ledger, "site-b", "updates", "sent")
            assert PUSH_BYTES < sent < 1.01 * PUSH_BYTES + sent_again_bytes(ledger)
            assert 0 < count_of(ledger, "site-b", "updates", "received") < 0.02 * PUSH_BYTES
        before = ledger.totals()
        wait_for(lambda: not held(ledger), "the duplicates to be let go")
        after = ledger.totals()
        assert all(after[key] >= value for key, value in before.items())
        assert {learner for learner, _, _ in after} == {"site-a", "site-b"}
    assert ledger.totals() == after


def sent_again_bytes(ledger: SocketLedger) -> int:
    """What the kernel has sent more than once, as it does where a busy machine is late with its acknowledgements."""
    infos = [each.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for each in ledger._connections.values()]
    return sum(struct.unpack_from("=Q", info, 208)[0] for info in infos)  # tcpi_bytes_retrans, since Linux 4.19


def held(ledger: SocketLedger) -> int:
    """Duplicates that a ledger holds after a sample."""
    ledger.sample()
    return len(ledger._connections)


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with serving(None, "[::1]") as (_, ledger, address), dialling(address, None) as channel:
        push(channel, "site-a", CHUNK_BYTES)
        assert count_of(ledger, "site-a", "contributions", "received") > CHUNK_BYTES


def test_ipv4_on_a_socket_for_both() -> None:
    with serving(None, "[::]") as (_, ledger, address), dialling(address.replace("[::]", "127.0.0.1"), None) as channel:
        push(channel, "site-a", CHUNK_BYTES)
        assert count_of(ledger, "site-a", "contributions", "received") > CHUNK_BYTES


def test_what_a_connection_carried_before_its_label_is_its_own() -> None:
    with bare_connections() as (ledger, accept):
        client, served, peer = accept()
        client.sendall(b"x" * 1000)
        assert len(served.recv(1000, socket.MSG_WAITALL)) == 1000
        ledger.sample()
        assert ledger.totals() == {}
        ledger.label(peer, "joins", "site-a")
        assert count_of(ledger, "site-a", "joins", "received") == 1000
        ledger.label(peer, "control", "site-a")
        client.sendall(b"x" * 500)
        assert len(served.recv(500, socket.MSG_WAITALL)) == 500
        assert count_of(ledger, "site-a", "joins", "received") == 1000
        assert count_of(ledger, "site-a", "control", "received") == 500


def test_strangers_are_counted_apart() -> None:
    with bare_connections() as (ledger, accept):
        client, served, _ = accept()
        client.sendall(b"GET / HTTP/1.0")
        assert served.recv(100) == b"GET / HTTP/1.0"
        ledger.sample()
        served.close()
        ledger.sample()
        assert ledger.totals()[*UNLABELLED, "received"] == 14


@contextmanager
def bare_connections() -> Iterator[tuple[SocketLedger, Callable[..., tuple[socket.socket, socket.socket, str]]]]:
    """A listening socket without gRPC; each call connects to it and gives the client's end, the server's end and the
    peer's name."""
    opened: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, SocketLedger(listener.getsockname()[1]) as ledger:

        def accept(source: tuple[str, int] = ("127.0.0.1", 0)) -> tuple[socket.socket, socket.socket, str]:
            client = socket.create_connection(listener.getsockname(), timeout=30, source_address=source)
            served, (host, port) = listener.accept()
            opened.extend((client, served))
            return client, served, f"ipv4:{host}:{port}"

        yield ledger, accept
    for each in opened:
        each.close()


def test_a_duplicate_does_not_keep_a_closed_connection_open() -> None:
    """The owner closes without shutting down: the end of the stream must reach the peer with the next sample."""
    with bare_connections() as (ledger, accept):
        client, served, peer = accept()
        ledger.label(peer, "control", "site-a")
        served.sendall(b"bye")
        served.close()
        ledger.sample()
        assert client.recv(100) == b"bye"
        assert client.recv(100) == b""  # would time out after 30 s if the duplicate were still open
        assert held(ledger) == 0
        assert ledger.totals()["site-a", "control", "sent"] == 3


def test_a_second_connection_from_the_same_port_starts_unlabelled() -> None:
    with bare_connections() as (ledger, accept):
        client, served, peer = accept()
        ledger.label(peer, "control", "site-a")
        name = client.getsockname()
        client.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
        )  # reset, so that the port is free at once
        client.close()
        with pytest.raises(ConnectionResetError):
            served.recv(1)
        client, served, again = accept(name)
        assert again == peer
        ledger.label(peer, "joins", "site-b")
        client.sendall(b"x" * 10)
        assert len(served.recv(10, socket.MSG_WAITALL)) == 10
        assert count_of(ledger, "site-b", "joins", "received") == 10
        assert count_of(ledger, "site-a", "control", "received") == 0


@pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "tls"])
def test_a_client_killed_in_mid_transfer_keeps_its_bytes(keys: KeyPair | None) -> None:
    script = """
import os, sys, grpc
options = [("grpc.use_local_subchannel_pool", 1)]
ca = sys.stdin.buffer.read()
address = sys.argv[1]
if ca:
    channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca), options)
else:
    channel = grpc.insecure_channel(address, options)
def chunks():
    while True:
        yield bytes(1 << 18)
channel.stream_unary("/x/push")(chunks(), metadata=[("learner", "site-a")])
"""
    with serving(keys) as (service, ledger, address):
        ledger.start()
        client = subprocess.Popen(
            [sys.executable, "-c", script, address], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert client.stdin is not None
        client.stdin.write(keys.ca if keys else b"")
        client.stdin.close()
        wait_for(lambda: service.arrived > 4 * CHUNK_BYTES, "four megabytes")
        client.send_signal(signal.SIGKILL)
        assert client.wait() == -signal.SIGKILL
        wait_for(lambda: held(ledger) == 0, "the dead client's connection to be let go")
        assert ledger.totals()["site-a", "contributions", "received"] > service.arrived
        with dialling(address, keys) as channel:
            push(channel, "site-a", CHUNK_BYTES)  # the server goes on
            assert count_of(ledger, "site-a", "contributions", "received") > service.arrived


@pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "tls"])
def test_many_connections_come_and_go_while_it_samples(keys: KeyPair | None) -> None:
    """No descriptor is leaked and no byte lost; gRPC is not disturbed by duplicates of what it closes."""
    with serving(keys) as (service, ledger, address):
        open_before = num_descriptors()
        ledger.start(interval_s=0.002)

        def work(index: int) -> None:
            for _ in range(10):
                with dialling(address, keys) as channel:
                    push(channel, f"site-{index}", CHUNK_BYTES)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        wait_for(lambda: held(ledger) == 0, "the duplicates to be let go")
        wait_for(lambda: num_descriptors() <= open_before + 2, "descriptors to be closed")
        for index in range(4):
            received = ledger.totals()[f"site-{index}", "contributions", "received"]
            assert 10 * CHUNK_BYTES < received < 1.02 * 10 * CHUNK_BYTES
        assert service.arrived == 40 * CHUNK_BYTES


def test_totals_never_fall() -> None:
    with serving(None) as (_, ledger, address):
        ledger.start(interval_s=0.001)
        seen: list[dict[tuple[str, str, str], int]] = []
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                seen.append({tuple(key): value for key, value in ledger.totals().items()})  # type: ignore[misc]

        watcher = threading.Thread(target=watch)
        watcher.start()
        for _ in range(3):
            with dialling(address, None) as channel:
                push(channel, "site-a", CHUNK_BYTES)
        done.set()
        watcher.join()
        for earlier, later in pairwise(seen):
            assert all(later[key] >= value for key, value in earlier.items())
        assert any(seen)


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:127.0.0.1:54321", ("127.0.0.1", 54321)),
        ("ipv6:%5B::1%5D:54321", ("::1", 54321)),
        ("ipv6:[::ffff:10.0.0.7]:1", ("10.0.0.7", 1)),
        ("ipv6:%5Bfe80::1%25eth0%5D:7", ("fe80::1", 7)),
        ("unix:/run/diloco.sock", None),
        ("unix-abstract:x", None),
        ("", None),
    ],
)
def test_peers_as_grpc_names_them(peer: str, expected: tuple[str, int] | None) -> None:
    assert parse_peer(peer) == expected


def test_labelling_what_is_not_there_does_nothing() -> None:
    with bare_connections() as (ledger, _):
        ledger.label("ipv4:127.0.0.1:1", "control", "site-a")
        ledger.label("unix:/x", "control", "site-a")
        ledger.sample()
        assert ledger.totals() == {}


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_was_not_bound_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match="pass the port that was bound"):
        SocketLedger(port)


def test_a_connection_that_says_nothing_is_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        defer_accepts(server.getsockname()[1], 20)
        server.settimeout(30)
        with socket.create_connection(server.getsockname()) as silent, socket.create_connection(other.getsockname()):
            other.accept()[0].close()  # which was not asked to wait
            with socket.create_connection(server.getsockname()) as speaks:
                name = speaks.getsockname()
                speaks.sendall(b"P")
                taken, peer = server.accept()
                taken.close()
            assert peer == name != silent.getsockname()
