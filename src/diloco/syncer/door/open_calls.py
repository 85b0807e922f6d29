"""Open calls: authentication before the handler, and reasons to end a call (revoked credentials, a peer that stalls, a
learner that leaves the run).

gRPC hands over requests as raw bytes, so that a caller is authenticated before anything that it sent is parsed.
A connection whose other end has vanished looks like a slow one. A call waits for its peer at most as long as a stall
timeout; the transfer of a member of the run ends with its incarnation instead, for whose heartbeats there is a
deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from diloco.errors import AuthError, DilocoError, UnreachableError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import read_header
from diloco.exchange.wire.rpc import MAX_CONTROL_BYTES, MAX_MESSAGE_BYTES, abort
from diloco.protocol.session.lanes import StallTimeout
from diloco.run.run_state import require_run
from diloco.run.validation import check_name
from diloco.syncer.door.admission import Call, Kind, Shares
from diloco.syncer.door.audit import Audit
from diloco.syncer.hosting import HostedDriver, SyncerDriver
from diloco.syncer.keys.auth import Authenticator
from diloco.syncer.keys.certificates import BOUND, Caller, Role
from diloco.syncer.wire_bytes import WireBytes

log = logging.getLogger("diloco.syncer")

T = TypeVar("T")
M = TypeVar("M", bound=Message)
Replies = Iterator[Message] | Iterator[pb.Notice] | Iterator[bytes]

FIRST_S = 20.0
"""Longest wait for the first message of a call, which its sender has ready."""

NEXT_S = 300.0
"""Longest wait for every further message, and for a reply to be taken; also the wait where heartbeats show whether the
peer lives. A message has half a megabyte: 14 kbit/s are enough."""

OWN_CALL_POLL_S = 0.5
"""How often a transfer that waits for the end of an earlier one checks that its own call has not ended."""


@contextmanager
def _among(known: set[T], item: T, lock: threading.Lock) -> Iterator[None]:
    """A block in which an item is in a set."""
    with lock:
        known.add(item)
    try:
        yield
    finally:
        with lock:
            known.remove(item)


@dataclass(eq=False)
class _Call:
    name: str
    caller: Caller
    context: Any  # gRPC's, whose `cancel` has no types


class OpenCalls:
    """The long calls of a syncer, cancelled when the caller's credentials end. Any thread may call any method.

    The caller's next call is refused with the reason.
    """

    def __init__(self, auth: Authenticator, audit: Audit) -> None:
        self._auth, self._audit = auth, audit
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()

    def open(self, name: str, caller: Caller, context: grpc.ServicerContext) -> AbstractContextManager[None]:
        """Check the call's credentials during the block."""
        return _among(self._calls, _Call(name, caller, context), self._lock)

    def check(self) -> None:
        """Cancel the calls that have to end; call it regularly. Also writes refusals that the audit has counted."""
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            try:
                self._auth.check(call.caller)
            except (AuthError, UnreachableError) as error:
                log.warning("ended a call (%s) of %s: %s", call.name, call.caller.name, error)
                self._audit.refused(call.name, call.caller, call.context.peer(), error)
                call.context.cancel()
        self._audit.flush()


@dataclass(frozen=True, eq=False)
class _Wait:
    context: Any  # gRPC's, whose `cancel` has no types
    caller: str
    limit_s: float
    ends_at: float


