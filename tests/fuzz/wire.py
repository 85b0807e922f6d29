"""Readers of what crosses the network: a real syncer given raw messages, a learner's end given raw replies, codecs,
and what the ranks of one learner tell each other."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import grpc
import torch
from google.protobuf import message as protobuf_message
from google.protobuf.message import DecodeError
from safetensors.torch import save
from tests.frames import frames
from tests.fuzz.examining import Target
from tests.fuzz.mutations import JSON, Form, joined, mutated, mutated_parts, parted, protobuf
from tests.syncer.runs import RUN, Raw, layout, method, start, versions_of

import diloco
from diloco.core.codecs import CODECS, codec_from_name
from diloco.core.global_fragment import GlobalFragment
from diloco.core.layout import digest
from diloco.core.update import Update
from diloco.errors import CorruptPayloadError, DilocoError
from diloco.exchange.base import Arrived, Rejoined, StartingState
from diloco.exchange.connection import Connection
from diloco.exchange.dialling import Dialler, fetch_status
from diloco.exchange.group import read_frame, to_tensor
from diloco.exchange.island.rank_messages import Message, read_message, value_of
from diloco.exchange.probe import probe
from diloco.exchange.remote.messages import method_of, standing_of
from diloco.exchange.remote.transfers import Receiver
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire import values as wire_values
from diloco.exchange.wire.rpc import ERROR_KEY, from_rpc_error, path
from diloco.exchange.wire.tensors import bytes_of
from diloco.following.follower import newest_model
from diloco.protocol.contribution import CallForWork, Drained, Rejection
from diloco.protocol.leases import Grant
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Claim
from diloco.protocol.session import requests

METHODS: dict[str, type[protobuf_message.Message]] = {
    "Describe": pb.DescribeRequest, "Join": pb.JoinRequest, "Heartbeat": pb.HeartbeatRequest,
    "Lease": pb.LeaseRequest, "Leave": pb.LeaveRequest, "Status": pb.StatusRequest, "Watch": pb.WatchRequest,
    "Pull": pb.PullRequest, "Initialise": pb.InitialiseHeader, "Push": pb.PushHeader, "Probe": pb.ProbeHeader,
    "Promote": pb.PromoteRequest, "Deal": pb.DealRequest,
}  # fmt: skip
"""The calls of a syncer, and what each begins with."""

ONES = diloco.FP32().encode(torch.ones(layout().fragments[0].numel))
PUSHED = diloco.AsyncDiLoCo(sync_every=4, fragments=method().fragments, codec="fp32")

CALL_S = 20.0
"""No call of this size is under way for so long."""

MOST_REPLIES = 8
"""Replies that are taken before a call is broken off."""

REFUSED = (b"Initialise", b"Push", b"Heartbeat", b"Promote")
"""Calls that come too late, or from a learner that follows another syncer."""

MOST_TIMES = 5
"""That a call is made again."""

LOOK_EVERY = 16
"""Calls between two looks whether the run still comes to a next version."""


def _header(form_of: dict[str, Form]) -> Any:
    """Mutates [name of a call, its header, what follows]: by what the call's header is."""

    def mutate(data: bytes, random: Random) -> bytes:
        name = parted(data)[0].decode(errors="replace") if parted(data) else ""
        return mutated_parts(data, lambda index: form_of.get(name) if index == 1 else None, random)

    return mutate


# --- a syncer, given messages -----------------------------------------------------------------------------------------


