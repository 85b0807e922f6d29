"""Deadlines of what calls wait for: the next message of a peer, and that a peer takes the next reply."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

T = TypeVar("T")

FIRST_S = 20.0
"""For the first message of a call, which its sender has ready before it calls."""

NEXT_S = 300.0
"""For every further message, and for each reply to be taken. A message is half a megabyte: 14 kbit/s are
enough. A peer that is gone is found by gRPC's own pings much earlier."""

LOOK_EVERY_S = 0.5


@dataclass(frozen=True, eq=False)
class _Wait:
    context: Any  # of gRPC, whose `cancel` has no types
    ends_at: float


class CallDeadlines:
    """Cancels calls whose peer lets them wait for too long. Any thread may call any method.

    Arguments:
        first_s, next_s: as above. clock: monotonic seconds.
    """

    def __init__(
        self, first_s: float = FIRST_S, next_s: float = NEXT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_s, self._next_s, self._clock = first_s, next_s, clock
        self._lock = threading.Lock()
        self._waits: set[_Wait] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncer-deadlines", daemon=True)

    def start(self) -> None:
        """Look from a thread until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    def messages(self, stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The messages of a call, each in time."""
        limit_s = self._first_s
        while True:
            with self._waiting(context, limit_s):
                message = next(stream, None)
            if message is None:
                return
            yield message
            limit_s = self._next_s

    def replies(self, replies: Iterator[T], context: grpc.ServicerContext) -> Iterator[T]:
        """The replies of a call, each taken in time. How long the next one takes to make is not limited."""
        for reply in replies:
            with self._waiting(context, self._next_s):
                yield reply

    @contextmanager
    def _waiting(self, context: grpc.ServicerContext, limit_s: float) -> Iterator[None]:
        wait = _Wait(context, self._clock() + limit_s)
        with self._lock:
            self._waits.add(wait)
        try:
            yield
        finally:
            with self._lock:
                self._waits.discard(wait)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self.look()

    def look(self) -> None:
        """Cancel the calls that have waited for too long."""
        now = self._clock()
        with self._lock:
            late = [wait for wait in self._waits if wait.ends_at <= now]
            self._waits.difference_update(late)
        for wait in late:
            wait.context.cancel()
