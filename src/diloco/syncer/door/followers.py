"""The calls of followers: the manifest, the objects that it names, and the results of evaluators.

A follower decides what it reads and when; the syncer keeps nothing about it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import grpc

from diloco.errors import PayloadError, StoreError
from diloco.escaping import printable
from diloco.events import Reported
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import streamed
from diloco.exchange.wire.outgoing import Acknowledged, LearnersFirst
from diloco.protocol.manifest import is_object_name
from diloco.run.objects import Objects
from diloco.store.reading import ObjectReader
from diloco.syncer.door.admission import Call, Kind
from diloco.syncer.door.open_calls import CallGuard
from diloco.syncer.hosting import HostedDriver
from diloco.syncer.keys.certificates import UNKNOWN, Caller

log = logging.getLogger("diloco.syncer")

MOST_BYTES = 4 << 20
"""Of one Read, which are in memory while they are sent."""

MOST_PLACES = 4096
"""Of tensors in objects, which a start of several learners asks for."""

MOST_SCORES, MOST_NAME, MOST_FRAGMENTS = 256, 100, 10_000
"""Of one Report."""


class SignedObjects:
    """URLs of objects, where the store can sign them.

    Arguments:
        expires_s: how long a URL is valid.
    """

    def __init__(self, objects: Objects, expires_s: float) -> None:
        self._sign: Callable[[str, float], str] | None = getattr(objects, "sign", None)  # a bucket's
        self._objects, self._expires_s = objects, expires_s
        self._places: dict[tuple[str, str], tuple[int, str]] = {}  # of tensors: first byte, hash

    def url_of(self, name: str) -> str:
        """The URL of an object; empty: the syncer sends its bytes itself."""
        if self._sign is None:
            return ""
        try:
            return self._sign(name, self._expires_s)
        except StoreError as error:
            log.warning("this syncer sends all objects itself from now on: %s", error)
            self._sign = None
            return ""

    def refer(self, header: pb.PullHeader, name: str, tensor: str, first: int) -> bool:
        """Add the place of a payload to its header: the bytes of this tensor of an object, from `first` on. False: the
        syncer sends them itself."""
        if not (url := self.url_of(name)):
            return False
        if (place := self._places.get((name, tensor))) is None:
            try:
                with ObjectReader(self._objects) as reader:
                    head = reader.head(name, tensor)
            except StoreError as error:
                log.warning("this syncer sends to a joiner what it does not find in its store: %s", error)
                return False
            if (entry := head.entries.get(tensor)) is None:
                return False
            if len(self._places) >= MOST_PLACES:
                self._places.clear()
            place = self._places[name, tensor] = len(head.data) + entry.first, entry.hash
        start, header.digest = place
        header.url, header.url_start = url, start + first
        return True


@dataclass
class FollowerCalls:
    """Handlers of these calls.

    Arguments:
        host: gives the driver of the run; raises StandbyError while this syncer does not serve it, or is suspended.
        objects: of the run.
        signed: URLs of the objects.
        guard: wraps the handlers.
        reported: called with each report of an evaluator.

    Attributes:
        link: on which learners' downloads go before reads.
    """

    host: Callable[[], HostedDriver]
    objects: Objects
    signed: SignedObjects
    guard: CallGuard
    reported: Callable[[Reported], None]
    link: LearnersFirst = field(default_factory=LearnersFirst, init=False)

    def handlers(self) -> Mapping[str, tuple[Kind, Call]]:
        """By method."""
        return {
            "Manifest": self.guard.unary("Manifest", self.manifest, pb.ManifestRequest),
            "Read": self.guard.streamed("Read", self.read, pb.PullRequest, "reads"),
            "Report": self.guard.unary("Report", self.report, pb.ReportRequest),
        }

    def manifest(self, caller: Caller, request: pb.ManifestRequest, context: grpc.ServicerContext) -> pb.ManifestReply:
        self.guard.admit(context, caller, request, "viewer")
        return pb.ManifestReply(manifest=self.host().manifest.to_bytes())

    def read(
        self, caller: Caller, request: pb.PullRequest, stream: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        self.guard.admit(context, caller, request, "viewer", "reads")
        self.host()
        wanted = request.object
        if not is_object_name(wanted.name) or not 0 <= wanted.stop - wanted.start <= MOST_BYTES:
            raise PayloadError(
                f"{printable(wanted.name, MOST_NAME)!r} from {wanted.start} to {wanted.stop} is not a range of at most "
                f"{MOST_BYTES} bytes of an object; use the syncer's version of diloco."
            )
        if not request.direct and (url := self.signed.url_of(wanted.name)):
            header = pb.PullHeader(url=url, url_start=wanted.start, num_bytes=wanted.stop - wanted.start)
            yield header.SerializeToString()
            return
        data = memoryview(self.objects.get(wanted.name, wanted.start, wanted.stop))
        yield from streamed(
            pb.PullHeader(num_bytes=len(data)), [data], Acknowledged(stream, self.link, is_follower=True)
        )

    def report(self, caller: Caller, request: pb.ReportRequest, context: grpc.ServicerContext) -> pb.ReportReply:
        self.guard.admit(context, caller, request, "evaluator")
        self.host()
        loss = request.loss if request.HasField("loss") else None
        scores = {score.name: score.value for score in request.scores}
        is_named = all(0 < len(name) <= MOST_NAME and printable(name) == name for name in scores)
        values = [*scores.values(), *(() if loss is None else (loss,))]
        if len(request.scores) > MOST_SCORES or len(request.versions) > MOST_FRAGMENTS or not is_named:
            raise PayloadError(
                f"a report has up to {MOST_SCORES} scores, each with a name of up to {MOST_NAME} printable characters."
            )
        if not all(map(math.isfinite, values)):
            raise PayloadError(f"a result of the report is not finite ({values}); leave it out.")
        self.reported(
            Reported(
                by="evaluator" if caller == UNKNOWN else caller.name, tokens=request.run_tokens, loss=loss,
                step=request.step, versions=tuple(request.versions), scores=scores,
            )
        )  # fmt: skip
        return pb.ReportReply()
