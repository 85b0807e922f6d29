"""A relay in front of a syncer, with the faults of a network."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

PIECE_BYTES = 1 << 16
"""Most that is forwarded at once."""


class Link:
    """One relayed connection.

    Attributes:
        up_bytes, down_bytes: forwarded towards the syncer, and towards the learner.
        is_half_open: one end hears of nothing.
        is_swallowed: what either end sends is taken and goes nowhere.
    """

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.ends = (client, server)
        self.up_bytes = self.down_bytes = 0
        self.is_half_open = self.is_swallowed = False
        self.may_flow = threading.Event()
        self.may_flow.set()
        self._lock = threading.Lock()
        self._num_ended = 0

    def ended(self) -> None:
        """One of the two directions has ended; with the second one the sockets are closed."""
        with self._lock:
            self._num_ended += 1
            if self.is_over:
                for end in self.ends:
                    end.close()

    @property
    def is_over(self) -> bool:
        """Whether it was closed."""
        return self._num_ended == len(self.ends)

    def hang_up(self) -> None:
        """Shut both sockets down, so that both ends read the end of the stream and no thread here stays blocked."""
        for end in self.ends:
            with suppress(OSError):  # the other side was quicker
                end.shutdown(socket.SHUT_RDWR)
        self.may_flow.set()


class Direction:
    """One direction of all links, and its faults.

    Attributes:
        flows: cleared, nothing arrives, and neither end is told.
        delay_s: how long every piece is held.
        bytes_per_s: of each link; None: as fast as it goes.
        num_corrupt: so many pieces from now on have one bit changed.
        cut_after_bytes: the link that brings so many more bytes is cut; None: none is.
        num_touched: pieces that any of this has happened to.
    """

    def __init__(self) -> None:
        self.flows = threading.Event()
        self.flows.set()
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.num_corrupt = 0
        self.cut_after_bytes: int | None = None
        self.num_touched = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def passed(self, data: bytes) -> bytes | None:
        """Hold a piece for as long as it takes; returns it as it arrives, or None where its link breaks."""
        wait_s = self.delay_s + (len(data) / self.bytes_per_s if self.bytes_per_s else 0.0)
        with self._lock:
            self.num_touched += wait_s > 0 or not self.flows.is_set()
        if wait_s:
            self._is_over.wait(wait_s)
        self.flows.wait()
        with self._lock:
            if self.cut_after_bytes is not None:
                self.cut_after_bytes -= len(data)
                if self.cut_after_bytes < 0:
                    self.cut_after_bytes = None
                    self.num_touched += 1
                    return None
            if self.num_corrupt:
                self.num_corrupt -= 1
                self.num_touched += 1
                place = len(data) // 2
                data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return data

    def heal(self) -> None:
        """End all faults."""
        self.delay_s, self.bytes_per_s, self.num_corrupt, self.cut_after_bytes = 0.0, None, 0, None
        self.flows.set()

    def end(self) -> None:
        """Release what is held, for the last time."""
        self._is_over.set()
        self.heal()


class Relay:
    """Forwards connections to a port of this machine; a context manager.

    `before_up(link)` is called with every piece that goes towards the syncer, before it does, and `before_down(link)`
    with every piece that goes towards the learner.

    Attributes:
        port, address: where it listens.
        links: all connections that there were.
        up, down: what happens to what goes towards the syncer, and towards the learner.
    """

    def __init__(
        self,
        port: int,
        before_up: Callable[[Link], None] = lambda _: None,
        before_down: Callable[[Link], None] = lambda _: None,
    ) -> None:
        self._target = port
        self._before_up, self._before_down = before_up, before_down
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.links: list[Link] = []
        self.up, self.down = Direction(), Direction()
        self._is_open = threading.Event()
        self._is_open.set()
        self._is_over = False
        self._num_swallowed = self._num_refused = self._num_cut = 0
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    @property
    def num_touched(self) -> int:
        """Pieces that were held, slowed, changed or swallowed, and connections that led nowhere or were cut."""
        mine = self._num_swallowed + self._num_refused + self._num_cut
        return mine + self.up.num_touched + self.down.num_touched

    def stall(self) -> None:
        """Hold everything on the open connections, without a word to either end. New ones work."""
        for link in self.links:
            link.may_flow.clear()

    def resume(self) -> None:
        """Deliver what was held."""
        for link in self.links:
            link.may_flow.set()

    def swallow(self) -> None:
        """Acknowledge and drop everything on the open connections. New ones work."""
        for link in self.links:
            link.is_swallowed = True

    def cut(self) -> None:
        """Break the open connections."""
        for link in self.links:
            self._num_cut += not link.is_over
            link.hang_up()

    def cut_at_the_syncer(self) -> None:
        """Break the open connections at the syncer's end: the learner is not told."""
        for link in self.links:
            link.is_half_open = True
            with suppress(OSError):
                link.ends[1].shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """Hold new connections: the system accepts them, and they lead nowhere."""
        self._is_open.clear()

    def accept(self) -> None:
        """Connect new connections to the syncer again, and those that were held."""
        self._is_open.set()

    def heal(self) -> None:
        """End all faults: deliver what was held, and break connections whose bytes were swallowed."""
        self.accept()
        self.resume()
        for direction in (self.up, self.down):
            direction.heal()
        for link in self.links:
            if link.is_swallowed:
                link.hang_up()

    def close(self) -> None:
        self._is_over = True
        self._is_open.set()
        self.hang_up_end(self._listener)
        self.cut()
        for direction in (self.up, self.down):
            direction.end()
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *(end for link in self.links for end in link.ends)):
            end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            self._num_refused += not self._is_open.is_set()
            self._is_open.wait()
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the syncer is away, or this is over
                client.close()
                continue
            link = Link(client, server)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self.links.append(link)
            if self._is_over:
                link.hang_up()
            self._run(self._forward, link, client, server, True)
            self._run(self._forward, link, server, client, False)

    def _forward(self, link: Link, source: socket.socket, target: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                (self._before_up if up else self._before_down)(link)
                link.may_flow.wait()
                if link.is_swallowed:
                    self._num_swallowed += 1
                    continue
                passed = (self.up if up else self.down).passed(data)
                if passed is None:
                    break
                target.sendall(passed)
                if up:
                    link.up_bytes += len(data)
                else:
                    link.down_bytes += len(data)
        if not link.is_half_open:
            link.hang_up()
            link.ended()

    @staticmethod
    def hang_up_end(end: socket.socket) -> None:
        """Shut a socket down: its peer reads the end of the stream."""
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
