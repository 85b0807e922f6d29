"""The network of a chaos run, over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from benchmarks.processes import until
from tests.chaos.relay import Relay


class Echo:
    """Sends back what it hears. `heard`: all of it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.heard = b""
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                end = self._listener.accept()[0]
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._answer, args=(end,)))
            self._threads[-1].start()

    def _answer(self, end: socket.socket) -> None:
        with end, suppress(OSError):
            while data := end.recv(1 << 16):
                self.heard += data
                end.sendall(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


@pytest.fixture
def relay(echo: Echo) -> Iterator[Relay]:
    with Relay(echo.port) as relay:
        yield relay


@pytest.fixture
def client(relay: Relay) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", relay.port)) as client:
        client.settimeout(30.0)
        yield client


def read(client: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes and (piece := client.recv(num_bytes - len(data))):
        data += piece
    return data


def hears_nothing(client: socket.socket) -> bool:
    client.settimeout(0.2)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return True
    finally:
        client.settimeout(30.0)


def exchanged(client: socket.socket, text: bytes) -> bool:
    client.sendall(text)
    return read(client, len(text)) == text


def test_it_forwards_both_ways(client: socket.socket, relay: Relay) -> None:
    assert exchanged(client, b"x" * 300_000)
    assert relay.links[0].up_bytes == 300_000


def test_a_partition_holds_everything_and_heals(client: socket.socket, relay: Relay) -> None:
    assert exchanged(client, b"before")
    relay.up.flows.clear()
    relay.down.flows.clear()
    relay.refuse()
    client.sendall(b"held")
    assert hears_nothing(client)
    relay.heal()
    assert read(client, 4) == b"held"
    assert exchanged(client, b"after")


def test_one_way_is_stopped_alone(client: socket.socket, relay: Relay, echo: Echo) -> None:
    relay.down.flows.clear()
    client.sendall(b"up")
    assert hears_nothing(client)
    assert echo.heard == b"up"
    relay.heal()
    assert read(client, 2) == b"up"


def test_swallowed_bytes_never_arrive_and_new_connections_work(client: socket.socket, relay: Relay, echo: Echo) -> None:
    assert exchanged(client, b"before")
    relay.swallow()
    client.sendall(b"gone")
    assert hears_nothing(client)
    with socket.create_connection(("127.0.0.1", relay.port)) as other:
        assert exchanged(other, b"new")
    assert echo.heard == b"beforenew"
    relay.heal()
    assert client.recv(1) == b""  # nothing that was swallowed comes back: the connection breaks


def test_one_bit_is_changed_and_no_more(client: socket.socket, relay: Relay) -> None:
    relay.up.num_corrupt = 1
    client.sendall(bytes(100))
    assert sum(byte != 0 for byte in read(client, 100)) == 1
    assert exchanged(client, bytes(100))


def test_a_transfer_is_cut_in_its_middle(client: socket.socket, relay: Relay, echo: Echo) -> None:
    relay.up.cut_after_bytes = 100_000
    with suppress(OSError):
        client.sendall(bytes(1_000_000))
        while client.recv(1 << 16):
            pass
    assert 0 < relay.links[0].up_bytes <= 100_000  # the break can overtake what `echo` has not read yet
    assert len(echo.heard) <= relay.links[0].up_bytes
    assert relay.up.cut_after_bytes is None


def test_delay_and_rate_hold_pieces_up_and_lose_none(client: socket.socket, relay: Relay) -> None:
    relay.up.delay_s, relay.down.bytes_per_s = 0.05, 1e6
    assert exchanged(client, bytes(range(256)) * 400)


@pytest.mark.parametrize(
    "harm",
    [
        lambda relay: relay.up.flows.clear(), lambda relay: relay.down.flows.clear(), lambda relay: relay.swallow(),
        lambda relay: setattr(relay.up, "num_corrupt", 1), lambda relay: setattr(relay.down, "cut_after_bytes", 1),
        lambda relay: setattr(relay.up, "delay_s", 0.01), lambda relay: setattr(relay.down, "bytes_per_s", 1e6),
        lambda relay: relay.cut(),
    ],
)  # fmt: skip
def test_what_was_touched_is_counted(harm: Callable[[Relay], None], client: socket.socket, relay: Relay) -> None:
    assert exchanged(client, b"before")
    assert relay.num_touched == 0
    harm(relay)
    with suppress(OSError):
        client.sendall(b"harmed")
    until(lambda: relay.num_touched == 1, "it is not counted")


def test_a_connection_that_leads_nowhere_is_counted(relay: Relay) -> None:
    relay.refuse()
    with socket.create_connection(("127.0.0.1", relay.port)):
        until(lambda: relay.num_touched == 1, "it is not counted")


def test_many_connections_leave_nothing_behind(relay: Relay) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", relay.port)) as client:
            client.settimeout(30.0)
            assert exchanged(client, b"hello")
    until(lambda: all(end.fileno() == -1 for link in relay.links for end in link.ends), "sockets stay open")
