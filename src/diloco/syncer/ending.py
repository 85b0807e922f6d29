"""Ends connections by what `Guard` says, and has fewer new ones taken from where those come.

Ended are: a connection on which no caller has become known in time, the oldest of too many of those, one that brings
bytes which no call takes, such as a header without an end, and one with many refused calls.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from diloco.syncer.guard import Guard, Strikes
from diloco.syncer.syn_filter import SynFilter
from diloco.syncer.tcp import Peer, TcpCounts, tcp_counts

ACKNOWLEDGING = 16
"""A peer that only receives sends less than one byte for so many: window updates and the framing of TLS."""

NEW_S, PROVEN_S = 1.0, 5.0
"""How long a connection is new; and one that is used for longer than the second, without a refused call, says that
there is a learner at its host."""

log = logging.getLogger("diloco.syncer")


@dataclass(eq=False)
class Connection:
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
    label: tuple[str, str] | None = None
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


class Ending:
    """Of the connections of a port. Its calls are those of one thread at a time.

    Arguments:
        clock: monotonic seconds.

    Attributes:
        num_ended: connections that were ended.
    """

    def __init__(self, port: int, guard: Guard, clock: Callable[[], float]) -> None:
        self.num_ended = 0
        self._port, self._guard, self._clock = port, guard, clock
        self._suspects: list[Connection] = []
        self._strikes = Strikes(guard.free_strikes)
        self._filter: SynFilter | None = None

    @property
    def has_suspects(self) -> bool:
        """Whether `look` would look at any."""
        return bool(self._suspects)

    def taken_up(self, connection: Connection) -> None:
        """It is new."""
        self._suspects.append(connection)

    def counted(self, connection: Connection, counts: TcpCounts) -> None:
        """It was read: end it, if it is over a limit."""
        self._check(connection, counts)
        is_good = connection.is_used and not connection.num_refused and not connection.is_ended
        if is_good and self._clock() - connection.seen_at > PROVEN_S and self._has_credit(connection):
            self._strikes.known(self._clock(), connection.peer[0])
        if counts.received > connection.looked_bytes and not connection.is_used:
            self._suspects.append(connection)

    def look(self) -> None:
        """At connections that are new, or bring bytes of which no call has taken any: end those over a limit."""
        now = self._clock()
        self._suspects = [each for each in self._suspects if self._is_suspect(each, now)]

    def refused(self, connection: Connection) -> None:
        """A call on it was refused for what its sender did."""
        connection.num_refused += 1
        most = self._guard.num_refused if self._has_credit(connection) else self._guard.few_refused
        if connection.num_refused > most:
            self._end(connection)

    def released(self, connection: Connection) -> None:
        """It is not this process's any more; it can still be read."""
        if not (connection.is_known or connection.is_ended):  # it came and went
            self._strikes.add(self._clock(), connection.peer[0], tcp_counts(connection.socket).received)
        connection.is_ended = True

    def end_unknown(self, connections: Iterable[Connection]) -> None:
        """End connections without a known caller until there are not too many. The oldest come first."""
        unknown = [each for each in connections if not each.is_known and not each.is_ended]
        by_host: dict[str, list[Connection]] = {}
        for each in unknown:
            by_host.setdefault(each.peer[0], []).append(each)
        for _ in range(len(unknown) - self._guard.num_unknown):
            self._end(max(by_host.values(), key=len).pop(0))

    def thin(self) -> None:
        """Leave out new connections where they are mostly such as bring no call."""
        if not self._guard.thins:
            return
        thinned = self._strikes.thinned(self._clock())
        try:
            if self._filter is None and thinned:
                self._filter = SynFilter(self._port)
            if self._filter is not None:
                self._filter.thin(thinned)
        except OSError as error:
            log.warning("new connections cannot be left out by where they come from: %s", error)
            self._guard = replace(self._guard, thins=False)

    def _is_suspect(self, connection: Connection, now: float) -> bool:
        """Whether it is to be looked at soon again, after this look."""
        if connection.is_ended or (connection.is_used and self._has_credit(connection)):
            return False
        counts = tcp_counts(connection.socket)
        self._check(connection, counts)
        before, connection.looked_bytes = connection.looked_bytes, counts.received
        return now - connection.seen_at < NEW_S or counts.received > before

    def _check(self, connection: Connection, counts: TcpCounts) -> None:
        if not connection.is_known and self._clock() - connection.seen_at > self._guard.unknown_s:
            self._end(connection)
        if connection.has_taken:
            connection.has_taken, connection.untaken_from = False, (counts.sent, counts.received)
        sent, received = (now - then for now, then in zip(
            (counts.sent, counts.received), connection.untaken_from, strict=True
        ))  # fmt: skip
        if received - sent // ACKNOWLEDGING > self._most_untaken(connection):
            self._end(connection)

    def _most_untaken(self, connection: Connection) -> int:
        """Bytes that it may bring before a call takes a message."""
        if not connection.is_known or not self._has_credit(connection):
            return self._guard.unknown_bytes
        return self._guard.untaken_bytes if connection.is_used else self._guard.first_bytes

    def _has_credit(self, connection: Connection) -> bool:
        """Whether no connection of the same caller was ended lately for what it brought."""
        return not (connection.caller and self._strikes.of_caller(self._clock(), connection.caller))

    def _end(self, connection: Connection) -> None:
        """gRPC sees that it has ended, and closes it."""
        if not connection.is_ended:
            connection.is_ended = True
            self.num_ended += 1
            untaken = tcp_counts(connection.socket).received - connection.untaken_from[1]
            self._strikes.add(self._clock(), connection.peer[0], untaken, connection.caller)
            with suppress(OSError):  # the peer was quicker
                connection.socket.shutdown(socket.SHUT_RDWR)
