"""A relay before a syncer: the network, and what can happen to it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self


class Link:
    """One relayed connection. `up_bytes`, `down_bytes`: forwarded towards the syncer and towards the learner so far.
    `is_half_open`: one end hears of nothing."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.ends = (client, server)
        self.up_bytes = self.down_bytes = 0
        self.is_half_open = False
        self.may_flow = threading.Event()
        self.may_flow.set()

    def hang_up(self) -> None:
        """Both ends read the end of the stream, and blocked threads here go on."""
        for end in self.ends:
            with suppress(OSError):  # the other side was quicker
                end.shutdown(socket.SHUT_RDWR)
        self.may_flow.set()


class Relay:
    """Forwards connections to a port of this machine; a context manager.

    `before_up(link)` is called with every piece that goes towards the syncer, before it does, and `before_down(link)`
    with every piece that goes towards the learner.
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
        self._is_open = threading.Event()
        self._is_open.set()
        self._is_over = False
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def stall(self) -> None:
        """From now on nothing arrives over the open connections, and neither end is told. New ones work."""
        for link in self.links:
            link.may_flow.clear()

    def resume(self) -> None:
        """What was held back arrives."""
        for link in self.links:
            link.may_flow.set()

    def cut(self) -> None:
        """Break the connections there are."""
        for link in self.links:
            link.hang_up()

    def cut_at_the_syncer(self) -> None:
        """Break the connections there are, at the syncer's end: the learner is not told."""
        for link in self.links:
            link.is_half_open = True
            with suppress(OSError):
                link.ends[1].shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """New connections are taken by the system and lead nowhere."""
        self._is_open.clear()

    def accept(self) -> None:
        """New connections lead to the syncer again, and so do those that were refused."""
        self._is_open.set()

    def close(self) -> None:
        self._is_over = True
        self._is_open.set()
        self.hang_up_end(self._listener)
        self.cut()
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
            self._is_open.wait()
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # the syncer is away, or this is over
                client.close()
                continue
            link = Link(client, server)
            self.links.append(link)
            if self._is_over:
                link.hang_up()
            self._run(self._forward, link, client, server, True)
            self._run(self._forward, link, server, client, False)

    def _forward(self, link: Link, source: socket.socket, target: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                (self._before_up if up else self._before_down)(link)
                link.may_flow.wait()
                target.sendall(data)
                if up:
                    link.up_bytes += len(data)
                else:
                    link.down_bytes += len(data)
        if not link.is_half_open:
            link.hang_up()

    @staticmethod
    def hang_up_end(end: socket.socket) -> None:
        """Its peer reads the end of the stream."""
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
