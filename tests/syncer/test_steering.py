"""An operator's orders over a real syncer: who may give them, what learners do, and what a restart keeps."""

from __future__ import annotations

import datetime as dt
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.syncer.runs import PATIENT, RUN, LearnerThreads, Raw, method, start, status_of, train
from tests.syncer.test_faults import until
from tests.syncer.test_live_page import entered, post

from diloco import events as ev
from diloco.cli import main
from diloco.errors import AuthError, ConfigError, DrainedError
from diloco.event_log import read_events
from diloco.exchange.connection import Connection
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.protocol.steering import Order
from diloco.syncer.keys.keyring import Keyring
from diloco.syncer.server import Syncer


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    names: Any = [*((f"the-{role}", role) for role in ("viewer", "standby", "admin")), ("site-a", "learner")]
    Keyring.new(tmp_path / "keys", RUN, ["127.0.0.1"], names, dt.timedelta(days=1))
    return tmp_path / "keys"


def steer(syncer: Syncer, order: str, *, keys: Path | None = None, **fields: Any) -> str:
    with closing(Connection(syncer.address, keys=keys)) as connection:
        request = pb.SteerRequest(run=RUN, order=order, **fields)
        return connection.call("control", "Steer", request, pb.SteerReply, timeout_s=300.0).said


def admin(syncer: Syncer, *arguments: str) -> int:
    """The exit code of `diloco admin`."""
    try:
        main(["admin", *arguments, "--address", syncer.address, "--run", RUN])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def steered(syncer: Syncer) -> list[ev.Steered]:
    return [event for event in read_events(syncer._events.path) if isinstance(event, ev.Steered)]


class Learners:
    """Learners that train on threads until each is told to stop, or the run has no place for it."""

    def __init__(self, syncer: Syncer, pool: LearnerThreads, *names: str) -> None:
        self.steps = dict.fromkeys(names, 0)
        self.stop = threading.Event()
        self.lives: dict[str, Future[Any]] = {
            name: pool.submit(self._life, pool, syncer, index, name) for index, name in enumerate(names)
        }
        for name in names:
            until(lambda name=name: self.steps[name] > 0, f"{name} does not train")  # type: ignore[misc]

    def _life(self, pool: LearnerThreads, syncer: Syncer, index: int, name: str) -> Any:
        def at_step(step: int) -> None:
            self.steps[name] = step
            if self.stop.is_set():
                raise KeyboardInterrupt

        exchange = pool.connect(syncer.address, learner=name, initialise=index == 0)
        return train(index, exchange, None, 10**6, at_step)

    def goes_on(self, name: str) -> Callable[[], bool]:
        before = self.steps[name]
        return lambda: self.steps[name] > before + 2


def test_only_an_admin_steers(tmp_path: Path, keys: Path) -> None:
    with start(tmp_path, method(), keys=keys / "syncer") as syncer:
        raw = Raw(syncer.address, "site-a", keys / "site-a")
        raw.initialise()
        raw.join()
        for name, role in (("the-viewer", "viewer"), ("the-standby", "standby"), ("site-a", "learner")):
            with pytest.raises(AuthError, match=f"'{name}' has the role '{role}' and this needs 'admin'"):
                steer(syncer, "pause", keys=keys / name)
        assert status_of(syncer)["steering"]["paused"] is None
        said = steer(syncer, "pause", keys=keys / "the-admin", reason="a move")
        assert said == "the run was paused by the-admin: a move"
        with pytest.raises(ConfigError, match="no learner 'x' takes part; those that do are site-a"):
            steer(syncer, "evict", keys=keys / "the-admin", learner="x")
        path = syncer._events.path
    found = read_events(path)
    (order,) = [event for event in found if isinstance(event, ev.Steered)]
    assert (order.order, order.by, order.text) == ("pause", "the-admin", "the run was paused by the-admin: a move")
    (call,) = [event for event in found if isinstance(event, ev.Admitted) and event.call == "Steer"]
    assert (call.name, call.role) == ("the-admin", "admin")
    refused = [event for event in found if isinstance(event, ev.Refused)]
    assert {event.name for event in refused} >= {"the-viewer", "the-standby", "site-a"}


def test_learners_stand_still_while_the_run_is_paused_also_over_a_restart(tmp_path: Path) -> None:
    with LearnerThreads(2) as pool:
        with start(tmp_path, method(at_least=1)) as syncer:
            port = syncer.port
            learners = Learners(syncer, pool, "a", "b")
            assert admin(syncer, "pause", "--reason", "a move") == 0
            until(lambda: all(it["waiting"] for it in status_of(syncer)["learners"].values()), "a learner trains on")
            syncer.driver.drain()
            stood, versions = dict(learners.steps), syncer.versions()
        with Syncer(RUN, method(at_least=1), _options(tmp_path, port)) as syncer:
            until(lambda: len(_live(syncer)) == 2, "a learner does not come back")
            assert status_of(syncer)["steering"]["paused"] == "paused by anyone: a move"
            assert syncer.versions() == versions
            # One that was waiting for the last of these versions took a step once it came, and stands after it.
            assert all(learners.steps[name] <= step + 1 for name, step in stood.items())
            assert admin(syncer, "resume") == 0
            for name in "ab":
                until(learners.goes_on(name), f"{name} stands still")
            assert admin(syncer, "end") == 0
            for life in learners.lives.values():
                life.result(timeout=300)


