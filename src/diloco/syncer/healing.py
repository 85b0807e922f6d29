"""The calls by which a joiner has a healthy learner's inner optimizer's state. What is in it, the syncer does not look
at: the joiner checks it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import grpc

from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import streamed
from diloco.exchange.wire.outgoing import Acknowledged
from diloco.syncer.callers import Caller, Role
from diloco.syncer.hosting import HostedDriver
from diloco.syncer.receiving import receiving

Admit = Callable[[grpc.ServicerContext, Caller, str, Role, str, str], None]
"""The caller may do this for this learner in this run; its connection is counted as this kind."""


class HealingService:
    """Handlers of one run.

    Arguments:
        host: gives the driver, as in `Service`.
        admit: as `Service` does it.
    """

    def __init__(self, host: Callable[[], HostedDriver], admit: Admit) -> None:
        self._host, self._admit = host, admit

    @property
    def _driver(self) -> HostedDriver:
        return self._host()

    def heal(self, caller: Caller, request: pb.HealRequest, context: grpc.ServicerContext) -> pb.HealReply:
        """A joiner wants a state, or has one."""
        self._admit(context, caller, request.run, "learner", request.learner, "control")
        learner, process, number = request.learner, request.process, request.over
        if number:
            self._driver.ask(lambda driver: driver.healed(learner, process=process, number=number))
            return pb.HealReply(state="none")
        answer = self._driver.ask(lambda driver: driver.heal(learner, process=process, digest=request.digest))
        return pb.HealReply(
            state=answer.state, number=answer.number, num_bytes=answer.num_bytes, sha256=answer.sha256,
            peer=answer.peer, reason=answer.reason,
        )  # fmt: skip

    def share(
        self, caller: Caller, header: pb.ShareHeader, stream: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[pb.ShareReply]:
        """The learner that was asked gives its state, or says why it does not."""
        self._admit(context, caller, header.run, "learner", header.learner, "joins")
        learner, incarnation, number = header.learner, header.incarnation, header.number
        if header.refusal:
            reason = header.refusal
            self._driver.ask(
                lambda driver: driver.decline_share(
                    learner, incarnation, number=number, reason=reason, process=header.process
                )
            )
            yield pb.ShareReply()
            return
        digest, num_bytes = header.digest, header.num_bytes
        self._driver.ask(
            lambda driver: driver.begin_share(
                learner, incarnation, number=number, digest=digest, num_bytes=num_bytes, process=header.process
            )
        )
        sha256 = None
        try:
            buffer = self._driver.ask(lambda driver: driver.inner_slot(number)).buffer
            for received in receiving(stream, buffer):
                yield pb.ShareReply(received=received)
            sha256 = hashlib.sha256(buffer).hexdigest()
        finally:
            self._driver.ask(lambda driver: driver.end_share(learner, incarnation, number=number, sha256=sha256))
        yield pb.ShareReply()

    def pull(
        self, caller: Caller, request: pb.PullInnerRequest, stream: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """The joiner fetches the state that is ready."""
        self._admit(context, caller, request.run, "learner", request.learner, "joins")
        learner, process, number = request.learner, request.process, request.number
        self._driver.ask(lambda driver: driver.begin_take(learner, process=process, number=number))
        try:
            buffer = self._driver.ask(lambda driver: driver.inner_slot(number)).buffer
            yield from streamed(pb.PullInnerHeader(num_bytes=len(buffer)), [buffer], Acknowledged(stream, 0))
        finally:
            self._driver.ask(lambda driver: driver.end_take(learner, process=process, number=number))
