"""The connection breaks while a run is given its model: it gets it once, and the learner goes on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.syncer.runs import RUN, Net, Raw, is_initialised, layout, method, start, train, versions_of

import diloco
from diloco.core.fragments import Layout, make_layout
from diloco.errors import DilocoError
from diloco.syncer.hosting import while_waiting


class CutOnce:
    """A relay before a syncer that breaks one connection, the first over which `limit_bytes` went up.

    `keeps_answers`: that connection's upload arrives in full, but nothing comes back; it breaks when `is_over` says so.
    """

    def __init__(self, port: int, limit_bytes: int, keeps_answers: bool, is_over: Callable[[], bool]) -> None:
        self._port = port
        self._limit_bytes = limit_bytes
        self._keeps_answers = keeps_answers
        self._is_over = is_over
        self._lock = threading.Lock()
        self._marked: socket.socket | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.has_cut = False
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def _run(self, target: Callable[..., None], *args: socket.socket) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        for client in self._clients():
            server = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [client, server]
            self._run(self._up, client, server)
            self._run(self._down, client, server)

    def _clients(self) -> Iterator[socket.socket]:
        while True:
            try:
                yield self._listener.accept()[0]
            except OSError:
                return

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        total = 0
        while data := _read(client):
            total += len(data)
            with self._lock:
                if total > self._limit_bytes and self._marked is None:
                    self._marked = client
            if self._marked is client and not self._keeps_answers:
                break
            if not _write(server, data):
                break
            if self._marked is client:
                self._run(self._cut_when_over, client, server)
        self._cut(client, server)

    def _down(self, client: socket.socket, server: socket.socket) -> None:
        while data := _read(server):
            if self._marked is not client and not _write(client, data):
                break
        self._cut(client, server)

    def _cut_when_over(self, client: socket.socket, server: socket.socket) -> None:
        waiting = threading.Event()
        while not self._is_over():
            waiting.wait(0.01)
        self._cut(client, server)

    def _cut(self, *ends: socket.socket) -> None:
        self.has_cut = self.has_cut or self._marked in ends
        for end in ends:
            _hang_up(end)

    def close(self) -> None:
        for end in self._sockets:
            _hang_up(end)
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()


def _hang_up(end: socket.socket) -> None:
    """Wakes a blocked reader, too."""
    with suppress(OSError):  # the other side was quicker
        end.shutdown(socket.SHUT_RDWR)


def _write(end: socket.socket, data: bytes) -> bool:
    try:
        end.sendall(data)
    except OSError:
        return False
    return True


def _read(end: socket.socket) -> bytes:
    try:
        return end.recv(1 << 16)
    except OSError:
        return b""


@pytest.mark.parametrize("answer_lost", [False, True], ids=["upload breaks off", "answer is lost"])
def test_a_run_is_given_its_model_across_a_broken_connection(answer_lost: bool, tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer:
        # Shaking hands takes some hundred bytes; the layout alone, which leads the upload, is longer than this.
        with closing(CutOnce(syncer.port, 600, answer_lost, lambda: is_initialised(syncer))) as relay:
            exchange = diloco.connect(f"127.0.0.1:{relay.port}", run=RUN, learner="first", initialise=True)
            train(0, exchange, None, steps=8)
            assert relay.has_cut
        assert versions_of(syncer) == [2, 2]


THREE = make_layout(Net(), diloco.Named([["layers.0.weight"], ["layers.0.bias"], ["layers.1.*"]]))
UNFIT = {
    "no fragment": (method(), Layout((), ()), layout()),
    "another number of offsets": (method(offsets=(1, 2, 3)), layout(), THREE),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_model_that_the_method_cannot_train_is_refused_before_anything_is_written(kind: str, tmp_path: Path) -> None:
    given, unfit, fit = UNFIT[kind]
    for is_restarted in (False, True):
        with start(tmp_path, given) as syncer:
            raw = Raw(syncer.address)
            assert not is_initialised(syncer), "a restarted syncer finds what was refused"
            with pytest.raises(DilocoError, match=str(len(unfit.fragments))):
                raw.initialise(wanted=unfit)
            assert list((tmp_path / "state" / "objects").iterdir()) == []
            if is_restarted:
                raw.initialise(wanted=fit)
                raw.join(fit)
            raw.connection.close()
    with start(tmp_path, given) as syncer:
        assert versions_of(syncer) == [0] * len(fit.fragments)


def test_a_sender_hears_from_a_syncer_that_is_at_work_on_what_it_sent() -> None:
    answer: Future[int] = Future()
    heard = while_waiting(answer)
    for _ in range(2):
        next(heard)
    answer.set_result(1)
    assert next(heard, None) is None
