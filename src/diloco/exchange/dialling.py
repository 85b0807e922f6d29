"""The addresses of a run: that of the syncer that serves it, and those of standbys, which may take the run over."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from diloco.errors import AuthError, PayloadError, StandbyError, UnreachableError
from diloco.escaping import read_json
from diloco.exchange.connection import Connection
from diloco.exchange.key_pair import AnyKeys
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.address import split_addresses
from diloco.exchange.wire.rpc import OTHER_VERSION
from diloco.protocol.session.lanes import address_of

BULK = ("contributions", "updates", "joins")
"""Channels of requests that go to the syncer that serves the run."""


@dataclass(frozen=True)
class Door:
    """Where the syncers of a run are called, and with which keys; as in `connect`."""

    addresses: str
    run: str
    keys: AnyKeys | None
    insecure: bool


class Dialler:
    """The connections to a run's syncers. All requests go to one address, which `dial` and `next` change. Any thread
    may call any method.

    Control connections are numbered and go to the addresses in turn: see `control`.

    Arguments:
        connections: one to each address.

    Attributes:
        place: index of the connection that requests go to.
        closing: set once the connections are being closed.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.place = 0
        self.closing = threading.Event()
        self._connections = list(connections)
        self._first = 0

    @property
    def num_addresses(self) -> int:
        """The number of syncers."""
        return len(self._connections)

    @property
    def current(self) -> Connection:
        """The connection that requests go to."""
        return self._connections[self.place]

    def control(self, number: int) -> Connection:
        """The connection of the control channel with this number."""
        return self._connections[self._place_of(address_of(number, self.num_addresses))]

    def start_here(self) -> None:
        """Number the addresses anew: the current one becomes number 0."""
        self._first = self.place

    def dial(self, address: int) -> None:
        """Send requests to the address with this number from now on; those in flight at another address fail."""
        self.move(self._place_of(address))

    def next(self) -> None:
        """Send requests to the next address from now on."""
        self.move((self.place + 1) % self.num_addresses)

    def move(self, place: int) -> None:
        """As `dial`, by `place`."""
        before, self.place = self.current, place
        if before is not self.current:
            for channel in BULK:
                before.close_channel(channel)

    def _place_of(self, address: int) -> int:
        return (self._first + address) % self.num_addresses

    def expect_answers_within(self, floor_s: float) -> None:
        """As `Connection.expect_answers_within`."""
        for connection in self._connections:
            connection.expect_answers_within(floor_s)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.closing.set()
        for connection in self._connections:
            connection.close()


def dialler(addresses: str, *, keys: AnyKeys | None, insecure: bool) -> Dialler:
    """A dialler to "host:port", or to several addresses with commas between them.

    Raises:
        ConfigError: an invalid address or combination, or keys that cannot be used.
    """
    each = split_addresses(addresses)
    return Dialler([Connection(address, keys=keys, insecure=insecure) for address in each])


def found(syncers: Dialler, run: str) -> pb.DescribeReply:
    """Find the syncer that serves a run, and send requests to it from now on. Returns its description of the run.

    Raises:
        AuthError: no syncer serves the run to this caller, and one refuses it.
        StandbyError: no syncer serves the run; requests go to one that answers.
        UnreachableError: no syncer answers. Others as `Connection.call`.
    """
    failures = list[tuple[int, UnreachableError | AuthError]]()
    for _ in range(syncers.num_addresses):
        try:
            description = syncers.current.call("control", "Describe", pb.DescribeRequest(run=run), pb.DescribeReply)
            syncers.expect_answers_within(description.lost_floor_s)
            return description
        except (UnreachableError, AuthError) as error:
            failures.append((syncers.place, error))
        syncers.next()
    informative = [each for kind in (AuthError, StandbyError) for each in failures if isinstance(each[1], kind)]
    place, failure = informative[0] if informative else failures[-1]
    syncers.move(place)
    raise failure


def fetch_status(address: str, *, run: str, keys: AnyKeys | None = None, insecure: bool = False) -> dict[str, object]:
    """The status of a run as plain values, for viewers: from the syncer that serves it, or else from the first of
    several that answers. Raises as `found`."""
    with closing(dialler(address, keys=keys, insecure=insecure)) as syncers:
        if syncers.num_addresses > 1:
            with suppress(StandbyError):
                found(syncers, run)
        reply = syncers.current.call("control", "Status", pb.StatusRequest(run=run), pb.StatusReply)
        status: dict[str, object] = read_json(reply.status, "the syncer's status", PayloadError, OTHER_VERSION)
        return status
