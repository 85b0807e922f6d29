"""Senders whose connections bring no call: they are ended soon, and fewer new ones are taken from where they come."""

from __future__ import annotations

import datetime as dt
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from benchmarks.hostile import CONTINUATION, ENDLESS, Http2, Target, frame, headers
from benchmarks.processes import until
from tests.syncer.runs import RUN, Raw, method, start
from tests.syncer.test_floods import ONES, guarded, is_open, know, needs_counts

from diloco.syncer import guard as limits
from diloco.syncer.callers import UNKNOWN, Caller
from diloco.syncer.ending import PROVEN_S
from diloco.syncer.guard import Guard, Strikes
from diloco.syncer.keyring import Keyring
from diloco.syncer.sockets import SocketLedger
from diloco.syncer.syn_filter import SynFilter
from diloco.syncer.tcp import duplicate_of, listeners, network_of, tcp_counts
from diloco.syncer.tls import server_credentials

SYN_SENT, SO_GET_FILTER = 2, 26
NEVER = 31
"""One connection in 2^31."""
FREE = Guard().free_strikes
HOST, OTHER = "127.0.0.2", "127.0.0.3"


# --- strikes


def struck(strikes: Strikes, host: str, num: int, now: float = 0.0, num_bytes: int = 0) -> int:
    """k for the host, after so many strikes."""
    for _ in range(num):
        strikes.add(now, host, num_bytes)
    return strikes.thinned(now).get(network_of(host), 0)


def test_connections_are_left_out_by_the_square_of_the_strikes() -> None:
    assert [struck(Strikes(FREE), HOST, num) for num in (FREE, 2 * FREE, 4 * FREE, 100 * FREE)] == [0, 2, 4, 10]


def test_bytes_are_strikes_too() -> None:
    assert struck(Strikes(FREE), HOST, 4, num_bytes=31 << 20) == 2


def test_strikes_are_of_one_host_and_are_forgotten() -> None:
    strikes = Strikes(FREE)
    assert struck(strikes, HOST, 1000) > 0
    assert network_of(OTHER) not in strikes.thinned(0.0)
    assert strikes.thinned(60.0) == {}
    assert struck(strikes, HOST, 1, now=200.0) == 0


def test_a_host_with_learners_keeps_one_connection_in_eight() -> None:
    strikes = Strikes(FREE)
    strikes.known(0.0, HOST)
    assert struck(strikes, HOST, limits.KNOWN_FACTOR * FREE) == 0
    assert struck(strikes, HOST, 100_000) == limits.MOST_THINNED_KNOWN == 3
    later = limits.KNOWN_S + 1
    assert struck(strikes, HOST, 100_000, now=later) == limits.MOST_THINNED


def test_an_ipv6_host_is_its_first_64_bits() -> None:
    strikes = Strikes(FREE)
    for number in range(1000):
        strikes.add(0.0, f"2001:db8:0:1::{number:x}", 0)
    assert list(strikes.thinned(0.0)) == [network_of("2001:db8:0:1::")]


def test_what_is_remembered_is_bounded_and_the_worst_are_left_out() -> None:
    strikes = Strikes(FREE)
    hosts = [f"10.0.{number // 256}.{number % 256}" for number in range(2000)]
    for number, host in enumerate(hosts):
        strikes.known(0.0, host)
        strikes.add(0.0, host, (100 + number) << 20, caller=host)
    worst = {network_of(host) for host in hosts[-limits.MOST_FILTERED :]}
    assert set(strikes.thinned(0.0)) == worst
    assert not strikes.of_caller(0.0, hosts[0])
    assert strikes.of_caller(0.0, hosts[-1])


@pytest.mark.parametrize(
    ("caller", "expected"),
    [
        (UNKNOWN, True),
        (Caller("all", "learner", key="1"), True),
        (Caller("a", "learner", learner="a", key="1"), False),
        (Caller("eye", "viewer", key="1"), False),
    ],
)
def test_only_what_one_alone_calls_with_stands_for_it(caller: Caller, expected: bool) -> None:
    assert caller.is_shared is expected


# --- the kernel's filter


Dial = Callable[[str], socket.socket]


@contextmanager
def listening(family: socket.AddressFamily, address: str) -> Iterator[tuple[socket.socket, Dial]]:
    """A listener, and what dials it without waiting, from an address."""
    with ExitStack() as stack:
        both = family is socket.AF_INET6 and address == "::"
        listener = stack.enter_context(socket.create_server((address, 0), family=family, dualstack_ipv6=both))
        listener.settimeout(30)

        def dial(source: str) -> socket.socket:
            it = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET))
            it.bind((source, 0))
            it.setblocking(False)
            it.connect_ex(("::1" if ":" in source else "127.0.0.1", listener.getsockname()[1]))
            return it

        yield listener, dial


