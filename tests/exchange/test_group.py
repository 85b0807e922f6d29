"""Exchanges between the ranks of a group: parts of any size, and a rank that dies. Real processes over gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exchange import group_life
from tests.exchange.worlds import read, start_processes

pytestmark = pytest.mark.timeout(900)  # includes a world of processes

WORLD_SIZE = group_life.WORLD_SIZE
Facts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    """Three processes that go through every life of group_life.py, in which the last rank dies at last."""
    directory: Path = tmp_path_factory.mktemp("group")
    start_processes(group_life.__name__, directory, WORLD_SIZE, expect=(0, 0, 9))
    *others, last = (life.__name__ for life in group_life.LIVES)
    return {
        **{name: [read(directory, name, rank).facts for rank in range(WORLD_SIZE)] for name in others},
        last: [read(directory, last, rank).facts for rank in range(WORLD_SIZE - 1)],
    }


def test_parts_may_be_unequal_and_empty(world: dict[str, Facts]) -> None:
    for facts in world["exchanges_unequal_and_empty_parts"]:
        assert facts["right"] == [True] * 9


def test_pieces_are_the_same_bits_over_the_ranks_own_process_group(world: dict[str, Facts]) -> None:
    """On CUDA where there are three GPUs, and there `divided` chooses it; else over gloo."""
    for facts in world["moves_pieces_by_both_transports"]:
        assert facts["right"] == [True] * 12
        assert facts["over"] == ("nccl" if torch.cuda.device_count() >= WORLD_SIZE else "host")


def test_a_rank_may_leave_while_one_of_its_threads_waits_for_the_others(world: dict[str, Facts]) -> None:
    """gloo would wait for that operation, and let no other thread of the process run."""
    first, *others = world["leaves_while_a_thread_waits"]
    assert first == {"sums": [[WORLD_SIZE]]}
    for facts in others:
        assert facts["sums"] == [[WORLD_SIZE]]
        assert facts["error"].startswith("the next one did not get through, because")


def test_a_rank_that_dies_in_a_bulk_exchange_is_named_by_all_others(world: dict[str, Facts]) -> None:
    """By name, and by no other name: the others finish their parts with each other."""
    for facts in world["loses_a_rank_in_a_bulk_exchange"]:
        assert facts["errors"][0].startswith("the bulk did not get through, because rank 2 is lost or silent for more")


def test_a_rank_that_leaves_after_an_error_ends_the_waiting_of_the_others(world: dict[str, Facts]) -> None:
    [first, second] = world["loses_a_rank_in_a_bulk_exchange"]
    assert len(first["errors"]) == 1
    assert second["errors"][1].startswith("the next one did not get through, because rank 0 and rank 2 are lost")
