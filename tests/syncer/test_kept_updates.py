"""What a syncer keeps for learners that are behind: no more bytes than a fragment has, and what the schedule needs."""

from __future__ import annotations

import pytest
import torch
from diloco.syncer.held import HeldModel
from tests.syncer.runs import layout, method

import diloco
from diloco.core.held import HeldFragment, close
from diloco.core.merges import Encoded
from diloco.core.method import Method

VERSIONS = 5


def published(how: Method) -> HeldModel:
    """A model whose first fragment has had five rounds of one learner."""
    fragments = [HeldFragment.first(how, it.index, torch.randn(it.numel)) for it in layout().fragments]
    model = HeldModel(how, layout(), b"", fragments, [(), ()], [{}, {}])
    for _ in range(VERSIONS):
        held, places = model.fragments[0], layout().fragments[0].tensors
        gradient = how.up.encode(torch.randn(held.theta.numel()))
        model.take(close(how, held, [Encoded("a", (gradient,), 1.0)], places), {})
    return model


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        (method(codec="fp32"), 1),
        (method(codec="bf16"), 1),
        (method(codec="int8"), 3),
        (diloco.DiLoCo(sync_every=4, overlap=4, fragments=method().fragments), 2),
        (diloco.DelayedDiLoCo(sync_every=4, intervals=2, fragments=method().fragments), 3),
    ],
    ids=["fp32", "bf16", "int8", "fp32, overlap H", "means, overlap 2H"],
)
def test_updates_are_kept_while_they_are_shorter_than_the_fragment(how: Method, kept: int) -> None:
    model = published(how)
    answers = [model.pull(0, base).update for base in range(VERSIONS)]
    assert [answer.base for answer in answers[-kept:]] == list(range(VERSIONS - kept, VERSIONS))
    assert {(answer.version, answer.lossless) for answer in answers[:-kept]} == {(VERSIONS, True)}


def test_a_whole_fragment_is_the_newest_version_itself() -> None:
    model = published(method(codec="fp32"))
    for base in (-1, VERSIONS - 1):
        assert model.pull(0, base).payload.data_ptr() == model.fragments[0].theta.data_ptr()