class SyncerUnderFire:
    """A real syncer over a real socket, an honest learner, and one that sends anything."""

    def __init__(self) -> None:
        self._root = tempfile.TemporaryDirectory()
        self.syncer = start(Path(self._root.name), PUSHED, journal=False)
        self.honest, self.liar = Raw(self.syncer.address, "honest"), Raw(self.syncer.address, "liar")
        self.honest.initialise()
        self.honest.join()
        self.liar.join()
        self._channel = grpc.insecure_channel(self.syncer.address)
        self._num_calls = self._trained = 0

    def seeds(self) -> Iterator[bytes]:
        """A valid call of each kind."""
        seen = pb.Lineage(run_id="0" * 32, epoch=1, boot=5)
        who = {"run": RUN, "learner": "liar"}
        text = json.dumps(layout().to_dict())
        ones = bytes_of(ONES)
        push = pb.PushHeader(
            **who, incarnation=1, number=1, tokens=5, steps=1, trained=5, step=2, num_bytes=len(ones), boot=1,
            discarded=[pb.Discard(reason="overlap", tokens=0)], units=[pb.Units(first=0, stop=2)], tensors=[0],
        )  # fmt: skip
        whole = [bytes_of(torch.ones(fragment.numel)) for fragment in layout().fragments]
        parts = [*whole, memoryview(save({}))]
        model = pb.InitialiseHeader(
            **who, layout=text, source="fuzz", step=1, tokens=1, part_bytes=[len(part) for part in parts]
        )
        calls: list[tuple[str, list[bytes]]] = [
            ("Describe", [pb.DescribeRequest(run=RUN).SerializeToString()]),
            ("Join", [pb.JoinRequest(**who, layout=text, process=3).SerializeToString()]),
            ("Heartbeat", [pb.HeartbeatRequest(
                **who, incarnation=1, step=4, steps=4, tokens=9, step_s=0.5, versions=[0, 0], confirmed=[0, 0],
                earlier_tokens=7,
            ).SerializeToString()]),
            ("Lease", [pb.LeaseRequest(
                **who, incarnation=1, number=1, num_units=2, data_units=10, data_passes=3, data_digest="ab",
                unit_tokens=4, claim=[pb.UnitSet(ranges=[pb.Units(first=1, stop=2)])] * 2
            ).SerializeToString()]),
            ("Leave", [pb.LeaveRequest(
                **who, incarnation=1, tokens=9, earlier_tokens=7, process=3
            ).SerializeToString()]),
            ("Status", [pb.StatusRequest(run=RUN).SerializeToString()]),
            ("Watch", [pb.WatchRequest(**who, incarnation=1, versions=[0, 0]).SerializeToString()]),
            ("Pull", [pb.PullRequest(
                **who, incarnation=1, fragment=1, base=-1, segments=pb.Segments(first=0, stop=1), versions=[0, 0]
            ).SerializeToString()]),
            ("Initialise", list(frames(model, *parts))),
            ("Push", list(frames(push, ones))),
            ("Probe", [pb.ProbeHeader(**who, up_bytes=8, down_bytes=8).SerializeToString(), bytes(8)]),
            ("Promote", [pb.PromoteRequest(run=RUN).SerializeToString()]),
        ]  # fmt: skip
        calls[2][1][0] += pb.HeartbeatRequest(seen=seen).SerializeToString()
        for name, messages in calls:
            yield joined([name.encode(), *messages])

    def call(self, data: bytes) -> None:
        """Make a call; raises the syncer's refusal."""
        name, *messages = parted(data) or [b""]
        known = METHODS.get(name.decode(errors="replace"))
        if known is None:
            return
        if messages:
            messages[0] = self._brought_up_to_date(known, messages[0])
        try:
            self._send(name.decode(), messages)
        finally:
            self.syncer.driver.raise_failure()
            self._num_calls += 1
            if self._num_calls % LOOK_EVERY == 0:
                self.look()

    def _send(self, name: str, messages: list[bytes], times: int = 0) -> None:
        call: Any = self._channel.stream_stream(path(name), None, None)(iter(messages), timeout=CALL_S)
        try:
            for num, _ in enumerate(call):
                if name == "Watch" or num == MOST_REPLIES:
                    call.cancel()
                    return None
        except grpc.RpcError as error:
            if call.code() is grpc.StatusCode.UNAVAILABLE and times < MOST_TIMES:  # hung up on, after many refusals
                return self._send(name, messages, times + 1)
            assert ERROR_KEY in dict(call.trailing_metadata() or ()), (
                f"{name} ended with {call.code()}: {call.details()}"
            )
            raise from_rpc_error(error, self.syncer.address) from error

    def _brought_up_to_date(self, kind: type[protobuf_message.Message], data: bytes) -> bytes:
        """An incarnation, number or process that is 1 is today's: a message that was valid once still is."""
        try:
            message: Any = kind.FromString(data)
        except DecodeError:
            return data
        fields = {field.name for field in kind.DESCRIPTOR.fields}
        if "incarnation" in fields and message.incarnation == 1:
            if not self.syncer.driver.ask(lambda driver: "liar" in driver.core.members):
                self.liar.join()
            account = self.syncer.driver.ask(lambda driver: driver.core.accounting.accounts["liar"])
            message.incarnation, message.process = account.incarnation, account.process
        if "boot" in fields and message.boot == 1:
            message.boot = self.honest.boot
        return message.SerializeToString()

    def look(self) -> None:
        """The honest learner's next contribution makes the next version."""
        version = versions_of(self.syncer)[0]
        self._trained += 5
        step = self.syncer.driver.ask(lambda driver: driver.state.step) + 4
        assert self.honest.push(ONES, round=version, base=version, trained=self._trained, step=step)
        self.syncer.driver.drain()
        self.syncer.driver.raise_failure()
        assert versions_of(self.syncer)[0] > version, "the run comes to no next version"
        json.dumps(fetch_status(self.syncer.address, run=RUN))

    def close(self) -> None:
        """End all of it."""
        self._channel.close()
        for raw in (self.honest, self.liar):
            raw.connection.close()
        self.syncer.close()
        self._root.cleanup()


