"""Collective: shards, failures and counts. What it shares with other exchanges is in test_contract.py."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.exchange import collective_life
from tests.exchange.worlds import read, start_processes

import diloco
from diloco.core.codecs import CODECS, SEGMENT_ELEMENTS
from diloco.core.shards import Shards, even_shards
from diloco.errors import ConfigError
from diloco.exchange.group import reason_of

pytestmark = pytest.mark.timeout(900)  # includes a world of processes

WORLD_SIZE = 3
Facts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    """Three processes that go through every life of collective_life.py, in which the last learner dies at last."""
    directory: Path = tmp_path_factory.mktemp("collective")
    start_processes(collective_life.__name__, directory, WORLD_SIZE, expect=(0, 0, 9))
    facts = {
        life.__name__: [read(directory, life.__name__, rank).facts for rank in range(WORLD_SIZE)]
        for life in collective_life.LIVES[:-1]
    }
    killed = collective_life.LIVES[-1].__name__
    return facts | {killed: [read(directory, killed, rank).facts for rank in range(WORLD_SIZE - 1)]}


@given(num_elements=st.integers(1, 12 * SEGMENT_ELEMENTS), num_shards=st.integers(1, 9), first=st.integers(0, 8))
def test_shards_cover_a_vector_in_whole_segments(num_elements: int, num_shards: int, first: int) -> None:
    shards = Shards(num_elements, num_shards, first=first % num_shards)
    parts = [shards.elements(rank) for rank in range(num_shards)]
    assert parts[0].start == 0
    assert parts[-1].stop == num_elements
    assert all(one.stop == next_.start for one, next_ in itertools.pairwise(parts))
    assert all(part.start % SEGMENT_ELEMENTS == 0 or part.start == num_elements for part in parts)
    for codec in CODECS.values():
        sizes = shards.sizes_bytes(codec)
        assert sizes == [codec.encoded_bytes(part.stop - part.start) for part in parts]
        assert sum(sizes) == codec.encoded_bytes(num_elements)


@given(
    nums_elements=st.lists(st.integers(1, 7 * SEGMENT_ELEMENTS), min_size=1, max_size=20),
    num_shards=st.integers(1, 9),
)
def test_the_shards_of_all_fragments_differ_by_one_segment_at_most(nums_elements: list[int], num_shards: int) -> None:
    shards = even_shards(nums_elements, num_shards)
    parts = [[each.segments(rank) for each in shards] for rank in range(num_shards)]
    in_all = [sum(part.stop - part.first for part in own) for own in parts]
    assert max(in_all) - min(in_all) <= 1
    for fragment in zip(*parts, strict=True):
        of_one = [part.stop - part.first for part in fragment]
        assert max(of_one) - min(of_one) <= 1


def test_needs_a_process_group() -> None:
    with pytest.raises(ConfigError, match="init_process_group first"):
        diloco.Collective()


def test_every_rank_counts_the_same_run_tokens_at_every_step(world: dict[str, Facts]) -> None:
    facts = world["counts_the_same_run_tokens_at_every_step"]
    a_step = 10 + 17 + 24
    # Fragments are sent after steps 1, 3, 4, 5, 7, 8, 9, … and known to have been answered two steps later.
    expected = [a_step * t for t in (0, 0, 1, 1, 3, 4, 5, 5, 7, 8, 9, 9)]
    assert [each["run_tokens"] for each in facts] == [expected] * WORLD_SIZE


def test_with_overlaps_of_their_own_ranks_count_what_the_longest_overlap_has_waited_for(
    world: dict[str, Facts],
) -> None:
    facts = world["counts_the_same_run_tokens_with_overlaps_of_their_own"]
    expected = [(10 + 17 + 24) * t for t in (0, 0, 0, 0, 1, 1, 3, 4, 5, 5, 7, 8)]
    assert [each["run_tokens"] for each in facts] == [expected] * WORLD_SIZE


def test_the_users_own_collectives_are_not_disturbed(world: dict[str, Facts]) -> None:
    for facts in world["counts_the_same_run_tokens_at_every_step"]:
        assert facts["sums"] == [3 * step + 3 for step in range(1, 13)]


def test_bytes_are_counted_by_kind(world: dict[str, Facts]) -> None:
    facts = world["counts_bytes"]
    num_parameters = facts[0]["num_parameters"]
    rounds = 2
    for kind, codec in (("contributions", CODECS["int8"]), ("updates", CODECS["bf16"])):
        # Every byte of a payload goes to the M − 1 other learners in all, and is counted where it leaves and where it
        # arrives.
        expected = 2 * (WORLD_SIZE - 1) * rounds * codec.encoded_bytes(num_parameters)
        assert sum(each["num_bytes"][kind] for each in facts) == expected
    joins = [each["num_bytes"]["joins"] for each in facts]
    assert joins[0] == 2 * joins[1] == 2 * joins[2]
    assert joins[1] >= 4 * num_parameters


def test_refuses_methods_that_need_a_syncer(world: dict[str, Facts]) -> None:
    for facts in world["refuses_methods_that_need_a_syncer"]:
        assert facts["wait"][0] == facts["quorum"][0] == "ConfigError"
        assert "wait=False needs a syncer" in facts["wait"][1]
        assert "the quorum needs 4 learners and the process group has 3" in facts["quorum"][1]


def test_refuses_a_re_warm_up_that_no_learner_takes(world: dict[str, Facts]) -> None:
    for facts in world["refuses_a_re_warm_up"]:
        assert facts["five"][0] == "ConfigError"
        assert "rewarm_steps=5 has no effect over Collective" in facts["five"][1]
        assert facts["none"] == []


def test_refuses_to_be_used_twice(world: dict[str, Facts]) -> None:
    for facts in world["refuses_to_be_used_twice"]:
        assert facts["open"][0] == facts["closed"][0] == "ConfigError"
        assert "belongs to another Learner already" in facts["open"][1]
        assert facts["state"] == ["ConfigError", "this exchange is not open; attach a new one to a Learner."]


def test_refuses_checkpoints_that_do_not_fit(world: dict[str, Facts]) -> None:
    for facts in world["refuses_checkpoints_that_do_not_fit"]:
        assert {kind for kind, _ in facts.values()} == {"CheckpointError"}
        assert "learner-000: the checkpoint is of rank 1 of 3 and this is rank 0 of 3" in facts["swapped"][1]
        assert "of rank 0 of 4" in facts["larger"][1]
        assert "learner-000 and learner-001 were not taken after the same step" in facts["moments"][1]


def test_any_number_of_tensors_may_be_trained_in_parts(world: dict[str, Facts]) -> None:
    for facts in world["trains_parts_of_many_tensors"]:
        assert facts["first"] == [-0.5, -1.0, -1.0, -0.5]  # the mean of 0 and 1, or of 0 and 2
        assert facts["last"] == [-0.5, -1.0, -1.0, -0.5]


def test_different_bits_are_an_error_on_every_rank(world: dict[str, Facts]) -> None:
    for facts in world["notices_different_bits"]:
        assert facts["error"][0] == "DigestError"
        assert "learner-000 and learner-001 hold version 2 of fragment 0" in facts["error"][1]
        assert facts["again"] == facts["error"]
        assert facts["versions"] == [1]  # never trained on


def test_learners_out_of_step_are_named(world: dict[str, Facts]) -> None:
    for facts in world["notices_learners_out_of_step"]:
        assert facts["error"][0] == "ExchangeError"
        assert "learner-000 is at the contribution of fragment 0 in round 0" in facts["error"][1]
        assert "learner-002 at the contribution of fragment 1 in round 0" in facts["error"][1]


def test_a_learner_that_stops_early_is_an_error_for_the_others(world: dict[str, Facts]) -> None:
    first, *others = world["notices_a_learner_that_stops_early"]
    assert first["error"] == []
    for facts in others:
        assert facts["error"][0] == "ExchangeError"
        assert "the contribution of fragment 0 in round 1 did not get through" in facts["error"][1]


def test_a_silent_learner_is_an_error_for_the_others(world: dict[str, Facts]) -> None:
    for facts in (world["notices_a_silent_learner"][rank] for rank in (0, 2)):
        assert facts["error"][0] == "ExchangeError"
        assert "the contribution of fragment 0 in round 0 did not get through" in facts["error"][1]
        assert "because rank 1 is lost or silent for more than 3 s" in facts["error"][1]


def test_closing_finishes_what_others_wait_for(world: dict[str, Facts]) -> None:
    assert [facts["versions"] for facts in world["finishes_what_others_wait_for"]] == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]


def test_a_killed_learner_is_an_error_for_the_others(world: dict[str, Facts]) -> None:
    for facts in world["notices_a_killed_learner"]:
        assert facts["error"][0] == "ExchangeError"
        assert "the contribution of fragment 0 in round 1 did not get through" in facts["error"][1]
        assert "because rank 2 is lost" in facts["error"][1]
        assert "start all ranks again from a checkpoint" in facts["error"][1]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('status: Unavailable, message: "tcp connect error", details: [], metadata: MetadataMap { headers: {} }',
         "tcp connect error"),
        (("[/src/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:14511: Connection reset by peer. "
         "This is typically caused by …"),
         "Read error [127.0.0.1]:14511: Connection reset by peer"),
        (("NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage (run with "
         "NCCL_DEBUG=WARN for details), NCCL version 2.28.9\nncclInvalidUsage: This usually reflects invalid usage of "
         "NCCL library.\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 60\n"),
         "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"),
        ("deadline has elapsed", "deadline has elapsed"),
        ("", "RuntimeError"),
    ],
)  # fmt: skip
def test_what_torchft_gloo_and_nccl_say_is_cut_down_to_words_for_people(said: str, reason: str) -> None:
    assert reason_of(RuntimeError(said)) == reason
