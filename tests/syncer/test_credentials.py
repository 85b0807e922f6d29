"""A learner whose credentials end while it trains, or waits for whatever, ends with one sentence."""

from __future__ import annotations

import datetime as dt
import gc
import itertools
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.processes import until
from tests.chaos.relay import Link, Relay
from tests.exchange.test_remote import living
from tests.syncer.runs import RUN, Net, Raw, method, start, status_of, train, versions_of

import diloco
from diloco import errors
from diloco.core.fragments import make_layout
from diloco.demo.plan import free_port
from diloco.exchange import connection
from diloco.exchange.credentials import DialSettings, find_reason
from diloco.exchange.dialling import fetch_status
from diloco.exchange.key_pair import read_key_pair
from diloco.syncer.keys.keyring import Keyring
from diloco.syncer.server import Options, Syncer

DAY = dt.timedelta(days=1)
WIDTH, MUCH_BYTES = 30_000, 200_000
WAIT_S = 300.0


class Certificates:
    """Of one learner, site-a, and of another, site-b; `end` ends those of the first."""

    words = r"the certificate of 'site-a' was revoked; ask the run's operator for a new one"

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys, self._patch = path / "keys", monkeypatch
        Keyring.new(self.keys, RUN, ["127.0.0.1"], [("site-a", "learner"), ("site-b", "learner")], DAY)

    def end(self) -> None:
        Keyring.read(self.keys).revoke("site-a")


class ExpiringCertificates(Certificates):
    """By the syncer's clock."""

    words = r"the certificate of 'site-a' expired at .* UTC; ask the run's operator for a new one"

    def end(self) -> None:
        now = SimpleNamespace(now=lambda zone: dt.datetime.now(zone) + 2 * DAY)
        self._patch.setattr("diloco.syncer.keys.auth.datetime", now)


