"""Encoding contributions and sending them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from torch import Tensor

from diloco.core.contribution import Contribution
from diloco.core.session import requests
from diloco.exchange.connection import Connection
from diloco.exchange.remote.messages import push_header
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import bytes_of, frames


class _Payload:
    """`boot`: the process of the syncer that it was sent to last."""

    def __init__(self, encode: Callable[[], Tensor]) -> None:
        self._encode: Callable[[], Tensor] | None = encode
        self._bytes: Tensor | None = None
        self.boot: int | None = None

    def bytes(self) -> Tensor:
        """Encoded when first asked for."""
        if self._bytes is None:
            assert self._encode is not None
            self._bytes, self._encode = self._encode(), None
        return self._bytes


class Sender:
    """The payloads of contributions that may have to be sent.

    Attributes:
        num_bytes: sent; a payload counts once for each process of the syncer.
    """

    def __init__(self, connection: Connection) -> None:
        self.num_bytes = 0
        self._connection = connection
        self._payloads: dict[tuple[int, int, int], _Payload] = {}
        self._lock = threading.Lock()

    def keep(self, c: Contribution, payload: Callable[[], Tensor]) -> None:
        """A new contribution."""
        with self._lock:
            self._payloads[_key(c)] = _Payload(payload)

    def drop(self, c: Contribution) -> None:
        """It will not be sent again."""
        with self._lock:
            self._payloads.pop(_key(c), None)

    def push(self, call: requests.Push) -> None:
        """Upload a contribution, unless it was dropped meanwhile. Raises as `Connection.upload`."""
        with self._lock:
            payload = self._payloads.get(_key(call.contribution))
        if payload is None:
            return
        encoded = payload.bytes()
        if payload.boot != call.boot:
            # Counted before it goes out: its version may be here, and the run over, before the acknowledgement is.
            payload.boot, self.num_bytes = call.boot, self.num_bytes + encoded.numel()
        stream: Iterator[bytes] = frames(push_header(call, encoded.numel()), bytes_of(encoded))
        self._connection.upload("contributions", "Push", stream, pb.PushReply)


def _key(c: Contribution) -> tuple[int, int, int]:
    return c.incarnation, c.fragment, c.number
