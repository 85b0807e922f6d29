"""The physical limit that transfers are compared with: a TCP or TLS socket to another process, and nothing else.

Python's own `ssl` (OpenSSL) is at both ends; the other process reads into, and sends from, one buffer that it fills
before the start. The cipher is set in that process's OpenSSL configuration, since Python has no call that chooses among
those of TLS 1.3.
"""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Self

from diloco.exchange.wire.frames import LONGEST_CHUNK_BYTES

_ROOT = Path(__file__).parent.parent
_PUSH, _PULL, _DONE = b"<", b">", b"."
_CONFIG = """openssl_conf = diloco
[diloco]
ssl_conf = diloco_ssl
[diloco_ssl]
system_default = diloco_tls
[diloco_tls]
Ciphersuites = {cipher}
"""


class RawSocket:
    """A connection to a peer process over which `num_bytes` go up or down at a time; a context manager.

    Arguments:
        num_bytes: of one transfer.
        folder: None for plain TCP; for TLS the directory with ca.pem, cert.pem and key.pem.
        cipher: of TLS 1.3, by its standard name.
    """

    def __init__(self, num_bytes: int, folder: Path | None = None, cipher: str = "") -> None:
        environment = dict(os.environ)
        if folder is not None:
            config = folder / "openssl.cnf"
            config.write_text(_CONFIG.format(cipher=cipher))
            environment["OPENSSL_CONF"] = str(config)
        self._peer = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rawsocket", str(num_bytes), *([] if folder is None else [str(folder)])],
            stdout=subprocess.PIPE, text=True, cwd=_ROOT, env=environment,
        )  # fmt: skip
        assert self._peer.stdout is not None
        self._socket = socket.create_connection(("127.0.0.1", int(self._peer.stdout.readline())))
        if folder is not None:
            self._socket = client_context(folder).wrap_socket(self._socket, server_hostname="127.0.0.1")
            if tls_of(self._socket) != ("TLSv1.3", cipher):
                raise RuntimeError(
                    f"the socket speaks {tls_of(self._socket)} where TLSv1.3 with {cipher} was asked for"
                )

    def push(self, payload: memoryview) -> None:
        """Send it; returns when the peer has it all."""
        self._socket.sendall(_PUSH)
        send_all(self._socket, payload)
        if self._socket.recv(1) != _DONE:
            raise RuntimeError("the peer went away")

    def pull(self, buffer: memoryview) -> None:
        """Fill the buffer."""
        self._socket.sendall(_PULL)
        receive_all(self._socket, buffer)

    def close(self) -> None:
        self._socket.close()
        self._peer.wait()
        if self._peer.stdout is not None:
            self._peer.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def client_context(folder: Path) -> ssl.SSLContext:
    """Trusts the authority in the directory; TLS 1.3."""
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def tls_of(connection: socket.socket) -> tuple[str | None, str]:
    """Version and cipher of a TLS connection."""
    assert isinstance(connection, ssl.SSLSocket)
    cipher = connection.cipher()
    return connection.version(), "" if cipher is None else cipher[0]


def send_all(connection: socket.socket, payload: memoryview) -> None:
    for start in range(0, len(payload), LONGEST_CHUNK_BYTES):
        connection.sendall(payload[start : start + LONGEST_CHUNK_BYTES])


def receive_all(connection: socket.socket, buffer: memoryview) -> None:
    filled = 0
    while filled < len(buffer):
        received = connection.recv_into(buffer[filled : filled + LONGEST_CHUNK_BYTES])
        if received == 0:
            raise RuntimeError(f"the peer went away after {filled} of {len(buffer)} bytes")
        filled += received


def _serve(num_bytes: int, folder: Path | None) -> None:
    buffer = memoryview(bytearray(os.urandom(1 << 16) * (num_bytes // (1 << 16) + 1)))[:num_bytes]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    if folder is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        connection = context.wrap_socket(connection, server_side=True)
    with connection:
        while command := connection.recv(1):
            if command == _PUSH:
                receive_all(connection, buffer)
                connection.sendall(_DONE)
            else:
                send_all(connection, buffer)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