def _options(tmp_path: Path, port: int) -> Any:
    from diloco.syncer.server import Options

    return Options(f"127.0.0.1:{port}", tmp_path / "state", deadlines=PATIENT)


def _live(syncer: Syncer) -> list[str]:
    return [name for name, it in status_of(syncer)["learners"].items() if it["live"] and it["versions"]]


def test_learners_leave_a_run_that_is_ended_and_none_joins_it(tmp_path: Path) -> None:
    with LearnerThreads(2) as pool, start(tmp_path, method(at_least=1)) as syncer:
        learners = Learners(syncer, pool, "a", "b")
        assert admin(syncer, "end", "--reason", "the paper is out") == 0
        for life in learners.lives.values():
            life.result(timeout=300)
        until(lambda: status_of(syncer)["learners"] == {}, "a learner does not leave")
        accounts = syncer.driver.ask(lambda driver: driver.core.accounting.accounts)
        assert {ledger.pending for account in accounts.values() for ledger in account.ledgers} == {0}
        assert all(version > 0 for version in syncer.versions())
        raw = Raw(syncer.address, "late")
        with pytest.raises(DrainedError, match="the run was ended by anyone: the paper is out; no learner may join"):
            raw.join()
        assert [event.order for event in steered(syncer)] == ["end"]


def test_an_evicted_learner_comes_back_and_a_banned_one_leaves(tmp_path: Path) -> None:
    with LearnerThreads(2) as pool, start(tmp_path, method(at_least=1)) as syncer:
        learners = Learners(syncer, pool, "a", "b")
        assert admin(syncer, "evict", "b") == 0
        until(lambda: status_of(syncer)["learners"].get("b", {}).get("incarnation") == 2, "b does not come back")
        until(learners.goes_on("b"), "b stands still")
        assert admin(syncer, "evict", "b", "--ban", "--reason", "it is stolen") == 0
        learners.lives["b"].result(timeout=300)
        until(learners.goes_on("a"), "a stands still")
        assert set(status_of(syncer)["learners"]) == {"a"}
        assert admin(syncer, "drain", "a") == 0
        learners.lives["a"].result(timeout=300)
        assert admin(syncer, "admit", "b") == 0
        Raw(syncer.address, "b").join(after=0)


def test_what_cannot_be_is_said_and_the_exit_code_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with start(tmp_path, method()) as syncer:
        Raw(syncer.address).initialise()
        assert admin(syncer, "quorum", "3") == 2
        assert "a quorum of 3 is out of reach: 0 learners take part (none); use 1 to 1." in capsys.readouterr().err
        assert admin(syncer, "quorum", "1", "--json") == 0
        assert capsys.readouterr().out == '{"said": "the quorum was set to 1 by anyone"}\n'


def test_an_order_of_the_driver_is_one_of_the_wire(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer:
        Raw(syncer.address).initialise()
        steer(syncer, "evict", learner="b", bans=True, reason="stolen")
        steer(syncer, "quorum", at_least=1)
        assert [(each.order, each.learner) for each in steered(syncer)] == [("evict", "b"), ("quorum", "")]
        assert Order("evict", "b", bans=True).given("x") == "by x"


def test_a_page_is_asked_for_and_its_orders_are_the_callers(
    tmp_path: Path, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start(tmp_path, method(), keys=keys / "syncer", page_address="127.0.0.1:0") as syncer:
        Raw(syncer.address, "site-a", keys / "site-a").initialise()
        with pytest.raises(SystemExit) as ended:
            main(["page", "--address", syncer.address, "--run", RUN, "--keys", str(keys / "the-admin"), "--json"])
        assert not ended.value.code
        url = json.loads(capsys.readouterr().out)["url"]
        page = syncer.page
        assert page is not None
        cookie, secret = entered(page, url)
        answer = post(page, json.dumps({"what": "pause"}), cookie=cookie, **{"x-diloco-token": secret})
        assert json.loads(answer.text) == {"said": "the run was paused by the-admin"}
        assert status_of(syncer)["steering"]["paused"] == "paused by the-admin"
        path = syncer._events.path
    (call,) = [event for event in read_events(path) if isinstance(event, ev.Admitted) and event.call == "Steer"]
    assert (call.name, call.role, call.peer) == ("the-admin", "admin", "page")


def test_a_syncer_without_a_page_says_so(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer, closing(Connection(syncer.address)) as connection:
        with pytest.raises(ConfigError, match="serves no page; start it with --page"):
            connection.call("control", "OpenPage", pb.OpenPageRequest(run=RUN), pb.OpenPageReply)
