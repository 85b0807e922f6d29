"""Deadlines of what calls wait for: the next message of a peer, and that a peer takes the next reply."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from diloco.protocol.session.lanes import StallTimeout

log = logging.getLogger("diloco.syncer")

T = TypeVar("T")

FIRST_S = 20.0
"""For the first message of a call at most, which its sender has ready before it calls."""

NEXT_S = 300.0
"""For every further message, and for each reply to be taken, at most; and where heartbeats tell whether the peer is
there. A message is half a megabyte: 14 kbit/s are enough."""

LOOK_EVERY_S = 0.5


@dataclass(frozen=True, eq=False)
class _Wait:
    context: Any  # of gRPC, whose `cancel` has no types
    caller: str
    limit_s: float
    ends_at: float


class CallDeadlines:
    """Cancels calls whose peer lets them wait for too long: a stall timeout for each caller. Any thread may call any
    method.

    A peer that is gone without a word is noticed within the lost deadline; one whose link is slow is given more time
    with each try, up to `FIRST_S` and `NEXT_S`. A transfer of a learner in the run is not limited by that: it ends with
    its incarnation (`Transfers`), for whose heartbeats there is a deadline.

    Arguments:
        floor_s: the stall timeout of a caller that is not known to be slow: the lost deadline at least.
        first_s, next_s: as above. clock: monotonic seconds.
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
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncer-deadlines", daemon=True)

    def start(self) -> None:
        """Look from a thread until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    def messages(self, stream: Iterator[bytes], caller: str, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The messages of a call, each in time."""
        most_s = self._first_s
        while True:
            with self._waiting(caller, context, most_s):
                message = next(stream, None)
            if message is None:
                return
            yield message
            most_s = self._next_s

    def replies(self, replies: Iterator[T], caller: str, context: grpc.ServicerContext) -> Iterator[T]:
        """The replies of a call, each taken in time. How long the next one takes to make is not limited."""
        for reply in replies:
            with self._waiting(caller, context, self._next_s):
                yield reply

    @contextmanager
    def member(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Inside, heartbeats or the like tell whether the peer of this call is there."""
        with self._lock:
            self._members.add(context)
        try:
            yield
        finally:
            with self._lock:
                self._members.discard(context)

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
            log.info("ended a call of %s: nothing has moved for %.1f s", wait.caller, wait.limit_s)
            wait.context.cancel()
