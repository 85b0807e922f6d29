"""What goes up and down in bulk: contributions, encoded when they are first sent; versions, decoded and verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from safetensors.torch import load
from torch import Tensor

from diloco.core.contribution import Contribution, Verdict
from diloco.core.fragments import Layout
from diloco.core.held import Advanced, HeldFragment, advance
from diloco.core.method import Method
from diloco.core.session import requests
from diloco.core.update import Update
from diloco.exchange.connection import Connection
from diloco.exchange.remote.messages import pull_request, push_header, update_of, verdicts_of
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import bytes_of, frames, tensor_of

# --- up ---------------------------------------------------------------------------------------------------------------


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


# --- down -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Download:
    """What a fetch has brought: a fragment's new version, or the static tensors (`advanced` None)."""

    update: Update
    verdicts: tuple[Verdict, ...]
    advanced: Advanced | None
    static: Mapping[str, Tensor]


class Receiver:
    """The newest global fragments, and how to get newer ones. `fetch` runs on one thread; the caller guards the rest.

    Attributes:
        num_bytes: received as a joiner, and as a member of the run.
    """

    def __init__(self, connection: Connection, layout: Layout, method: Method) -> None:
        self.num_bytes = {"joins": 0, "updates": 0}
        self._connection, self._layout, self._method = connection, layout, method
        self._newest: dict[int, HeldFragment] = {}
        self._static: Mapping[str, Tensor] = {}

    def fetch(self, call: requests.Fetch) -> Download:
        """Fetch a part of the model.

        Raises:
            VersionError, CorruptPayloadError, DigestError: it is not what the syncer published, or leads from another
                version. Others as `Connection.pull`.
        """
        channel = "joins" if call.joining else "updates"
        header, buffer = self._connection.pull(channel, pull_request(call))
        self.num_bytes[channel] += len(buffer)
        verdicts, update = verdicts_of(header.verdicts), update_of(header)
        if call.fragment is None:
            return Download(update, verdicts, None, load(bytes(buffer)))
        fragment = self._layout.fragments[call.fragment]
        if header.lossless:
            advanced = Advanced(whole_of(header, buffer, fragment.numel))
        else:
            advanced = advance(self._method, self._newest[fragment.index], update, tensor_of(buffer), fragment.tensors)
        return Download(update, verdicts, advanced, {})

    def take(self, download: Download) -> None:
        """Hold what was fetched."""
        if download.advanced is None:
            self._static = download.static
        else:
            self._newest[download.update.fragment] = download.advanced.held

    @property
    def fragments(self) -> tuple[HeldFragment, ...]:
        """The global model, as it is held."""
        return tuple(self._newest[fragment.index] for fragment in self._layout.fragments)

    @property
    def static(self) -> Mapping[str, Tensor]:
        """The tensors that training leaves alone."""
        return self._static


def whole_of(header: pb.PullHeader, buffer: memoryview, num_elements: int) -> HeldFragment:
    """A version that was sent losslessly, in the memory of the buffer; with its outer state, where that was sent too.

    Raises:
        CorruptPayloadError, DigestError: it is not what the syncer published.
    """
    num_theta_bytes = header.num_bytes - header.outer_bytes
    outer_state = load(bytes(buffer[num_theta_bytes:])) if header.outer_bytes else {}
    return HeldFragment.received(update_of(header), tensor_of(buffer[:num_theta_bytes]), num_elements, outer_state)
