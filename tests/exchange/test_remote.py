"""A learner whose link or syncer misbehaves: nothing hangs, nothing is sent in vain, no learner is forgotten."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tests.chaos.relay import Link, Relay
from tests.syncer.runs import RUN, Fetch, Net, Raw, fall_silent, method, num_live, start, status_of, tamper, train
from tests.syncer.test_faults import syncer_process, until

import diloco
from diloco import errors, events
from diloco.core.update import Update
from diloco.event_log import read_events
from diloco.exchange.base import Rejoined
from diloco.exchange.connection import Connection
from diloco.exchange.dialling import Dialler
from diloco.exchange.remote import Remote, remote
from diloco.exchange.remote.entry import Initial
from diloco.exchange.remote.messages import lease_request, pull_request, push_header, request_of, standing_of
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.values import message_of, value_of
from diloco.protocol.contribution import OVERLAP, Budget, Contribution, Standing, Verdict
from diloco.protocol.leases import Ask, DataSet, Grant
from diloco.protocol.lineage import Lineage
from diloco.protocol.members import Claim, Evaluation, Member, Report
from diloco.protocol.rounds.called import CalledSyncer
from diloco.protocol.session import requests
from diloco.protocol.session.requests import Lease, Push
from diloco.protocol.steering import Order
from diloco.syncer.door.messages import ask_of, contribution_of, report_of, standing_message

EXCHANGE_BYTES = 4 * (8 * 4 + 8 + 3 * 8 + 3)
"""Both fragments in fp32."""


@pytest.fixture
def _waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A goodbye that waited for the syncer would take longer than the test may."""
    monkeypatch.setattr(remote, "LEAVE_TIMEOUT_S", 1000.0)


def over(connection: Connection) -> Remote:
    return Remote(Dialler([connection]), run=RUN, learner="a", initial=Initial(0, 0, "test"))


class ImpatientConnection(Connection):
    def expect_answers_within(self, floor_s: float) -> None:
        super().expect_answers_within(min(0.5, floor_s))


def impatient(address: str) -> Remote:
    """A learner that tries a transfer again after half a second of nothing."""
    return over(ImpatientConnection(address))


def phase(exchange: Remote) -> str:
    return exchange._opened.core.phase


class Life:
    """A learner that trains in a thread until it is stopped or fails."""

    def __init__(self, exchange: Remote, steps: int = 1_000_000) -> None:
        self.exchange = exchange
        self.step = 0
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self.result: Future[Any] = self._pool.submit(train, 0, exchange, None, steps, self._at_step)

    def _at_step(self, step: int) -> None:
        self.step = step
        if self._stop.is_set():
            raise StopIteration

    def stop(self) -> None:
        self._stop.set()
        wait([self.result], timeout=5)
        self.exchange.close()  # whatever it waits for
        with suppress(StopIteration, errors.ExchangeError, errors.StaleIncarnationError):
            self.result.result(timeout=300)
        self._pool.shutdown()


@contextmanager
def living(exchange: Remote) -> Any:
    life = Life(exchange)
    try:
        yield life
    finally:
        life.stop()


@pytest.mark.usefixtures("_waits_for_long")
def test_closing_while_the_syncer_is_away_is_prompt(tmp_path: Path) -> None:
    """A contribution waits to be sent again, the training thread waits for its answer."""
    with syncer_process(tmp_path, at_least=1) as syncer:
        exchange = diloco.connect(syncer.address, run=RUN, learner="a", initialise=True)
        with living(exchange) as life:
            until(lambda: life.step > 5, "it does not train")
            syncer.kill()
            until(lambda: exchange._opened.core._lanes.is_away, "the learner does not notice")
            exchange.close()
            with pytest.raises(errors.ExchangeError, match="closed"):
                life.result.result(timeout=300)