def calls() -> Target:
    """Every call of a real syncer: messages in protobuf, streams of a header, chunks and a checksum."""
    it = SyncerUnderFire()
    mutate = _header({name: protobuf(kind) for name, kind in METHODS.items()})
    seeds, others = [], []
    for seed in it.seeds():
        (others if parted(seed)[0] in REFUSED else seeds).append(seed)
    return Target("calls", tuple(seeds), it.call, mutate, it.close, tuple(others))


# --- a learner, given replies -----------------------------------------------------------------------------------------

REPLIES: dict[str, type[protobuf_message.Message]] = {
    "Describe": pb.DescribeReply, "Join": pb.JoinReply, "Heartbeat": pb.HeartbeatReply, "Lease": pb.LeaseReply,
    "Status": pb.StatusReply, "Watch": pb.Notice, "Pull": pb.PullHeader, "Push": pb.PushReply, "Probe": pb.ProbeReply,
    "Promote": pb.PromoteReply, "Initialise": pb.InitialiseReply,
}  # fmt: skip

UNARY = (b"Describe", b"Join", b"Heartbeat", b"Lease", b"Status", b"Promote")
"""Calls that have one answer."""


class LearnerUnderFire(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A learner's end of calls, and a server that answers with given bytes."""

    def __init__(self) -> None:
        self._answers: dict[str, list[bytes]] = {}
        self._server = grpc.server(ThreadPoolExecutor(4), handlers=[self])
        self._address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        self._connection = Connection(self._address)
        self._receiver = Receiver(Dialler([self._connection]), RUN, layout(), PUSHED)

    def service(self, details: Any) -> Any:
        """As gRPC calls it: a handler that answers any call."""
        name = details.method.rsplit("/", 1)[-1]
        return grpc.stream_stream_rpc_method_handler(lambda stream, context: iter(self._answers.get(name, [])))

    def seeds(self) -> Iterator[bytes]:
        """A valid answer to each call."""
        seen = pb.Lineage(run_id="0" * 32, epoch=1, boot=5)
        standing = pb.Standing(
            step=4, start_step=4, run_tokens=9, num_live=1, versions=[1, 1], calls=[pb.Call(fragment=1, version=1)],
            verdicts=[pb.Verdict(fragment=0, number=1, reason="missed", version=1)], order=3,
        )  # fmt: skip
        theta = torch.ones(layout().fragments[0].numel)
        outer = memoryview(save({"momentum": theta.clone()}))
        header = pb.PullHeader(
            base=0, version=1, contributors=["a"], weights=[1.0], scale=1.0, digest=digest(theta), lossless=True,
            num_bytes=4 * theta.numel() + len(outer), outer_bytes=len(outer), lineage=seen,
            verdicts=standing.verdicts,
        )  # fmt: skip
        described = pb.DescribeReply(
            method=json.dumps(PUSHED.to_dict()), layout=json.dumps(layout().to_dict()), initialised=True, lineage=seen
        )
        static = memoryview(save({"b": torch.ones(2)}))
        messages: list[tuple[str, list[bytes]]] = [
            ("Describe", [described.SerializeToString()]),
            ("Join", [pb.JoinReply(incarnation=3, lineage=seen).SerializeToString()]),
            ("Heartbeat", [pb.HeartbeatReply(lineage=seen, standing=standing).SerializeToString()]),
            ("Lease", [pb.LeaseReply(units=[pb.Units(first=0, stop=3)]).SerializeToString()]),
            ("Status", [pb.StatusReply(status='{"run": "tiny"}').SerializeToString()]),
            ("Watch", [pb.Notice(welcome=pb.Welcome(lineage=seen, standing=standing)).SerializeToString()]),
            ("Pull", list(frames(header, bytes_of(theta), outer))),
            ("Pull", list(frames(pb.PullHeader(num_bytes=len(static), lineage=seen, lossless=True), static))),
            ("Push", [pb.PushReply(received=pb.Received(num_bytes=9, all=True)).SerializeToString()] * 2),
            ("Probe", [pb.ProbeReply(num_bytes=8, seconds=0.1).SerializeToString(), bytes(8)]),
        ]
        received = pb.Received(num_bytes=9, all=True)
        messages += [
            ("Promote", [pb.PromoteReply(epoch=2, versions=[1, 1]).SerializeToString()]),
            ("Initialise", [pb.InitialiseReply(received=received).SerializeToString()]),
        ]  # fmt: skip
        for name, answer in messages:
            yield joined([name.encode(), *answer])

    def hear(self, data: bytes) -> None:
        """Make a call that gets this answer."""
        name, *answer = parted(data) or [b""]
        if name in UNARY:  # gRPC itself waits for the call's deadline where there is none, or a second one
            answer = [*answer, b""][:1]
        self._answers = {name.decode(errors="replace"): answer}
        connection, claim = self._connection, Claim("a", 1, 1)
        match name:
            case b"Describe":
                described = connection.call("control", "Describe", pb.DescribeRequest(), pb.DescribeReply)
                method_of(described)
                with suppress(DilocoError):  # there is no model behind it
                    newest_model(self._address, run=RUN).state_dict()
            case b"Join":
                wire_values.value_of(Lineage, connection.call("joins", "Join", pb.JoinRequest(), pb.JoinReply).lineage)
            case b"Heartbeat":
                reply = connection.call("control", "Heartbeat", pb.HeartbeatRequest(), pb.HeartbeatReply)
                standing_of(reply.standing)
            case b"Lease":
                leased = connection.call("control", "Lease", pb.LeaseRequest(), pb.LeaseReply)
                wire_values.value_of(Grant, leased, number=1)
            case b"Status":
                fetch_status(self._address, run=RUN)
            case b"Watch":
                for notice in connection.watch("control", pb.WatchRequest()):
                    standing_of(notice.welcome.standing if notice.HasField("welcome") else notice.standing)
            case b"Pull":
                is_static = len(answer) > 1 and not any(b"momentum" in each for each in answer)
                fetch = requests.Fetch(claim, None if is_static else 0, -1, True)
                self._receiver.fetch(fetch)
            case b"Push":
                connection.upload("contributions", "Push", iter([b"header"]), pb.PushReply)
            case b"Promote":
                promoted = connection.call("control", "Promote", pb.PromoteRequest(), pb.PromoteReply)
                json.dumps([promoted.epoch, list(promoted.versions)])
            case b"Initialise":
                connection.upload("joins", "Initialise", iter([b"header"]), pb.InitialiseReply)
            case b"Probe":
                probe(connection, pb.ProbeHeader(up_bytes=8, down_bytes=8))

    def close(self) -> None:
        """End all of it."""
        self._connection.close()
        self._server.stop(grace=None).wait()


def replies() -> Target:
    """Every answer of a syncer, as a learner or viewer reads it."""
    it = LearnerUnderFire()
    mutate = _header({name: protobuf(kind) for name, kind in REPLIES.items()})
    return Target("replies", tuple(it.seeds()), it.hear, mutate, it.close)


# --- ranks of one learner ---------------------------------------------------------------------------------------------


def ranks() -> Target:
    """What rank 0 tells the other ranks of its learner, and the small frames of all ranks."""
    held = GlobalFragment(0, 2, torch.rand(5), {"steps": torch.tensor(3)}, None, "d0")
    update = Update(0, 1, 2, ("site-a",), (1.0,), 0.5, "d0", lossless=True)
    opened = StartingState("site-a", 3, 40, (held,), {"b": torch.rand(2)}, run_tokens=9)
    told = (
        [Rejoined(opened, "replaced"), Rejection(1, 4, "missed")], [Arrived(update, held.bare, 3, mean=torch.rand(5))],
        Grant(1, ((0, 3),), ()), {"loaded": True, "run_tokens": 3}, [CallForWork(0, 2), Drained()],
    )  # fmt: skip
    seeds = [Message.of(value).raw for value in told]
    others = (Message.of(error=CorruptPayloadError("no")).raw, b'{"bytes": 12}'.ljust(64))

    def read(data: bytes) -> None:
        read_frame(to_tensor(data))
        said, specs = read_message(data)
        sizes = [math.prod(shape) for shape, _, _ in specs]
        if max(sizes, default=0) <= MOST_ELEMENTS:
            value_of(said, [torch.zeros(shape, dtype=dtype) for shape, dtype, _ in specs])

    return Target("ranks", tuple(seeds), read, lambda data, random: mutated(data, JSON, random), others=others)


# --- payloads ---------------------------------------------------------------------------------------------------------

MOST_ELEMENTS = 100_000
"""Of a vector in a test: the caller knows how many there are."""


def codecs() -> Target:
    """A codec's name from a run file, and a payload of any bytes."""
    generator = torch.Generator().manual_seed(0)
    seeds = []
    for name in CODECS:
        for num_elements in (5, 700):
            payload = codec_from_name(name).encode(torch.randn(num_elements, generator=generator))
            seeds.append(joined([name.encode(), str(num_elements).encode(), bytes(bytes_of(payload))]))

    def read(data: bytes) -> None:
        parts = [*parted(data), b"", b"", b""]
        codec = codec_from_name(parts[0].decode(errors="replace"))
        num_elements = int(parts[1]) if parts[1].isdigit() and len(parts[1]) < 9 else 0
        payload = torch.tensor(list(parts[2]), dtype=torch.uint8)
        if num_elements > MOST_ELEMENTS:
            return
        codec.check(payload, num_elements)
        decoded = codec.decode(payload, num_elements)
        assert torch.isfinite(decoded).all(), f"{codec.name} decodes to what is not finite"

    return Target("codecs", tuple(seeds), read, lambda data, random: mutated_parts(data, lambda _: None, random))
