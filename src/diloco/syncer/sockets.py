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
such as a header without an end, and one with many refused calls. Fewer new ones are taken from where those come.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, Self

from diloco.errors import ConfigError
from diloco.syncer.guard import Guard, Strikes
from diloco.syncer.syn_filter import SynFilter
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

ACKNOWLEDGING = 16
"""A peer that only receives sends less than one byte for so many: window updates and the framing of TLS."""

SAMPLE_S, LOOK_S, NEW_S = 0.25, 0.02, 1.0
"""Between two samples; between two looks at connections of which no call has taken a message, while one of them is new
or brings bytes: in a quarter of a second a hundred megabytes may come; and how long a connection is new."""

SAMPLING_SHARE = 0.05
"""Of the time, at most, goes into listing descriptors."""

log = logging.getLogger("diloco.syncer")


@dataclass(eq=False)
class _Connection:
    """A duplicate of one connection's socket, what was counted of it so far, and whose it is.

    Attributes:
        is_known: a caller on it is known. caller: as in `taken`. is_used: a call has taken a message of it.
        has_taken: since it was looked at last.
        untaken_from: bytes (sent, received) when a call took a message last.
        looked_bytes: received when it was looked at last.
    """

    socket: socket.socket
    peer: Peer
    seen_at: float
    label: Label | None = None
    sent: int = 0
    received: int = 0
    is_known: bool = False
    caller: str = ""
    is_used: bool = False
    has_taken: bool = False
    untaken_from: tuple[int, int] = (0, 0)
    num_refused: int = 0
    looked_bytes: int = 0
    is_ended: bool = False


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
        self._suspects: list[_Connection] = []
        self._strikes = Strikes((guard or Guard()).free_strikes)
        self._filter: SynFilter | None = None
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
                self._takes(connection)
            yield message

    def _takes(self, connection: _Connection) -> None:
        """A call takes a message."""
        connection.has_taken = True
        if not connection.is_used:
            connection.is_used = True
            with self._lock:
                if self._has_credit(connection):
                    self._strikes.known(self._clock(), connection.peer[0])

    def refused(self, peer: str) -> None:
        """A call was refused for what its sender did; a connection with many of them is ended."""
        key = parse_peer(peer)
        with self._lock:
            connection = None if key is None else self._by_peer.get(key)
            if connection is not None and self._guard is not None:
                connection.num_refused += 1
                most = self._guard.num_refused if self._has_credit(connection) else self._guard.few_refused
                if connection.num_refused > most:
                    self._end(connection)

    def _has_credit(self, connection: _Connection) -> bool:
        """Whether no connection of the same caller was ended lately for what it brought."""
        return not (connection.caller and self._strikes.of_caller(self._clock(), connection.caller))

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
                self._thin()

    def look(self) -> None:
        """End connections that are new, or bring bytes of which no call has taken any, and are over a limit. Cheap."""
        with self._lock:
            now = self._clock()
            self._suspects = [each for each in self._suspects if self._is_suspect(each, now)]

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
            self._wake.wait(LOOK_S if self._suspects else max(0.0, due_at - now))
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
            elif self._guard is not None:
                self._check(connection, counts, self._guard)
                if counts.received > connection.looked_bytes and not connection.is_used:
                    self._suspects.append(connection)
        if self._guard is not None:
            self._end_unknown(self._guard.num_unknown)
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
        connection = _Connection(duplicate, peer, self._clock())
        self._connections[inode] = self._by_peer[peer] = connection
        if self._guard is not None:
            self._suspects.append(connection)

    def _is_suspect(self, connection: _Connection, now: float) -> bool:
        """Whether it is to be looked at soon again, after this look."""
        if connection.is_ended or self._guard is None or (connection.is_used and self._has_credit(connection)):
            return False
        counts = tcp_counts(connection.socket)
        self._check(connection, counts, self._guard)
        before, connection.looked_bytes = connection.looked_bytes, counts.received
        return now - connection.seen_at < NEW_S or counts.received > before

    def _thin(self) -> None:
        """Leave out new connections where they are mostly such as bring no call."""
        if self._guard is None or not self._guard.thins:
            return
        thinned = self._strikes.thinned(self._clock())
        try:
            if self._filter is None and thinned:
                self._filter = SynFilter(self.port)
            if self._filter is not None:
                self._filter.thin(thinned)
        except OSError as error:
            log.warning("new connections cannot be left out by where they come from: %s", error)
            self._guard = replace(self._guard, thins=False)

    def _check(self, connection: _Connection, counts: TcpCounts, guard: Guard) -> None:
        """End a connection that is over a limit."""
        if not connection.is_known and self._clock() - connection.seen_at > guard.unknown_s:
            self._end(connection)
        if connection.has_taken:
            connection.has_taken, connection.untaken_from = False, (counts.sent, counts.received)
        sent, received = (now - then for now, then in zip(
            (counts.sent, counts.received), connection.untaken_from, strict=True
        ))  # fmt: skip
        if received - sent // ACKNOWLEDGING > self._most_untaken(connection, guard):
            self._end(connection)

    def _most_untaken(self, connection: _Connection, guard: Guard) -> int:
        """Bytes that a connection may bring before a call takes a message."""
        if not connection.is_known or not self._has_credit(connection):
            return guard.unknown_bytes
        return guard.untaken_bytes if connection.is_used else guard.first_bytes

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
            untaken = tcp_counts(connection.socket).received - connection.untaken_from[1]
            self._strikes.add(self._clock(), connection.peer[0], untaken, connection.caller)
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
        if not (connection.is_known or connection.is_ended):  # it came and went
            self._strikes.add(self._clock(), connection.peer[0], tcp_counts(connection.socket).received)
        connection.is_ended = True
        connection.socket.close()
        self._others.add(inode)  # its owner may hold a dead socket a little longer

    def _add(self, label: Label, sent: int, received: int) -> None:
        directions: tuple[tuple[Direction, int], ...] = (("sent", sent), ("received", received))
        for direction, num_bytes in directions:
            key = (*label, direction)
            self._totals[key] = self._totals.get(key, 0) + num_bytes
