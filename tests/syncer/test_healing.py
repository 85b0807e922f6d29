"""A joiner has the inner optimizer's state of a healthy learner, through a syncer and over sockets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tests.syncer.runs import RUN, Net, Raw, method, start, status_of
from tests.syncer.test_replay import replayed
from torch import Tensor

import diloco
from diloco import Heal
from diloco.errors import ConfigError, PayloadError
from diloco.event_log import read_events
from diloco.events import InnerState
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.frames import frames
from diloco.learner import inner_state
from diloco.syncer.server import Syncer

pytestmark = pytest.mark.timeout(60)
Moments = dict[str, Tensor]
Make = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def moments(optimizer: torch.optim.Optimizer) -> list[Moments]:
    state: Any = optimizer.state_dict()["state"]
    return [{name: value.clone() for name, value in state[index].items()} for index in sorted(state)]


class Founder:
    """A learner that trains until it is told to stop, and remembers its moments after each step."""

    def __init__(self, make: Make = adamw) -> None:
        self.make = make
        self.is_under_way, self.may_end = threading.Event(), threading.Event()
        self.past: dict[int, list[Moments]] = {}

    def train(self, address: str) -> None:
        generator, model = torch.Generator().manual_seed(3), Net()
        optimizer = self.make(model.parameters())
        exchange = diloco.connect(address, run=RUN, learner="founder", initialise=True)
        with diloco.Learner(model, optimizer, exchange=exchange) as learner:
            while not self.may_end.is_set():
                x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)
                (model(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                self.past[learner.steps + 1] = moments(optimizer)
                learner.step(tokens=5)
                if min(learner.versions) >= 1:
                    self.is_under_way.set()
                self.may_end.wait(0.01)  # or it would make thousands of steps


@contextmanager
def under_way(tmp_path: Path, make: Make = adamw, **options: Any) -> Iterator[tuple[Syncer, Founder]]:
    founder = Founder(make)
    with start(tmp_path, method(), **options) as syncer, ThreadPoolExecutor(1) as pool:
        training: Future[None] = pool.submit(founder.train, syncer.address)
        try:
            assert founder.is_under_way.wait(30)
            yield syncer, founder
        finally:
            founder.may_end.set()
        training.result(30)


def join(syncer: Syncer, heal: Heal, make: Make = adamw, **keywords: Any) -> tuple[diloco.Learner, Any]:
    model = Net()
    optimizer = make(model.parameters())
    exchange = diloco.connect(syncer.address, run=RUN, learner="joiner")
    return diloco.Learner(model, optimizer, exchange=exchange, heal=heal, **keywords), optimizer


def events_of(tmp_path: Path) -> list[InnerState]:
    return [each for each in read_events(tmp_path / "state" / "events.jsonl") if isinstance(each, InnerState)]


def test_a_joiner_has_the_bits_of_a_peers_moments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with under_way(tmp_path) as (syncer, founder):
        learner, optimizer = join(syncer, Heal("peer", rewarm_steps=3, timeout_s=30.0))
        with learner:
            healed, state = learner.healed, moments(optimizer)
            assert healed is not None
            assert (healed.source, healed.peer, healed.rewarm_steps, healed.reason) == ("peer", "founder", 0, "")
            assert learner.lr_factor == 1.0
            (step,) = {int(each["step"]) for each in state}
            for mine, theirs in zip(state, founder.past[step], strict=True):
                assert mine.keys() == theirs.keys() == {"step", "exp_avg", "exp_avg_sq"}
                for name, value in mine.items():
                    assert torch.equal(value, theirs[name]), name
            assert all(group["lr"] == 1e-2 for group in optimizer.param_groups)
        with pytest.raises(PayloadError, match="no inner state"):  # the syncer holds nothing any more
            syncer.driver.ask(lambda driver: driver.begin_take("joiner", process=1, number=1))
    (event,) = events_of(tmp_path)
    assert (event.learner, event.peer, event.reason) == ("joiner", "founder", "")
    assert event.num_bytes > 2 * 4 * sum(each.numel() for each in Net().parameters())
    code, found = replayed(capsys, str(tmp_path / "state"))
    assert (code, found["difference"], found["gaps"]) == (0, None, [])


def test_a_peer_with_another_optimizer_is_no_peer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)

    with under_way(tmp_path) as (syncer, _), caplog.at_level(logging.WARNING):
        learner, optimizer = join(syncer, Heal("peer", rewarm_steps=3, timeout_s=30.0), sgd)
        with learner:
            healed = learner.healed
            assert healed is not None
            assert (healed.source, healed.peer, healed.rewarm_steps) == ("global", None, 3)
            assert "founder has another inner optimizer" in healed.reason
            assert not optimizer.state
            assert learner.lr_factor == pytest.approx(1 / 3)
    (event,) = events_of(tmp_path)
    assert event.peer is None
    assert "another inner optimizer" in event.reason
    assert "joiner has no peer's inner state: founder has another inner optimizer" in caplog.text


def test_without_a_healthy_learner_a_joiner_heals_from_the_model(tmp_path: Path) -> None:
    with under_way(tmp_path) as (syncer, founder):
        founder.may_end.set()
        while "founder" in status_of(syncer)["learners"]:
            threading.Event().wait(0.02)
        learner, _ = join(syncer, Heal("peer", timeout_s=30.0))
        with learner:
            assert learner.healed is not None
            assert (learner.healed.source, learner.healed.reason) == ("global", "no healthy learner can be asked")


def test_a_peer_that_does_not_answer_is_waited_for_no_longer_than_was_said(tmp_path: Path) -> None:
    """A learner that takes no step cannot take a snapshot."""
    with start(tmp_path, method()) as syncer:
        raw = Raw(syncer.address, "raw")
        publish(raw, syncer)
        with connected(raw):
            learner, _ = join(syncer, Heal("peer", timeout_s=0.7))
        with learner:
            assert learner.healed is not None
            assert (learner.healed.source, learner.healed.reason) == ("global", "none came within 0.7 s")


def test_what_cannot_be_had_is_refused_at_construction(tmp_path: Path) -> None:
    def life(_: int, exchange: Any) -> None:
        model = Net()
        with pytest.raises(ConfigError, match="needs a syncer that relays it"):
            diloco.Learner(model, adamw(model.parameters()), method=method(), exchange=exchange, heal=Heal("peer"))
        diloco.Learner(model, adamw(model.parameters()), method=method(), exchange=exchange).close()

    diloco.run_local(life, learners=1)


# --- hostile senders --------------------------------------------------------------------------------------------------


def publish(raw: Raw, syncer: Syncer) -> None:
    """Give a run its model, and train a first version of it."""
    raw.initialise()
    raw.join()
    raw.beat(4, 20)
    for fragment in range(2):
        raw.push(torch.zeros(raw.layout.fragments[fragment].numel * 4, dtype=torch.uint8), fragment=fragment, step=4)
    while min(status["version"] for status in status_of(syncer)["fragments"]) < 1:
        raw.beat(4, 20)


class Asked(Raw):
    """A learner made of bare calls that is asked for its state, and answers with what it likes."""

    def share(self, content: bytes, **fields: Any) -> None:
        values = {"number": self.heard.inner_wanted, "num_bytes": len(content), **fields}
        header = pb.ShareHeader(run=RUN, learner=self.name, incarnation=self.incarnation, **values)
        self.connection.upload("inner", "ShareInner", frames(header, memoryview(content)), pb.ShareReply)


DIGEST = inner_state.InnerState([adamw((net := Net()).parameters())], dict(net.named_parameters())).digest


def valid() -> bytes:
    model = Net()
    optimizer = adamw(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return inner_state.InnerState([optimizer], dict(model.named_parameters())).snapshot()()


def changed(name: str, value: Tensor) -> bytes:
    from safetensors.torch import load

    return save({**load(valid()), name: value}, metadata={"plain": "{}"})


def without(ending: str) -> bytes:
    from safetensors.torch import load

    kept = {name: each for name, each in load(valid()).items() if not name.endswith(ending)}
    return save(kept, metadata={"plain": "{}"})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 bytes"),
        (without("layers.0.weight/exp_avg"), r"lacks \['exp_avg'\]"),
        (without("/exp_avg_sq"), r"lacks \['exp_avg_sq'\] of a parameter, which AdamW needs"),
        (without("/step"), r"lacks \['step'\]"),
        (changed("0/layers.1.weight/exp_avg_sq", torch.ones(())), r"lacks \['exp_avg_sq'\]"),
        (changed("0/layers.1.weight/more", torch.ones(())), "of another one"),
        (b"\x07" * 200, "cannot be read"),
        (changed("0/layers.0.weight/exp_avg", torch.full((8, 4), float("nan"))), "not finite"),
        (changed("0/layers.0.weight/exp_avg", torch.ones(4, 8)), "of shape"),
        (changed("0/layers.9.weight/exp_avg", torch.ones(4)), "no parameter here"),
        (save({"0/layers.0.weight/step": torch.ones(())}), "cannot be read"),
        (save({}, metadata={"plain": "{}"}), "is empty"),
    ],
)
def test_what_a_peer_gives_is_checked_before_any_of_it_is_taken(content: bytes, said: str) -> None:
    model = Net()
    optimizer = adamw(model.parameters())
    state = inner_state.InnerState([optimizer], dict(model.named_parameters()))
    if content:
        with pytest.raises(PayloadError, match=said):
            state.read(content)
    assert not optimizer.state
    state.take(state.read(valid()))
    assert len(optimizer.state) == 4


def test_a_learner_may_give_a_state_only_when_asked_and_only_one_that_fits(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer, ThreadPoolExecutor(1) as pool:
        raw = Asked(syncer.address, "raw")
        publish(raw, syncer)
        with connected(raw):
            with pytest.raises(PayloadError, match="was not asked"):
                raw.share(valid(), digest=DIGEST, number=5)
            joining = pool.submit(join, syncer, Heal("peer", rewarm_steps=2, timeout_s=30.0))
            while not raw.beat(4, 20).standing.inner_wanted:
                threading.Event().wait(0.02)
            with pytest.raises(PayloadError, match="has at most"):
                raw.share(b"", digest=DIGEST, num_bytes=1 << 40)
            learner, _ = joining.result(30)
            with learner:
                assert learner.healed is not None
                assert learner.healed.source == "global"
                assert "1099511627776 bytes" in learner.healed.reason
            assert status_of(syncer)["spooled_bytes"] == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (valid(), ""),
        (changed("0/layers.0.weight/exp_avg", torch.full((8, 4), float("inf"))), "not finite"),
        (without("/exp_avg_sq"), "lacks ['exp_avg_sq']"),
    ],
)
def test_a_state_that_is_no_state_costs_the_joiner_nothing_but_time(content: bytes, said: str, tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer, ThreadPoolExecutor(1) as pool:
        raw = Asked(syncer.address, "raw")
        publish(raw, syncer)
        with connected(raw):
            joining = pool.submit(join, syncer, Heal("peer", rewarm_steps=2, timeout_s=30.0))
            while not raw.beat(4, 20).standing.inner_wanted:
                threading.Event().wait(0.02)
            raw.share(content, digest=DIGEST)
            learner, optimizer = joining.result(30)
        with learner:
            assert learner.healed is not None
            if not said:
                assert (learner.healed.source, learner.healed.peer, len(optimizer.state)) == ("peer", "raw", 4)
            else:
                assert (learner.healed.source, learner.healed.rewarm_steps) == ("global", 2)
                assert said in learner.healed.reason
                assert not optimizer.state
        assert status_of(syncer)["spooled_bytes"] == 0  # it is held no longer than it takes


@contextmanager
def connected(raw: Raw) -> Iterator[None]:
    """It listens, as a healthy learner does."""
    request = pb.WatchRequest(run=RUN, learner=raw.name, incarnation=raw.incarnation)
    stream = raw.connection.watch("watch", request)
    next(stream)
    try:
        yield
    finally:
        raw.connection.close_channel("watch")