@needs_counts
@pytest.mark.parametrize(
    ("family", "address", "thinned", "other"),
    [
        (socket.AF_INET, "127.0.0.1", HOST, OTHER),
        (socket.AF_INET6, "::", HOST, OTHER),
        (socket.AF_INET6, "::", HOST, "::1"),
        (socket.AF_INET6, "::", "::1", HOST),
    ],
)
def test_new_connections_of_a_host_are_left_unanswered(
    family: socket.AddressFamily, address: str, thinned: str, other: str
) -> None:
    with listening(family, address) as (listener, dial):
        syns = SynFilter(listener.getsockname()[1])
        before = dial(thinned)
        early, _ = listener.accept()
        syns.thin({network_of(thinned): NEVER, network_of("10.1.2.3"): NEVER, network_of("2001:db8::1"): NEVER})
        waits, comes = dial(thinned), dial(other)
        accepted, peer = listener.accept()
        assert peer[1] == comes.getsockname()[1]
        assert tcp_counts(waits).state == SYN_SENT
        before.setblocking(True)  # connections that are open go on
        before.sendall(b"early")
        comes.setblocking(True)
        comes.sendall(b"late")
        assert (early.recv(8), accepted.recv(8)) == (b"early", b"late")
        syns.thin({})
        again, peer = listener.accept()  # what was not answered is sent again
        assert peer[1] == waits.getsockname()[1]
        for each in (early, accepted, again):
            each.close()


@needs_counts
def test_a_share_of_a_hosts_connections_passes() -> None:
    with listening(socket.AF_INET, "127.0.0.1") as (listener, dial):
        SynFilter(listener.getsockname()[1]).thin({network_of(HOST): 1})
        states = [tcp_counts(dial(HOST)).state for _ in range(100)]
        assert 10 < states.count(SYN_SENT) < 90  # by chance else: once in 10^17


@needs_counts
def test_a_filter_of_many_hosts_has_room() -> None:
    hosts = [f"10.0.0.{number}" for number in range(32)] + [f"2001:db8:0:{number:x}::" for number in range(32)]
    assert len(hosts) == limits.MOST_FILTERED
    with listening(socket.AF_INET6, "::") as (listener, dial):
        syns = SynFilter(listener.getsockname()[1])
        syns.thin({network_of(host): 10 for host in hosts})
        dial("::1")
        dial(HOST)
        for _ in range(2):
            listener.accept()[0].close()


# --- the ledger


def num_instructions(port: int) -> int:
    """Of the filter on what listens there."""
    ((fd, inode),) = listeners(port)
    listener = duplicate_of(fd, inode)
    assert listener is not None
    with listener:
        return len(listener.getsockopt(socket.SOL_SOCKET, SO_GET_FILTER, 1024))  # room for 128


@needs_counts
@pytest.mark.parametrize("thins", [True, False])
def test_fewer_connections_are_taken_from_a_host_whose_connections_bring_no_call(thins: bool) -> None:
    now = [0.0]
    with guarded(Guard(thins=thins, free_strikes=4), lambda: now[0]) as (ledger, accepted, dial):
        know(ledger, dial())
        come_and_go(dial, accepted, 6)
        ledger.sample()
        assert (num_instructions(ledger.port) > 0) is thins
        assert is_open(accepted[0])
        now[0] = 100.0
        ledger.sample()
        assert num_instructions(ledger.port) == 0


@needs_counts
def test_a_host_is_known_by_a_connection_that_is_used_for_a_while() -> None:
    now = [0.0]
    with guarded(Guard(thins=True, free_strikes=1), lambda: now[0]) as (ledger, accepted, dial):
        know(ledger, dial())
        now[0] = PROVEN_S + 1
        ledger.sample()
        come_and_go(dial, accepted, limits.KNOWN_FACTOR)
        ledger.sample()
        assert num_instructions(ledger.port) == 0
        come_and_go(dial, accepted, limits.KNOWN_FACTOR)
        ledger.sample()
        assert num_instructions(ledger.port) > 0


def come_and_go(dial: Callable[[], socket.socket], accepted: list[socket.socket], num: int) -> None:
    """Connections of which no call comes."""
    for _ in range(num):
        dial()
    for each in accepted[-num:]:
        each.close()


