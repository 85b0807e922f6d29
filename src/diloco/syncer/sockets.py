"""Bytes on the sockets: what the kernel counted for each TCP connection of a port, TLS and HTTP/2 framing included.

gRPC shows message sizes and hides its sockets, so this asks the kernel. The process's descriptors are listed, each
connection of the port is duplicated and read with TCP_INFO (<linux/tcp.h>): `tcpi_bytes_sent` counts payload octets of
outgoing segments, sent again ones included; `tcpi_bytes_received` payload octets that arrived, in order and once. IP
and TCP headers are in neither.

The duplicate is what lets the last count be read after gRPC has closed its own descriptor. It must not outlive that: an
open descriptor would keep the peer waiting for the end of the stream where the owner only closed and did not shut down.
Each `sample` therefore looks whether the process still has the connection elsewhere, and if not reads it a last time
and lets go.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
import sys
import threading
import urllib.parse
from collections.abc import Iterator
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


@dataclass
class _Connection:
    """A duplicate of one connection's socket, what was counted of it so far, and whose it is."""

    socket: socket.socket
    peer: Peer
    label: Label | None = None
    sent: int = 0
    received: int = 0


class SocketLedger:
    """Bytes by learner, kind and direction over all TCP connections accepted on one local port of this process.

    One connection carries one kind; `label` says whose and which, and may come late: what was counted before belongs to
    the first label. Totals never fall and outlive their connections. Any thread may call any method. `start` samples
    four times a second, which is what limits how long a duplicate outlives its owner; without it call `sample`.

    Arguments:
        port: the local port that the server listens on.

    Attributes:
        available: False where the system cannot count; then nothing is counted, and reports must say so.
    """

    def __init__(self, port: int) -> None:
        if not 0 < port < 65536:
            raise ConfigError(f"port {port} is not one that connections arrive at; pass the port that was bound.")
        self.port = port
        self.available = is_available()
        self._lock = threading.Lock()
        self._connections: dict[int, _Connection] = {}  # by inode, which names a socket for as long as it lives
        self._by_peer: dict[Peer, _Connection] = {}
        self._others: set[int] = set()  # inodes of sockets that are not the port's
        self._totals: dict[tuple[str, str, Direction], int] = {}
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
        duplicates = {connection.socket.fileno() for connection in self._connections.values()}
        present = {inode: fd for fd, inode in _sockets() if fd not in duplicates}
        for inode, connection in list(self._connections.items()):
            counts = self._count(connection)
            if inode not in present or counts.state == _CLOSE:
                self._release(inode)
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
        connection = _Connection(duplicate, peer)
        self._connections[inode] = self._by_peer[peer] = connection

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
