"""The gRPC service of a syncer: the handlers of its calls, which pass events to the driver and move tensors."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import torch
from safetensors.torch import save

from diloco.core.method import Method
from diloco.core.shards import Segments, num_segments_of
from diloco.errors import LayoutError, NoRoomError, RunError, StandbyError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import streamed
from diloco.exchange.wire.incoming import start_of
from diloco.exchange.wire.link_probe import answer_probe
from diloco.exchange.wire.outgoing import Acknowledged
from diloco.exchange.wire.rpc import MAX_CONTROL_BYTES, MAX_MESSAGE_BYTES
from diloco.exchange.wire.tensors import bytes_of
from diloco.exchange.wire.values import message_of, value_of
from diloco.protocol.contribution import Contribution
from diloco.protocol.leases import Grant
from diloco.protocol.members import Claim, Report
from diloco.protocol.steering import Order
from diloco.run.run_state import RunState
from diloco.run.status import RunStatus
from diloco.run.uploads import Upload
from diloco.syncer.door.admission import Admission
from diloco.syncer.door.audit import Audit
from diloco.syncer.door.followers import FollowerCalls
from diloco.syncer.door.initialising import Initialising
from diloco.syncer.door.messages import WatchStream, ask_of, contribution_of, layout_of, report_of, standing_message
from diloco.syncer.door.open_calls import CallGuard, OpenTransfers
from diloco.syncer.door.receiving import IncomingBytes, IncomingModel
from diloco.syncer.door.workers import WorkerCalls
from diloco.syncer.hosting import HostedDriver, SyncerDriver
from diloco.syncer.keys.certificates import Caller
from diloco.syncer.spool import Slot


@dataclass
class Service:
    """Handlers of one run.

    Arguments:
        run, method: its id and method.
        host: gives the driver, also while the syncer is suspended; raises StandbyError while it does not serve the run.
        guard: wraps the handlers.
        transfers: the open transfers of learners.
        incoming: keeps the received part of the run's initial model.
        audit: records admissions.
        lost_floor_s: the shortest deadline of a silent learner.
        resumed: called with the learner, the kind and the bytes that a resumed transfer did not repeat.
        status_extra: more values for `Status`.
        reported: called with each accepted heartbeat and Leave.
        page_url: gives a caller a link to the live page.
        take_over: lets this syncer serve the run by an admin's order; returns the epoch and versions that it serves.
        followers: handlers of the calls of followers.
    """

    run: str
    method: Method
    host: Callable[[], HostedDriver]
    guard: CallGuard
    transfers: OpenTransfers
    incoming: IncomingModel
    audit: Audit
    lost_floor_s: float
    resumed: Callable[[str, str, int], None]
    status_extra: Callable[[], dict[str, Any]]
    reported: Callable[[Claim, Report], None]
    page_url: Callable[[Caller], str]
    take_over: Callable[[], tuple[int, tuple[int, ...]]]
    followers: FollowerCalls

    def __post_init__(self) -> None:
        self._admit, self._probing = self.guard.admit, threading.Lock()
        self._initialising = Initialising(lambda: self.driver, self.transfers, self.audit, self.incoming, self.resumed)

    def handlers(self) -> Admission:
        """The argument of `grpc.Server.add_generic_rpc_handlers`."""
        guard = self.guard
        return Admission(
            {
                "Describe": guard.unary("Describe", self.describe, pb.DescribeRequest),
                "Join": guard.unary("Join", self.join, pb.JoinRequest, "writes", MAX_MESSAGE_BYTES),
                "Deal": guard.unary("Deal", self.deal, pb.DealRequest),
                "Heartbeat": guard.unary("Heartbeat", self.heartbeat, pb.HeartbeatRequest),
                "Lease": guard.unary("Lease", self.lease, pb.LeaseRequest, "writes", MAX_MESSAGE_BYTES),
                "Promote": guard.unary("Promote", self.promote, pb.PromoteRequest),
                "Steer": guard.unary("Steer", self.steer, pb.SteerRequest, "writes"),
                "OpenPage": guard.unary("OpenPage", self.open_page, pb.OpenPageRequest),
                "Leave": guard.unary("Leave", self.leave, pb.LeaveRequest, "writes"),
                "Status": guard.unary("Status", self.status, pb.StatusRequest),
                "Watch": guard.streamed("Watch", self.watch, pb.WatchRequest, "watches", MAX_CONTROL_BYTES),
                "Pull": guard.streamed("Pull", self.pull, pb.PullRequest),
                "Initialise": guard.streamed("Initialise", self.initialise, pb.InitialiseHeader),
                "Push": guard.streamed("Push", self.push, pb.PushHeader),
                "Probe": guard.streamed("Probe", self.probe, pb.ProbeHeader),
                **self.followers.handlers(),
                **WorkerCalls(lambda: self.driver, guard).handlers(),
            }
        )

    @property
    def driver(self) -> HostedDriver:
        """The driver, for all calls but Heartbeat, Watch and Status, which a syncer that does not reach its store
        answers too. Raises StandbyError: this syncer does not serve the run, or does not reach its store."""
        hosted = self.host()
        hosted.require(reaches_store=True)
        return hosted

    # --- control ------------------------------------------------------------------------------------------------------

    def describe(self, caller: Caller, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeReply:
        self._admit(context, caller, request, "viewer")

        def reply(driver: SyncerDriver) -> pb.DescribeReply:
            layout = json.dumps(driver.state.model.layout.to_dict()) if driver.state.is_initialised else ""
            return pb.DescribeReply(
                method=json.dumps(driver.state.method.to_dict()), initialised=driver.state.is_initialised,
                layout=layout, step=driver.state.step, run_tokens=driver.state.run_tokens,
                lineage=vars(driver.lineage), lost_floor_s=self.lost_floor_s,
            )  # fmt: skip

        return self.driver.ask(reply)

    def join(self, caller: Caller, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        self._admit(context, caller, request, "learner", "joins")
        layout = layout_of(request.layout)

        def join(driver: SyncerDriver, done: Callable[[pb.JoinReply], None]) -> None:
            def joined(incarnation: int) -> None:
                done(pb.JoinReply(incarnation=incarnation, lineage=vars(driver.lineage)))

            overlap = request.overlap if request.HasField("overlap") else None
            claim = value_of(Claim, request, incarnation=request.after)
            driver.join(
                claim, layout, joined, overlap=overlap, tokens_per_step=request.tokens_per_step or None,
                held=tuple(request.held) or None, dealt=request.dealt,
            )  # fmt: skip

        reply: pb.JoinReply = self.driver.wait_for(join, context)
        self.audit.admitted("Join", caller, request.learner, context.peer())
        return reply

    def deal(self, caller: Caller, request: pb.DealRequest, context: grpc.ServicerContext) -> pb.DealReply:
        self._admit(context, caller, request, "learner")
        return pb.DealReply(groups=self.driver.ask(lambda driver: driver.deal(request.learner, request.size)))

    def heartbeat(
        self, caller: Caller, request: pb.HeartbeatRequest, context: grpc.ServicerContext
    ) -> pb.HeartbeatReply:
        self._admit(context, caller, request, "learner")
        claim, report, hosted = value_of(Claim, request), report_of(request), self.host()

        def reply(driver: SyncerDriver) -> pb.HeartbeatReply:
            standing = standing_message(driver.heartbeat(claim, report))
            return pb.HeartbeatReply(lineage=vars(driver.lineage), standing=standing, is_suspended=hosted.is_suspended)

        answer = hosted.ask(reply)
        self.reported(claim, report)
        return answer

    def lease(self, caller: Caller, request: pb.LeaseRequest, context: grpc.ServicerContext) -> pb.LeaseReply:
        self._admit(context, caller, request, "learner")
        claim, ask = value_of(Claim, request), ask_of(request)

        grant: Grant = self.driver.wait_for(lambda driver, done: driver.lease(claim, ask, done), context)
        return message_of(pb.LeaseReply, grant, repeat=not grant.number)

    def leave(self, caller: Caller, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:
        self._admit(context, caller, request, "learner")
        claim, report = value_of(Claim, request), report_of(request)

        self.driver.wait_for(lambda driver, done: driver.leave(claim, report, partial(done, None)), context)
        self.reported(claim, report)
        return pb.LeaveReply()

    def status(self, caller: Caller, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        self._admit(context, caller, request, "viewer")
        try:
            status = self.host().ask(lambda driver: driver.status())
        except StandbyError:
            idle = RunState[Any, Any](self.run, self.method)
            status = {**RunStatus().as_dict(idle, 0.0), "spooled_bytes": 0, "waits_for": None}
        return pb.StatusReply(status=json.dumps({**status, **self.status_extra()}))

    def promote(self, caller: Caller, request: pb.PromoteRequest, context: grpc.ServicerContext) -> pb.PromoteReply:
        self._admit(context, caller, request, "admin")
        epoch, versions = self.take_over()
        self.audit.admitted("Promote", caller, "", context.peer())
        return pb.PromoteReply(epoch=epoch, versions=versions)

    def steer(self, caller: Caller, request: pb.SteerRequest, context: grpc.ServicerContext) -> pb.SteerReply:
        self._admit(context, caller, request, "admin")

        order = value_of(Order, request, what=request.order)  # checked by the driver
        return pb.SteerReply(said=self.execute(order, caller, context.peer(), context))

    def execute(self, order: Order, caller: Caller, peer: str, context: grpc.ServicerContext | None = None) -> str:
        """Execute an admin's order, from a call or from the live page; returns a sentence on its effect."""

        said: str = self.driver.wait_for(lambda driver, done: driver.steer(order, caller.name, done), context)
        self.audit.admitted("Steer", caller, order.learner, peer)
        return said

    def open_page(self, caller: Caller, request: pb.OpenPageRequest, context: grpc.ServicerContext) -> pb.OpenPageReply:
        self._admit(context, caller, request, "viewer")
        return pb.OpenPageReply(url=self.page_url(caller))

    def watch(
        self, caller: Caller, request: pb.WatchRequest, _: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[pb.Notice]:
        self._admit(context, caller, request, "learner")
        claim, hosted = value_of(Claim, request), self.host()
        stream = WatchStream(hosted.ask(lambda driver: driver.lineage))
        hosted.ask(lambda driver: driver.connected(claim, stream))
        if not context.add_callback(stream.end):  # the connection has ended already
            stream.end()
        try:
            yield from stream.notices()
        finally:
            hosted.ask(lambda driver: driver.disconnected(claim, stream))

    # --- bulk ---------------------------------------------------------------------------------------------------------

    def initialise(
        self, caller: Caller, header: pb.InitialiseHeader, stream: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[pb.InitialiseReply]:
        self._admit(context, caller, header, "learner", "joins")
        yield from self._initialising.receive(caller, header, stream, context)

    def push(
        self, caller: Caller, header: pb.PushHeader, stream: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[pb.PushReply]:
        self._admit(context, caller, header, "learner", "contributions")
        contribution, hosted = contribution_of(header), self.driver
        what = "Push", header.fragment, header.number, header.start, header.stop
        with self.transfers.open(header.learner, header.incarnation, what, context):
            push = yield from self._receive(hosted, contribution, header, stream)
        start, stop = push.room
        whole = pb.Received(num_bytes=stop - start, all=True)
        waiting = hosted.until_done(lambda driver, done: driver.complete_push(push, done))
        yield from (pb.PushReply(received=whole) for _ in waiting)
        hosted.require(reaches_store=True)
        yield pb.PushReply()

    def _receive(
        self, hosted: HostedDriver, contribution: Contribution, header: pb.PushHeader, stream: Iterator[bytes]
    ) -> Generator[pb.PushReply, None, Upload[Slot]]:
        """Receive the payload of a contribution, without the part that is kept."""
        span = (header.start, header.stop) if header.stop else None
        push = hosted.ask(
            lambda driver: driver.begin_push(
                contribution, header.num_bytes, boot=header.boot, span=span, process=header.process
            )
        )
        start, stop = push.room
        no_room, is_complete, incoming = None, False, None
        try:
            incoming = IncomingBytes(push.slot.buffer[start:stop], push.received if header.resumes else 0)
            resumed = partial(self.resumed, header.learner, "contributions")
            for received in incoming.reports(stream, resumed, resumes=header.resumes):
                yield pb.PushReply(received=received)
            is_complete = True
        except NoRoomError as error:
            no_room = error
            raise
        finally:
            if not is_complete:
                filled = 0 if incoming is None else incoming.filled
                hosted.ask(lambda driver: driver.cut_push(push, no_room, received=filled))
        return push

    def pull(
        self, caller: Caller, request: pb.PullRequest, stream: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        kind = "joins" if request.joining else "updates"
        self._admit(context, caller, request, "learner", kind)
        claim, hosted = value_of(Claim, request), self.driver
        lineage = vars(hosted.ask(lambda driver: driver.lineage))
        if request.WhichOneof("part") == "static":
            hosted.ask(lambda driver: driver.core.check(claim.learner, claim.incarnation, claim.process))
            static = memoryview(hosted.ask(lambda driver: driver.state.model.static))
            header = pb.PullHeader(lossless=True, num_bytes=len(static), lineage=lineage)
            stored = hosted.manifest.frozen, "static", 0
            yield from self._send(request, kind, header, [static], stored, stream, context)
            return
        fetched, manifest = hosted.ask(
            lambda driver: (driver.fetch(request.fragment, request.base, claim), hosted.manifest)
        )
        update, held, outer = fetched.update, fetched.held, memoryview(b"")
        num_elements = held.theta.numel()
        segments = _segments(request, num_elements)
        elements = segments.elements(num_elements)
        if fetched.payload is None:
            payload = bytes_of(held.theta[elements])
        elif update.lossless:
            payload = bytes_of(fetched.payload.view(torch.float32)[elements])
        else:
            codec = hosted.method.for_fragment(update.fragment).down
            payload = bytes_of(fetched.payload[segments.payload_span(codec, num_elements)])
        if fetched.payload is None and held.outer_state and hosted.method.outer_at == "learners":
            state = {name: each[elements].clone() if each.dim() else each for name, each in held.outer_state.items()}
            outer = memoryview(save(state))
        header = message_of(
            pb.PullHeader, update, base=max(update.base, 0), num_bytes=len(payload) + len(outer),
            outer_bytes=len(outer), verdicts=fetched.verdicts, lineage=lineage,
        )  # fmt: skip
        is_stored = fetched.payload is None and not outer
        named = (it.held for it in manifest.fragments[update.fragment] if is_stored and it.version == update.version)
        stored = next(named, None), "theta", elements.start * held.theta.element_size()
        yield from self._send(request, kind, header, [payload, outer], stored, stream, context)

    def _send(
        self, request: pb.PullRequest, kind: str, header: pb.PullHeader, parts: list[memoryview],
        stored: tuple[str | None, str, int], stream: Iterator[bytes], context: grpc.ServicerContext,
    ) -> Iterator[bytes]:  # fmt: skip
        """Send a payload at the pace of the caller, without the part that it has kept; or refer a joiner to the store.

        `stored`: the object that has it (None: there is none), the tensor in it, and the first byte of that.
        """
        name, tensor, first = stored
        may_refer = request.joining and not request.direct and not request.HasField("kept") and header.num_bytes > 0
        if name is not None and may_refer and self.followers.signed.refer(header, name, tensor, first):
            yield header.SerializeToString()
            return
        checksum = 0
        if request.HasField("kept"):
            header.start = start_of(request.kept, header, parts[0])
            checksum = zlib.crc32(parts[0][: header.start])
        if header.start:
            self.resumed(request.learner, kind, header.start)
        pace = Acknowledged(stream, self.followers.link, header.start)
        frames = streamed(header, parts, pace, start=header.start, checksum=checksum)
        segments = request.segments
        is_empty = request.HasField("segments") and segments.first == segments.stop  # several ranks may have this part
        if is_empty:
            yield from frames
            return
        what = "Pull", request.fragment, request.static, segments.first, segments.stop
        with self.transfers.open(request.learner, request.incarnation, what, context), self.followers.link.download():
            yield from frames

    def probe(
        self, caller: Caller, header: pb.ProbeHeader, stream: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Measure one link at a time: two probes would disturb each other, and exceed the share of one."""
        self._admit(context, caller, header, "learner", "probes")
        if not self._probing.acquire(blocking=False):
            raise RunError("another learner's link is being measured; measure again in a minute.")
        try:
            yield from answer_probe(header, stream)
        finally:
            self._probing.release()


def _segments(request: pb.PullRequest, num_elements: int) -> Segments:
    """The requested segments of a fragment."""
    num_segments = num_segments_of(num_elements)
    if not request.HasField("segments"):
        return Segments(0, num_segments)
    asked = Segments(request.segments.first, request.segments.stop)
    if not asked.first <= asked.stop <= num_segments:
        raise LayoutError(
            f"fragment {request.fragment} has segments 0 to {num_segments - 1}, not {asked.first} to {asked.stop - 1}; "
            "use the run's layout."
        )
    return asked