@pytest.mark.usefixtures("_waits_for_long")
def test_closing_while_joining_again_is_prompt(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer, Relay(syncer.port) as relay:
        exchange = diloco.connect(relay.address, run=RUN, learner="a", initialise=True)
        with living(exchange) as life:
            until(lambda: life.step > 5, "it does not train")
            relay.refuse()  # neither dialling anew nor joining again leads anywhere
            relay.stall()
            fall_silent(syncer, "a")
            assert not status_of(syncer)["learners"]
            relay.resume()
            until(lambda: phase(exchange) == "joining", "the learner does not hear that it was given up")
            exchange.close()


@pytest.mark.slow
def test_a_process_that_fails_without_closing_ends(tmp_path: Path) -> None:
    """The threads of an exchange do not keep it alive, even with the syncer gone."""
    script = (
        "import sys, diloco, torch; from tests.syncer.runs import Net, RUN\n"
        "net = Net(); exchange = diloco.connect(sys.argv[1], run=RUN, learner='a', initialise=True)\n"
        "learner = diloco.Learner(net, torch.optim.SGD(net.parameters(), lr=0.1), exchange=exchange)\n"
        "for _ in range(3): learner.step(tokens=1)\n"
        "print('trained', flush=True); sys.stdin.readline(); raise SystemExit(7)"
    )
    with syncer_process(tmp_path, at_least=1) as syncer:
        command = [sys.executable, "-c", script, syncer.address]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == b"trained\n"
            syncer.kill()
            process.stdin.close()
            assert process.wait(timeout=300) == 7


CONTRIBUTIONS = 3
"""Which of a learner's connections this is, in the order dialled: the run's description, control, joins come before."""


class StallOnce:
    """Stalls a connection once more than `limit_bytes` went up over it."""

    def __init__(self, number: int, limit_bytes: int) -> None:
        self._number, self._limit_bytes = number, limit_bytes
        self.relay: Relay | None = None
        self.stalled: Link | None = None

    def __call__(self, link: Link) -> None:
        if self.relay is None or self.stalled is not None or self.relay.links.index(link) != self._number:
            return
        if link.up_bytes > self._limit_bytes:
            self.stalled = link
            link.may_flow.clear()


def test_an_upload_that_stands_still_is_sent_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is told: neither end sees an error."""
    stall = StallOnce(CONTRIBUTIONS, 5_000)
    with start(tmp_path, method()) as syncer, Relay(syncer.port, stall) as relay:
        stall.relay = relay
        connection = Connection(relay.address)

        def at_step(step: int) -> None:
            if step == 8:  # it has dialled all connections, in their order
                connection.expect_answers_within(0.5)

        _, metrics = train(0, over(connection), None, 60, at_step)
    assert stall.stalled is not None
    assert "neither sent nor accepted bytes" in caplog.text
    assert metrics["incarnation"] == 1
    assert metrics["merges"] == 2 * 60 // 4


def test_a_broken_link_costs_no_contribution_twice(tmp_path: Path) -> None:
    """The same syncer is there after every cut, and has what it acknowledged."""
    with start(tmp_path, method()) as syncer, Relay(syncer.port) as relay:
        cuts = []

        def at_step(step: int) -> None:
            if step % 20 == 9:
                cuts.append(step)
                relay.cut()

        exchange = diloco.connect(relay.address, run=RUN, learner="a", initialise=True)
        with ThreadPoolExecutor(1) as pool:
            _, metrics = pool.submit(train, 0, exchange, None, 60, at_step).result(timeout=300)
    assert len(cuts) == 3
    assert metrics["incarnation"] == 1
    assert metrics["merges"] == 2 * 60 // 4
    assert metrics["num_bytes"]["contributions"] == 60 // 4 * EXCHANGE_BYTES


def test_half_open_connections_are_dialled_anew(tmp_path: Path) -> None:
    """They have died silently; the learner goes on as the same incarnation."""
    with start(tmp_path, method()) as syncer, Relay(syncer.port) as relay:
        with living(impatient(relay.address)) as life:
            until(lambda: life.step > 5, "it does not train")
            num_links = len(relay.links)
            relay.stall()
            until(lambda: len(relay.links) > num_links, "it does not dial anew")
            step = life.step
            until(lambda: life.step > step + 20, "it does not train on")
            assert status_of(syncer)["learners"]["a"]["incarnation"] == 1


def test_connections_that_broke_at_the_syncers_end_are_dialled_anew(tmp_path: Path) -> None:
    """The learner is not told: it notices by itself."""
    with start(tmp_path, method()) as syncer, Relay(syncer.port) as relay:
        with living(impatient(relay.address)) as life:
            until(lambda: life.step > 5, "it does not train")
            relay.cut_at_the_syncer()
            until(lambda: not status_of(syncer)["learners"]["a"]["healthy"], "the syncer does not notice")
            until(lambda: status_of(syncer)["learners"]["a"]["healthy"], "it does not come back")
            step = life.step
            until(lambda: life.step > step + 20, "it does not train on")
            assert status_of(syncer)["learners"]["a"]["incarnation"] == 1
    assert not evictions(tmp_path)


@pytest.mark.slow
def test_a_syncer_that_is_slow_to_answer_does_not_see_its_learner_hang_up(tmp_path: Path) -> None:
    """The learner dials anew; until that is answered its old connection stays, and the syncer has no reason to think it
    dead."""
    with start(tmp_path, method()) as syncer, Relay(syncer.port) as relay:
        with living(impatient(relay.address)) as life:
            until(lambda: life.step > 5, "it does not train")
            relay.refuse()  # the new connection leads nowhere
            relay.stall()
            until(lambda: status_of(syncer)["learners"]["a"]["silent_s"] > 2.5, "it is still heard")
            assert status_of(syncer)["learners"]["a"]["healthy"]
            relay.resume()
    assert not evictions(tmp_path)


def test_nobody_waits_for_a_learner_that_has_finished(tmp_path: Path) -> None:
    """It stays to evaluate for as long as it likes, and is neither waited for nor given up."""
    with start(tmp_path, method()) as syncer, ThreadPoolExecutor(1) as pool:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = diloco.connect(syncer.address, run=RUN, learner="first", initialise=True)
        with diloco.Learner(model, optimizer, exchange=exchange) as learner:
            learner.step(tokens=5)
            other = pool.submit(train, 1, diloco.connect(syncer.address, run=RUN, learner="second"), None, 60)
            learner.finish()
            _, metrics = other.result(timeout=300)  # one that is waited for is given up later
            status = status_of(syncer)["learners"]
            assert status["first"]["incarnation"] == 1
            assert metrics["merges"] == 2 * 60 // 4
            assert learner.global_state_dict().keys() == model.state_dict().keys()
    assert not evictions(tmp_path)


def test_a_learner_that_leaves_is_not_given_up(tmp_path: Path) -> None:
    """The sign of life that says that it has finished may come after its goodbye."""
    names = [f"learner-{number}" for number in range(12)]
    with start(tmp_path, method()) as syncer:
        for name in names:
            model = Net()
            exchange = diloco.connect(syncer.address, run=RUN, learner=name, initialise=name == names[0])
            with diloco.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=exchange) as learner:
                learner.step(tokens=5)
                learner.finish()
    said = read_events(tmp_path / "state" / "events.jsonl")
    assert [it.learner for it in said if isinstance(it, events.Joined)] == names
    assert not evictions(tmp_path)


def test_a_finished_learner_that_was_given_up_comes_back_as_finished(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer, Relay(syncer.port) as relay:
        model = Net()
        exchange = diloco.connect(relay.address, run=RUN, learner="a", initialise=True)
        with diloco.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=exchange) as learner:
            learner.step(tokens=5)
            learner.finish()
            until(lambda: num_live(syncer) == 0, "it does not say that it has finished")
            relay.refuse()
            relay.stall()
            fall_silent(syncer, "a")
            assert not status_of(syncer)["learners"]
            relay.accept()
            relay.resume()
            until(lambda: "a" in status_of(syncer)["learners"], "it does not join again")
            until(lambda: num_live(syncer) == 0, "it comes back as one that trains")


def test_a_run_clock_counts_a_learners_own_steps(tmp_path: Path) -> None:
    """Its first report may come after several steps, and the run is at a later step than 0."""
    called = diloco.DecoupledDiLoCo(sync_every=100, fragments=diloco.Whole())

    def clock(driver: Any) -> float:
        assert isinstance(driver.core.rounds, CalledSyncer)
        return driver.core.rounds.clock

    with start(tmp_path, called) as syncer:
        model = Net()
        exchange = diloco.connect(syncer.address, run=RUN, learner="a", initialise=True, initial_step=50)
        with diloco.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=exchange) as learner:
            before = syncer.driver.ask(clock)
            for _ in range(3):
                learner.step(tokens=5)
            until(lambda: status_of(syncer)["step"] == 53, "its steps are not heard")
            assert syncer.driver.ask(clock) == before + 3


def evictions(directory: Path) -> list[events.Evicted]:
    return [it for it in read_events(directory / "state" / "events.jsonl") if isinstance(it, events.Evicted)]


def test_what_is_reported_before_a_learner_starts_over_is_of_the_incarnation_that_is_out(tmp_path: Path) -> None:
    """The first of several ranks polls the news, and waits for the others before all of them start over."""
    with start(tmp_path, method()) as syncer:

        def member() -> Member | None:
            return syncer.driver.ask(lambda driver: copy(driver.core.members.get("a")))

        def is_heard_since(at: float) -> bool:
            return (it := member()) is not None and it.incarnation == 2 and it.seen_at > at

        exchange = diloco.connect(syncer.address, run=RUN, learner="a", initialise=True)
        model = Net()
        learner = diloco.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=exchange)
        learner.step(tokens=5)
        fall_silent(syncer, "a")
        until(lambda: any(isinstance(event, Rejoined) for event in exchange.poll()), "it does not join again")
        for _ in range(2):  # the second heartbeat has begun after the report
            exchange.report(Report(step=7, tokens=35, steps=7))
            before = member()
            assert before is not None
            until(lambda at=before.seen_at: is_heard_since(at), "it is not heard")
        now = member()
        assert now is not None
        assert now.tokens == 0
        exchange.rejoined(2)
        exchange.report(Report(step=8, tokens=5, steps=1, earlier_tokens=35))
        until(lambda: (it := member()) is not None and it.tokens == 5, "it is not heard as the new one")
        learner.close()
        assert status_of(syncer)["tokens"] == 40


def test_a_process_whose_name_another_one_took_does_not_come_back(tmp_path: Path) -> None:
    """It does not even hear that it was replaced: it is refused when it wants to join again, and the newer one trains
    on."""
    with start(tmp_path, method()) as syncer, Relay(syncer.port) as relay:
        with living(diloco.connect(relay.address, run=RUN, learner="a", initialise=True)) as older:
            until(lambda: older.step > 5, "the older one does not train")
            relay.stall()
            with living(diloco.connect(syncer.address, run=RUN, learner="a")) as newer:
                until(lambda: newer.step > 5, "the newer one does not train")
                relay.cut()
                with pytest.raises(errors.StaleIncarnationError, match="another process has joined"):
                    older.result.result(timeout=300)
                step = newer.step
                until(lambda: newer.step > step + 20, "the newer one does not train on")
                assert status_of(syncer)["learners"]["a"]["incarnation"] == 2


@pytest.mark.parametrize("kind", ["damaged", "behind"])
def test_a_whole_fragment_for_one_that_is_in_the_run_is_an_update(kind: str, tmp_path: Path) -> None:
    """Fetched whole because the update was damaged on the way, or is not kept; bytes of joins are those of joining."""
    with start(tmp_path, method()) as syncer:
        tampered: list[int] = []

        def tampering(fetch: Fetch, fragment: int, base: int) -> Any:
            fetched = fetch(fragment, base)
            if base == 0 and not tampered:
                tampered.append(fragment)
                if kind == "behind":
                    return fetch(fragment, -1)
                return replace(fetched, payload=fetched.payload.clone().add_(1))
            return fetched

        tamper(syncer, tampering)
        _, metrics = train(0, diloco.connect(syncer.address, run=RUN, learner="a", initialise=True), None, 8)
        status = status_of(syncer)
    assert tampered
    assert metrics["num_bytes"]["joins"] == 2 * (EXCHANGE_BYTES + len(save({})))  # given and fetched; no static tensors
    assert metrics["merges"] == 4
    assert all(not fragment["ledger"]["discarded"].get("missed") for fragment in status["fragments"])


def test_a_viewer_and_a_stranger_cannot_hang_a_learner(tmp_path: Path) -> None:
    """A connection that says nothing, and one that stops in the middle of a push, hold up no other learner."""
    with start(tmp_path, method()) as syncer:
        first = Raw(syncer.address)
        first.initialise()
        first.join()
        hang = threading.Event()

        def half() -> Any:
            yield first.header(4 * 40).SerializeToString()
            hang.wait(300)

        with ThreadPoolExecutor(1) as pool:
            stuck = pool.submit(first.push_frames, half())
            _, metrics = train(1, diloco.connect(syncer.address, run=RUN, learner="b"), None, 12)
            assert metrics["merges"] > 0
            first.connection.close()
            hang.set()
            with pytest.raises(errors.ExchangeError):
                stuck.result(timeout=300)
        until(lambda: status_of(syncer)["spooled_bytes"] == 0, "the room of the broken push is not given back")


@pytest.mark.parametrize("tensors", [None, (), (0, 2)])
@pytest.mark.parametrize("routed", [None, (0, 0, 0), (7, 0, 2**40)])
def test_a_contribution_is_read_as_it_was_sent(tensors: tuple[int, ...] | None, routed: tuple[int, ...] | None) -> None:
    sent = Contribution(
        "a", 2, 3, 4, 5, 6, 70, 8, 90, ((OVERLAP, 10),), step=11, tensors=tensors, units=((1, 3), (5, 6)),
        overwritten=((3, 5),), routed=routed,
    )  # fmt: skip
    blank = Contribution("", 0, 0, 0, 0, 0, 0, 0, step=0)
    for each in fields(Contribution):  # a field that is added is to be sent too
        if each.name not in ("tensors", "routed"):
            assert getattr(sent, each.name) != getattr(blank, each.name), each.name
    header = push_header("run", Push(Claim("a", 2, process=12), sent, 13)).SerializeToString()
    assert contribution_of(pb.PushHeader.FromString(header)) == sent


SEEN = Lineage("0f" * 16, 3, 12)
REPORT = Report(
    7, 70, 0.25, waiting=True, finished=True, steps=6, blocked_with=(1, 2), earlier_tokens=8, training_loss=0.0,
    evaluation=Evaluation(2.5, 60), blocked_s=1.5, confirmed=(3, 4),
)  # fmt: skip
STANDING = Standing(
    9, 8, 900, 3, 5, (2, 1), ((0, 2),), (Verdict(0, 1, None, 2), Verdict(1, 2, "late", 1)), drained=True, order=4,
    paused=True, at_least=2, settled=True, budget=Budget(1000, 20),
)  # fmt: skip


NAMED_AS_IN: list[tuple[Any, Any, set[str]]] = [
    (Claim, pb.HeartbeatRequest, set()), (Claim, pb.WatchRequest, set()), (Claim, pb.PullRequest, set()),
    (Claim, pb.LeaseRequest, {"versions"}), (Claim, pb.LeaveRequest, {"versions"}),
    (Claim, pb.JoinRequest, {"versions", "incarnation"}),
    (Claim, pb.InitialiseHeader, {"versions", "incarnation", "process"}),
    (Report, pb.HeartbeatRequest, set()), (Contribution, pb.PushHeader, set()), (Standing, pb.Standing, {"budget"}),
    (Update, pb.PullHeader, set()), (requests.Fetch, pb.PullRequest, {"claim"}), (Ask, pb.LeaseRequest, {"data"}),
    (Grant, pb.LeaseReply, {"number"}), (Order, pb.SteerRequest, {"what"}),
    (Initial, pb.InitialiseHeader, {"initialises"}),
    (Lineage, pb.Lineage, set()), (Verdict, pb.Verdict, set()), (Evaluation, pb.Evaluation, set()),
]  # fmt: skip


def test_values_are_sent_by_the_names_of_their_fields() -> None:
    for kind, message, others in NAMED_AS_IN:
        names = {each.name for each in fields(kind)} - others
        assert names <= {each.name for each in message.DESCRIPTOR.fields}, (kind, message)
    for message, names in ((pb.Units, "first stop"), (pb.Call, "fragment version"), (pb.Discard, "reason tokens")):
        assert [each.name for each in message.DESCRIPTOR.fields] == names.split()  # tuples are sent in this order


@pytest.mark.parametrize("report", [REPORT, Report()])
@pytest.mark.parametrize("claim", [Claim("a", 2, 12, SEEN, (5, 0)), Claim("a", 2, 12)])
def test_what_a_learner_reports_arrives_as_it_was(claim: Claim, report: Report) -> None:
    beat = request_of(pb.HeartbeatRequest, "run", claim, report)
    assert (value_of(Claim, beat), report_of(beat)) == (claim, report)
    leave = request_of(pb.LeaveRequest, "run", claim, report)
    left = Report(
        report.step, report.tokens, earlier_tokens=report.earlier_tokens, training_loss=report.training_loss,
        evaluation=report.evaluation, blocked_s=report.blocked_s,
    )  # fmt: skip
    assert (value_of(Claim, leave), report_of(leave)) == (replace(claim, versions=()), left)


@pytest.mark.parametrize("standing", [STANDING, Standing(0, 0, 0, 1, None, (0,))])
def test_what_a_syncer_tells_arrives_as_it_was(standing: Standing) -> None:
    assert standing_of(pb.Standing.FromString(standing_message(standing).SerializeToString())) == standing


def test_a_lease_arrives_as_it_was() -> None:
    ask = Ask(1, 8, DataSet(100, 2, "d", 16), (((0, 2), (5, 6)), ()))
    request = lease_request("run", Lease(Claim("a", 2, 12, SEEN), 1, 1.0, ask))
    assert (value_of(Claim, request), ask_of(request)) == (Claim("a", 2, 12, SEEN), ask)
    grant = Grant(1, ((3, 5), (8, 9)), ((0, 1),))
    assert value_of(Grant, message_of(pb.LeaseReply, grant), number=1) == grant


@pytest.mark.parametrize(("fragment", "part"), [(0, "fragment"), (2, "fragment"), (None, "static")])
def test_a_fetch_asks_for_one_part(fragment: int | None, part: str) -> None:
    request = pull_request("run", requests.Fetch(Claim("a", 2, 12, SEEN, (-1, 4)), fragment, -1, joining=True))
    assert (request.WhichOneof("part"), request.fragment, request.static) == (part, fragment or 0, fragment is None)
    assert (request.base, request.joining, list(request.versions), value_of(Claim, request).seen) == (
        -1,
        True,
        [0, 4],
        SEEN,
    )
