"""Bulk transfers: contributions, encoded when they are first sent; versions, decoded and verified."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3
from torch import Tensor

from diloco.compute.threads import ThreadMap, num_cores
from diloco.core.fragments import Layout
from diloco.core.global_fragment import AppliedUpdate, GlobalFragment, apply_lossless_update, apply_update
from diloco.core.memory import Each, one_by_one
from diloco.core.merges import shard_of
from diloco.core.method import Method
from diloco.core.shards import Segments
from diloco.core.update import Update
from diloco.errors import CorruptPayloadError, DigestError, ExchangeError, VersionError
from diloco.exchange.dialling import Dialler
from diloco.exchange.remote.messages import pull_request, push_header, update_of, verdicts_of
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.incoming import Download as Incoming
from diloco.exchange.wire.outgoing import OutgoingUpload
from diloco.exchange.wire.tensors import bytes_of, tensor_of, tensors_of
from diloco.exchange.wire.values import value_of
from diloco.protocol.contribution import Contribution, Verdict
from diloco.protocol.lineage import Lineage
from diloco.protocol.session import requests

log = logging.getLogger("diloco")

# --- up ---------------------------------------------------------------------------------------------------------------


class Payload:
    """The payload of a contribution, or this rank's part of it.

    Attributes:
        boot: the syncer's process that it was sent to last.
        arrived_at: the syncer's process that has acknowledged it.
    """

    def __init__(self, encode: Callable[[], Tensor]) -> None:
        self._encode: Callable[[], Tensor] | None = encode
        self._bytes: Tensor | None = None
        self.boot: int | None = None
        self.arrived_at: int | None = None

    def bytes(self) -> Tensor:
        """The encoded bytes; the first call encodes them."""
        if self._bytes is None:
            assert self._encode is not None
            self._bytes, self._encode = self._encode(), None
        return self._bytes


Key = tuple[int, int, int]
"""Incarnation, fragment and number of a contribution."""


class Sender:
    """The payloads of contributions that may have to be sent.

    Arguments:
        run: its name.
        spans: for every fragment the bytes of a payload that this rank sends, and the size of the whole payload; None:
            it sends whole payloads.

    Attributes:
        num_bytes: bytes sent; a payload counts once for each process of the syncer.
        resumed_bytes: bytes that resumed uploads did not send again.
    """

    def __init__(self, dialler: Dialler, run: str, spans: Sequence[tuple[slice, int]] | None = None) -> None:
        self.num_bytes = self.resumed_bytes = 0
        self._dialler, self._run, self._spans = dialler, run, spans
        self._payloads: dict[Key, Payload] = {}
        self._changed = threading.Condition()
        self._is_over = False

    def keep(self, c: Contribution, payload: Callable[[], Tensor]) -> None:
        """Add the payload of a new contribution."""
        with self._changed:
            self._payloads[key_of(c)] = Payload(payload)
            self._changed.notify_all()

    def drop(self, key: Key) -> None:
        """Forget a payload, which will not be sent again."""
        with self._changed:
            self._payloads.pop(key, None)

    def push(self, call: requests.Push) -> None:
        """Upload a contribution, unless it was dropped. Raises as `Connection.upload`."""
        if (payload := self.kept(key_of(call.contribution))) is not None:
            self.upload(push_header(self._run, call), payload)

    def kept(self, key: Key) -> Payload | None:
        """The payload; None: it was dropped."""
        with self._changed:
            return self._payloads.get(key)

    def awaited(self, key: Key) -> Payload:
        """The payload; blocks until the training thread has offered it. Raises ExchangeError: the exchange is being
        closed."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._payloads or self._is_over)
            if key not in self._payloads:
                raise ExchangeError("this learner's exchange is being closed.")
            return self._payloads[key]

    def upload(self, header: pb.PushHeader, payload: Payload, *, again: bool = False) -> None:
        """Upload this process's part of a contribution, also if it was dropped meanwhile.

        Arguments:
            again: upload it also if this process of the syncer has acknowledged it.

        Raises:
            As `Connection.upload`.
        """
        encoded = payload.bytes()
        if payload.arrived_at == header.boot and not again:
            return
        if self._spans is None:
            header.num_bytes = encoded.numel()
        else:
            span, num_bytes = self._spans[header.fragment]
            is_empty = header.part and not header.tensors  # one rank sends it
            if span.start == span.stop or (is_empty and span.start > 0):
                return
            if not is_empty:
                header.num_bytes, header.start, header.stop = num_bytes, span.start, span.stop
        if payload.boot == header.boot:
            header.resumes = True
        else:  # Counted before it is sent: its version may arrive, and the run end, before the acknowledgement does.
            payload.boot, self.num_bytes = header.boot, self.num_bytes + encoded.numel()
        with OutgoingUpload(header, lambda: [bytes_of(encoded)]) as upload:
            try:
                self._dialler.current.upload(
                    "contributions", "Push", upload.messages(), pb.PushReply, heard=upload.heard
                )
            finally:
                self.resumed_bytes += upload.resumed_bytes
        payload.arrived_at = header.boot

    def close(self) -> None:
        """End all waiting for payloads."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def key_of(c: Contribution) -> Key:
    """The key of a contribution's payload."""
    return c.incarnation, c.fragment, c.number


# --- down -------------------------------------------------------------------------------------------------------------


_MOST_THREADS = 2
"""Threads that apply an update. The cores are for training."""


