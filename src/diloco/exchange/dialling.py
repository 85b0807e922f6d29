"""Several addresses of one run: a syncer that serves it, and others that follow and may take it over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from diloco.core.session.lanes import control_number
from diloco.errors import ConfigError, UnreachableError
from diloco.exchange.connection import Connection
from diloco.exchange.wire import syncer_pb2 as pb

R = TypeVar("R", bound=Message)


class Dialler:
    """Calls to whichever of a run's syncers serves it. Any thread may call any method.

    Control connections are numbered and go to the addresses in turn (`core.session.lanes`); all other calls go to one
    address, which `dial` and `next` change.

    Arguments:
        connections: one to each address.

    Attributes:
        closing: set once the connections are being closed.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        if not connections:
            raise ConfigError("there is no address of a syncer; give at least one.")
        self._connections = list(connections)
        self._dialled = 0
        self.closing = threading.Event()

    @property
    def num_addresses(self) -> int:
        """Of syncers."""
        return len(self._connections)

    def dial(self, address: int) -> None:
        """From here on calls other than control ones go to this address."""
        self._dialled = address

    def next(self) -> None:
        """From here on they go to the next address."""
        self._dialled = (self._dialled + 1) % len(self._connections)

    def start_here(self) -> None:
        """Make the address that calls go to the first one."""
        first = self._dialled
        self._connections = [*self._connections[first:], *self._connections[:first]]
        self._dialled = 0

    # --- calls, as of `Connection` ------------------------------------------------------------------------------------

    def call(self, channel: str, method: str, request: Message, kind: type[R], *, timeout_s: float = 30.0) -> R:
        """As `Connection.call`."""
        return self._of(channel).call(channel, method, request, kind, timeout_s=timeout_s)

    def upload(self, channel: str, method: str, stream: Iterator[bytes], kind: type[R]) -> R:
        """As `Connection.upload`."""
        return self._of(channel).upload(channel, method, stream, kind)

    def pull(self, channel: str, request: pb.PullRequest) -> tuple[pb.PullHeader, memoryview]:
        """As `Connection.pull`."""
        return self._of(channel).pull(channel, request)

    def watch(self, channel: str, request: pb.WatchRequest) -> Iterator[pb.Notice]:
        """As `Connection.watch`."""
        return self._of(channel).watch(channel, request)

    def close_channel(self, channel: str) -> None:
        """Hang up one channel, wherever it goes."""
        for connection in self._connections:
            connection.close_channel(channel)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.closing.set()
        for connection in self._connections:
            connection.close()

    def _of(self, channel: str) -> Connection:
        number = control_number(channel)
        index = self._dialled if number is None else (number - 1) % len(self._connections)
        return self._connections[index]


def anywhere(dialler: Dialler, call: Callable[[], R]) -> R:
    """Make a call that any syncer may answer: at the next address if it is not reached at this one.

    Raises:
        DilocoError: as the call, of the last address that was tried.
    """
    for _ in range(dialler.num_addresses - 1):
        try:
            return call()
        except UnreachableError:
            dialler.next()
    return call()
