"""What a driver keeps for learners that are behind: no more bytes than a fragment has, and what the schedule needs."""

from __future__ import annotations

import pytest
import torch
from tests.run.toy import Scene, contribution, scheduled, started
from tests.syncer.runs import layout, method
from torch import Tensor

import diloco
from diloco.core.global_fragment import GlobalFragment, close
from diloco.core.merges import Encoded
from diloco.core.method import Method
from diloco.errors import LayoutError
from diloco.protocol.actions import MergeRound
from diloco.protocol.members import Claim, Report
from diloco.protocol.rounds.base import Rules
from diloco.run.global_model import GlobalModel
from diloco.run.ports import MergedRound

VERSIONS = 5


def published(how: Method) -> GlobalModel[GlobalFragment, Tensor]:
    """A model whose first fragment has had five rounds of one learner."""
    fragments = [GlobalFragment.first(how, it.index, torch.randn(it.numel)) for it in layout().fragments]
    in_flight = Rules.of(how, 2).schedule.intervals_in_flight
    model = GlobalModel[GlobalFragment, Tensor](layout(), b"", fragments, [(), ()])
    for round_ in range(VERSIONS):
        held, places = model.held(0), layout().fragments[0].tensors
        gradient = how.up.encode(torch.randn(held.theta.numel()))
        closed = close(how, held, [Encoded("a", (gradient,), 1.0)], places)
        action = MergeRound(0, round_, (), (), 1.0, frozenset("a"), "all")
        model.take(MergedRound(action, closed.update, closed.held, closed.payload, closed.payload.numel()), in_flight)
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
    answers = [model.fetch(0, base).update for base in range(VERSIONS)]
    assert [answer.base for answer in answers[-kept:]] == list(range(VERSIONS - kept, VERSIONS))
    assert {(answer.version, answer.lossless) for answer in answers[:-kept]} == {(VERSIONS, True)}


def kept(scene: Scene) -> list[int]:
    """The bases of the updates that the driver has of fragment 0."""
    model = scene.driver.state.model
    return [base for base in range(model.versions[0]) if model.fetch(0, base).payload is not None]


def test_updates_are_kept_for_the_longest_overlap_of_the_learners_that_are_there() -> None:
    scene = started("a", method=scheduled(at_least=1))
    scene.join("b", overlap=4)
    for round_ in range(8):
        match round_:
            case 3:
                scene.restart()
                scene.driver.heartbeat(Claim("b", 1), Report(step=0, steps=0, tokens=0, step_s=1.0))
            case 6:
                scene.driver.leave(Claim("b", 1), Report(tokens=0), lambda: None)
        scene.push(contribution("a", round_ + 1, round_=round_))
        scene.settle()
        newest = [base for base in (round_ - 1, round_) if base >= (3 if round_ >= 3 else 0)]
        assert kept(scene) == (newest if round_ < 6 else [round_])


def test_a_whole_fragment_is_the_newest_version_itself() -> None:
    model = published(method(codec="fp32"))
    assert model.fetch(0, -1).payload is None
    assert model.fetch(0, -1).held is model.held(0)
    newest = model.fetch(0, VERSIONS - 1)
    assert newest.payload is not None
    assert newest.payload.data_ptr() == newest.held.theta.data_ptr()
    with pytest.raises(LayoutError, match="0 to 1, not 2"):
        model.fetch(2, 0)