class Blocked:
    """A learner, site-a, over a relay, in a run that site-b has begun; it fails, and is to say how.

    Attributes:
        result: of its life.
    """

    def __init__(self, syncer: Syncer, given: Certificates, relay: Relay, pool: ThreadPoolExecutor) -> None:
        self.syncer, self.relay = syncer, relay
        self.exchange = diloco.connect(relay.address, run=RUN, learner="site-a", keys=given.keys / "site-a")
        held = make_layout(Net(WIDTH), method().fragments)
        self.other = Raw(syncer.address, "site-b", held=held, keys=given.keys / "site-b")
        self._pool = pool
        self.steps = 0

    @property
    def waits(self) -> bool:
        return bool(status_of(self.syncer)["learners"].get("site-a", {}).get("waiting", False))

    def train(self, before_data: Callable[[], None] | None = None) -> Future[None]:
        return self._pool.submit(self._life, before_data)

    def _life(self, before_data: Callable[[], None] | None) -> None:
        model = Net(WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with diloco.Learner(model, optimizer, exchange=self.exchange) as learner:
            batches: Iterable[Any] = itertools.repeat(None)
            if before_data is not None:
                before_data()
                batches = diloco.LeasedSampler(learner, 8, 4)
            for _ in batches:
                model(torch.ones(5, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=5)
                self.steps += 1


@contextmanager
def blocked(given: Certificates, tmp_path: Path, at_least: int = 1) -> Iterator[Blocked]:
    with ExitStack() as stack:
        syncer = stack.enter_context(start(tmp_path, method(at_least=at_least), keys=given.keys / "syncer"))
        relay = stack.enter_context(Relay(syncer.port))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        it = Blocked(syncer, given, relay, pool)
        stack.callback(it.exchange.close)
        stack.callback(relay.cut)
        stack.enter_context(closing(it.other.connection))
        it.other.initialise()
        yield it


def ends(it: Blocked, life: Future[None], given: Certificates) -> None:
    given.end()
    with pytest.raises(errors.AuthError, match=given.words) as caught:
        life.result(WAIT_S)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [Certificates, ExpiringCertificates])
def test_a_learner_that_waits_for_another_one_ends(
    kind: type[Certificates], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = kind(tmp_path, monkeypatch)
    with blocked(given, tmp_path, at_least=2) as it:
        it.other.join()
        it.other.beat(1, 5)
        life = it.train()
        until(lambda: it.waits or life.done(), "it does not wait")
        ends(it, life, given)


def stalls(links: str) -> Callable[[Link], None]:
    """Holds connections that have carried much, up or down; heartbeats pass."""

    def hold(link: Link) -> None:
        if getattr(link, links) > MUCH_BYTES:
            link.may_flow.clear()

    return hold


@pytest.mark.parametrize("where", ["training", "push", "pull"])
def test_a_learner_ends_wherever_it_is(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Certificates(tmp_path, monkeypatch)
    with blocked(given, tmp_path) as it:
        if where == "push":
            it.relay._before_up = stalls("up_bytes")
        if where == "pull":
            it.relay._before_down = stalls("down_bytes")
        life = it.train()
        if where == "training":
            until(lambda: min(versions_of(it.syncer)) > 1 or life.done(), "it does not train")
        else:
            until(lambda: any(not link.may_flow.is_set() for link in it.relay.links) or life.done(), "nothing stalls")
        ends(it, life, given)


def test_a_learner_that_waits_for_data_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is answered once it is durable, and the syncer's disk is slow."""
    given, may_write = Certificates(tmp_path, monkeypatch), threading.Event()
    with blocked(given, tmp_path) as it:

        def slow_disk() -> None:
            it.syncer.driver.ask(
                lambda driver: driver._ports.worker.submit("swap", None, may_write.wait, lambda _: None)
            )

        try:
            life = it.train(slow_disk)
            until(lambda: it.waits or life.done(), "it does not wait")
            ends(it, life, given)
            assert it.steps == 0
        finally:
            may_write.set()


# --- TLS


@contextmanager
def at_one_port(tmp_path: Path) -> Iterator[tuple[Callable[[str], Syncer], Callable[[], None]]]:
    """What starts a syncer of the run with the keys of this directory, always at the same port, in place of the last
    one; and what stops that."""
    port = free_port()
    running: list[Syncer] = []

    def stop() -> None:
        while running:
            running.pop().close()

    def serve(keys: str) -> Syncer:
        stop()
        options = Options(f"127.0.0.1:{port}", tmp_path / "state", keys=tmp_path / keys / "syncer")
        running.append(Syncer(RUN, method(), options))
        return running[0]

    try:
        yield serve, stop
    finally:
        stop()


@pytest.fixture
def both_keys(tmp_path: Path) -> None:
    for name in ("keys", "other"):
        Keyring.new(tmp_path / name, RUN, ["127.0.0.1"], [("site-a", "learner")], DAY)


def test_a_syncer_with_the_keys_of_another_authority_ends_its_learners(
    tmp_path: Path, both_keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at once: something else may answer in its place for a while."""
    monkeypatch.setattr(connection, "DIAGNOSE_EVERY_S", 0.2)
    with at_one_port(tmp_path) as (serve, _):
        address = serve("keys").address
        exchange = diloco.connect(address, run=RUN, keys=tmp_path / "keys" / "site-a", initialise=True)
        not_trusted = pytest.raises(errors.AuthError, match="that the syncer at .* shows is not trusted")
        with not_trusted, living(exchange) as life:
            until(lambda: life.step > 5, "it does not train")
            serve("other")
            refused = exchange._dialler.current
            until(lambda: refused._refused_at is not None, "it is not refused")
            syncer = serve("keys")
            versions = versions_of(syncer)
            until(lambda: min(versions_of(syncer)) > max(versions) + 1, "it does not train on")
            monkeypatch.setattr(connection, "REFUSED_S", 0.5)
            serve("other")
            life.result.result(WAIT_S)


# --- several addresses


def test_an_address_that_refuses_does_not_end_a_learner_that_another_one_serves(
    tmp_path: Path, both_keys: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At its start, and while its own syncer is away; viewers go on to the other one, too."""
    keys = tmp_path / "keys" / "site-a"
    options = Options("127.0.0.1:0", tmp_path / "other-state", keys=tmp_path / "other" / "syncer")
    with Syncer(RUN, method(), options) as stranger, at_one_port(tmp_path) as (serve, stop):
        monkeypatch.setattr(connection, "DIAGNOSE_EVERY_S", 0.2)
        good = serve("keys").address
        addresses = f"{stranger.address},{good}"
        exchange = diloco.connect(addresses, run=RUN, keys=keys, initialise=True)
        with living(exchange) as life:
            until(lambda: life.step > 5 or life.result.done(), "it does not train")
            assert fetch_status(addresses, run=RUN, keys=keys)["run"] == RUN
            stop()
            until(lambda: "at one of the addresses refuses" in caplog.text or life.result.done(), "it asks no other")
            syncer = serve("keys")
            versions = versions_of(syncer)
            until(lambda: min(versions_of(syncer)) > max(versions) + 1 or life.result.done(), "it does not train on")
            assert not life.result.done()


def test_a_learner_that_every_address_refuses_ends(tmp_path: Path, both_keys: None) -> None:
    keys = tmp_path / "keys" / "site-a"
    with ExitStack() as stack:
        addresses = ",".join(
            stack.enter_context(
                Syncer(RUN, method(), Options("127.0.0.1:0", tmp_path / name, keys=tmp_path / "other" / "syncer"))
            ).address
            for name in ("first", "second")
        )
        with pytest.raises(errors.AuthError, match="shows is not trusted"):
            train(0, diloco.connect(addresses, run=RUN, keys=keys), None, 1)
        with pytest.raises(errors.AuthError, match="shows is not trusted"):
            fetch_status(addresses, run=RUN, keys=keys)


@pytest.mark.parametrize(
    "kind",
    ["ends", pytest.param("resets", marks=pytest.mark.slow), "resets after the first bytes",
     pytest.param("answers something else", marks=pytest.mark.slow)],
)  # fmt: skip
@pytest.mark.parametrize("has_keys", [False, True])
def test_a_server_that_hangs_up_in_a_diagnosis_refuses_nobody(kind: str, has_keys: bool, tmp_path: Path) -> None:
    """And no socket stays open: such a warning is an error here."""
    reset = struct.pack("ii", 1, 0)

    def serve(listener: socket.socket, times: int) -> None:
        for _ in range(times):
            with listener.accept()[0] as found:
                if kind == "resets after the first bytes":
                    found.recv(1)
                if kind == "answers something else":
                    found.sendall(b"SSH-2.0-server\r\n")
                if kind.startswith("resets"):
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)

    Keyring.new(tmp_path / "keys", RUN, ["127.0.0.1"], [("site-a", "learner")], DAY)
    pair = read_key_pair(tmp_path / "keys" / "site-a") if has_keys else None
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve, listener, 20)
        way = DialSettings(f"127.0.0.1:{listener.getsockname()[1]}", pair, "keys")
        reasons = [find_reason(way) for _ in range(20)]
        served.result(timeout=60)
    for reason in reasons:
        if kind == "answers something else" and has_keys:
            assert reason is not None
            assert "does not speak TLS" in reason.text
        else:
            assert reason is None or not reason.is_refusal
    gc.collect()
