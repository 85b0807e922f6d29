"""Learners whose models have a part of a mixture's experts: what they hold, receive, send and save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.learner.mixtures import Mixture, mixture, train_step
from tests.syncer.runs import RUN
from tests.syncer.runs import start as start_syncer
from torch import Tensor, nn

import diloco
from diloco import Learner
from diloco.core.fragments import make_layout
from diloco.core.quorum import AllLive
from diloco.errors import CheckpointError, ConfigError, LayoutError
from diloco.exchange.base import Exchange
from diloco.learner.experts import mixture_blocks
from diloco.learner.held import HeldExperts

CUT = diloco.Experts(groups=2, trunk=diloco.Whole())
METHOD = diloco.DiLoCo(sync_every=3, fragments=CUT, offsets=(3,) * 3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def attached(
    exchange: Exchange, text: str | None, *, method: diloco.Method = METHOD, model: Mixture | None = None,
    whole: nn.Module | None = None, **options: Any
) -> tuple[Learner, Mixture, torch.optim.Optimizer]:  # fmt: skip
    """A learner over an exchange, its model and its optimizer."""
    model = mixture(experts=len(experts_of(text))) if model is None else model
    optimizer = adamw(model)
    learner = Learner(
        model, optimizer, method=method, exchange=exchange, buffers="average", holds_experts=text, whole=whole,
        **options,
    )  # fmt: skip
    return learner, model, optimizer


def experts_of(text: str | None) -> list[int]:
    first, _, last = "0-3".partition("-") if text is None else text.split(" ")[0].partition("-")
    return list(range(int(first), int(last or first) + 1))


def trained(
    index: int, exchange: Exchange, text: str | None, steps: int = 6, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """The global part and the metrics of a learner that has trained, and the elements that it measures from."""
    whole = mixture(7) if index == 0 and text is not None else None
    model = mixture(7) if text is None else None
    learner, model, optimizer = attached(exchange, text, whole=whole, model=model, **options)
    with learner:
        for step in range(1, steps + 1):
            train_step(model, optimizer, index, step)
            learner.step(tokens=10)
        learner.finish()
        anchors = sum(each.numel() for each in learner._tensors.anchors)
        return learner.global_state_dict(), learner.metrics(), anchors


def test_a_learner_holds_receives_and_sends_its_part_only() -> None:
    texts = ["0-1 of 4", "2-3 of 4", None]
    results = diloco.run_local(lambda i, exchange: trained(i, exchange, texts[i]), learners=3)
    layout = make_layout(mixture(), CUT)
    expert = layout.fragments[0].numel + 2 * 2  # of two layers, with the averaged biases of two experts
    trunk = layout.fragments[2].numel
    for text, (_, metrics, anchors) in zip(texts, results, strict=True):
        held = trunk + expert * (2 if text is None else 1)
        assert anchors == held
        assert metrics["num_bytes"]["contributions"] == metrics["num_bytes"]["updates"] == 2 * 4 * held
    assert results[1][1]["versions"] == [-1, 2, 2]
    assert results[1][1]["num_bytes"]["joins"] < results[2][1]["num_bytes"]["joins"]
    ledgers = results[0][1]["ledger"]
    assert [it["trained"] for it in ledgers] == [60, 0, 60]
    assert [it["merged"] for it in ledgers] == [60, 0, 60]
    whole = results[2][0]
    for text, (mine, _, _) in zip(texts, results, strict=True):
        for name, value in mine.items():
            rows = ".experts." in name or ".gate." in name
            assert torch.equal(value, whole[name][experts_of(text)] if rows else whole[name]), name


def test_a_part_of_all_experts_is_the_whole_to_the_bit() -> None:
    def run(text: str | None) -> list[Any]:
        return diloco.run_local(lambda i, exchange: trained(i, exchange, text), learners=2)

    for mine, theirs in zip(run("0-3 of 4"), run(None), strict=True):
        assert mine[0].keys() == theirs[0].keys()
        assert all(torch.equal(mine[0][name], theirs[0][name]) for name in mine[0])
        assert mine[1]["ledger"] == theirs[1]["ledger"]


def test_a_group_that_none_of_several_learners_contributes_to_waits_for_its_holders_only() -> None:
    """K is at most the number of a fragment's holders."""
    method = diloco.DiLoCo(sync_every=3, fragments=CUT, offsets=(3,) * 3, quorum=AllLive(at_least=2))
    texts = ["0-1 of 4", "2-3 of 4"]
    results = diloco.run_local(lambda i, exchange: trained(i, exchange, texts[i], method=method), learners=2)
    assert [metrics["versions"] for _, metrics, _ in results] == [[2, -1, 2], [-1, 2, 2]]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as intended, by a single process