@needs_counts
def test_connections_that_bring_calls_are_no_strikes() -> None:
    with guarded(Guard(thins=True, free_strikes=1)) as (ledger, accepted, dial):
        for _ in range(4):
            client = dial()
            know(ledger, client)
            client.close()
            accepted[-1].close()
        ledger.sample()
        assert num_instructions(ledger.port) == 0


@needs_counts
def test_a_connection_is_ended_between_two_samples() -> None:
    with guarded(Guard(unknown_bytes=1000, first_bytes=2000)) as (ledger, _, dial):
        stranger, begins = dial(), dial()
        know_not_used(ledger, begins)
        stranger.sendall(b"x" * 1001)
        begins.sendall(b"x" * 1001)
        ledger.look()
        assert stranger.recv(1) == b""
        assert ledger.num_ended == 1
        begins.sendall(b"x" * 1000)
        ledger.look()
        assert begins.recv(1) == b""
        assert ledger.num_ended == 2


def know_not_used(ledger: SocketLedger, client: socket.socket) -> None:
    """A call of a known caller begins, and takes nothing."""
    host, port = client.getsockname()
    assert next(ledger.taken(iter([]), f"ipv4:{host}:{port}"), None) is None


@needs_counts
def test_a_caller_whose_connection_was_ended_has_low_limits_for_a_while() -> None:
    now = [0.0]
    rules = Guard(unknown_bytes=1000, untaken_bytes=5000, few_refused=1)
    with guarded(rules, lambda: now[0]) as (ledger, _, dial):

        def know_as(caller: str) -> tuple[socket.socket, str]:
            client = dial()
            host, port = client.getsockname()
            peer = f"ipv4:{host}:{port}"
            next(ledger.taken(iter([b"message"]), peer, caller))
            ledger.sample()
            return client, peer

        def takes(caller: str, num_bytes: int) -> bool:
            client, _ = know_as(caller)
            num_ended = ledger.num_ended
            client.sendall(b"x" * num_bytes)
            ledger.look()
            ledger.sample()
            return ledger.num_ended == num_ended

        assert takes("site-a", 4000)
        assert not takes("site-a", 5001)
        assert not takes("site-a", 1001)
        assert takes("site-b", 4000)
        _, peer = know_as("site-a")
        num_ended = ledger.num_ended
        ledger.refused(peer)
        assert ledger.num_ended == num_ended
        ledger.refused(peer)
        assert ledger.num_ended == num_ended + 1
        now[0] = 300.0
        assert takes("site-a", 4000)


# --- a syncer


@needs_counts
def test_endless_headers_with_a_certificate_end_their_connection(tmp_path: Path) -> None:
    day, names = dt.timedelta(days=1), [("raw", "learner"), ("villain", "learner")]
    Keyring.new(tmp_path / "keys", RUN, ["127.0.0.1"], names, day)  # type: ignore[arg-type]
    with start(tmp_path, method(), keys=tmp_path / "keys" / "syncer") as syncer, ExitStack() as stack:
        raw = Raw(syncer.address, keys=tmp_path / "keys" / "raw")
        stack.callback(raw.connection.close)
        raw.initialise()
        raw.join()
        target = Target(syncer.address, tls=True, keys=tmp_path / "keys" / "villain", source=HOST)
        for _ in range(2):
            with closing(Http2(target)) as hostile:
                hostile.begin_headers(headers("Push") + ENDLESS)
                piece = frame(CONTINUATION, 0, 1, b"a" * 16384) * 16

                def is_ended(hostile: Http2 = hostile, piece: bytes = piece) -> bool:
                    try:
                        hostile.send(piece)
                    except OSError:
                        return True
                    return not hostile.answer()

                until(is_ended, "the connection stays")
        raw.beat()
        assert raw.push(ONES) == 1


@needs_counts
def test_a_refused_handshake_is_a_strike(tmp_path: Path) -> None:
    Keyring.new(tmp_path / "keys", RUN, ["127.0.0.1"], [("raw", "learner")], dt.timedelta(days=1))
    ledgers: list[SocketLedger] = []
    credentials = server_credentials(
        tmp_path / "keys" / "syncer", client_certificates=True, begins=lambda: [each.dialled() for each in ledgers]
    )
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    with SocketLedger(port, Guard(thins=True, free_strikes=4), clock=lambda: 0.0) as ledger:
        ledgers.append(ledger)
        server.start()
        target = Target(f"127.0.0.1:{port}", tls=True, source=HOST)

        def is_thinned() -> bool:
            with suppress(OSError), closing(Http2(target)) as stranger:
                stranger.socket.settimeout(5)
                stranger.socket.recv(1)
            ledger.sample()
            return num_instructions(port) > 0

        until(is_thinned, "all connections are taken")
        server.stop(None).wait()