class CallDeadlines:
    """Cancels calls whose peer does not send or receive in time: a stall timeout for each caller. Any thread may call
    any method.

    A peer that vanishes is noticed within the lost deadline. A slow link gets a longer timeout with each try, up to
    `FIRST_S` and `NEXT_S`.

    Arguments:
        floor_s: the stall timeout of a caller that is not known to be slow; at least the lost deadline.
        first_s, next_s: as the constants.
        clock: monotonic seconds.
    """

    def __init__(
        self, floor_s: float, *, first_s: float = FIRST_S, next_s: float = NEXT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._first_s, self._next_s, self._clock = first_s, next_s, clock
        self._lock = threading.Lock()
        self._timeouts: defaultdict[str, StallTimeout] = defaultdict(lambda: StallTimeout(floor_s, next_s))
        self._waits: set[_Wait] = set()
        self._members: set[grpc.ServicerContext] = set()

    def messages(self, stream: Iterator[bytes], caller: str, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The messages of a call, each with a deadline."""
        limit_s = self._first_s
        while True:
            with self._waiting(caller, context, limit_s):
                message = next(stream, None)
            if message is None:
                return
            yield message
            limit_s = self._next_s

    def replies(self, replies: Iterator[T], caller: str, context: grpc.ServicerContext) -> Iterator[T]:
        """The replies of a call; the peer has a deadline to take each. The time to make a reply is not limited."""
        for reply in replies:
            with self._waiting(caller, context, self._next_s):
                yield reply

    def member(self, context: grpc.ServicerContext) -> AbstractContextManager[None]:
        """During the block the call has no stall timeout: heartbeats show whether its peer lives."""
        return _among(self._members, context, self._lock)

    @contextmanager
    def _waiting(self, caller: str, context: grpc.ServicerContext, most_s: float) -> Iterator[None]:
        began_at = self._clock()
        with self._lock:
            timeout = None if context in self._members else self._timeouts[caller]
            limit_s = most_s if timeout is None else min(most_s, timeout.limit_s)
            wait = _Wait(context, caller, limit_s, began_at + limit_s)
            self._waits.add(wait)
        try:
            yield
        finally:
            with self._lock:
                self._waits.discard(wait)
                if timeout is not None:
                    timeout.waited(self._clock() - began_at)

    def check(self) -> None:
        """Cancel the calls that have to end; call it regularly."""
        now = self._clock()
        with self._lock:
            late = [wait for wait in self._waits if wait.ends_at <= now]
            self._waits.difference_update(late)
        for wait in late:
            log.info("ended a call of %s: nothing has moved for %.1f s", wait.caller, wait.limit_s)
            wait.context.cancel()


@dataclass(frozen=True, eq=False)
class _Transfer:
    learner: str
    incarnation: int | None
    content: Hashable
    context: Any  # gRPC's, whose `cancel` has no types
    ended: threading.Event = field(default_factory=threading.Event)

    def require_member(self, driver: SyncerDriver) -> None:
        """Raise StaleIncarnationError unless the incarnation is a member of the run."""
        assert self.incarnation is not None
        driver.core.check(self.learner, self.incarnation)


class OpenTransfers:
    """The transfers of learners, cancelled when the incarnation has left the run or starts the same transfer again over
    another connection. Any thread may call any method.

    Arguments:
        host: gives the driver.
        deadlines: do not limit the transfers of members.
    """

    def __init__(self, host: Callable[[], HostedDriver], deadlines: CallDeadlines) -> None:
        self._host, self._deadlines = host, deadlines
        self._lock = threading.Lock()
        self._open: set[_Transfer] = set()

    @contextmanager
    def open(
        self, learner: str, incarnation: int | None, content: Hashable, context: grpc.ServicerContext
    ) -> Iterator[None]:  # fmt: skip
        """Watch a transfer during the block. An earlier transfer of the same content ends before the block begins.

        Arguments:
            incarnation: None: the learner is not a member yet; only a newer transfer ends this one.
            content: distinguishes the transfers of an incarnation.
        """
        mine = _Transfer(learner, incarnation, content, context)
        key = learner, incarnation, content
        with self._lock:
            same = [it for it in self._open if (it.learner, it.incarnation, it.content) == key]
            self._open.add(mine)
        try:
            for earlier in same:
                log.info("%s repeats %s over a new connection: the earlier one is ended", learner, content)
                earlier.context.cancel()
                while not earlier.ended.wait(OWN_CALL_POLL_S) and context.is_active():
                    pass
            with nullcontext() if incarnation is None else self._deadlines.member(context):
                yield
        finally:
            mine.ended.set()
            with self._lock:
                self._open.remove(mine)

    def check(self) -> None:
        """Cancel the calls that have to end; call it regularly."""
        with self._lock:
            transfers = [it for it in self._open if it.incarnation is not None]
        for it in transfers:
            try:
                self._host().ask(it.require_member)
            except DilocoError as error:
                log.info("ended a transfer of %s: %s", it.learner, error)
                it.context.cancel()


class CallGuard:
    """Wraps the handlers of one run's calls.

    Arguments:
        run: its id.
        auth: authenticates callers.
        calls: ends the calls of callers whose credentials have ended.
        deadlines: of the messages of calls.
        audit: records refusals.
        wire_bytes: counts the bytes of each call.
    """

    def __init__(
        self, run: str, auth: Authenticator, calls: OpenCalls, deadlines: CallDeadlines, audit: Audit,
        wire_bytes: WireBytes,
    ) -> None:  # fmt: skip
        self._run, self._auth, self._audit, self._wire_bytes = run, auth, audit, wire_bytes
        self._calls, self._deadlines = calls, deadlines
        self._shares = Shares()

    def unary(
        self, name: str, handler: Callable[[Caller, M, grpc.ServicerContext], Message], request: type[M],
        kind: Kind = "control", most_bytes: int = MAX_CONTROL_BYTES,
    ) -> tuple[Kind, Call]:  # fmt: skip
        """A call of one request, of at most so many bytes, and one reply."""

        def call(stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._authenticated(name, kind, context) as caller:
                found = read_header(self._messages(stream, caller, context), request, most_bytes)
                yield from self._serialized(iter([handler(caller, found, context)]), context)

        return kind, call

    def streamed(
        self, name: str, handler: Callable[[Caller, M, Iterator[bytes], grpc.ServicerContext], Replies],
        header: type[M], kind: Kind = "transfers", most_bytes: int = MAX_MESSAGE_BYTES,
    ) -> tuple[Kind, Call]:  # fmt: skip
        """A call of a header, of at most so many bytes, and a stream, answered by a stream."""

        def call(stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._authenticated(name, kind, context) as caller, self._calls.open(name, caller, context):
                messages = self._messages(stream, caller, context)
                found = read_header(messages, header, most_bytes)
                replies = self._serialized(handler(caller, found, messages, context), context)
                yield from self._deadlines.replies(replies, caller.name, context)

        return kind, call

    def admit(
        self, context: grpc.ServicerContext, caller: Caller, request: Any, role: Role, kind: str = "control"
    ) -> None:
        """Check that the caller may act in this role, in the request's run and for its learner; count the call's bytes
        as `kind`.

        Arguments:
            request: a message with the run, and for a role in `BOUND` with the name of the learner or worker.

        Raises:
            AuthError, PayloadError, UnknownRunError: it may not.
        """
        learner: str = request.learner if role in BOUND else ""
        if role in BOUND:
            check_name(learner)
        caller.may(role, learner or None)
        require_run(self._run, request.run)
        self._wire_bytes.label(context, learner or "viewers", kind)

    @contextmanager
    def _authenticated(self, name: str, kind: Kind, context: grpc.ServicerContext) -> Iterator[Caller]:
        """Authenticate the caller before anything of the call is read. An error, now or in the block, ends the call
        with its gRPC status and message."""
        caller = None
        try:
            caller = self._auth.caller(context)
            self._auth.check(caller)
            with self._shares.take(kind, caller), self._wire_bytes.call(context):
                yield caller
        except DilocoError as error:
            self._audit.refused(name, caller, context.peer(), error)
            abort(context, error)

    def _messages(self, stream: Iterator[bytes], caller: Caller, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The messages of an authenticated caller, each with a deadline."""
        return self._wire_bytes.received(self._deadlines.messages(stream, caller.name, context), context)

    def _serialized(self, replies: Replies, context: grpc.ServicerContext) -> Iterator[bytes]:
        for reply in replies:
            message = reply if isinstance(reply, bytes) else reply.SerializeToString()
            self._wire_bytes.count(context, "sent", message)
            yield message
