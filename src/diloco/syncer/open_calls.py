"""Calls that are open: their callers are looked at again, and a call whose credentials have ended is ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from diloco.errors import AuthError, UnreachableError
from diloco.syncer.audit import Audit
from diloco.syncer.auth import Authenticator
from diloco.syncer.callers import Caller

log = logging.getLogger("diloco.syncer")

LOOK_EVERY_S = 1.0


@dataclass(frozen=True, eq=False)
class _Call:
    name: str
    caller: Caller
    context: Any  # of gRPC, whose `cancel` has no types


class OpenCalls:
    """Every call of a syncer that may last. Any thread may call any method.

    A call that is ended is cancelled; what the caller asks next is refused with the reason.
    """

    def __init__(self, auth: Authenticator, audit: Audit) -> None:
        self._auth, self._audit = auth, audit
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncer-callers", daemon=True)
        self._thread.start()

    @contextmanager
    def open(self, name: str, caller: Caller, context: grpc.ServicerContext) -> Iterator[None]:
        """Inside, the call is looked at again."""
        call = _Call(name, caller, context)
        with self._lock:
            self._calls.add(call)
        try:
            yield
        finally:
            with self._lock:
                self._calls.remove(call)

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()
        self._audit.close()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self._look()
            self._audit.flush()

    def _look(self) -> None:
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            try:
                self._auth.check(call.caller)
            except (AuthError, UnreachableError) as error:
                log.warning("ended a call (%s) of %s: %s", call.name, call.caller.name, error)
                self._audit.refused(call.name, call.caller, call.context.peer(), error)
                call.context.cancel()
