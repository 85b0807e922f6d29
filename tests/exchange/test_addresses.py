"""A learner with several addresses, over sockets: here two ways to one syncer, one of which may be closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.processes import until
from tests.chaos.relay import Relay
from tests.exchange.test_remote import Life, living, status_of
from tests.syncer.runs import RUN, method, start

import diloco
from diloco import errors
from diloco.exchange.connection import Connection
from diloco.exchange.dialling import Dialler, fetch_status
from diloco.following.follower import newest_model
from diloco.protocol.members import Claim, Report


def test_the_address_that_answers_is_used(tmp_path: Path) -> None:
    """By a learner from its first request on, and by viewers."""
    with start(tmp_path, method()) as syncer:
        addresses = f"127.0.0.1:1, {syncer.address}"
        life = Life(diloco.connect(addresses, run=RUN, learner="a", initialise=True), steps=20)
        _, metrics = life.result.result(timeout=300)
        life.stop()
        assert metrics["merges"] == 2 * 20 // 4
        assert fetch_status(addresses, run=RUN)["step"] == 20
        assert newest_model(addresses, run=RUN).state_dict()
    with pytest.raises(errors.UnreachableError, match="nothing listens at"):
        fetch_status(addresses, run=RUN)


def test_a_learner_goes_on_over_the_other_address_and_back(tmp_path: Path) -> None:
    """With all of its requests, as the same incarnation."""
    with (
        start(tmp_path, method()) as syncer,
        Relay(syncer.port) as first,
        Relay(syncer.port) as second,
    ):
        exchange = diloco.connect(f"{first.address},{second.address}", run=RUN, learner="a", initialise=True)
        with living(exchange) as life:
            for old, new in ((first, second), (second, first)):
                step = life.step
                until(lambda step=step: life.step > step + 5, "it does not train")
                old.refuse()
                old.cut()
                num_old = len(old.links)
                step = life.step
                until(lambda step=step: life.step > step + 20, "it does not train over the other address")
                assert new.links
                assert sum(link.up_bytes for link in old.links[num_old:]) == 0
                old.accept()
            assert status_of(syncer)["learners"]["a"]["incarnation"] == 1


def test_a_learner_that_was_given_up_joins_over_the_other_address(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer, Relay(syncer.port) as first:
        exchange = diloco.connect(f"{first.address},{syncer.address}", run=RUN, learner="a", initialise=True)
        with living(exchange) as life:
            until(lambda: life.step > 5, "it does not train")
            process = syncer.driver.ask(lambda driver: driver.core.accounting.accounts["a"].process)
            syncer.driver.ask(
                lambda driver: driver.leave(Claim("a", 1, process=process), Report(tokens=0), lambda: None)
            )
            first.close()
            until(lambda: status_of(syncer)["learners"].get("a", {}).get("incarnation") == 2, "it does not join again")
            step = life.step
            until(lambda: life.step > step + 20, "it does not train on")


def test_an_address_is_given_once() -> None:
    with pytest.raises(errors.ConfigError, match="names an address twice; give each syncer's once"):
        diloco.connect("127.0.0.1:7700, 127.0.0.1:7700", run=RUN)
    with pytest.raises(errors.ConfigError, match="'nowhere' is not an address"):
        diloco.connect("127.0.0.1:7700,nowhere", run=RUN)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"address": None}, r'connect\(address=None\) cannot be used; give "host:port"'),
        ({"run": None}, r"connect\(run=None\).*; give the run's name"),
        ({"learner": 3}, r"connect\(learner=3\).*; give a name"),
        ({"learner": "../x"}, r"a learner cannot be called '\.\./x'; use 1 to 64 letters"),
        ({"initialise": "once"}, r"connect\(initialise='once'\).*; give \"if-empty\", True or False"),
        ({"lineage": "foo"}, r"connect\(lineage='foo'\) cannot be used \(.*; give that of a state_dict"),
        ({"join_timeout_s": -1}, "join_timeout_s must be a finite number above 0, not -1"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(given: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"address": "127.0.0.1:7700", "run": RUN, **given}
    with pytest.raises(errors.ConfigError, match=words):
        diloco.connect(**arguments)


def test_requests_go_to_the_address_that_was_dialled() -> None:
    connections = [Connection(f"127.0.0.1:{port}") for port in (7701, 7702, 7703)]
    it = Dialler(connections)
    assert [it.control(number) for number in (1, 2, 3, 4)] == [*connections, connections[0]]
    it.next()
    assert it.current is connections[1]
    it.move(2)
    it.start_here()
    it.dial(1)
    assert it.current is connections[0]
    assert [it.control(number) for number in (1, 2, 3)] == [connections[2], connections[0], connections[1]]
    it.close()
    assert all(connection.closing.is_set() for connection in connections)
