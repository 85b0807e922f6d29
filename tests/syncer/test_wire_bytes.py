"""Bytes by learner and kind: what a real syncer counts is what its peers send and get."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import grpc
import pytest
import torch
from tests.frames import frames
from tests.syncer.runs import RUN, Raw, layout, method, start

import diloco
from diloco.errors import UnknownRunError
from diloco.event_log import read_events
from diloco.events import Traffic
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.tensors import bytes_of
from diloco.syncer.wire_bytes import FRAME_BYTES, WireBytes

ONES = diloco.FP32().encode(torch.ones(layout().fragments[0].numel))


def test_a_contribution_is_counted_to_the_byte(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer, ExitStack() as stack:
        raw = Raw(syncer.address)
        stack.callback(raw.connection.close)
        raw.initialise()
        raw.join()
        sent = [
            list(frames(raw.header(ONES.numel(), number=number, trained=5 * number), bytes_of(ONES)))
            for number in (1, 2)
        ]
        for messages in sent:
            raw.push_frames(iter(messages))
        with pytest.raises(UnknownRunError):
            raw.connection.call("control", "Status", pb.StatusRequest(run="another"), pb.StatusReply)
        reply = raw.connection.call("control", "Status", pb.StatusRequest(run=RUN), pb.StatusReply)
        counted = json.loads(reply.status)["num_bytes"]
        assert counted["raw"]["contributions"]["received"] == sum(
            FRAME_BYTES + len(message) for messages in sent for message in messages
        )
        assert counted["raw"]["contributions"]["sent"] > 2 * FRAME_BYTES
        assert counted["raw"]["joins"]["received"] > 4 * sum(fragment.numel for fragment in layout().fragments)
        assert counted["raw"]["control"].keys() == {"received", "sent"}
        asked = FRAME_BYTES + len(pb.StatusRequest(run=RUN).SerializeToString())
        assert counted["viewers"] == {"control": {"received": asked}}  # this call's answer is under way
    newest = {event.learner: event for event in read_events(tmp_path / "state" / "events.jsonl")
              if isinstance(event, Traffic)}  # fmt: skip
    assert newest["raw"].received_bytes == {kind: ways["received"] for kind, ways in counted["raw"].items()}
    assert newest["viewers"].sent_bytes["control"] > FRAME_BYTES


def test_what_comes_before_the_label_belongs_to_it_and_what_comes_after_the_call_to_nobody() -> None:
    context = cast("grpc.ServicerContext", object())
    wire_bytes = WireBytes()
    with wire_bytes.call(context):
        stream = wire_bytes.received(iter([b"header", b"chunk"]), context)
        next(stream)
        assert wire_bytes.totals() == {}
        wire_bytes.label(context, "site-a", "contributions")
        assert wire_bytes.totals() == {("site-a", "contributions", "received"): FRAME_BYTES + 6}
        wire_bytes.count(context, "sent", b"reply")
    next(stream)
    assert wire_bytes.totals() == {
        ("site-a", "contributions", "received"): FRAME_BYTES + 6, ("site-a", "contributions", "sent"): FRAME_BYTES + 5,
    }  # fmt: skip
    with wire_bytes.call(context):  # refused
        wire_bytes.count(context, "received", b"x" * 100)
    assert sum(wire_bytes.totals().values()) == 2 * FRAME_BYTES + 11
