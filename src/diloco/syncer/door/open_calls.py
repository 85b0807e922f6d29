"""Calls that are open: their callers are looked at again, and a call whose credentials have ended is ended. Of a kind
of which a caller needs one only, a newer call takes the place of an older one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from diloco.errors import AuthError, UnreachableError
from diloco.syncer.door.audit import Audit
from diloco.syncer.keys.auth import Authenticator
from diloco.syncer.keys.callers import Caller

log = logging.getLogger("diloco.syncer")

LOOK_EVERY_S = 1.0


@dataclass(eq=False)
class _Call:
    name: str
    caller: Caller
    context: Any  # of gRPC, whose `cancel` has no types
    is_settled: bool = False


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
    def open(self, name: str, caller: Caller, context: grpc.ServicerContext, *, single: bool = False) -> Iterator[None]:
        """Inside, the call is looked at again.

        Arguments:
            single: the caller has one such call, and one that is not `settled` yet: this one ends the others of those.
        """
        call = _Call(name, caller, context)
        with self._lock:
            before = self._alike(call, is_settled=False) if single else []
            self._calls.add(call)
        for each in before:
            each.context.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._calls.remove(call)

    def settled(self, context: grpc.ServicerContext) -> None:
        """A `single` call was let in: what it takes the place of is ended."""
        with self._lock:
            (call,) = (each for each in self._calls if each.context is context)
            before = self._alike(call, is_settled=True)
            call.is_settled = True
        for each in before:
            each.context.cancel()

    def _alike(self, call: _Call, *, is_settled: bool) -> list[_Call]:
        """Other calls of the same name and caller."""
        who = call.name, call.caller.name
        return [
            each for each in self._calls
            if each is not call and (each.name, each.caller.name) == who and each.is_settled is is_settled
        ]  # fmt: skip

    @property
    def num_open(self) -> int:
        """How many are open."""
        with self._lock:
            return len(self._calls)

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
