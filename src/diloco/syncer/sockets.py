"""Bytes on the sockets: what the kernel counted for each TCP connection of a port, TLS and HTTP/2 framing included.

gRPC shows message sizes and hides its sockets, so this asks the kernel. The process's descriptors are listed, each
connection of the port is duplicated and read with TCP_INFO (<linux/tcp.h>): `tcpi_bytes_sent` counts payload octets of
outgoing segments, sent again ones included; `tcpi_bytes_received` payload octets that arrived, in order and once. IP
and TCP headers are in neither.

The duplicate is what lets the last count be read after gRPC has closed its own descriptor. It must not outlive that: an
open descriptor would keep the peer waiting for the end of the stream where the owner only closed and did not shut down.
Each `sample` therefore looks whether the process still has the connection elsewhere, and if not reads it a last time
and lets go.

With the duplicate a connection can also be ended, which gRPC lets no program do: `ending.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, Self

from diloco.errors import ConfigError
from diloco.syncer.ending import Connection, Ending
from diloco.syncer.guard import Guard
from diloco.syncer.tcp import (
    CLOSED,
    ESTABLISHED,
    Peer,
    TcpCounts,
    duplicate_of,
    is_available,
    open_sockets,
    parse_peer,
    peer_on,
    tcp_counts,
)

Direction = Literal["received", "sent"]  # as this process sees it
Label = tuple[str, str]  # learner, kind
UNLABELLED: Label = ("", "unlabelled")  # failed handshakes, strangers

SAMPLE_S, LOOK_S = 0.25, 0.02
"""Between two samples; between two looks at connections that are suspect: in a quarter of a second a hundred megabytes
may come."""

SAMPLING_SHARE = 0.05
"""Of the time, at most, goes into listing descriptors."""

log = logging.getLogger("diloco.syncer")


class SocketLedger:
    """Bytes by learner, kind and direction over all TCP connections accepted on one local port of this process.

    One connection carries one kind; `label` says whose and which, and may come late: what was counted before belongs to
    the first label. Totals never fall and outlive their connections. Any thread may call any method. `start` samples
    every quarter of a second, which is what limits how long a duplicate outlives its owner; without it call `sample`.

    Arguments:
        port: the local port that the server listens on.
        guard: when connections are ended; None: never.
        clock: monotonic seconds.

    Attributes:
        available: False where the system cannot count; then nothing is counted, and reports must say so.
    """

    def __init__(self, port: int, guard: Guard | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 < port < 65536:
            raise ConfigError(f"port {port} is not one that connections arrive at; pass the port that was bound.")
        self.port = port
        self._clock = clock
        self.available = is_available()
        self._lock = threading.Lock()
        self._connections: dict[int, Connection] = {}  # by inode, which names a socket for as long as it lives
        self._by_peer: dict[Peer, Connection] = {}
        self._others: set[int] = set()  # inodes of sockets that are not the port's
        self._ending = None if guard is None else Ending(port, guard, clock)
        self._totals: dict[tuple[str, str, Direction], int] = {}
        self._sampled_at, self._sampling_s = -1.0, 0.0  # monotonic; and how long it took
        self._is_closed = self._is_stopping = False
        self._wake = threading.Event()
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
            if connection is None or tcp_counts(connection.socket).state != ESTABLISHED:
                self._sample()  # it is new, or a closed one had the same address
                connection = self._by_peer.get(key)
            if connection is not None and connection.label != (learner, kind):
                if connection.label is not None:
                    self._count(connection)  # up to here it was another's
                connection.label = (learner, kind)

    def taken(self, messages: Iterator[bytes], peer: str, caller: str = "") -> Iterator[bytes]:
        """The messages of a call of a known caller; what the peer sends is seen to be taken.

        Arguments:
            caller: the name that its limits go by; "": of no one in particular.
        """
        key = parse_peer(peer)
        with self._lock:
            if key is not None and key not in self._by_peer and self.available:
                self._sample()
            connection = None if key is None else self._by_peer.get(key)
            if connection is not None:
                connection.is_known, connection.caller = True, caller
        for message in messages:
            if connection is not None:
                connection.is_used = connection.has_taken = True
            yield message

    def refused(self, peer: str) -> None:
        """A call was refused for what its sender did; a connection with many of them is ended."""
        key = parse_peer(peer)
        with self._lock:
            connection = None if key is None else self._by_peer.get(key)
            if connection is not None and self._ending is not None:
                self._ending.refused(connection)

    @property
    def num_ended(self) -> int:
        """Connections that the guard has ended."""
        return 0 if self._ending is None else self._ending.num_ended

    def dialled(self) -> None:
        """A handshake begins. One that fails is over within milliseconds, so that its connection is taken up now, while
        that does not take too much of the time."""
        if self.available and time.monotonic() - self._sampled_at >= self._sampling_s / SAMPLING_SHARE:
            with self._lock:
                self._sample()
            self._wake.set()

    def sample(self) -> None:
        """Take up new connections, count all, let go of those that their owner has closed, and have the kernel leave
        out new ones of hosts that sent too many without a call."""
        if self.available:
            with self._lock:
                self._sample()
                if self._ending is not None:
                    self._ending.thin()

    def look(self) -> None:
        """End connections that are suspect and over a limit. Cheap."""
        if self._ending is not None:
            with self._lock:
                self._ending.look()

    def totals(self) -> dict[tuple[str, str, Direction], int]:
        """Bytes by (learner, kind, direction), as of the last sample."""
        with self._lock:
            return dict(self._totals)

    def start(self, interval_s: float = SAMPLE_S) -> None:
        """Sample from a thread until `close`."""
        if self.available and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(interval_s,), name="socket-ledger", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Count a last time and let go of everything. Totals stay readable."""
        self._is_stopping = True
        self._wake.set()
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
        due_at = 0.0
        while not self._is_stopping:
            if (now := time.monotonic()) >= due_at:
                self.sample()
                due_at = time.monotonic() + max(interval_s, self._sampling_s / SAMPLING_SHARE)
            else:
                self.look()
            has_suspects = self._ending is not None and self._ending.has_suspects
            self._wake.wait(LOOK_S if has_suspects else max(0.0, due_at - now))
            self._wake.clear()

    def _sample(self) -> None:
        if self._is_closed:
            return
        began = time.monotonic()
        duplicates = {connection.socket.fileno() for connection in self._connections.values()}
        try:
            present = {inode: fd for fd, inode in open_sockets() if fd not in duplicates}
        except OSError as error:  # no descriptor is left to list them with; what is counted stays, and is read later
            log.warning("the open sockets cannot be listed: %s", error)
            return
        self._update(present)
        self._sampled_at = time.monotonic()
        self._sampling_s = self._sampled_at - began

    def _update(self, present: dict[int, int]) -> None:
        """To the sockets that are open now: their inodes and descriptors."""
        for inode, connection in list(self._connections.items()):
            counts = self._count(connection)
            if inode not in present or counts.state == CLOSED:
                self._release(inode)
            elif self._ending is not None:
                self._ending.counted(connection, counts)
        if self._ending is not None:
            self._ending.end_unknown(self._connections.values())
        self._others &= present.keys()
        for inode, fd in present.items():
            if inode not in self._connections and inode not in self._others:
                self._take_up(inode, fd)

    def _take_up(self, inode: int, fd: int) -> None:
        duplicate = duplicate_of(fd, inode)
        if duplicate is None:  # closed since it was listed
            return
        peer = peer_on(duplicate, self.port)
        if peer is None:
            self._others.add(inode)
            duplicate.close()
            return
        connection = Connection(duplicate, peer, self._clock())
        self._connections[inode] = self._by_peer[peer] = connection
        if self._ending is not None:
            self._ending.taken_up(connection)

    def _count(self, connection: Connection) -> TcpCounts:
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
        if self._ending is not None:
            self._ending.released(connection)
        connection.socket.close()
        self._others.add(inode)  # its owner may hold a dead socket a little longer

    def _add(self, label: Label, sent: int, received: int) -> None:
        directions: tuple[tuple[Direction, int], ...] = (("sent", sent), ("received", received))
        for direction, num_bytes in directions:
            key = (*label, direction)
            self._totals[key] = self._totals.get(key, 0) + num_bytes
