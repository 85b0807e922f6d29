"""Bytes on the sockets: what the kernel counted for each TCP connection of a port, TLS and HTTP/2 framing included.

gRPC shows message sizes and hides its sockets, so this asks the kernel. The process's descriptors are listed, each
connection of the port is duplicated and read with TCP_INFO (<linux/tcp.h>): `tcpi_bytes_sent` counts payload octets of
outgoing segments, sent again ones included; `tcpi_bytes_received` payload octets that arrived, in order and once. IP
and TCP headers are in neither.

The duplicate is what lets the last count be read after gRPC has closed its own descriptor. It must not outlive that: an
open descriptor would keep the peer waiting for the end of the stream where the owner only closed and did not shut down.
Each `sample` therefore looks whether the process still has the connection elsewhere, and if not reads it a last time
and lets go.

With the duplicate a connection can also be ended, which gRPC lets no program do. `Guard` says when: a connection on
which no caller has become known in time, the oldest of too many of those, one that brings bytes which no call takes,
such as a header without an end, and one with many refused calls.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import stat
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

from diloco.errors import ConfigError

Direction = Literal["received", "sent"]  # as this process sees it
Label = tuple[str, str]  # learner, kind
Peer = tuple[str, int]
UNLABELLED: Label = ("", "unlabelled")  # failed handshakes, strangers

_ESTABLISHED, _CLOSE = 1, 7  # tcpi_state
_U64 = struct.Struct("=Q")
_BYTES_ACKED, _BYTES_RECEIVED, _BYTES_SENT = (
    120,
    128,
    200,
)  # offsets in struct tcp_info; the first two since Linux 4.1, the last since 4.19
_TCP_INFO_BYTES = 256
ACKNOWLEDGING = 16
"""A peer that only receives sends less than one byte for so many: window updates and the framing of TLS."""

log = logging.getLogger("diloco.syncer")


@dataclass(frozen=True)
class TcpCounts:
    """What the kernel says of a connection."""

    state: int
    sent: int
    received: int


def tcp_counts(connection: socket.socket) -> TcpCounts:
    """Read a TCP socket's counters. Where the kernel has no `bytes_sent`, what the peer acknowledged stands for it.

    Raises:
        OSError: not a TCP socket, or a system without TCP_INFO.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _BYTES_RECEIVED + 8:
        raise OSError(f"TCP_INFO has {len(info)} bytes and holds no byte counts; Linux 4.1 or newer has them")
    sent_at = _BYTES_SENT if len(info) >= _BYTES_SENT + 8 else _BYTES_ACKED
    return TcpCounts(info[0], _U64.unpack_from(info, sent_at)[0], _U64.unpack_from(info, _BYTES_RECEIVED)[0])


def is_available() -> bool:
    """Whether this system can count: Linux, with /proc."""
    return sys.platform == "linux" and os.access("/proc/self/fd", os.R_OK | os.X_OK)


@dataclass(frozen=True)
class Guard:
    """When connections are ended.

    Attributes:
        unknown_s: after so long without a known caller.
        num_unknown: connections without a known caller at most; beyond, the oldest of the host that has most is ended.
        unknown_bytes: received on a connection without a known caller, at most.
        untaken_bytes: received since a call took a message last, at most: more than gRPC receives ahead.
        num_refused: calls of one connection that were refused for what their sender did, at most.
    """

    unknown_s: float = 20.0
    num_unknown: int = 256
    unknown_bytes: int = 1 << 20
    untaken_bytes: int = 32 << 20
    num_refused: int = 64


@dataclass(eq=False)
class _Connection:
    """A duplicate of one connection's socket, what was counted of it so far, and whose it is.

    Attributes:
        is_known: a caller on it is known. has_taken: a call has taken a message since the last sample.
        untaken_from: bytes (sent, received) when a call took a message last.
    """

    socket: socket.socket
    peer: Peer
    seen_at: float
    label: Label | None = None
    sent: int = 0
    received: int = 0
    is_known: bool = False
    has_taken: bool = False
    untaken_from: tuple[int, int] = (0, 0)
    num_refused: int = 0
    is_ended: bool = False


