"""The gRPC face of a syncer: who may call what, bytes in and out, errors as statuses. All decisions are the engine's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
import torch
from google.protobuf.message import Message
from safetensors import SafetensorError
from safetensors.torch import load, save

from diloco.core.contribution import Contribution
from diloco.core.fragments import Layout
from diloco.errors import CorruptPayloadError, DilocoError, LayoutError, StoreError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import bytes_of, filling, frames, read_header, room, tensor_of
from diloco.exchange.wire.rpc import SERVICE, abort
from diloco.syncer import sense
from diloco.syncer.auth import Authenticator, Role
from diloco.syncer.engine import Engine
from diloco.syncer.probe import Prober
from diloco.syncer.sockets import SocketLedger

M = TypeVar("M", bound=Message)
SAY_EVERY_S = 0.5
"""Between two words on how much of an upload has arrived."""


class Service:
    """Handlers of one run.

    Arguments:
        engine: the run.
        auth: checks tokens; None lets everybody in (a loopback port, or --insecure).
        sockets: counts bytes; told whose connection each call came on.
        status_extra: more values for `Status`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        auth: Authenticator | None,
        sockets: SocketLedger | None,
        status_extra: Callable[[], dict[str, Any]],
    ) -> None:
        self._engine = engine
        self._auth = auth
        self._sockets = sockets
        self._status_extra = status_extra
        self._prober = Prober()

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """What `grpc.Server.add_generic_rpc_handlers` takes."""
        unary: dict[str, tuple[Callable[[Any, grpc.ServicerContext], Message], type[Message]]] = {
            "Describe": (self.describe, pb.DescribeRequest),
            "Join": (self.join, pb.JoinRequest),
            "Heartbeat": (self.heartbeat, pb.HeartbeatRequest),
            "Leave": (self.leave, pb.LeaveRequest),
            "Status": (self.status, pb.StatusRequest),
        }
        methods = {
            name: grpc.unary_unary_rpc_method_handler(_mapped(handler), kind.FromString, _serialize)
            for name, (handler, kind) in unary.items()
        }
        methods["Initialise"] = grpc.stream_stream_rpc_method_handler(_mapped_stream(self.initialise), None, _serialize)
        methods["Push"] = grpc.stream_stream_rpc_method_handler(_mapped_stream(self.push), None, _serialize)
        methods["Pull"] = grpc.unary_stream_rpc_method_handler(
            _mapped_stream(self.pull), pb.PullRequest.FromString, None
        )
        methods["Probe"] = grpc.stream_stream_rpc_method_handler(_mapped_stream(self.probe), None, None)
        methods["Watch"] = grpc.unary_stream_rpc_method_handler(
            _mapped_stream(self.watch), pb.WatchRequest.FromString, _serialize
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    # --- control ----------------------------------------------------------------------------------------------------------

    def describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeReply:
        self._admit(context, request.run, "viewer", "", "control")
        engine = self._engine
        step, run_tokens = engine.position()
        layout = json.dumps(engine.model.layout.to_dict()) if engine.initialised else ""
        return pb.DescribeReply(
            method=json.dumps(engine.method.to_dict()),
            initialised=engine.initialised,
            layout=layout,
            step=step,
            run_tokens=run_tokens,
        )

    def join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        self._admit(context, request.run, "learner", request.learner, "joins")
        incarnation = self._engine.join(
            request.learner, _layout(request.layout), process=request.process, again=request.again
        )
        step, run_tokens = self._engine.position()
        return pb.JoinReply(incarnation=incarnation, step=step, run_tokens=run_tokens)

    def heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatReply:
        self._admit(context, request.run, "learner", request.learner, "control")
        self._engine.check(request.learner, request.incarnation)
        sense.check_heartbeat(request, len(self._engine.versions()), self._engine.position()[0])
        start_step = self._engine.heartbeat(
            request.learner, request.incarnation, step=request.step, tokens=request.tokens, step_s=request.step_s or None,
            waiting=request.waiting, finished=request.finished, versions=tuple(request.versions),
        )  # fmt: skip
        step, run_tokens = self._engine.position()
        return pb.HeartbeatReply(
            step=step, run_tokens=run_tokens, versions=self._engine.versions(), live=self._engine.num_live(),
            sync_every=self._engine.sync_every(request.learner), start_step=start_step,
        )  # fmt: skip

    def leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:
        self._admit(context, request.run, "learner", request.learner, "control")
        sense.check_leave(request)
        self._engine.leave(request.learner, request.incarnation, request.tokens)
        return pb.LeaveReply()

    def status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        self._admit(context, request.run, "viewer", "", "control")
        return pb.StatusReply(status=json.dumps({**self._engine.status(), **self._status_extra()}))

    def watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Notice]:
        self._admit(context, request.run, "learner", request.learner, "control")
        learner, incarnation = request.learner, request.incarnation
        notices = self._engine.watch(learner, incarnation)
        context.add_callback(lambda: notices.put(None))  # the connection is gone: wake up and say so
        try:
            while context.is_active():
                notice = notices.get()
                if notice is None:
                    return
                yield notice
        finally:
            self._engine.disconnected(learner, incarnation, notices)

    # --- bulk -------------------------------------------------------------------------------------------------------------

    def initialise(self, stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[pb.InitialiseReply]:
        header = read_header(stream, pb.InitialiseHeader)
        self._admit(context, header.run, "learner", header.learner, "joins")
        layout = _layout(header.layout)
        sense.check_initial(header, layout)
        buffer = _room_for_model(sum(header.part_bytes))
        for received in _receiving(stream, buffer):
            yield pb.InitialiseReply(received=received)
        thetas, start = [], 0
        for num_bytes in header.part_bytes[:-1]:
            thetas.append(tensor_of(buffer[start : start + num_bytes], torch.float32))
            start += num_bytes
        for fragment, theta in zip(layout.fragments, thetas, strict=True):
            if not torch.isfinite(theta).all():
                raise LayoutError(
                    f"fragment {fragment.index} of the initial model is not finite; start from other weights."
                )
        _check_static(layout, bytes(memoryview(buffer)[start:]))
        self._engine.initialise(
            layout, thetas, bytes(buffer[start:]), learner=header.learner, source=header.source, step=header.step,
            tokens=header.tokens,
        )  # fmt: skip
        yield pb.InitialiseReply()

    def push(self, stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[pb.PushReply]:
        header = read_header(stream, pb.PushHeader)
        self._admit(context, header.run, "learner", header.learner, "contributions")
        self._engine.check(header.learner, header.incarnation)
        sense.check_push(header, self._engine.position()[0])
        slot = self._engine.allocate(header.fragment, header.num_bytes)
        contribution = Contribution(
            header.learner, header.incarnation, header.fragment, header.round, header.base, header.tokens, header.steps, header.trained,
            tuple((discard.reason, discard.tokens) for discard in header.discarded), step=header.step,
            tensors=tuple(header.tensors) if header.part else None,
        )  # fmt: skip
        complete = False
        try:
            for received in _receiving(stream, slot.buffer):
                yield pb.PushReply(received=received)
            complete = True
        finally:
            if not complete:
                self._engine.release(slot)
        reason = self._engine.contribute(contribution, slot)
        yield pb.PushReply(accepted=reason is None, reason=reason or "")

    def pull(self, request: pb.PullRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        kind = "joins" if request.joining or not request.learner else "updates"
        self._admit(context, request.run, "learner" if request.learner else "viewer", request.learner, kind)
        if request.learner:
            self._engine.check(request.learner, request.incarnation)
        if request.WhichOneof("part") == "static":
            static = memoryview(self._engine.model.static)
            yield from frames(pb.PullHeader(lossless=True, num_bytes=len(static)), static)
            return
        pulled = self._engine.pull(request.fragment, request.base)
        update, payload = pulled.update, bytes_of(pulled.payload)
        outer = memoryview(save(dict(pulled.outer_state)) if pulled.outer_state else b"")
        header = pb.PullHeader(
            fragment=update.fragment, base=max(update.base, 0), version=update.version, contributors=update.contributors,
            weights=update.weights, scale=update.scale, digest=update.digest, lossless=update.lossless,
            num_bytes=len(payload) + len(outer), outer_bytes=len(outer),
            merged_round=pulled.merged_round(request.learner, request.incarnation),
        )  # fmt: skip
        yield from frames(header, payload, outer)

    def probe(self, stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        header = read_header(stream, pb.ProbeHeader)
        self._admit(context, header.run, "learner", header.learner, "probes")
        yield from self._prober.answer(header, stream)

    # --- helpers ----------------------------------------------------------------------------------------------------------

    def _admit(self, context: grpc.ServicerContext, run: str, role: Role, learner: str, kind: str) -> None:
        """The caller may do this, for this learner, in this run; its connection is counted as `kind`."""
        if self._auth is not None:
            authorization = str(dict(context.invocation_metadata()).get("authorization", ""))
            self._auth.check(authorization.removeprefix("Bearer ") or None, role, learner=learner or None)
        self._engine.require_run(run)
        if role == "learner":
            sense.check_name(learner)
        if self._sockets is not None:
            self._sockets.label(context.peer(), kind, learner or "viewers")


def _receiving(stream: Iterator[bytes], buffer: memoryview) -> Iterator[pb.Received]:
    """Fill `buffer`, saying now and then how far it is: whoever sends must see that it moves."""
    said_at = time.monotonic()
    for filled in filling(stream, buffer):
        if time.monotonic() - said_at >= SAY_EVERY_S:
            yield pb.Received(num_bytes=filled)
            said_at = time.monotonic()
    yield pb.Received(num_bytes=len(buffer), all=True)


def _layout(text: str) -> Layout:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"the layout is not JSON ({error}); send Layout.to_dict().") from error
    if not isinstance(values, dict):
        raise LayoutError(f"the layout is JSON of a {type(values).__name__}; send Layout.to_dict().")
    return Layout.from_dict(values)


def _room_for_model(num_bytes: int) -> memoryview:
    try:
        return room(num_bytes)
    except (MemoryError, OSError, OverflowError) as error:
        raise StoreError(f"a model of {num_bytes} bytes does not fit into the syncer's memory ({error}).") from error


def _check_static(layout: Layout, static: bytes) -> None:
    """The frozen tensors and buffers are what the layout says."""
    try:
        tensors = load(static)
    except SafetensorError as error:
        raise CorruptPayloadError(
            f"the static tensors are not a safetensors file ({error}); send them again."
        ) from error
    if set(tensors) != {spec.name for spec in layout.static}:
        raise LayoutError(
            f"the model brings the static tensors {sorted(tensors)} and its layout names {[s.name for s in layout.static]}."
        )


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _mapped(handler: Callable[[Any, grpc.ServicerContext], M]) -> Callable[[Any, grpc.ServicerContext], M]:
    def call(request: Any, context: grpc.ServicerContext) -> M:
        try:
            return handler(request, context)
        except DilocoError as error:
            abort(context, error)
            raise

    return call


def _mapped_stream(
    handler: Callable[[Any, grpc.ServicerContext], Iterator[M] | Iterator[bytes]],
) -> Callable[[Any, grpc.ServicerContext], Iterator[M] | Iterator[bytes]]:
    def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from handler(request, context)
        except DilocoError as error:
            abort(context, error)

    return call
