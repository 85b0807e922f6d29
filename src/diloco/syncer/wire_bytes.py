"""Bytes of calls by learner, kind and direction, counted where gRPC frames messages.

A message counts as its own bytes and the five that gRPC puts before it. HTTP/2, TLS and TCP add theirs below, which no
program sees through gRPC; for chunks of a transfer that is about 0.2 %. A message that is sent counts once gRPC takes
it, one that is received once the syncer reads it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import grpc

Direction = Literal["received", "sent"]  # as this process sees it
Key = tuple[str, str, Direction]  # learner, kind

FRAME_BYTES = 5
"""Before each message: a flag, and its length (gRPC over HTTP/2, Length-Prefixed-Message)."""


@dataclass
class _Call:
    """A call that is open; `unlabelled`: what was counted before it was known whose it is."""

    label: tuple[str, str] | None = None
    unlabelled: Counter[Direction] = field(default_factory=Counter)


class WireBytes:
    """Totals never fall and outlive their calls. Any thread may call any method.

    Calls that were not let in, and so got no label, are not counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[grpc.ServicerContext, _Call] = {}
        self._totals = Counter[Key]()

    @contextmanager
    def call(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Inside, the call is open."""
        with self._lock:
            self._calls[context] = _Call()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[context]

    def label(self, context: grpc.ServicerContext, learner: str, kind: str) -> None:
        """Name the learner and the kind of an open call: "control", "contributions", "updates", "joins", "probes" or
        "standby"."""
        with self._lock:
            call = self._calls[context]
            call.label = learner, kind
            for direction, num_bytes in call.unlabelled.items():
                self._totals[learner, kind, direction] += num_bytes
            call.unlabelled.clear()

    def count(self, context: grpc.ServicerContext, direction: Direction, message: bytes) -> None:
        """Count a message of an open call; a thread that still reads when the call has ended counts nothing."""
        num_bytes = FRAME_BYTES + len(message)
        with self._lock:
            call = self._calls.get(context)
            if call is None:
                return
            if call.label is None:
                call.unlabelled[direction] += num_bytes
            else:
                self._totals[*call.label, direction] += num_bytes

    def received(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The messages that a peer sends, counted."""
        for message in messages:
            self.count(context, "received", message)
            yield message

    def totals(self) -> dict[Key, int]:
        """Bytes by (learner, kind, direction) so far."""
        with self._lock:
            return dict(self._totals)
