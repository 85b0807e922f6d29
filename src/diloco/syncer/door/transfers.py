"""Transfers of learners that are open: one that has lost its peer ends when the learner is evicted or comes anew."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import grpc

from diloco.errors import DilocoError
from diloco.syncer.door.call_deadlines import CallDeadlines
from diloco.syncer.hosting import HostedDriver

log = logging.getLogger("diloco.syncer")

LOOK_EVERY_S = 1.0


@dataclass(frozen=True, eq=False)
class _Transfer:
    learner: str
    incarnation: int | None
    what: Hashable
    context: Any  # of gRPC, whose `cancel` has no types
    ended: threading.Event = field(default_factory=threading.Event)


class Transfers:
    """The open transfers of incarnations. Any thread may call any method. `host` gives the driver; `deadlines` need not
    look at what is open here.

    A connection whose other end is gone without a word looks like a slow one. But its learner's heartbeats have a
    deadline, and a learner that finds its connection dead uploads the same again over another one.
    """

    def __init__(self, host: Callable[[], HostedDriver], deadlines: CallDeadlines) -> None:
        self._host, self._deadlines = host, deadlines
        self._lock = threading.Lock()
        self._open: set[_Transfer] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncer-transfers", daemon=True)

    def start(self) -> None:
        """Look from a thread until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    @contextmanager
    def open(
        self, learner: str, incarnation: int | None, what: Hashable, context: grpc.ServicerContext
    ) -> Iterator[None]:  # fmt: skip
        """Inside, the transfer is cancelled once the incarnation is not part of the run, or opens it again. An earlier
        one of the same is over before the inside begins.

        Arguments:
            incarnation: None: the learner is no member yet, and may go on.
            what: tells the transfers of an incarnation apart.
        """
        mine = _Transfer(learner, incarnation, what, context)
        with self._lock:
            same = [it for it in self._open if (it.learner, it.incarnation, it.what) == (learner, incarnation, what)]
            self._open.add(mine)
        try:
            for earlier in same:
                log.info("%s comes anew with %s: its earlier connection is ended", learner, what)
                earlier.context.cancel()
                while not earlier.ended.wait(LOOK_EVERY_S) and context.is_active():
                    pass
            with nullcontext() if incarnation is None else self._deadlines.member(context):
                yield
        finally:
            mine.ended.set()
            with self._lock:
                self._open.remove(mine)

    @property
    def num_open(self) -> int:
        """How many are open."""
        with self._lock:
            return len(self._open)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self.look()

    def look(self) -> None:
        """Cancel the transfers of incarnations that are out."""
        with self._lock:
            transfers = list(self._open)
        for it in transfers:
            if it.incarnation is None:
                continue
            try:
                self._host().ask(lambda driver, it=it: driver.core.check(it.learner, it.incarnation))  # type: ignore[misc]
            except DilocoError as error:
                log.info("ended a transfer of %s: %s", it.learner, error)
                it.context.cancel()
