"""Bytes of calls by learner, kind and direction, counted where gRPC frames messages.

A message counts as its own bytes and gRPC's prefix of five. HTTP/2, TLS and TCP add bytes that gRPC does not show,
about 0.2 % for chunks of a transfer. A sent message counts when gRPC accepts it, a received one when the syncer reads
it.
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
"""The prefix of each message: a flag and its length (gRPC over HTTP/2, Length-Prefixed-Message)."""


@dataclass
class _Call:
    """An open call; `unlabelled`: bytes counted before its label is known."""

    label: tuple[str, str] | None = None
    unlabelled: Counter[Direction] = field(default_factory=Counter)


class WireBytes:
    """Totals that only grow and outlive their calls. Any thread may call any method.

    Refused calls have no label and are not counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[grpc.ServicerContext, _Call] = {}
        self._totals = Counter[Key]()

    @contextmanager
    def call(self, context: grpc.ServicerContext) -> Iterator[None]:
        """The call is open during the block."""
        with self._lock:
            self._calls[context] = _Call()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[context]

    def label(self, context: grpc.ServicerContext, learner: str, kind: str) -> None:
        """Name the learner and the kind of an open call: "control", "contributions", "updates", "joins" or
        "probes"."""
        with self._lock:
            call = self._calls[context]
            call.label = learner, kind
            for direction, num_bytes in call.unlabelled.items():
                self._totals[learner, kind, direction] += num_bytes
            call.unlabelled.clear()

    def count(self, context: grpc.ServicerContext, direction: Direction, message: bytes) -> None:
        """Count a message of an open call; nothing once the call has ended, though a thread may still read from it."""
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
        """Count the messages that a peer sends."""
        for message in messages:
            self.count(context, "received", message)
            yield message

    def totals(self) -> dict[Key, int]:
        """Bytes by (learner, kind, direction) so far."""
        with self._lock:
            return dict(self._totals)

    def by_learner(self) -> dict[str, dict[str, dict[Direction, int]]]:
        """The same, by learner, then kind, then direction."""
        found: dict[str, dict[str, dict[Direction, int]]] = {}
        for (learner, kind, direction), num_bytes in self.totals().items():
            found.setdefault(learner, {}).setdefault(kind, {})[direction] = num_bytes
        return found
