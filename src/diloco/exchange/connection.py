"""Connections of one learner (or viewer) to a syncer: channels, calls, tokens, errors, and trying again."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from diloco.errors import AuthError, ConfigError, DilocoError, ExchangeError, NoRoomError, UnreachableError
from diloco.exchange.patience import Patience, Watchdog
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.address import is_loopback, split_address
from diloco.exchange.wire.frames import filling, read_header, room
from diloco.exchange.wire.probe import noise, timed
from diloco.exchange.wire.rpc import CHANNEL_OPTIONS, from_rpc_error, is_retryable, path

R = TypeVar("R", bound=Message)
T = TypeVar("T")
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 1.0
"""Pauses between tries: a syncer that was started again must hear of everybody before the shortest deadline it may give is over."""

STALL_FLOOR_S, STALL_CAP_S = 60.0, 3600.0
"""A transfer may stand still for this long before anything is known of the link, and at most. A chunk of a transfer is half a
megabyte: the floor is enough for 70 kbit/s."""


class Connection:
    """Channels to one syncer, one TCP connection each, made when first used.

    Bulk transfers have channels of their own ("contributions", "updates", "joins"), so that they cannot starve the "control"
    channel's heartbeats. A transfer that stands still is cut off after a time that is measured, not guessed (`Patience`), and a
    channel over which an answer did not come is not used again: the next call dials anew.

    Arguments:
        address: "host:port"; a learner only ever dials out, to this one address.
        token: bearer token.
        ca: PEM file of the authority that signed the syncer's certificate; None: the system's, or no TLS at all for a loopback
            address and with `insecure`.
        insecure: no TLS beyond this machine, on purpose.
        stall_floor_s: how long a transfer may stand still before anything is known of the link, seconds.
    """

    def __init__(
        self, address: str, *, token: str | None, ca: str | Path | None, insecure: bool, stall_floor_s: float = STALL_FLOOR_S
    ) -> None:  # fmt: skip
        host, _ = split_address(address)
        self.address = address
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._channels: dict[str, grpc.Channel] = {}
        self._retired: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()
        self._patience: defaultdict[str, Patience] = defaultdict(lambda: Patience(stall_floor_s, STALL_CAP_S))
        self._num_retrying = 0
        self.closing = threading.Event()
        if insecure and ca is not None:
            raise ConfigError("insecure=True and ca=… contradict each other; drop one of them.")
        plain = insecure or (ca is None and is_loopback(host))
        self._credentials = None if plain else grpc.ssl_channel_credentials(None if ca is None else _read(ca))

    # --- calls ------------------------------------------------------------------------------------------------------------

    def call(self, channel: str, method: str, request: Message, kind: type[R], *, timeout_s: float | None = 30.0) -> R:
        """One unary call.

        Raises:
            DilocoError: what the syncer answered, as its own class; ExchangeError where it did not answer.
        """
        with self._mapping(channel):
            stub = self._channel(channel).unary_unary(path(method), _serialize, kind.FromString)
            reply: R = stub(request, timeout=timeout_s, metadata=self._metadata)
        self._close_retired(channel)
        return reply

    def upload(self, channel: str, method: str, stream: Iterator[bytes], kind: type[R]) -> R:
        """Send a stream of frames; returns the reply. Raises as `call`.

        The syncer says on the way how much has arrived, in replies with `received`; those are what moves here. Once all
        is there, it may take its time to answer.
        """
        with self._mapping(channel):
            stub = self._channel(channel).stream_stream(path(method), None, kind.FromString)
            call: Any = stub(stream, metadata=self._metadata)
            reply: Any = None
            with self._watching(call, channel) as watchdog:
                for reply in call:
                    watchdog.moved()
                    if reply.received.all:
                        watchdog.stop()
        last: R = reply
        return last

    def pull(self, channel: str, request: pb.PullRequest) -> tuple[pb.PullHeader, memoryview]:
        """Fetch one part of the model. Raises as `call`, and CorruptPayloadError for damaged bytes."""
        with self._mapping(channel):
            stub = self._channel(channel).unary_stream(path("Pull"), _serialize, None)
            stream: Any = stub(request, metadata=self._metadata)
            with self._watching(stream, channel) as watchdog:
                header = read_header(stream, pb.PullHeader)
                buffer = room(header.num_bytes)
                for _ in filling(stream, buffer):
                    watchdog.moved()
        return header, buffer

    def probe(self, channel: str, header: pb.ProbeHeader) -> tuple[pb.ProbeReply, tuple[int, float]]:
        """Send and fetch what the header announces; the reply, and how the bytes down came: see `timed`. Raises as `call`."""
        with self._mapping(channel):
            stub = self._channel(channel).stream_stream(path("Probe"), None, None)
            call: Any = stub(chain([_serialize(header)], noise(header.up_bytes)), metadata=self._metadata)
            with self._watching(call, channel) as watchdog:
                reply = read_header(call, pb.ProbeReply)
                watchdog.moved()
                return reply, timed(call, header.down_bytes, watchdog.moved)

    def watch(self, request: pb.WatchRequest) -> Iterator[pb.Notice]:
        """Notices until the syncer ends them or the connection breaks. Raises as `call`."""
        with self._mapping("control"):
            stub = self._channel("control").unary_stream(path("Watch"), _serialize, pb.Notice.FromString)
            yield from stub(request, metadata=self._metadata)

    @contextmanager
    def _watching(self, call: Any, channel: str) -> Iterator[Watchdog]:
        with Watchdog(call, self._patience[channel]) as watchdog:
            try:
                yield watchdog
            except grpc.RpcError as error:
                if watchdog.stood_still_s is None:
                    raise
                self.close_channel(channel)
                raise UnreachableError(
                    f"nothing has moved between here and the syncer at {self.address} for {watchdog.stood_still_s:.1f} s; "
                    "is the link up?"
                ) from error

    @contextmanager
    def _mapping(self, channel: str) -> Iterator[None]:
        """Errors of gRPC become this package's."""
        try:
            yield
        except DilocoError:
            raise
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._retire(channel)
            mapped = from_rpc_error(error, self.address)
            raise UnreachableError(str(mapped)) if is_retryable(error) else mapped from error
        except ValueError as error:  # what gRPC says of a channel that another thread has closed
            raise UnreachableError(f"the connection to {self.address} was closed: {error}") from error

    # --- trying again -----------------------------------------------------------------------------------------------------

    def retrying(
        self, action: Callable[[], T], *, on_retry: Callable[[DilocoError], None], give_up_after_s: float | None = None
    ) -> T:
        """Repeat `action` while the syncer cannot be reached or has no room, with growing pauses; other errors propagate.

        Raises:
            ExchangeError, NoRoomError: still so after `give_up_after_s`, or this connection is being closed.
        """
        pause_s, waited_s, failed = FIRST_RETRY_S, 0.0, 0
        try:
            while True:
                try:
                    return action()
                except (UnreachableError, NoRoomError) as error:
                    if self.closing.is_set() or (give_up_after_s is not None and waited_s >= give_up_after_s):
                        raise
                    on_retry(error)
                    is_away = int(isinstance(error, UnreachableError))
                with self._lock:
                    self._num_retrying, failed = self._num_retrying + is_away - failed, is_away
                self.closing.wait(pause_s)
                waited_s += pause_s
                pause_s = min(2 * pause_s, LAST_RETRY_S)
        finally:
            with self._lock:
                self._num_retrying -= failed

    @property
    def is_away(self) -> bool:
        """Whether something is being tried again because the syncer was not reached."""
        return self._num_retrying > 0

    # --- channels ---------------------------------------------------------------------------------------------------------

    def close_channel(self, channel: str) -> None:
        """Hang up one channel; using it again dials again."""
        with self._lock:
            held = self._channels.pop(channel, None)
        if held is not None:
            held.close()

    def _retire(self, channel: str) -> None:
        """Dial anew for the next call. The old connection stays until a call has been answered over the new one: hanging up would
        look like death to a syncer that is only slow to answer."""
        with self._lock:
            held = self._channels.pop(channel, None)
            if held is not None and channel not in self._retired:
                self._retired[channel], held = held, None
        if held is not None:  # one that never carried an answer
            held.close()

    def _close_retired(self, channel: str) -> None:
        with self._lock:
            retired = self._retired.pop(channel, None)
        if retired is not None:
            retired.close()

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.closing.set()
        with self._lock:
            channels = [*self._channels.values(), *self._retired.values()]
            self._channels.clear()
            self._retired.clear()
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


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _read(ca: str | Path) -> bytes:
    try:
        return Path(ca).read_bytes()
    except OSError as error:
        raise AuthError(
            f"the authority's certificate {ca} cannot be read ({error.strerror}); copy ca.pem from the syncer."
        ) from error