class SocketLedger:
    """Bytes by learner, kind and direction over all TCP connections accepted on one local port of this process.

    One connection carries one kind; `label` says whose and which, and may come late: what was counted before belongs to
    the first label. Totals never fall and outlive their connections. Any thread may call any method. `start` samples
    four times a second, which is what limits how long a duplicate outlives its owner; without it call `sample`.

    Arguments:
        port: the local port that the server listens on.
        guard: when connections are ended; None: never.
        clock: monotonic seconds.

    Attributes:
        num_ended: connections that the guard has ended.
        available: False where the system cannot count; then nothing is counted, and reports must say so.
    """

    def __init__(self, port: int, guard: Guard | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 < port < 65536:
            raise ConfigError(f"port {port} is not one that connections arrive at; pass the port that was bound.")
        self.port = port
        self.num_ended = 0
        self._guard, self._clock = guard, clock
        self.available = is_available()
        self._lock = threading.Lock()
        self._connections: dict[int, _Connection] = {}  # by inode, which names a socket for as long as it lives
        self._by_peer: dict[Peer, _Connection] = {}
        self._others: set[int] = set()  # inodes of sockets that are not the port's
        self._totals: dict[tuple[str, str, Direction], int] = {}
        self._is_closed = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def label(self, peer: str, kind: str, learner: str) -> None:
        """Say whose bytes a connection carries; cheap when it is known.

        Arguments:
            peer: as gRPC's `context.peer()` gives it: "ipv4:127.0.0.1:54321", "ipv6:%5B::1%5D:54321". Others are not
                TCP and not counted.
            kind: "control", "contributions", "updates", "joins", "probes".
        """
        key = parse_peer(peer)
        if key is None or not self.available:
            return
        with self._lock:
            connection = self._by_peer.get(key)
            if connection is None or tcp_counts(connection.socket).state != _ESTABLISHED:
                self._sample()  # it is new, or a closed one had the same address
                connection = self._by_peer.get(key)
            if connection is not None and connection.label != (learner, kind):
                if connection.label is not None:
                    self._count(connection)  # up to here it was another's
                connection.label = (learner, kind)

    def taken(self, messages: Iterator[bytes], peer: str) -> Iterator[bytes]:
        """The messages of a call of a known caller; what the peer sends is seen to be taken."""
        key = parse_peer(peer)
        with self._lock:
            if key is not None and key not in self._by_peer and self.available:
                self._sample()
            connection = None if key is None else self._by_peer.get(key)
            if connection is not None:
                connection.is_known = True
        for message in messages:
            if connection is not None:
                connection.has_taken = True
            yield message

    def refused(self, peer: str) -> None:
        """A call was refused for what its sender did; a connection with many of them is ended."""
        key = parse_peer(peer)
        with self._lock:
            connection = None if key is None else self._by_peer.get(key)
            if connection is not None and self._guard is not None:
                connection.num_refused += 1
                if connection.num_refused > self._guard.num_refused:
                    self._end(connection)

    def sample(self) -> None:
        """Take up new connections, count all, and let go of those that their owner has closed."""
        if self.available:
            with self._lock:
                self._sample()

    def totals(self) -> dict[tuple[str, str, Direction], int]:
        """Bytes by (learner, kind, direction), as of the last sample."""
        with self._lock:
            return dict(self._totals)

    def start(self, interval_s: float = 0.25) -> None:
        """Sample from a thread until `close`."""
        if self.available and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(interval_s,), name="socket-ledger", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Count a last time and let go of everything. Totals stay readable."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.sample()
        with self._lock:
            self._is_closed = True  # a call that ends late takes up nothing
            for inode in list(self._connections):
                self._release(inode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            self.sample()

    def _sample(self) -> None:
        if self._is_closed:
            return
        duplicates = {connection.socket.fileno() for connection in self._connections.values()}
        try:
            present = {inode: fd for fd, inode in _sockets() if fd not in duplicates}
        except OSError as error:  # no descriptor is left to list them with; what is counted stays, and is read later
            log.warning("the open sockets cannot be listed: %s", error)
            return
        for inode, connection in list(self._connections.items()):
            counts = self._count(connection)
            if inode not in present or counts.state == _CLOSE:
                self._release(inode)
            elif self._guard is not None:
                self._check(connection, counts, self._guard)
        if self._guard is not None:
            self._end_unknown(self._guard.num_unknown)
        self._others &= present.keys()
        for inode, fd in present.items():
            if inode not in self._connections and inode not in self._others:
                self._take_up(inode, fd)

    def _take_up(self, inode: int, fd: int) -> None:
        try:
            duplicate = socket.socket(fileno=os.dup(fd))
        except OSError:  # closed since it was listed
            return
        peer = _peer_on(duplicate, self.port) if os.fstat(duplicate.fileno()).st_ino == inode else None
        if peer is None:
            self._others.add(inode)
            duplicate.close()
            return
        connection = _Connection(duplicate, peer, self._clock())
        self._connections[inode] = self._by_peer[peer] = connection

    def _check(self, connection: _Connection, counts: TcpCounts, guard: Guard) -> None:
        """End a connection that is over a limit."""
        if not connection.is_known:
            if counts.received > guard.unknown_bytes or self._clock() - connection.seen_at > guard.unknown_s:
                self._end(connection)
            return
        if connection.has_taken:
            connection.has_taken, connection.untaken_from = False, (counts.sent, counts.received)
        sent, received = (now - then for now, then in zip(
            (counts.sent, counts.received), connection.untaken_from, strict=True
        ))  # fmt: skip
        if received - sent // ACKNOWLEDGING > guard.untaken_bytes:
            self._end(connection)

    def _end_unknown(self, most: int) -> None:
        """End connections without a known caller until there are not too many."""
        unknown = [each for each in self._connections.values() if not each.is_known and not each.is_ended]
        by_host: dict[str, list[_Connection]] = {}
        for each in unknown:  # the oldest first
            by_host.setdefault(each.peer[0], []).append(each)
        for _ in range(len(unknown) - most):
            self._end(max(by_host.values(), key=len).pop(0))

    def _end(self, connection: _Connection) -> None:
        """gRPC sees that it has ended, and closes it."""
        if not connection.is_ended:
            connection.is_ended = True
            self.num_ended += 1
            with suppress(OSError):  # the peer was quicker
                connection.socket.shutdown(socket.SHUT_RDWR)

    def _count(self, connection: _Connection) -> TcpCounts:
        counts = tcp_counts(connection.socket)
        if connection.label is not None:
            self._add(connection.label, counts.sent - connection.sent, counts.received - connection.received)
            connection.sent, connection.received = counts.sent, counts.received
        return counts

    def _release(self, inode: int) -> None:
        connection = self._connections.pop(inode)
        if self._by_peer.get(connection.peer) is connection:
            del self._by_peer[connection.peer]
        if connection.label is None:
            connection.label = UNLABELLED
            self._count(connection)
        connection.socket.close()
        self._others.add(inode)  # its owner may hold a dead socket a little longer

    def _add(self, label: Label, sent: int, received: int) -> None:
        directions: tuple[tuple[Direction, int], ...] = (("sent", sent), ("received", received))
        for direction, num_bytes in directions:
            key = (*label, direction)
            self._totals[key] = self._totals.get(key, 0) + num_bytes


def defer_accepts(port: int, seconds: int) -> None:
    """Have the kernel keep connections to a port of this process to itself until the peer has said something, which
    every client does first, or `seconds` have passed: one that is silent costs this process nothing.

    Raises:
        OSError: the system cannot.
    """
    for fd, _ in _sockets():
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            if _listens_at(duplicate, port):
                duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, seconds)


def _listens_at(it: socket.socket, port: int) -> bool:
    if it.family not in (socket.AF_INET, socket.AF_INET6) or it.type != socket.SOCK_STREAM:
        return False
    return bool(it.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and it.getsockname()[1] == port


def parse_peer(peer: str) -> Peer | None:
    """gRPC's name of a peer as (IP address, port); None where it is not TCP."""
    family, _, rest = peer.partition(":")
    if family not in ("ipv4", "ipv6"):
        return None
    host, _, port = urllib.parse.unquote(rest).rpartition(":")
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    """One spelling of an address: no scope, and IPv4 where it is only wrapped in IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _peer_on(connection: socket.socket, port: int) -> Peer | None:
    """The other end, if this is a TCP connection of the local port."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return None
    try:
        if connection.getsockname()[1] != port:
            return None
        host, peer_port, *_ = connection.getpeername()
    except OSError:  # it listens, or is closed already
        return None
    return _plain(host), peer_port


def _sockets() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of every socket this process has open."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a hundred times a minute, and names are all it takes
        try:
            status = os.fstat(int(name))
        except OSError:  # closed since it was listed
            continue
        if stat.S_ISSOCK(status.st_mode):
            yield int(name), status.st_ino
