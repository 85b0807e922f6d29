"""A tiny run for the syncer's tests: one model, learners that train it, and raw calls that misbehave."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save
from tests.frames import frames
from torch import nn

import diloco
from diloco.core.fragments import Layout, make_layout
from diloco.core.quorum import AllLive
from diloco.exchange.base import Exchange
from diloco.exchange.connection import Connection
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.tensors import bytes_of
from diloco.protocol.members import Claim, Deadlines
from diloco.syncer.hosting import SyncerDriver
from diloco.syncer.server import Options, Syncer

RUN = "tiny"

PATIENT = Deadlines(lost_floor_s=600.0, lost_cap_s=600.0, reconnect_floor_s=600.0, stalled_floor_s=600.0)
"""No learner is evicted, also on a busy machine."""


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
        hidden: torch.Tensor = self.layers[0](x)
        output: torch.Tensor = self.layers[1](torch.tanh(hidden))
        return output


def train(
    index: int,
    exchange: Exchange,
    given: diloco.Method | None,
    steps: int | Iterable[int],
    at_step: Callable[[int], None] | None = None,
) -> Any:
    """A learner's life of so many steps, or of these, from 1 on; until the run's pool has no place for it. Returns its
    global model and its metrics."""
    generator = torch.Generator().manual_seed(index)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with diloco.Learner(model, optimizer, method=given, exchange=exchange) as learner:
        for step in range(1, steps + 1) if isinstance(steps, int) else steps:
            x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=5)
            if at_step is not None:
                at_step(step)
            if learner.drained:
                break
        learner.state_dict()  # answers that are on their way
        return learner.global_state_dict(), learner.metrics()


class LearnerThreads(ThreadPoolExecutor):
    """Threads of learners. When the test fails, their exchanges are closed: no learner trains or waits on, and the
    failure is reported at once."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self._exchanges: list[Exchange] = []

    def connect(self, address: str, **options: Any) -> Exchange:
        self._exchanges.append(diloco.connect(address, run=RUN, **options))
        return self._exchanges[-1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        for exchange in self._exchanges if kind is not None else ():
            exchange.close()
        return super().__exit__(kind, error, trace)


def layout() -> Layout:
    return make_layout(Net(), method().fragments)


def start(tmp_path: Path, given: diloco.Method, *, deadlines: Deadlines = PATIENT, **options: Any) -> Syncer:
    return Syncer(RUN, given, Options("127.0.0.1:0", tmp_path / "state", deadlines=deadlines, **options))


def connection_to(address: str, stall_floor_s: float, keys: Path | None = None) -> Connection:
    """A connection with a stall timeout of its own, before it knows that of the run."""
    connection = Connection(address, keys=keys)
    connection.expect_answers_within(stall_floor_s)
    return connection


class Raw:
    """A learner made of bare calls. `held`: the layout of its model, unless it is `layout()`."""

    def __init__(
        self, address: str, name: str = "raw", keys: Path | None = None, *, held: Layout | None = None
    ) -> None:
        self.name = name
        self.layout = held or layout()
        self.connection = connection_to(address, 60.0, keys)  # also on a busy machine
        self.incarnation = self.process = self.boot = 0
        self.numbers: dict[int, int] = {}
        self.heard = pb.Standing()

    def initialise(self, values: float = 1.0, wanted: Layout | None = None, **fields: Any) -> None:
        model = wanted or self.layout
        parts = [bytes_of(torch.full((fragment.numel,), values)) for fragment in model.fragments]
        parts.append(memoryview(save({})))
        header = pb.InitialiseHeader(
            run=RUN, learner=self.name, layout=json.dumps(model.to_dict()), part_bytes=[len(part) for part in parts],
            **fields,
        )  # fmt: skip
        self.connection.upload("joins", "Initialise", frames(header, *parts), pb.InitialiseReply)

    def join(self, wanted: Layout | None = None, run: str = RUN, text: str | None = None, **fields: Any) -> None:
        held = text or json.dumps((wanted or self.layout).to_dict())
        self.process = fields.pop("process", self.process)
        request = pb.JoinRequest(run=run, learner=self.name, layout=held, process=self.process, **fields)
        self.incarnation = self.connection.call("joins", "Join", request, pb.JoinReply).incarnation
        self.numbers = {}
        self.beat(0, 0)

    def beat(self, step: int = 1, tokens: int = 5, **fields: Any) -> pb.HeartbeatReply:
        values = {"incarnation": self.incarnation, "process": self.process, **fields}
        request = pb.HeartbeatRequest(run=RUN, learner=self.name, step=step, steps=step, tokens=tokens, **values)
        reply = self.connection.call("control", "Heartbeat", request, pb.HeartbeatReply)
        self.boot, self.heard = reply.lineage.boot, reply.standing
        return reply

    def leave(self, tokens: int = 0, **fields: Any) -> None:
        values = {"incarnation": self.incarnation, "process": self.process, "tokens": tokens, **fields}
        request = pb.LeaveRequest(run=RUN, learner=self.name, **values)
        self.connection.call("control", "Leave", request, pb.LeaveReply)

    def header(self, num_bytes: int, **fields: Any) -> pb.PushHeader:
        """Of the next contribution to its fragment, unless `fields` give a number."""
        values = {"fragment": 0, "round": 0, "base": 0, "tokens": 5, "steps": 1, "trained": 5, "step": 2, **fields}
        number = self.numbers.get(values["fragment"], 0) + 1
        values = {
            "incarnation": self.incarnation,
            "process": self.process,
            "boot": self.boot,
            "num_bytes": num_bytes,
            "number": number,
            **values,
        }
        return pb.PushHeader(run=RUN, learner=self.name, **values)

    def push(self, payload: torch.Tensor, **fields: Any) -> int:
        """A contribution; returns its number once it is acknowledged."""
        header = self.header(payload.numel(), **fields)
        self.push_frames(frames(header, bytes_of(payload)))
        self.numbers[header.fragment] = max(self.numbers.get(header.fragment, 0), header.number)
        return header.number

    def push_frames(self, stream: Iterator[bytes]) -> pb.PushReply:
        return self.connection.upload("contributions", "Push", stream, pb.PushReply)

    def verdict(self, number: int, fragment: int = 0) -> str | None:
        """What became of a contribution, as heard last: "open", why it was rejected, or None where it is merged."""
        for verdict in self.heard.verdicts:
            if (verdict.fragment, verdict.number) == (fragment, number):
                return verdict.reason if verdict.HasField("reason") else None
        return "open"


Fetch = Callable[[int, int], Any]
"""Fragment and base → what `Driver.fetch` gives for it."""


def tamper(syncer: Syncer, tampering: Callable[[Fetch, int, int], Any]) -> None:
    """From now on `tampering` makes the answer to each fetch."""

    def replace(driver: SyncerDriver) -> None:
        fetch = driver.fetch

        def tampered(fragment: int, base: int, claim: Claim | None = None) -> Any:
            return tampering(lambda f, b: fetch(f, b, claim), fragment, base)

        driver.fetch = tampered  # type: ignore[method-assign]

    syncer.driver.ask(replace)


def status_of(syncer: Syncer) -> dict[str, Any]:
    return syncer.driver.ask(lambda driver: driver.status())


def versions_of(syncer: Syncer) -> list[int]:
    return list(syncer.driver.ask(lambda driver: driver.state.versions))


def num_live(syncer: Syncer) -> int:
    return syncer.driver.ask(lambda driver: driver.num_live)


def is_initialised(syncer: Syncer) -> bool:
    return syncer.driver.ask(lambda driver: driver.state.is_initialised)


def fall_silent(syncer: Syncer, learner: str) -> None:
    """As if nothing had been heard of a learner for longer than `PATIENT` allows: it is evicted."""

    def event(driver: SyncerDriver) -> None:
        driver.core.members[learner].seen_at -= 2 * PATIENT.lost_cap_s
        driver.tick()

    syncer.driver.ask(event)


def position(syncer: Syncer) -> tuple[int, int]:
    """The highest inner step known, and the run's tokens."""
    return syncer.driver.ask(lambda driver: (driver.state.step, driver.state.run_tokens))


def _victim(address: str, kill_at: int) -> None:
    """A learner process that is killed after a step."""

    def at_step(step: int) -> None:
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    train(1, diloco.connect(address, run=RUN, learner="victim"), None, kill_at, at_step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _victim(sys.argv[1], int(sys.argv[2]))
