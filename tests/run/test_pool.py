"""What the driver admits and drains where the number of learners follows a schedule."""

from __future__ import annotations

import pytest
from tests.run.toy import Scene, contribution, scheduled, started

from diloco.errors import DrainedError, NoRoomError
from diloco.protocol.members import Claim, Report
from diloco.protocol.steering import Pool

UP, DOWN = Pool("ramp up", 2, 8), Pool("ramp down", 2, 8)


def run(pool: Pool, *learners: str) -> Scene:
    return started(*learners, method=scheduled(at_least=1), pool=pool)


def drained(scene: Scene) -> dict[str, bool]:
    return {learner: scene.driver.core.standing(learner).drained for learner in scene.driver.core.members}


def test_a_learner_is_admitted_when_the_pool_has_grown() -> None:
    scene = run(UP, "a")
    with pytest.raises(NoRoomError, match="places for 1 of 2 learners at step 1, taken by a; b gets one when"):
        scene.join("b")
    scene.beat("a", 3)
    with pytest.raises(NoRoomError):
        scene.join("b")
    scene.beat("a", 4)
    assert scene.join("b") == 1  # what was refused is no incarnation
    with pytest.raises(NoRoomError):
        scene.join("c")


def test_a_place_is_free_when_its_learner_has_finished_left_or_comes_back_itself() -> None:
    scene = run(UP, "a")
    assert scene.join("a") == 2  # another process of the same learner
    scene.beat("a", 2, incarnation=2, finished=True)
    assert scene.join("b") == 1
    with pytest.raises(NoRoomError):
        scene.join("c")
    scene.driver.leave(Claim("b", 1), Report(tokens=0), lambda: None)
    assert scene.join("c") == 1


def test_a_learner_without_a_place_in_a_pool_that_has_shrunk_is_refused_for_good() -> None:
    scene = run(DOWN, "a", "b")
    with pytest.raises(NoRoomError, match="c gets one when"):
        scene.join("c")
    scene.beat("a", 4)
    for learner in ("b", "c"):  # b as another process of the learner that is being drained
        with pytest.raises(DrainedError, match=f"1 of 2 learners at step 4, .* so train without {learner}"):
            scene.join(learner)
    with pytest.raises(NoRoomError):  # its place is not b's, which is there a little longer
        scene.join("a")
    scene.beat("b", 4, finished=True)
    assert scene.join("a") == 2


def test_the_newest_learners_are_drained_when_the_pool_shrinks() -> None:
    scene = run(DOWN, "b", "a")
    assert drained(scene) == {"b": False, "a": False}
    assert scene.beat("b", 3).drained is False
    assert scene.beat("a", 4).drained is True  # one learner's step is the run's
    assert drained(scene) == {"b": False, "a": True}
    scene.settle()
    scene.restart()
    scene.beat("b", 4)  # a syncer that was started again hears the step, and drains the same one
    assert drained(scene) == {"b": False, "a": True}


def test_a_drained_learner_contributes_once_more_and_no_round_waits_for_it_after_that() -> None:
    scene = run(DOWN, "a", "b")
    for learner in ("a", "b"):
        scene.beat(learner, 4)
        scene.push(contribution(learner))
    scene.settle()
    assert scene.driver.state.versions == (1, 0)
    assert drained(scene) == {"a": False, "b": True}
    scene.beat("b", 4, finished=True)
    assert drained(scene) == {"a": False, "b": False}
    scene.push(contribution("a", 2))
    scene.settle()
    assert scene.driver.state.versions == (2, 0)


def test_a_place_that_becomes_free_is_the_drained_learners_again() -> None:
    scene = run(DOWN, "a", "b")
    scene.beat("a", 4)
    assert drained(scene) == {"a": False, "b": True}
    scene.driver.leave(Claim("a", 1), Report(tokens=40), lambda: None)
    assert drained(scene) == {"b": False}