def test_a_part_over_a_syncer_comes_back_without_the_whole_model(tmp_path: Path) -> None:
    """From a distributed checkpoint too, which has nothing of what is not held. The same line starts and comes back."""
    with start_syncer(tmp_path / "run", METHOD) as syncer:

        def learner(whole: nn.Module | None) -> tuple[Learner, Mixture, torch.optim.Optimizer]:
            exchange = diloco.connect(syncer.address, run=RUN, learner="a", initialise="if-empty")
            return attached(exchange, "0-1 of 4", whole=whole)

        first, model, optimizer = learner(mixture(7))
        with first:
            for step in range(1, 4):
                train_step(model, optimizer, 0, step)
                first.step(tokens=5)
            dcp.save({"learner": first.distributed_state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
            before = first.global_state_dict()
        second, _, _ = learner(None)
        with second:
            assert second.versions == (1, -1, 1)
            assert second.load_distributed_state_dict(tmp_path / "saved")
            assert all(torch.equal(second.global_state_dict()[name], before[name]) for name in before)
        exchange = diloco.connect(syncer.address, run=RUN, learner="a", initialise=True)
        with pytest.raises(ConfigError, match="cannot initialise the run from its part"):
            attached(exchange, "0-1 of 4")
        exchange.close()


@pytest.mark.parametrize("sync_every", [3, 2])
def test_a_checkpoint_continues_exactly_and_only_with_the_same_experts(sync_every: int) -> None:
    """With H = 2 the checkpoint is taken between two sends."""
    method = diloco.DiLoCo(sync_every=sync_every, fragments=CUT, offsets=(sync_every,) * 3)
    texts = ["0-1 of 4", "2-3 of 4"]

    def first(index: int, exchange: Exchange) -> tuple[Any, Any, Any]:
        whole = mixture(7) if index == 0 else None
        learner, model, optimizer = attached(exchange, texts[index], method=method, whole=whole)
        with learner:
            for step in range(1, 4):
                train_step(model, optimizer, index, step)
                learner.step(tokens=10)
            return learner.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()

    def second(index: int, exchange: Exchange) -> dict[str, Tensor]:
        state, own, inner = saved[index]
        model = mixture(experts=2)
        model.load_state_dict(own)
        whole = mixture(7) if index == 0 else None
        learner, model, optimizer = attached(
            exchange, texts[index], method=method, model=model, whole=whole, resume=state
        )
        with learner:
            assert learner.resumed
            optimizer.load_state_dict(inner)
            for step in range(4, 7):
                train_step(model, optimizer, index, step)
                learner.step(tokens=10)
            learner.finish()
            return learner.global_state_dict()

    saved = diloco.run_local(first, learners=2)
    resumed = diloco.run_local(second, learners=2)
    through = diloco.run_local(lambda i, exchange: trained(i, exchange, texts[i], method=method), learners=2)
    for mine, (theirs, _, _) in zip(resumed, through, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)

    def other(index: int, exchange: Exchange) -> None:
        with pytest.raises(CheckpointError, match="another model, another cut of it, or other experts"):
            attached(exchange, "2-3 of 4", method=method, resume=saved[0][0])

    diloco.run_local(other, learners=1)


def attach_beside_a_whole_one(
    text: Any, *, method: diloco.Method = METHOD, experts: int = 2, **options: Any
) -> None:  # fmt: skip
    def life(index: int, exchange: Exchange) -> None:
        own: dict[str, Any] = {"model": mixture(experts=experts), **options} if index == 0 else {"model": mixture()}
        learner, _, _ = attached(exchange, text if index == 0 else None, method=method, **own)
        learner.close()

    diloco.run_local(life, learners=2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0-1", r"holds_experts='0-1' does not say which experts the model has, of how many; write \"4-7 of 16\""),
        ("0-1 of 0", "does not say which experts"),
        ("0-1 of", "does not say which experts"),
        ((0, 1), "does not say which experts"),
        ("1-0 of 4", "holds_experts='1-0' is not a list of numbers"),
        ("0,0 of 4", "names 0 twice"),
        ("2-4 of 4", "names expert 4, and the run's are 0 to 3"),
        ("1-2 of 4", r"experts 0 to 1 are group 0 of Experts\(groups=2\), which a learner holds as a whole or not"),
        ("0-1,3 of 4", "experts 2 to 3 are group 1"),
        ("0-3 of 4", "the learner holds 4 experts, the model has 2; build it with 4"),
    ],
)
def test_a_text_that_names_no_part_of_the_model_is_refused(text: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        attach_beside_a_whole_one(text)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (diloco.DiLoCo(), r"holds_experts='0-1 of 4' finds no experts, since DiLoCo cuts the model by Whole\(\)"),
        (diloco.DataParallel(), "finds no experts, since DataParallel cuts"),
    ],
)
def test_a_method_without_groups_of_experts_is_refused(method: diloco.Method, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        attach_beside_a_whole_one("0-1 of 4", method=method)


def test_what_excludes_a_part_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trains_experts='0' exclude each other: a learner trains all that it holds"):
        attach_beside_a_whole_one("0-1 of 4", trains_experts="0")
    with pytest.raises(ConfigError, match=r"Learner\(whole=…\) has no effect on a learner that holds the whole model"):
        attach_beside_a_whole_one(None, experts=4, whole=mixture())
    with pytest.raises(LayoutError, match=r"'layers.0.gate.weight.0' is .*\(4 rows\) in the model .*\(6 rows\) in "):
        attach_beside_a_whole_one("0-1 of 4", whole=mixture(experts=6))


def test_a_tensor_with_a_row_for_each_expert_must_be_in_the_fragments() -> None:
    def life(index: int, exchange: Exchange) -> None:
        model = mixture(experts=2)
        Learner(model, adamw(model), method=METHOD, exchange=exchange, holds_experts="0-1 of 4", buffers="local")

    with pytest.raises(ConfigError, match=r"e_score_correction_bias' has a row for each expert and is not trained.*"):
        diloco.run_local(life, learners=1)


def test_a_learner_without_the_whole_model_waits_for_one_that_has_it() -> None:
    texts = ["0-1 of 4", "2-3 of 4"]

    def life(index: int, exchange: Exchange) -> tuple[int, ...]:
        learner, _, _ = attached(exchange, texts[index], whole=mixture() if index == 1 else None)
        with learner:
            return learner.versions

    assert diloco.run_local(life, learners=2) == [(0, -1, 0), (-1, 0, 0)]


def test_an_expert_that_no_learner_holds_is_an_error() -> None:
    def life(index: int, exchange: Exchange) -> None:
        attached(exchange, "0-1 of 4", whole=mixture() if index == 0 else None)

    with pytest.raises(ConfigError, match=r"no learner trains expert 2 \('layers.0.gate.weight.2'\)"):
        diloco.run_local(life, learners=2)


@pytest.fixture
def one_rank() -> Any:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_model_without_a_trunk_has_no_part() -> None:
    held, layout = HeldExperts.of("0-1 of 4", METHOD), make_layout(mixture(), CUT)
    with pytest.raises(LayoutError, match="all tensors of this one belong to experts"):
        held.part(replace(layout, fragments=layout.fragments[:2]))


def test_one_expert_is_a_mixture_too() -> None:
    assert [block.num_experts for block in mixture_blocks(mixture(experts=1))] == [1, 1]


@pytest.mark.usefixtures("one_rank")
def test_over_a_process_group_every_learner_holds_all() -> None:
    with pytest.raises(ConfigError, match="needs a syncer, which holds the experts that a learner does not"):
        attached(diloco.Collective(), "0-1 of 4")
