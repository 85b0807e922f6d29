"""Connections of one learner (or viewer) to a syncer: channels, calls, tokens and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from diloco.errors import AuthError, ConfigError, DilocoError, ExchangeError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.address import is_loopback, split_address
from diloco.exchange.wire.frames import read_header, read_into, room
from diloco.exchange.wire.rpc import CHANNEL_OPTIONS, from_rpc_error, is_retryable, path

R = TypeVar("R", bound=Message)
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 5.0


class Connection:
    """Channels to one syncer, one TCP connection each, made when first used.

    Bulk transfers have channels of their own ("contributions", "updates", "joins"), so that they cannot starve the "control"
    channel's heartbeats.

    Arguments:
        address: "host:port"; a learner only ever dials out, to this one address.
        token: bearer token.
        ca: PEM file of the authority that signed the syncer's certificate; None: the system's, or no TLS at all for a loopback
            address and with `insecure`.
        insecure: no TLS beyond this machine, on purpose.
    """

    def __init__(self, address: str, *, token: str | None, ca: str | Path | None, insecure: bool) -> None:
        host, _ = split_address(address)
        self.address = address
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()
        self.closing = threading.Event()
        if insecure and ca is not None:
            raise ConfigError("insecure=True and ca=… contradict each other; drop one of them.")
        plain = insecure or (ca is None and is_loopback(host))
        self._credentials = None if plain else grpc.ssl_channel_credentials(None if ca is None else _read(ca))

    def call(self, channel: str, method: str, request: Message, kind: type[R], *, timeout_s: float | None = 30.0) -> R:
        """One unary call.

        Raises:
            DilocoError: what the syncer answered, as its own class; ExchangeError where it did not answer.
        """
        try:
            stub = self._channel(channel).unary_unary(path(method), _serialize, kind.FromString)
            reply: R = stub(request, timeout=timeout_s, metadata=self._metadata)
            return reply
        except grpc.RpcError as error:
            raise _mapped(error, self.address) from error

    def upload(self, channel: str, method: str, stream: Iterator[bytes], kind: type[R]) -> R:
        """Send a stream of frames; returns the reply. Raises as `call`."""
        try:
            stub = self._channel(channel).stream_unary(path(method), None, kind.FromString)
            reply: R = stub(stream, metadata=self._metadata)
            return reply
        except grpc.RpcError as error:
            raise _mapped(error, self.address) from error

    def pull(self, channel: str, request: pb.PullRequest) -> tuple[pb.PullHeader, memoryview]:
        """Fetch one part of the model. Raises as `call`, and CorruptPayloadError for damaged bytes."""
        try:
            stub = self._channel(channel).unary_stream(path("Pull"), _serialize, None)
            stream: Iterator[bytes] = iter(stub(request, metadata=self._metadata))
            header = read_header(stream, pb.PullHeader)
            buffer = room(header.num_bytes)
            read_into(stream, buffer)
        except grpc.RpcError as error:
            raise _mapped(error, self.address) from error
        return header, buffer

    def watch(self, request: pb.WatchRequest) -> Iterator[pb.Notice]:
        """Notices until the syncer ends them or the connection breaks. Raises as `call`."""
        try:
            stub = self._channel("control").unary_stream(path("Watch"), _serialize, pb.Notice.FromString)
            yield from stub(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _mapped(error, self.address) from error

    def retrying(
        self, action: Callable[[], R], *, on_retry: Callable[[DilocoError], None], give_up_after_s: float | None = None
    ) -> R:
        """Repeat `action` while the syncer cannot be reached, with growing pauses; other errors propagate.

        Raises:
            ExchangeError: not reached within `give_up_after_s`, or this connection is being closed.
        """
        pause_s, waited_s = FIRST_RETRY_S, 0.0
        while True:
            try:
                return action()
            except _UnreachableError as error:
                if self.closing.is_set() or (give_up_after_s is not None and waited_s >= give_up_after_s):
                    raise
                on_retry(error)
            self.closing.wait(pause_s)
            waited_s += pause_s
            pause_s = min(2 * pause_s, LAST_RETRY_S)

    def close_channel(self, channel: str) -> None:
        """Hang up one channel; using it again dials again."""
        with self._lock:
            held = self._channels.pop(channel, None)
        if held is not None:
            held.close()

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.closing.set()
        with self._lock:
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()

    def _channel(self, name: str) -> grpc.Channel:
        with self._lock:
            if name not in self._channels:
                if self.closing.is_set():
                    raise ExchangeError(f"the connection to {self.address} is closed.")
                self._channels[name] = (
                    grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
                    if self._credentials is None
                    else grpc.secure_channel(self.address, self._credentials, options=CHANNEL_OPTIONS)
                )
            return self._channels[name]


class _UnreachableError(ExchangeError):
    """The call failed on the way; the syncer may be restarting."""


def _mapped(error: grpc.RpcError, address: str) -> DilocoError:
    mapped = from_rpc_error(error, address)
    return _UnreachableError(str(mapped)) if is_retryable(error) else mapped


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _read(ca: str | Path) -> bytes:
    try:
        return Path(ca).read_bytes()
    except OSError as error:
        raise AuthError(
            f"the authority's certificate {ca} cannot be read ({error.strerror}); copy ca.pem from the syncer."
        ) from error
