"""Where contributions wait: memory up to a budget and used again, files beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.processes import until
from tests.frames import frames
from tests.syncer.runs import Raw, layout, method, start, status_of

from diloco.errors import NoRoomError, StaleIncarnationError, StoreError
from diloco.exchange.wire.tensors import bytes_of
from diloco.syncer.spool import Slot, Spool

SIZE = 4096


def address(slot: Slot) -> int:
    return slot.tensor.data_ptr()


def test_a_payload_reads_back_from_memory_and_from_a_file(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SIZE)
    slots = [spool.allocate(SIZE), spool.allocate(SIZE)]
    assert [slot.in_memory for slot in slots] == [True, False]
    assert spool.held_bytes == SIZE
    for value, slot in enumerate(slots, start=1):
        slot.buffer[:] = bytes([value]) * SIZE
    assert [int(slot.tensor.int().sum()) for slot in slots] == [SIZE, 2 * SIZE]
    assert not list(tmp_path.iterdir()), "a crash would leave files behind"


def test_memory_is_used_again_by_the_next_payload_of_its_size(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 4 * SIZE)
    first = spool.allocate(SIZE)
    where = address(first)
    spool.release(first)
    assert spool.held_bytes == 0
    other, again = spool.allocate(SIZE // 2), spool.allocate(SIZE)
    assert address(again) == where != address(other)


def test_two_payloads_at_once_never_share_memory(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 4 * SIZE)
    spool.release(spool.allocate(SIZE))
    assert len({address(slot) for slot in [spool.allocate(SIZE) for _ in range(4)]}) == 4


def test_what_is_kept_for_the_next_ones_counts_against_the_budget(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 2 * SIZE)
    for slot in [spool.allocate(SIZE), spool.allocate(SIZE)]:
        spool.release(slot)
    large = spool.allocate(2 * SIZE)
    assert large.in_memory
    assert not spool._free


def test_a_released_slot_cannot_be_read_or_released_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path, SIZE)
    slot = spool.allocate(SIZE)
    spool.release(slot)
    with pytest.raises(AssertionError):
        spool.release(slot)
    assert spool.held_bytes == 0


def test_an_empty_payload_needs_no_budget(tmp_path: Path) -> None:
    slot = Spool(tmp_path, 0).allocate(0)
    assert slot.in_memory
    assert slot.tensor.numel() == 0


def test_a_disk_that_refuses_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="free disk space or raise spool_bytes"):
        Spool(tmp_path / "gone", 0).allocate(SIZE).buffer  # noqa: B018 - room on a disk is made when it is used


def test_memory_that_is_refused_is_not_taken(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1 << 62)
    with pytest.raises(NoRoomError, match="lower spool_bytes"):
        spool.allocate(1 << 60)
    assert spool.held_bytes == 0


def test_a_learner_replaced_while_it_sends_leaves_no_room_taken(tmp_path: Path) -> None:
    with start(tmp_path, method()) as syncer:
        raw = Raw(syncer.address)
        raw.initialise()
        raw.join()
        payload = torch.zeros(layout().fragments[0].numel)
        header = raw.header(4 * payload.numel())

        def interrupted() -> Iterator[bytes]:
            head, chunk, checksum = frames(header, bytes_of(payload))
            yield head
            until(lambda: status_of(syncer)["spooled_bytes"] > 0, "no room is taken")
            raw.join()
            yield chunk
            yield checksum

        with pytest.raises(StaleIncarnationError):
            raw.push_frames(interrupted())
        assert status_of(syncer)["spooled_bytes"] == 0
        raw.connection.close()