@dataclass(frozen=True)
class FetchResult:
    """The result of a fetch: a fragment's new version, or the static tensors (`advanced` is None). `lineage`: of the
    syncer that sent it."""

    lineage: Lineage
    update: Update
    verdicts: tuple[Verdict, ...]
    advanced: AppliedUpdate | None
    static: Mapping[str, Tensor]


class Receiver:
    """The newest global fragments, and the requests for newer ones. `fetch` runs on one thread; the caller guards the
    rest.

    Arguments:
        run: its name.
        shards: for every fragment the segments that this rank fetches; None: it fetches whole fragments.

    Attributes:
        num_bytes: bytes received as a joiner, and as a member of the run.
        resumed_bytes: bytes that resumed downloads did not fetch again.
        static: the tensors that training does not change.
    """

    def __init__(
        self, dialler: Dialler, run: str, layout: Layout, method: Method, shards: Sequence[Segments] | None = None
    ) -> None:
        self.num_bytes = {"joins": 0, "updates": 0}
        self._dialler, self._run, self._layout, self._method, self._shards = dialler, run, layout, method, shards
        self._download: Incoming | None = None  # the one that was cut off
        self.resumed_bytes = 0
        self._runs = ThreadMap(min(_MOST_THREADS, num_cores()))
        self._newest: dict[int, GlobalFragment] = {}
        self.static: Mapping[str, Tensor] = {}

    def fetch(self, call: requests.Fetch) -> FetchResult:
        """Fetch a part of the model.

        Raises:
            VersionError, CorruptPayloadError, DigestError: it is not what the syncer published, or its base is another
                version. Others as `Connection.pull`.
        """
        return self.pull(pull_request(self._run, call))

    def pull(self, request: pb.PullRequest) -> FetchResult:
        """As `fetch`. A shard is not verified: only the digests of all shards together give the published digest."""
        channel, shards = "joins" if request.joining else "updates", self._shards
        if shards is not None and not request.static:
            segments = shards[request.fragment]
            request.segments.CopyFrom(pb.Segments(first=segments.first, stop=segments.stop))
        header, buffer = self._pull(channel, request)
        try:
            return self._checked(request, header, buffer)
        except (CorruptPayloadError, DigestError) as error:
            if not header.url:
                raise
            log.warning("%s It was read from the store; fetching it again from the syncer itself.", error)
            request.direct = True
            return self._checked(request, *self._pull(channel, request))

    def _checked(self, request: pb.PullRequest, header: pb.PullHeader, buffer: memoryview) -> FetchResult:
        shards = self._shards
        is_shard = shards is not None and not request.static
        lineage, verdicts, update = value_of(Lineage, header.lineage), verdicts_of(header.verdicts), update_of(header)
        if request.static:
            if header.url and blake3(buffer).hexdigest() != header.digest:
                raise CorruptPayloadError("the static tensors are not those of the run.")
            return FetchResult(lineage, update, verdicts, None, tensors_of(buffer, "the static tensors"))
        fragment = self._layout.fragments[request.fragment]
        num_elements, places = fragment.numel, fragment.tensors
        if shards is not None:
            elements = shards[fragment.index].elements(num_elements)
            num_elements, places = elements.stop - elements.start, shard_of(places, elements)[0]
        if header.lossless:
            advanced = whole_of(header, buffer, num_elements, verify=not is_shard, each=self._runs)
        else:
            if (held := self._newest.get(fragment.index)) is None:
                raise VersionError(
                    f"the syncer sent a change to fragment {fragment.index}, of which this learner has no version; "
                    "fetch the whole fragment."
                )
            method = self._method.for_fragment(update.fragment)
            advanced = apply_update(
                method, held, update, tensor_of(buffer), places, verify=not is_shard, each=self._runs
            )
        return FetchResult(lineage, update, verdicts, advanced, {})

    def _pull(self, channel: str, request: pb.PullRequest) -> tuple[pb.PullHeader, memoryview]:
        """Download a part of the model; after a cut, the download of the same part is resumed."""
        if self._download is None or not self._download.is_for(request):
            self._download = Incoming(request)
        before = self._download.resumed_bytes
        try:
            answer = self._dialler.current.pull(channel, request, self._download)
        finally:
            self.resumed_bytes += self._download.resumed_bytes - before
        self._download = None
        self.num_bytes[channel] += len(answer[1])
        return answer

    def take(self, download: FetchResult) -> None:
        """Keep a result as the newest."""
        if download.advanced is None:
            self.static = download.static
        else:
            self._newest[download.update.fragment] = download.advanced.held

    @property
    def fragments(self) -> tuple[GlobalFragment | None, ...]:
        """The newest global model; None: a fragment that this learner does not hold."""
        return tuple(self._newest.get(fragment.index) for fragment in self._layout.fragments)


def whole_of(
    header: pb.PullHeader, buffer: memoryview, num_elements: int, *, verify: bool = True, each: Each = one_by_one
) -> AppliedUpdate:
    """A version that was sent losslessly, in the memory of the buffer; with its outer state, if that was sent too.

    Arguments:
        verify, each: as in `apply_update`.

    Raises:
        CorruptPayloadError, DigestError: it is not what the syncer published.
    """
    num_theta_bytes = header.num_bytes - header.outer_bytes
    outer_state = tensors_of(buffer[num_theta_bytes:], "the outer states") if header.outer_bytes else {}
    theta = tensor_of(buffer[:num_theta_bytes])
    return apply_lossless_update(update_of(header), theta, num_elements, outer_state, verify=verify, each=each)


def num_bytes_of(sender: Sender, receiver: Receiver) -> dict[str, int]:
    """Payload bytes by kind, sent and received."""
    return {"contributions": sender.num_bytes, **receiver.num_bytes}
