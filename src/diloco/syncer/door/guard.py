"""The path of every call to its handler: authentication, shares of threads, deadlines, byte counts, errors.

gRPC hands over requests as raw bytes: a caller is authenticated before anything that it sent is parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from diloco.errors import DilocoError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import read_header
from diloco.exchange.wire.rpc import MAX_CONTROL_BYTES, MAX_MESSAGE_BYTES, abort
from diloco.run.run_state import require_run
from diloco.run.validation import check_name
from diloco.syncer.door.admission import Call, Kind, Shares
from diloco.syncer.door.audit import Audit
from diloco.syncer.door.open_calls import CallDeadlines, OpenCalls
from diloco.syncer.keys.auth import Authenticator
from diloco.syncer.keys.callers import Caller, Role
from diloco.syncer.wire_bytes import WireBytes

M = TypeVar("M", bound=Message)
Replies = Iterator[Message] | Iterator[pb.Notice] | Iterator[bytes]


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
            single = kind == "standby"
            with (
                self._authenticated(name, kind, context) as caller,
                self._calls.open(name, caller, context, single=single),
            ):
                messages = self._messages(stream, caller, context)
                found = read_header(messages, header, most_bytes)
                replies = self._serialized(handler(caller, found, messages, context), context)
                yield from self._deadlines.replies(replies, caller.name, context)

        return kind, call

    def admit(
        self, context: grpc.ServicerContext, caller: Caller, run: str, role: Role, learner: str, kind: str
    ) -> None:
        """Check that the caller may act in this role, for this learner, in this run; count the call's bytes as `kind`.

        Raises:
            AuthError, PayloadError, UnknownRunError: it may not.
        """
        if role == "learner":
            check_name(learner)
        caller.may(role, learner or None)
        require_run(self._run, run)
        self._wire_bytes.label(context, learner or "viewers", kind)

    @contextmanager
    def _authenticated(self, name: str, kind: Kind, context: grpc.ServicerContext) -> Iterator[Caller]:
        """Authenticate the caller before anything of the call is read. An error, now or in the block, ends the call
        with its gRPC status and message."""
        caller = None
        try:
            caller = self._auth.caller(context)
            self._auth.check(caller)
            if kind == "standby":  # other roles must not hold its few threads
                caller.may("standby")
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
