"""What would have happened: storms replayed with one answer changed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.storms.plans import plan_of
from tests.storms.test_replays import storm

import diloco
from diloco.core.method import Method
from diloco.errors import ConfigError, StoreError
from diloco.run.payloads import ReadPayloads, tensor_formats
from diloco.run.replay import Replay
from diloco.run.what_if import Changes, WhatIf


def ask(seed: int, *asked: str, with_payloads: bool = True) -> tuple[dict[str, Any], Replay]:
    journal = storm(seed, with_payloads=with_payloads)
    replay = Replay(tensor_formats(ReadPayloads(journal.read)))
    what_if = WhatIf(replay, Changes(asked))
    for entry in journal.entries:
        what_if.take(entry)
    assert replay.findings.difference is None
    return what_if.answer(), replay


def method_of(seed: int) -> Method:
    return plan_of(seed).method


@pytest.mark.parametrize("seed", range(10))
def test_the_merges_of_the_same_method_are_the_same(seed: int) -> None:
    answer, replay = ask(seed, f"down={method_of(seed).down.name}")
    assert sum(map(len, answer["versions"].values())) == replay.findings.num_merges_equal > 0
    assert all(
        was == other and distance == 0 for each in answer["versions"].values() for _, was, other, distance in each
    )


def test_other_outer_steps_are_taken() -> None:
    """The first outer step with a momentum is a multiple of the learning rate."""
    seed = next(seed for seed in range(40) if isinstance(method_of(seed).outer, diloco.Nesterov))
    lr = method_of(seed).outer.to_dict()["lr"]
    answer, replay = ask(seed, f"outer.lr={lr / 1000}")
    first = answer["versions"]["0"][0]
    assert first[0] == 1
    assert 0 <= first[2] < first[1]
    assert replay.findings.num_equal == replay.findings.num_entries  # the replay itself is as it was


@pytest.mark.parametrize("merge", ["mean", "trimmed", "GeometricMedian"])
def test_another_merge_makes_another_model(merge: str) -> None:
    """Of seed 19, medians of three learners and more."""
    answer, replay = ask(19, f"merge={merge}")
    assert any(row[-1] != "0" for row in answer["rows"])
    assert sum(map(len, answer["versions"].values())) == replay.findings.num_merges > 0


@pytest.mark.parametrize("seed", [3, 4, 9, 11, 12, 21])
def test_the_rounds_of_the_same_quorum_are_the_same(seed: int) -> None:
    at_least = method_of(seed).quorum.at_least
    answer, _ = ask(seed, f"quorum.at_least={at_least}", with_payloads=False)
    assert all(was == other for _, was, other in answer["rows"])
    assert any(name == "versions published" and was > 0 for name, was, _ in answer["rows"])


def test_a_smaller_quorum_merges_earlier() -> None:
    answer, _ = ask(21, "quorum.at_least=1", with_payloads=False)
    counts = {name: (was, other) for name, was, other in answer["rows"]}
    assert counts["versions published"][1] > counts["versions published"][0]
    assert counts["contributions merged"][0] == counts["contributions merged"][1]


def test_longer_deadlines_evict_fewer() -> None:
    for seed in range(60):
        answer, _ = ask(seed, "reconnect_floor_s=1000.0", "lost_floor_s=1000.0", "lost_cap_s=1000.0")
        counts = {name: (was, other) for name, was, other in answer["rows"]}
        if counts.get("learners evicted", (0, 0))[0] > 1:
            assert counts["learners evicted"][1] < counts["learners evicted"][0]
            return
    pytest.fail("no storm has evicted two learners")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["merge"], "is not of the form field=value"),
        (["sync_every=5"], "cannot be asked of a journal"),
        (["merge=Mean", "quorum.at_least=1"], "not both at once"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(asked: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Changes(asked)


def test_answers_that_a_method_cannot_have_are_refused() -> None:
    for asked, said in (
        ("merge=Median of nothing", "is not one of its answers"),
        ("outer.speed=3", "no field 'speed'"),
    ):
        with pytest.raises(ConfigError, match=said):
            ask(3, asked)


def test_questions_about_tensors_need_the_contributions() -> None:
    with pytest.raises(StoreError, match="the journal has no contributions to merge"):
        ask(3, "outer.lr=0.1", with_payloads=False)
