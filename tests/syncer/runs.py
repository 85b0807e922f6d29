"""A tiny run for the syncer's tests: one model, learners that train it, and raw calls that misbehave."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

import diloco
from diloco.core.fragments import Layout, make_layout
from diloco.core.rounds import AllLive
from diloco.exchange.base import Exchange
from diloco.exchange.connection import Connection
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import bytes_of, frames
from diloco.syncer.server import Options, Syncer

RUN = "tiny"


def method(at_least: int = 1, codec: str = "fp32", **keywords: Any) -> diloco.Method:
    """Two fragments, every 4 steps."""
    return diloco.StreamingDiLoCo(
        sync_every=4, overlap=1, mix=0.0, codec=codec, fragments=diloco.Named([["layers.0.*"], ["layers.1.*"]]),
        quorum=AllLive(at_least=at_least), **keywords,
    )  # fmt: skip


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, width), nn.Linear(width, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x)))


def train(
    index: int,
    exchange: Exchange,
    given: diloco.Method | None,
    steps: int,
    at_step: Callable[[int], None] | None = None,
) -> Any:
    """A learner's life; returns its global model and its metrics."""
    generator = torch.Generator().manual_seed(index)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with diloco.Learner(model, optimizer, method=given, exchange=exchange) as learner:
        for step in range(1, steps + 1):
            x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=5)
            if at_step is not None:
                at_step(step)
        learner.state_dict()  # answers that are on their way
        return learner.global_state_dict(), learner.metrics()


def layout() -> Layout:
    return make_layout(Net(), method().fragments)


def start(tmp_path: Path, given: diloco.Method, **options: Any) -> Syncer:
    return Syncer(RUN, given, Options("127.0.0.1:0", tmp_path / "state", **options))


class Raw:
    """A learner made of bare calls. `held`: the layout of its model, unless it is `layout()`."""

    def __init__(
        self, address: str, name: str = "raw", token: str | None = None, ca: Path | None = None, *, held: Layout | None = None
    ) -> None:  # fmt: skip
        self.name = name
        self.layout = held or layout()
        self.connection = Connection(address, token=token, ca=ca, insecure=False)
        self.incarnation = 0

    def initialise(self, values: float = 1.0, wanted: Layout | None = None, **fields: Any) -> None:
        model = wanted or self.layout
        parts = [bytes_of(torch.full((fragment.numel,), values)) for fragment in model.fragments]
        parts.append(memoryview(save({})))
        header = pb.InitialiseHeader(
            run=RUN, learner=self.name, layout=json.dumps(model.to_dict()), part_bytes=[len(part) for part in parts], **fields
        )  # fmt: skip
        self.connection.upload("joins", "Initialise", frames(header, *parts), pb.InitialiseReply)

    def join(self, wanted: Layout | None = None, run: str = RUN, text: str | None = None) -> None:
        request = pb.JoinRequest(
            run=run, learner=self.name, layout=text or json.dumps((wanted or self.layout).to_dict())
        )
        self.incarnation = self.connection.call("joins", "Join", request, pb.JoinReply).incarnation

    def beat(self, step: int = 1, tokens: int = 5, **fields: Any) -> pb.HeartbeatReply:
        request = pb.HeartbeatRequest(
            run=RUN, learner=self.name, incarnation=self.incarnation, step=step, tokens=tokens, **fields
        )
        return self.connection.call("control", "Heartbeat", request, pb.HeartbeatReply)

    def leave(self, tokens: int = 0) -> None:
        request = pb.LeaveRequest(run=RUN, learner=self.name, incarnation=self.incarnation, tokens=tokens)
        self.connection.call("control", "Leave", request, pb.LeaveReply)

    def header(self, num_bytes: int, **fields: Any) -> pb.PushHeader:
        values = {"fragment": 0, "round": 0, "base": 0, "tokens": 5, "steps": 1, "trained": 5, "step": 2, **fields}
        values = {"incarnation": self.incarnation, "num_bytes": num_bytes, **values}
        return pb.PushHeader(run=RUN, learner=self.name, **values)

    def push(self, payload: torch.Tensor, **fields: Any) -> pb.PushReply:
        return self.push_frames(frames(self.header(payload.numel(), **fields), bytes_of(payload)))

    def push_frames(self, stream: Iterator[bytes]) -> pb.PushReply:
        return self.connection.upload("contributions", "Push", stream, pb.PushReply)


def _victim(address: str, kill_at: int) -> None:
    """A learner process that is killed after a step."""

    def at_step(step: int) -> None:
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    train(1, diloco.connect(address, run=RUN, learner="victim"), None, kill_at, at_step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _victim(sys.argv[1], int(sys.argv[2]))
