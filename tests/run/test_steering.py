"""An operator's orders to the driver: durable before they are answered, told to learners, refused where they make no
sense."""

from __future__ import annotations

from typing import Any

import pytest
from tests.run.toy import Scene, contribution, scheduled, started

from diloco.errors import ConfigError, DrainedError, NotInitialisedError, PayloadError
from diloco.protocol.steering import Order
from diloco.run.ports import Observer
from diloco.run.validation import MAX_WHY


class Told(Observer):
    """Keeps what was ordered."""

    def __init__(self) -> None:
        self.orders: list[tuple[Order, str, str]] = []

    def steered(self, order: Order, by: str, said: str) -> None:
        self.orders.append((order, by, said))


def steer(scene: Scene, what: Any, learner: str = "", **fields: Any) -> list[str]:
    """The answers, which are none before the disk has the order."""
    answers: list[str] = []
    scene.driver.steer(Order(what, learner, **fields), "alice", answers.append)
    return answers


def test_an_order_is_answered_once_it_is_durable() -> None:
    scene = started("a", "b")
    answers = steer(scene, "quorum", at_least=1)
    assert answers == []
    scene.settle()
    assert answers == ["the quorum was set to 1 by alice"]
    scene.restart()
    assert scene.driver.core.at_least == 1


def test_an_order_that_the_disk_has_not_taken_is_not_answered_and_does_not_stand() -> None:
    scene = started("a", "b")
    scene.refuse = lambda _: True
    answers = steer(scene, "pause")
    scene.settle()
    assert answers == []
    assert scene.driver.core.steering.paused is None
    scene.restart()
    assert scene.driver.core.steering.paused is None


def test_learners_hear_of_it_once_it_is_durable() -> None:
    scene = started("a", "b")
    lines = {learner: scene.listen(learner) for learner in "ab"}
    steer(scene, "pause")
    steer(scene, "drain", "b")
    assert not any(heard.paused for line in lines.values() for heard in line.heard)
    scene.settle()
    assert {learner: (line.heard[-1].paused, line.heard[-1].drained) for learner, line in lines.items()} == {
        "a": (True, False), "b": (True, True),
    }  # fmt: skip
    steer(scene, "evict", "a", reason="it is mute")
    assert not lines["a"].has_ended
    scene.settle()
    assert lines["a"].evicted_for == "evicted by alice: it is mute"
    assert lines["a"].has_ended


def test_the_observer_is_told_what_was_done() -> None:
    told = Told()
    scene = started("a", "b", observer=told)
    steer(scene, "drain", "b")
    assert told.orders == [
        (Order("drain", "b"), "alice", "b is drained by alice; it sends its last work and leaves"),
    ]


@pytest.mark.parametrize(
    ("order", "by", "error", "says"),
    [
        (Order("explode"), "a", PayloadError, "there is no order 'explode'; orders are evict, drain"),  # type: ignore[arg-type]
        (Order("evict", "../x"), "a", PayloadError, "a learner cannot be called"),
        (Order("pause", "b"), "a", PayloadError, "the order 'pause' concerns no learner, but names 'b'"),
        (Order("drain", "b", bans=True), "a", PayloadError, "may have bans, not 'drain'; evict or drain"),
        (Order("pause", reason="x" * (MAX_WHY + 1)), "a", PayloadError, "use at most 200 printable ones"),
        (Order("pause"), "a\nb", PayloadError, "printable"),
        (Order("evict", "x"), "a", ConfigError, "no learner 'x' takes part; those that do are a, b"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(
    order: Order, by: str, error: type[Exception], says: str
) -> None:
    scene = started("a", "b")
    before = scene.driver.core.saved().values
    with pytest.raises(error, match=says):
        scene.driver.steer(order, by, lambda _: None)
    assert scene.driver.core.saved().values == before


def test_there_is_nothing_to_steer_before_the_run_has_a_model() -> None:
    with pytest.raises(NotInitialisedError):
        steer(Scene(), "pause")


def test_a_paused_run_merges_after_a_restart_and_a_resume() -> None:
    scene = started("a", "b", method=scheduled())
    steer(scene, "pause")
    scene.settle()
    scene.restart()
    for learner in "ab":
        scene.beat(learner, 2)
        scene.push(contribution(learner))
    scene.settle()
    assert scene.driver.state.versions == (0, 0)
    assert scene.driver.status()["steering"]["paused"] == "paused by alice"
    steer(scene, "resume")
    scene.settle()
    assert scene.driver.state.versions == (1, 0)


def test_a_run_that_was_ended_admits_none_after_a_restart() -> None:
    scene = started("a", "b")
    steer(scene, "end")
    scene.settle()
    scene.restart()
    assert scene.driver.status()["steering"]["ended"] == "ended by alice"
    with pytest.raises(DrainedError):
        scene.join("c")
