"""Contributions in parts: each rank of a learner uploads its own, over a connection of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.run.toy import NUM_BYTES, Scene, contribution, scheduled, started

from diloco.errors import BusyError, CorruptPayloadError, DilocoError, NonFiniteError, NoRoomError, PayloadError
from diloco.protocol.contribution import Contribution
from diloco.protocol.members import Claim, Report
from diloco.run.memory import MemorySlot
from diloco.run.uploads import Upload

FIRST, SECOND = (0, 1), (1, NUM_BYTES)


def begin(scene: Scene, c: Contribution, span: tuple[int, int], payload: int = 1) -> Upload[MemorySlot]:
    push = scene.driver.begin_push(c, NUM_BYTES, boot=scene.driver.boot, span=span)
    push.slot.tensor = payload
    return push


def complete(scene: Scene, push: Upload[MemorySlot]) -> DilocoError | None:
    """Returns the refusal."""
    answers = list[Any]()
    scene.driver.complete_push(push, answers.append)
    if not answers:
        scene.next("check")
    [answer] = answers
    assert answer is None or isinstance(answer, DilocoError)
    return answer


def test_a_contribution_has_arrived_once_all_its_parts_have() -> None:
    scene = started("a", method=scheduled(at_least=1))
    c = contribution("a")
    first, second = begin(scene, c, FIRST), begin(scene, c, SECOND)
    assert first.slot is second.slot
    assert (first.room, second.room) == (FIRST, SECOND)
    assert complete(scene, second) is None
    scene.settle()
    assert scene.driver.state.versions == (0, 0)
    assert complete(scene, first) is None
    scene.settle()
    assert scene.driver.state.versions == (1, 0)
    assert scene.spool.held_bytes == 0


def test_a_part_that_was_cut_off_is_sent_again() -> None:
    scene = started("a", method=scheduled(at_least=1))
    c = contribution("a")
    assert complete(scene, begin(scene, c, FIRST)) is None
    scene.driver.cut_push(begin(scene, c, SECOND))
    assert scene.spool.held_bytes == NUM_BYTES  # of the part that is here
    assert complete(scene, begin(scene, c, SECOND)) is None
    scene.settle()
    assert scene.driver.state.versions == (1, 0)
    assert scene.spool.held_bytes == 0


@pytest.mark.parametrize("how", ["arrives", "is cut off"])
def test_a_part_that_is_here_is_not_written_again(how: str) -> None:
    """Its acknowledgement was lost while another part was on its way, and it is uploaded again while that one is."""
    scene = started("a", method=scheduled(at_least=1))
    c = contribution("a")
    first = begin(scene, c, FIRST)
    assert complete(scene, first) is None
    again, second = begin(scene, c, FIRST), begin(scene, c, SECOND)
    assert again.slot is not first.slot  # which is another contribution's once this one is merged
    assert complete(scene, second) is None
    scene.settle()
    assert scene.driver.state.versions == (1, 0)
    if how == "arrives":
        assert complete(scene, again) is None
    else:
        scene.driver.cut_push(again)
    assert scene.driver.state.versions == (1, 0)
    assert scene.spool.held_bytes == 0


def test_a_part_is_uploaded_by_one_connection_at_a_time() -> None:
    scene = started("a", method=scheduled(at_least=1))
    c = contribution("a")
    stuck = begin(scene, c, FIRST)
    with pytest.raises(BusyError, match=r"bytes 0 to 1 of contribution 1 of learner 'a' to fragment 0 are still being"):
        begin(scene, c, FIRST)
    assert scene.driver.status()["waits_for"] is None  # there is room
    scene.driver.cut_push(stuck)
    assert scene.spool.held_bytes == 0  # no part of it is here
    for span in (FIRST, SECOND):
        assert complete(scene, begin(scene, c, span)) is None
    scene.settle()
    assert scene.driver.state.versions == (1, 0)


def test_a_part_of_a_contribution_that_is_here_is_not_needed_again() -> None:
    """The acknowledgement was lost: while its content is checked, while its round is open, and with a verdict."""
    scene = started("a", "b")
    c = contribution("a")
    assert complete(scene, begin(scene, c, FIRST)) is None
    answers = list[Any]()
    scene.driver.complete_push(begin(scene, c, SECOND), answers.append)  # the check is still to come
    assert complete(scene, begin(scene, c, FIRST)) is None
    assert not answers
    scene.next("check")
    assert complete(scene, begin(scene, c, SECOND)) is None
    assert scene.push(contribution("b")) is None
    scene.settle()
    assert scene.driver.state.versions == (1, 0)
    assert complete(scene, begin(scene, c, SECOND)) is None
    assert scene.spool.held_bytes == 0


@pytest.mark.parametrize("how", ["leave", "replaced"])
def test_the_parts_of_an_incarnation_that_is_out_are_dropped(how: str) -> None:
    scene = started("a", "b")
    c = contribution("a")
    assert complete(scene, begin(scene, c, FIRST)) is None
    coming = begin(scene, c, SECOND)
    if how == "leave":
        scene.driver.leave(Claim("a", 1), Report(tokens=0), lambda: None)
    else:
        scene.join("a")
    scene.settle()
    assert scene.spool.held_bytes == NUM_BYTES  # a connection still writes into it
    assert complete(scene, coming) is None
    assert scene.spool.held_bytes == 0
    assert scene.driver.state.versions == (0, 0)


def test_parts_that_do_not_fit_together_are_refused() -> None:
    scene = started("a", method=scheduled(at_least=1))
    c = contribution("a")
    begin(scene, c, (0, 2))
    with pytest.raises(PayloadError, match="overlap"):
        begin(scene, c, (1, 3))
    with pytest.raises(PayloadError, match="differently"):
        begin(scene, replace(c, tokens=c.tokens - 1), (2, NUM_BYTES))
    for span in ((-1, 1), (1, 1), (2, NUM_BYTES + 1)):
        with pytest.raises(CorruptPayloadError, match="are not in a contribution"):
            begin(scene, c, span)


def test_content_is_checked_when_all_parts_are_there() -> None:
    scene = started("a", method=scheduled(at_least=1))
    c = contribution("a")
    assert complete(scene, begin(scene, c, FIRST)) is None
    assert isinstance(complete(scene, begin(scene, c, SECOND, payload=-1)), NonFiniteError)
    assert scene.spool.held_bytes == 0
    for span in (FIRST, SECOND):
        assert complete(scene, begin(scene, c, span)) is None
    scene.settle()
    assert scene.driver.state.versions == (1, 0)


def test_room_is_made_for_all_of_it_with_the_first_part() -> None:
    scene = started("a", method=scheduled(at_least=1))
    scene.spool.budget_bytes = NUM_BYTES - 1
    c = contribution("a")
    with pytest.raises(NoRoomError):
        begin(scene, c, FIRST)
    scene.spool.budget_bytes = NUM_BYTES
    for span in (FIRST, SECOND):
        assert complete(scene, begin(scene, c, span)) is None
    scene.settle()
    assert scene.driver.state.versions == (1, 0)


def test_a_part_for_which_the_disk_has_no_room_is_sent_again() -> None:
    """The room is made when the first byte comes, and another part finds it a moment later."""
    scene = started("a", method=scheduled(at_least=1))
    c = contribution("a")
    first, second = begin(scene, c, FIRST), begin(scene, c, SECOND)
    scene.driver.cut_push(first, NoRoomError("the disk is full."))
    assert scene.driver.status()["waits_for"] == "the disk is full."
    assert complete(scene, second) is None
    assert complete(scene, begin(scene, c, FIRST)) is None
    scene.settle()
    assert scene.driver.state.versions == (1, 0)
    assert scene.spool.held_bytes == 0
