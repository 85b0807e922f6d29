"""Connections of one learner (or viewer) to a syncer: channels, calls and errors."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message

from diloco.errors import AuthError, CorruptPayloadError, DilocoError, ExchangeError, UnreachableError
from diloco.exchange.credentials import Credentials, FailureReason
from diloco.exchange.key_pair import AnyKeys
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import parse
from diloco.exchange.wire.incoming import Download
from diloco.exchange.wire.rpc import CHANNEL_OPTIONS, from_rpc_error, is_retryable, path
from diloco.exchange.wire.urls import UrlReader
from diloco.protocol.members import Deadlines
from diloco.protocol.session.lanes import StallTimeout

R = TypeVar("R", bound=Message)

STALL_FLOOR_S, STALL_CAP_S = Deadlines().lost_floor_s, 3600.0
"""The stall timeout of a transfer before the run's is known, and its maximum. The run's is that of a silent learner,
which the syncer sends (`expect_answers_within`)."""

ANSWER_CAP_S = 30.0
"""The maximum of the timeout for answers; its minimum is the stall timeout's."""

DIAGNOSE_EVERY_S = 10.0
"""Minimum interval between two diagnoses of why the syncer is not reached."""

REFUSED_S = 60.0
"""How long TLS may fail against a syncer that has answered before, until this is final: for a while, a network on
the way may answer in its place."""


class Watchdog:
    """Cancels a call in which nothing moves for longer than its stall timeout; a context manager around the call.

    Only one call at a time uses a stall timeout.

    Arguments:
        call: has `cancel()`, which wakes the thread that waits for the call.
        timeout: that of the call's channel.

    Attributes:
        stalled_s: how long the call had stalled when it was cancelled; None: it was not cancelled.
    """

    def __init__(self, call: Any, timeout: StallTimeout) -> None:
        self.stalled_s: float | None = None
        self._call = call
        self._timeout = timeout
        self._moved_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="diloco-watchdog", daemon=True)

    def moved(self) -> None:
        """Record that bytes have arrived."""
        now = time.monotonic()
        self._timeout.paused(now - self._moved_at)
        self._moved_at = now

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self.stalled_s is not None:
            self._timeout.paused(self.stalled_s)

    def _watch(self) -> None:
        while True:
            paused_s = time.monotonic() - self._moved_at
            left_s = self._timeout.limit_s - paused_s
            if left_s <= 0:
                self.stalled_s = paused_s
                self._call.cancel()
                return
            if self._over.wait(left_s):
                return


