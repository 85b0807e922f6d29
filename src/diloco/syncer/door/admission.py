"""Admission of calls: each kind of call has its own threads, and each caller a share of them.

gRPC gives a call a thread at its first byte, so that silent calls could hold all threads. Here a kind of call cannot
use the threads of another: a flood of transfers leaves the threads of heartbeats free. A call beyond the limit of its
kind is refused before it gets a thread, and a call beyond its caller's share once the caller is authenticated.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import grpc

from diloco.errors import UnreachableError
from diloco.exchange.wire.rpc import abort, path
from diloco.syncer.keys.certificates import UNKNOWN, Caller

Kind = Literal["control", "writes", "work", "groups", "watches", "transfers", "reads"]
Call = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]


@dataclass(frozen=True)
class Limits:
    """Limits of one kind of call.

    Attributes:
        threads: that serve it.
        calls: at most, with a thread or waiting for one.
    """

    threads: int
    calls: int


LIMITS: Mapping[Kind, Limits] = {
    "control": Limits(64, 512),
    "writes": Limits(64, 512),
    "work": Limits(64, 1024),
    "groups": Limits(64, 512),
    "watches": Limits(512, 512),
    "transfers": Limits(256, 256),
    "reads": Limits(32, 256),
}
"""Calls of "control" are short. Those of "writes" (Join, Lease, Leave), and of "work" and "groups" (of workers of
reinforcement learning, which are heard by the first), are answered once their change is durable, however long the disk
refuses. Each learner has one "watch" while it trains. Followers only have "reads", each of a few megabytes: more of
them wait for a thread, or are refused and come again."""

BOUND_SHARE, SHARE = 4, 2
"""A caller that speaks for one learner gets at most a quarter of the threads of a kind, any other caller half. Without
certificates all calls are of one caller, which gets all threads."""

REFUSING_THREADS = 4


class CallThreads(ThreadPoolExecutor):
    """The threads of one kind of call. Only gRPC's serving thread begins calls, one at a time."""

    def __init__(self, kind: Kind, limits: Limits) -> None:
        super().__init__(limits.threads, thread_name_prefix=f"syncer-{kind}")
        self._limits = limits
        self._lock = threading.Lock()
        self._num_calls = 0

    @property
    def has_room(self) -> bool:
        """Whether one more call may begin."""
        return self._num_calls < self._limits.calls

    def submit(self, call: Callable[..., Any], /, *arguments: Any) -> Future[Any]:  # type: ignore[override]
        """As `Executor.submit`."""
        with self._lock:
            self._num_calls += 1
        future = super().submit(call, *arguments)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: Future[Any]) -> None:
        with self._lock:
            self._num_calls -= 1


class Admission(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # which it takes for type checkers only
    """Finds a call's handler and its threads. Every call is a stream of bytes answered by a stream of bytes, so that
    only its handler reads from it; on the wire a unary call looks the same.

    Arguments:
        calls: the kind and the handler of each method.
    """

    def __init__(self, calls: Mapping[str, tuple[Kind, Call]], limits: Mapping[Kind, Limits] = LIMITS) -> None:
        self.refusing = ThreadPoolExecutor(REFUSING_THREADS, thread_name_prefix="syncer-refusing")
        """Threads of calls that are refused."""
        self._threads = {kind: CallThreads(kind, limits[kind]) for kind in get_args(Kind)}
        self._handlers = {
            path(name): (self._threads[kind], _handler(call, self._threads[kind]))
            for name, (kind, call) in calls.items()
        }
        self._full = _handler(_refuse, self.refusing)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """As gRPC asks; None: there is no such method."""
        found = self._handlers.get(handler_call_details.method)
        if found is None:
            return None
        threads, handler = found
        return handler if threads.has_room else self._full


def _handler(call: Call, threads: ThreadPoolExecutor) -> grpc.RpcMethodHandler[Any, Any]:
    def behaviour(stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        return call(stream, context)

    behaviour.experimental_thread_pool = threads  # type: ignore[attr-defined]  # gRPC's way to name the threads
    return grpc.stream_stream_rpc_method_handler(behaviour, None, None)


def _refuse(_: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    abort(
        context,
        UnreachableError(
            "the syncer serves as many calls as it can; repeat the call, which is accepted once another ends."
        ),
    )
    yield from ()


class Shares:
    """Counts each caller's open calls. Any thread may call."""

    def __init__(self, limits: Mapping[Kind, Limits] = LIMITS) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._open = Counter[tuple[Kind, str]]()

    @contextmanager
    def take(self, kind: Kind, caller: Caller) -> Iterator[None]:
        """Count a call of the caller during the block.

        Raises:
            UnreachableError: the caller has its share open already.
        """
        most = self._limits[kind].threads
        if caller != UNKNOWN:
            most //= SHARE if caller.learner is None else BOUND_SHARE
        key = kind, caller.name
        with self._lock:
            if self._open[key] >= most:
                raise UnreachableError(
                    f"{caller.name!r} has {most} {kind} open, as many as it may have; repeat the call, "
                    "which is accepted once one ends."
                )
            self._open[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[key] -= 1
                if not self._open[key]:
                    del self._open[key]
