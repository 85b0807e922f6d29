"""What is here of a contribution whose upload was cut off: the next upload goes on from there."""

from __future__ import annotations

from typing import Any

import pytest
from tests.run.toy import NUM_BYTES, Scene, contribution, scheduled, started

from diloco.errors import BusyError, DilocoError, NoRoomError
from diloco.protocol.contribution import Contribution
from diloco.protocol.members import Claim, Report
from diloco.run.memory import MemorySlot
from diloco.run.uploads import KEPT_S, Upload


def complete(scene: Scene, push: Upload[MemorySlot]) -> DilocoError | None:
    """Returns the refusal."""
    answers = list[Any]()
    scene.driver.complete_push(push, answers.append)
    scene.next("check")
    [answer] = answers
    assert answer is None or isinstance(answer, DilocoError)
    return answer


def cut(scene: Scene, c: Contribution, received: int = 1) -> Upload[MemorySlot]:
    push = scene.begin(c)
    scene.driver.cut_push(push, received=received)
    return push


def test_an_upload_goes_on_in_the_room_that_it_had() -> None:
    scene = started("a", method=scheduled(at_least=1))
    c = contribution("a")
    first = cut(scene, c)
    assert scene.spool.held_bytes == NUM_BYTES
    again = scene.begin(c)
    assert again.slot is first.slot
    assert again.received == 1
    assert scene.spool.held_bytes == NUM_BYTES
    scene.driver.cut_push(again, received=2)
    last = scene.begin(c)
    assert last.received == 2
    assert complete(scene, last) is None
    scene.settle()
    assert scene.driver.state.versions == (1, 0)
    assert scene.spool.held_bytes == 0


def test_nothing_is_kept_of_an_upload_of_which_nothing_came() -> None:
    scene = started("a")
    cut(scene, contribution("a"), received=0)
    assert scene.spool.held_bytes == 0
    assert scene.begin(contribution("a")).received == 0


def test_a_learner_has_one_prefix() -> None:
    scene = started("a", "b")
    cut(scene, contribution("a"))
    cut(scene, contribution("b"))
    cut(scene, contribution("a", fragment=1))
    assert scene.spool.held_bytes == 2 * NUM_BYTES
    assert scene.begin(contribution("a")).received == 0
    assert scene.begin(contribution("a", fragment=1)).received == 0  # dropped by the upload of another one
    assert scene.begin(contribution("b")).received == 1


def test_another_contribution_of_the_same_number_starts_anew() -> None:
    scene = started("a")
    cut(scene, contribution("a"))
    assert scene.begin(contribution("a", step=3)).received == 0
    assert scene.spool.held_bytes == NUM_BYTES


@pytest.mark.parametrize(
    "how", ["leave", "replaced", "late", "no room", "arrived", "cut after it arrived", "cut after it left"]
)
def test_a_prefix_is_dropped(how: str) -> None:
    scene = started("a", "b")
    c = contribution("a")
    held = NUM_BYTES if "arrived" in how else 0
    if how.startswith("cut"):
        stuck = scene.begin(c)
        if how == "cut after it left":
            scene.driver.leave(Claim("a", 1), Report(tokens=0), lambda: None)
        else:
            assert scene.push(c) is None
        scene.driver.cut_push(stuck, received=1)
    else:
        stuck = scene.begin(c)
        cut(scene, c)
        match how:
            case "leave":
                scene.driver.leave(Claim("a", 1), Report(tokens=0), lambda: None)
            case "replaced":
                scene.join("a")
            case "late":
                scene.now += KEPT_S
                scene.beat("a", 1)
                scene.beat("b", 1)
                scene.driver.tick()
            case "no room":
                scene.driver.cut_push(scene.begin(contribution("b")), NoRoomError("the disk is full."))
            case "arrived":
                assert complete(scene, stuck) is None
        if how != "arrived":
            scene.driver.cut_push(stuck)
    scene.settle()
    assert scene.spool.held_bytes == held


def test_a_part_goes_on_where_it_was() -> None:
    scene = started("a", method=scheduled(at_least=1))
    c = contribution("a")
    whole = 0, NUM_BYTES
    push = scene.driver.begin_push(c, NUM_BYTES, boot=scene.driver.boot, span=whole)
    scene.driver.cut_push(push, received=1)
    assert scene.spool.held_bytes == NUM_BYTES
    again = scene.driver.begin_push(c, NUM_BYTES, boot=scene.driver.boot, span=whole)
    assert again.received == 1
    assert again.slot is push.slot
    again.slot.tensor = 1
    assert complete(scene, again) is None
    scene.settle()
    assert scene.driver.state.versions == (1, 0)
    assert scene.spool.held_bytes == 0


def test_the_part_of_an_incarnation_that_is_out_is_dropped() -> None:
    scene = started("a", "b")
    push = scene.driver.begin_push(contribution("a"), NUM_BYTES, boot=scene.driver.boot, span=(0, NUM_BYTES))
    scene.driver.cut_push(push, received=1)
    scene.driver.leave(Claim("a", 1), Report(tokens=0), lambda: None)
    assert scene.spool.held_bytes == 0


def test_an_incarnation_has_room_for_two_models_and_no_more() -> None:
    """One that begins uploads and ends none cannot take the spool from the others."""
    scene = started("a", "b")
    begun = [scene.begin(contribution("a", number=number)) for number in range(1, 5)]  # of a model of two fragments
    assert scene.spool.held_bytes == 4 * NUM_BYTES
    with pytest.raises(BusyError, match="may at a time; they are taken once an earlier upload has ended"):
        scene.begin(contribution("a", number=5))
    scene.begin(contribution("b"))
    scene.driver.cut_push(begun[1])
    scene.begin(contribution("a", number=5))
    assert complete(scene, begun[0]) is None
    scene.begin(contribution("a", number=6))
    assert scene.spool.held_bytes == 6 * NUM_BYTES