class Connection:
    """Channels to one syncer, one TCP connection each, made when first used.

    Bulk transfers have channels of their own ("contributions", "updates", "joins"), so that they cannot starve the
    heartbeats. A transfer that stalls, or a call without an answer, is cancelled after a measured stall timeout, and
    its channel is closed: the next call dials anew.

    Arguments:
        address: "host:port"; a learner only dials out, to this one address.
        keys, insecure: as `Credentials`.

    Attributes:
        closing: set once the connection is being closed.
    """

    def __init__(self, address: str, *, keys: AnyKeys | None = None, insecure: bool = False) -> None:
        self.address = address
        self._credentials = Credentials(address, keys=keys, insecure=insecure)
        self._has_answered = False
        self._diagnosed_at = -math.inf
        self._seen: FailureReason | None = None  # the newest diagnosis of why the syncer is not reached
        self._refused_at: float | None = None  # the first refusal by TLS since the last answer
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()
        self._stall_floor_s = STALL_FLOOR_S
        self._answers = StallTimeout(self._stall_floor_s, ANSWER_CAP_S)
        self._timeouts: defaultdict[str, StallTimeout] = defaultdict(
            lambda: StallTimeout(self._stall_floor_s, STALL_CAP_S)
        )
        self.closing = threading.Event()
        self._urls = UrlReader(self.closing)

    def expect_answers_within(self, floor_s: float) -> None:
        """Set the stall timeout of calls; it grows on a link where longer pauses are usual."""
        self._stall_floor_s = floor_s
        for timeout in (self._answers, *list(self._timeouts.values())):
            timeout.floor_s = self._stall_floor_s

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(
        self, channel: str, method: str, request: Message, kind: type[R], *, timeout_s: float | None = None
    ) -> R:  # fmt: skip
        """One unary call.

        Arguments:
            timeout_s: for the answer; the caller hangs up after it. None: the stall timeout of answers, after which the
                channel is closed.

        Raises:
            DilocoError: the error that the syncer answered, with its class; UnreachableError: it did not answer.
        """
        with self._mapping(), self._answering(channel, method, timeout_s) as limit_s:
            stub = self._channel(channel).unary_unary(path(method), _serialize, kind.FromString)
            reply: R | None = stub(request, timeout=limit_s)
        if reply is None:
            raise CorruptPayloadError(f"the syncer at {self.address} sent an empty answer to {method}; try again.")
        return reply

    @contextmanager
    def _answering(self, channel: str, method: str, timeout_s: float | None) -> Iterator[float]:
        """Around one call: yields the timeout of its answer, and measures how long the answer takes."""
        if timeout_s is not None:
            yield timeout_s
            return
        limit_s, began_at = self._answers.limit_s, time.monotonic()
        try:
            yield limit_s
        except grpc.RpcError as error:
            if _code(error) is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            self.close_channel(channel)
            raise UnreachableError(
                f"the syncer at {self.address} has not answered {method} within {limit_s:.1f} s; check the link."
            ) from error
        finally:
            self._answers.waited(time.monotonic() - began_at)

    def upload(
        self,
        channel: str,
        method: str,
        stream: Iterator[bytes],
        kind: type[R],
        *,
        heard: Callable[[pb.Received], None] = lambda _: None,
    ) -> R:
        """Send a stream of frames; returns the reply. Raises as `call`.

        The syncer acknowledges bytes in replies with `received`, which keep the call from stalling; `heard` is called
        with each.
        """
        reply: Any = None
        with self.stream(channel, method, stream) as (replies, moved):
            for message in replies:
                moved()
                reply = parse(kind, message)
                if reply.HasField("received"):
                    heard(reply.received)
        last: R = reply
        return last

    def pull(
        self, channel: str, request: pb.PullRequest, download: Download | None = None, *, method: str = "Pull"
    ) -> tuple[pb.PullHeader, memoryview]:
        """Fetch one part of the model, or of an object: from the syncer, or where it refers to (`url` of the header).
        Raises as `call`, and CorruptPayloadError for damaged bytes.

        Arguments:
            download: of the same part, with the bytes of earlier calls; it keeps those of this one.
        """
        download = download or Download(request)
        request.direct |= not self._urls.is_usable
        while True:
            header = self._answer_to(channel, request, download, method)
            if not header.url:
                return header, download.buffer
            if request.direct:
                raise CorruptPayloadError("the syncer refers to a URL, but its own bytes were requested.")
            found = self._urls.read(header.url, header.url_start, header.url_start + header.num_bytes)
            if found is not None:
                return header, found
            request.direct = True

    def _answer_to(self, channel: str, request: pb.PullRequest, download: Download, method: str) -> pb.PullHeader:
        download.ask(request)
        sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        sent.put(_serialize(request))
        try:
            with self.stream(channel, method, iter(sent.get, None)) as (replies, moved):
                for _ in download.read(replies, sent):
                    moved()
        finally:
            sent.put(None)
        assert download.header is not None
        return download.header

    @contextmanager
    def stream(
        self, channel: str, method: str, messages: Iterator[bytes]
    ) -> Iterator[tuple[Iterator[bytes], Callable[[], None]]]:
        """A call in which both ends send messages. Yields the syncer's messages, and a function to call after each.
        Raises as `call`."""
        with self._mapping():
            call: Any = self._channel(channel).stream_stream(path(method), None, None)(messages)
            with self._watching(call, channel) as watchdog:
                yield call, watchdog.moved

    def watch(self, channel: str, request: pb.WatchRequest) -> Iterator[pb.Notice]:
        """The syncer's notices, until the syncer ends the call or the connection breaks. Raises as `call`."""
        with self._mapping():
            stub = self._channel(channel).unary_stream(path("Watch"), _serialize, pb.Notice.FromString)
            yield from stub(request)

    @contextmanager
    def _watching(self, call: Any, channel: str) -> Iterator[Watchdog]:
        watchdog = Watchdog(call, self._timeouts[channel])
        try:
            with watchdog:
                yield watchdog
        except grpc.RpcError as error:
            if watchdog.stalled_s is None:
                raise
            self.close_channel(channel)
            raise UnreachableError(
                f"the syncer at {self.address} has neither sent nor accepted bytes for {watchdog.stalled_s:.1f} s; "
                "check the link."
            ) from error

    @contextmanager
    def _mapping(self) -> Iterator[None]:
        """Translate errors of gRPC into this package's."""
        try:
            yield
            self._has_answered, self._refused_at, self._seen = True, None, None
        except DilocoError:
            raise
        except grpc.RpcError as error:
            mapped = from_rpc_error(error, self.address)
            if is_retryable(error):
                reason = self._reason() if _code(error) is grpc.StatusCode.UNAVAILABLE else None
                raise reason or UnreachableError(str(mapped)) from error
            if isinstance(mapped, AuthError) and self._credentials.have_changed():
                self._hang_up()
                raise UnreachableError(f"{mapped} This caller has newer keys now: dialling again.") from error
            raise mapped from None  # it has the syncer's whole message
        except ValueError as error:  # gRPC's error for a channel that another thread has closed
            raise UnreachableError(f"the connection to {self.address} was closed: {error}") from error

    def _reason(self) -> DilocoError | None:
        """Why the syncer is not reached, by the newest diagnosis. A refusal is final (AuthError) at once if the
        syncer has never answered, and otherwise if it lasts."""
        with self._lock:
            now = time.monotonic()
            if self.closing.is_set():
                return None
            if now - self._diagnosed_at < DIAGNOSE_EVERY_S:
                seen = self._seen
                return None if seen is None or seen.is_refusal else UnreachableError(seen.text)
            self._diagnosed_at = now
        reason = self._seen = self._credentials.reason()
        if reason is None or not reason.is_refusal:
            self._refused_at = None
            return None if reason is None else UnreachableError(reason.text)
        self._refused_at = self._refused_at or now
        is_final = not self._has_answered or now - self._refused_at >= REFUSED_S
        return AuthError(reason.text) if is_final else UnreachableError(reason.text)

    # --- channels -----------------------------------------------------------------------------------------------------

    def close_channel(self, channel: str) -> None:
        """Hang up one channel; using it again dials again."""
        with self._lock:
            held = self._channels.pop(channel, None)
        if held is not None:
            held.close()

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.closing.set()
        self._hang_up()

    def _hang_up(self) -> None:
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
                credentials = self._credentials.for_channel()
                self._channels[name] = (
                    grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
                    if credentials is None
                    else grpc.secure_channel(self.address, credentials, options=CHANNEL_OPTIONS)
                )
            return self._channels[name]


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    call: Any = error
    code: grpc.StatusCode = call.code()
    return code
