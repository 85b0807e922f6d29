"""`Learner` over `run_local`: what users see, what it refuses, and that a run can be stopped and resumed to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco import Learner, Method
from diloco.core.adopt import Adopt
from diloco.core.quorum import AllLive
from diloco.errors import CheckpointError, ConfigError, ExchangeError, LayoutError, NonFiniteError
from diloco.exchange.base import Exchange
from diloco.protocol.contribution import UNMERGED
from diloco.training.checkpoint import load_checkpoint, save_checkpoint

SGD = torch.optim.SGD
LAYERS = diloco.Named([["0.*", "1.*"], ["2.*"]])


def make_model(seed: int = 0, *, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3), nn.Dropout(dropout))


def train_step(model: nn.Module, inner: torch.optim.Optimizer, index: int, step: int) -> None:
    """On data of this learner's own."""
    generator = torch.Generator().manual_seed(1000 * index + step)
    parameter = next(model.parameters())
    x, y = (torch.randn(6, n, generator=generator).to(parameter) for n in (4, 3))
    inner.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    inner.step()


def tokens_of(index: int) -> int:
    return 10 + 7 * index


def run(learner: Learner, index: int, steps: range) -> None:
    for step in steps:
        train_step(learner.model, learner.optimizer, index, step)
        learner.step(tokens=tokens_of(index))


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(mine: Any, theirs: Any, path: str = "") -> None:
    """Equal to the bit, whatever the nesting."""
    if isinstance(mine, Tensor):
        assert mine.dtype == theirs.dtype, path
        assert torch.equal(mine, theirs), path
    elif isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), path
        for key, value in mine.items():
            assert_same(value, theirs[key], f"{path}/{key}")
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(theirs), path
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(a, b, f"{path}/{index}")
    else:
        assert mine == theirs, path


def differ(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return any(not torch.equal(value, theirs[name]) for name, value in mine.items())


# --- the life of a learner --------------------------------------------------------------------------------------------


def test_parameters_become_learner_0s() -> None:
    def life(index: int, exchange: Exchange) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = make_model(index)
        before = parameters_of(model)
        learner = Learner(model, SGD(model.parameters(), lr=0.1), method=diloco.DiLoCo(sync_every=2), exchange=exchange)
        assert (learner.name, learner.steps, learner.versions) == (f"learner-00{index}", 0, (0,))
        after = parameters_of(model)
        learner.close()
        return before, after

    (start, _), *others = diloco.run_local(life, learners=3)
    for before, after in others:
        assert differ(before, start)
        assert_same(after, start)


def test_steps_versions_and_the_end() -> None:
    def life(index: int, exchange: Exchange) -> None:
        model = make_model()
        inner = SGD(model.parameters(), lr=0.1)
        with Learner(model, inner, method=diloco.DiLoCo(sync_every=3), exchange=exchange) as learner:
            seen = []
            for step in range(1, 8):
                run(learner, index, range(step, step + 1))
                seen.append((learner.steps, learner.versions))
            assert seen == [(1, (0,)), (2, (0,)), (3, (1,)), (4, (1,)), (5, (1,)), (6, (2,)), (7, (2,))]
            final = learner.global_state_dict()
        learner.close()  # a second time
        assert_same(learner.global_state_dict(), final)
        with pytest.raises(ConfigError, match="closed"):
            learner.step(tokens=1)

    diloco.run_local(life, learners=2)


def test_the_gradient_hook_goes_with_the_learner() -> None:
    def life(index: int, exchange: Exchange) -> dict[str, Tensor]:
        model = make_model()
        inner = SGD(model.parameters(), lr=0.1)
        with Learner(model, inner, method=diloco.DataParallel(), exchange=exchange) as learner:
            run(learner, index, range(1, 3))
            together = parameters_of(model)
        train_step(model, inner, index, 3)  # on its own again
        assert differ(parameters_of(model), together)
        return together

    first, second = diloco.run_local(life, learners=2)
    assert_same(first, second)


def test_an_error_in_the_block_closes_the_learner() -> None:
    def life(index: int, exchange: Exchange) -> None:
        model = make_model()
        with (
            pytest.raises(ZeroDivisionError),
            Learner(model, SGD(model.parameters(), lr=0.1), method=diloco.LocalSGD(), exchange=exchange) as learner,
        ):
            raise ZeroDivisionError
        with pytest.raises(ConfigError, match="closed"):
            learner.step(tokens=1)

    diloco.run_local(life, learners=1)


METRICS = {
    "learner", "incarnation", "steps", "tokens", "run_tokens", "versions", "updates", "merges", "num_bytes",
    "resumed_bytes", "ledger",
    "step_s", "blocked_s", "num_blocked", "blocked_histogram",
}  # fmt: skip


def test_metrics() -> None:
    def life(index: int, exchange: Exchange) -> dict[str, Any]:
        model = make_model()
        method = diloco.DiLoCo(sync_every=4, overlap=1, fragments=LAYERS)
        with Learner(model, SGD(model.parameters(), lr=0.1), method=method, exchange=exchange) as learner:
            assert learner.metrics()["step_s"] is None
            run(
                learner, index, range(1, 7)
            )  # fragment 0 sent after 2 and 6, fragment 1 after 4; adopted one step later
            return learner.metrics()

    for index, metrics in enumerate(diloco.run_local(life, learners=2)):
        tokens = 6 * tokens_of(index)
        assert metrics.keys() == METRICS
        assert metrics["learner"] == f"learner-00{index}"
        assert metrics["incarnation"] == 1
        assert metrics["steps"] == 6
        assert metrics["tokens"] == tokens
        assert metrics["run_tokens"] == 6 * (10 + 17)
        assert metrics["versions"] == [1, 1]
        # The answer to the last send is here at its own boundary, and adopted at the next.
        assert (metrics["updates"], metrics["merges"]) == (3, 3)
        assert metrics["step_s"] > 0
        assert metrics["blocked_s"] >= 0
        assert metrics["num_blocked"] == 0  # every answer was there in time
        first, second = metrics["ledger"]
        unit = tokens_of(index)
        merged = 2 * unit + 3 * unit
        assert first == {"trained": tokens, "pending": tokens - merged - unit, "merged": merged, "lost": 0,
                         "discarded": {"overlap": unit}}  # fmt: skip
        assert second == {"trained": tokens, "pending": unit, "merged": 4 * unit, "lost": 0,
                          "discarded": {"overlap": unit}}  # fmt: skip


# --- the global model -------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Tied weights, a frozen parameter, and buffers of every kind."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(4, 8, bias=False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.out = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.rand(8), requires_grad=False)
        self.register_buffer("shift", torch.rand(3))
        self.register_buffer("seen", torch.tensor(seed))
        self.register_buffer("cache", torch.rand(3), persistent=False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.embed(x) + self.head(x)) * self.scale) + self.shift


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_global_state_dict_is_a_state_dict(dtype: torch.dtype) -> None:
    def life(index: int, exchange: Exchange) -> dict[str, Tensor]:
        model = Tied(index, dtype)
        inner = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        start = {name: value.clone() for name, value in model.state_dict().items()}
        with Learner(model, inner, method=diloco.DiLoCo(sync_every=2), exchange=exchange) as learner:
            if index == 1:  # frozen parameters and persistent buffers are the run's
                for name in ("scale", "shift", "seen"):
                    assert not torch.equal(model.state_dict()[name], start[name])
            cache = model.cache.clone()
            run(learner, index, range(1, 4))
            state = learner.global_state_dict()
            assert torch.equal(model.cache, cache)
            assert differ(parameters_of(model), state)  # one step beyond the newest version
        fresh = Tied(99, dtype)
        fresh.load_state_dict(state)  # strict
        assert fresh.head.weight is fresh.embed.weight
        for name, value in model.state_dict().items():
            assert (state[name].dtype, state[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(state["embed.weight"], state["head.weight"])
        own = {name: value.clone() for name, value in model.state_dict().items()}
        for value in state.values():
            value.zero_()  # the copy is the caller's
        assert_same(dict(model.state_dict()), own)
        return learner.global_state_dict()

    first, second = diloco.run_local(life, learners=2)
    assert_same(first, second)
    assert torch.equal(first["shift"], Tied(0, dtype).shift)
    assert first["seen"] == 0


def test_with_gradients_exchanged_the_global_model_is_the_model() -> None:
    def life(index: int, exchange: Exchange) -> None:
        model = Tied(index)
        inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        with Learner(model, inner, method=diloco.DataParallel(), exchange=exchange) as learner:
            run(learner, index, range(1, 4))
            assert_same(learner.global_state_dict(), dict(model.state_dict()))

    diloco.run_local(life, learners=2)


def test_displacement_in_bf16_is_from_the_anchor_rounded_to_bf16() -> None:
    """A learner that stands still contributes nothing, though its parameters cannot hold the anchor."""

    def life(index: int, exchange: Exchange) -> None:
        model = make_model().to(torch.bfloat16)
        inner = SGD(model.parameters(), lr=0.1)
        method = diloco.DiLoCo(sync_every=1, outer=diloco.SGD(lr=0.3))
        with Learner(model, inner, method=method, exchange=exchange) as learner:
            run(learner, index, range(1, 3))
            anchor = learner.state_dict()["anchors"]["0"]
            assert not torch.equal(anchor, anchor.bfloat16().float())
            for group in inner.param_groups:
                group["lr"] = 0.0
            run(learner, index, range(3, 6))
            assert learner.versions == (5,)
            assert torch.equal(learner.state_dict()["anchors"]["0"], anchor)
            rounded = {name: value.bfloat16() for name, value in learner.global_state_dict().items()}
            assert_same(parameters_of(model), rounded)

    diloco.run_local(life, learners=2)


class Shapes(nn.Module):
    """Long tensors, also some that do not lie in row-major order or are in bf16, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        images = torch.randn(64, 70, 9, 9).to(memory_format=torch.channels_last)
        values = (
            torch.randn(300_001), torch.randn(700, 515).t(), images, torch.randn(3, 150_001)[:, 1:], torch.randn(()),
            torch.randn(3, 90_001, dtype=torch.bfloat16), torch.randn(700, 515, dtype=torch.bfloat16).t(),
        )  # fmt: skip
        self.tensors = nn.ParameterList(nn.Parameter(value) for value in values)


@pytest.mark.parametrize("adopt", [diloco.Mix(0.3), diloco.KeepDisplacement(), diloco.Replace()], ids=str)
def test_adopting_rounds_each_operation_once_whatever_the_shape(adopt: Adopt) -> None:
    method = replace(diloco.DiLoCo(sync_every=3, overlap=1), adopt=adopt)

    def life(index: int, exchange: Exchange) -> None:
        torch.manual_seed(index)
        model = Shapes()
        seen = []
        with Learner(model, SGD(model.parameters(), lr=0.1), method=method, exchange=exchange) as learner:
            for _ in range(4):  # sent after the third, adopted after the fourth
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn(parameter.shape))
                seen.append(parameters_of(model))
                learner.step(tokens=1)
            assert learner.versions == (1,)
            anchor = learner.state_dict()["anchors"]["0"]
        for name, own in model.named_parameters():
            value, anchor = anchor[: own.numel()].view(own.shape), anchor[own.numel() :]
            local, sent = seen[3][name].float(), seen[2][name].float()
            match adopt:
                case diloco.Mix(alpha):
                    kept, taken = alpha * local, (1 - alpha) * value
                    expected = kept + taken
                case diloco.KeepDisplacement():
                    displacement = local - sent
                    expected = displacement + value
                case _:
                    expected = value
            assert torch.equal(own.detach(), expected.to(own.dtype)), name

    diloco.run_local(life, learners=2)


# --- what is refused --------------------------------------------------------------------------------------------------


def attach(
    method: Method | None,
    make_inner: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: SGD(model.parameters(), lr=0.1),
    model: nn.Module | None = None,
) -> None:
    """Build a learner on its own, and take a few steps."""

    def life(index: int, exchange: Exchange) -> None:
        own = make_model() if model is None else model
        with Learner(own, make_inner(own), method=method, exchange=exchange) as learner:
            run(learner, index, range(1, 4))

    diloco.run_local(life, learners=1)


def test_a_method_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"no method was given.*pass method="):
        attach(None)


@pytest.mark.parametrize("fragments", [diloco.Whole(), diloco.Balanced(3)])
def test_running_statistics_are_refused_by_name(fragments: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(LayoutError, match=r"'1\.running_mean'.*LayerNorm"):
        attach(diloco.DiLoCo(sync_every=3, fragments=fragments), model=model)


class Teacher(nn.Module):
    """A frozen moving average beside the model, kept up in a way that autograd does not see."""

    def __init__(self, replace: bool) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        self.replace = replace

    def forward(self, x: Tensor) -> Tensor:
        mean = self.teacher.weight.data.lerp(self.student.weight.data, 0.1)
        if self.replace:
            self.teacher.weight.data = mean
        else:
            self.teacher.weight.data.copy_(mean)
        return self.student(x)


@pytest.mark.parametrize("replace", [False, True])
def test_a_frozen_parameter_that_changes_is_refused_by_name(replace: bool) -> None:
    model = Teacher(replace)
    with pytest.raises(LayoutError, match=r"'teacher\.weight'"):
        attach(diloco.DiLoCo(sync_every=2), lambda _: SGD(model.student.parameters(), lr=0.1), model)


def test_counting_buffers_may_change() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counting()
    attach(diloco.DiLoCo(sync_every=1), model=model)
    assert model.calls == 3


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_fully_sharded_modules_are_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = FullyShardedDataParallel(
        make_model(), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD
    )
    with pytest.raises(ConfigError, match=r"FullyShardedDataParallel.*fully_shard.*gather="):
        attach(diloco.DiLoCo(), model=model)


def test_an_optimizer_may_hold_parameters_that_are_frozen() -> None:
    model = make_model()
    frozen = next(model.parameters()).requires_grad_(False)
    before = frozen.clone()
    attach(diloco.DiLoCo(), model=model)
    assert torch.equal(frozen, before)


def test_private_master_weights_are_refused() -> None:
    def of_its_own(model: nn.Module) -> torch.optim.Optimizer:
        return SGD([nn.Parameter(p.detach().float().clone()) for p in model.parameters()], lr=0.1)

    with pytest.raises(ConfigError, match=r"trains 6 tensor\(s\) that are not parameters of the model.*master"):
        attach(diloco.DiLoCo(), of_its_own)


def test_private_master_weights_are_refused_by_their_names() -> None:
    class Mixed(SGD):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model.parameters(), lr=0.1)
            self.master_params = [p.detach().float().clone() for p in model.parameters()]

    with pytest.raises(ConfigError, match=r"Mixed keeps private master weights \('master_params'\)"):
        attach(diloco.DiLoCo(), Mixed)

    def in_the_state(model: nn.Module) -> torch.optim.Optimizer:
        inner = SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            inner.state[parameter]["master_param"] = parameter.detach().float().clone()
        return inner

    with pytest.raises(ConfigError, match=r"SGD keeps private master weights \('master_param'\)"):
        attach(diloco.DiLoCo(), in_the_state)


def test_averaging_parameters_needs_an_optimizer_without_state() -> None:
    method = diloco.DataParallel(average="parameters")
    with pytest.raises(ConfigError, match=r"AdamW keeps some.*average='gradients'"):
        attach(method, lambda model: torch.optim.AdamW(model.parameters()))
    with pytest.raises(ConfigError, match="SGD keeps some"):
        attach(method, lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9))
    attach(method)


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    model = make_model()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    for method in (diloco.DataParallel(), diloco.DiLoCo(sync_every=1, codec="e3m0")):
        with pytest.raises(NonFiniteError):
            attach(method, model=model)


def test_learners_must_agree() -> None:
    def other_method(index: int, exchange: Exchange) -> None:
        model = make_model()
        with Learner(
            model, SGD(model.parameters(), lr=0.1), method=diloco.DiLoCo(sync_every=2 + index), exchange=exchange
        ):
            pass

    with pytest.raises(ConfigError, match=r"sync_every is \d on learner-\d+ and \d on learner-"):
        diloco.run_local(other_method, learners=2)

    def other_model(index: int, exchange: Exchange) -> None:
        model = nn.Linear(4, 3 + index)
        with Learner(model, SGD(model.parameters(), lr=0.1), method=diloco.DiLoCo(), exchange=exchange):
            pass

    with pytest.raises(LayoutError, match=r"'weight' is \(3, 4\) float32 on .* and \(4, 4\) float32 on "):
        diloco.run_local(other_model, learners=2)


# --- methods that are the same ----------------------------------------------------------------------------------------


def train(method: Method, *, learners: int = 3, steps: int = 8, lr: float = 0.1) -> list[dict[str, Tensor]]:
    def life(index: int, exchange: Exchange) -> dict[str, Tensor]:
        model = make_model()
        with Learner(model, SGD(model.parameters(), lr=lr), method=method, exchange=exchange) as learner:
            run(learner, index, range(1, steps + 1))
            return parameters_of(model)

    return diloco.run_local(life, learners=learners)


def test_local_sgd_is_diloco_with_outer_sgd_1() -> None:
    assert_same(train(diloco.LocalSGD(sync_every=3)), train(diloco.DiLoCo(sync_every=3, outer=diloco.SGD(lr=1.0))))


def test_streaming_with_one_fragment_and_no_overlap_is_diloco() -> None:
    streaming = diloco.StreamingDiLoCo(
        sync_every=3,
        overlap=0,
        mix=0.0,
        fragments=diloco.Whole(),
        codec="fp32",
        outer=diloco.Nesterov(lr=0.7, momentum=0.9),
    )
    assert_same(train(streaming), train(diloco.DiLoCo(sync_every=3)))


def test_synchronising_every_step_of_plain_sgd_is_data_parallel() -> None:
    """Up to rounding: the mean is taken of parameters here and of gradients there."""
    gradients = train(diloco.DataParallel())
    for method in (
        diloco.DataParallel(average="parameters"),
        diloco.DiLoCo(sync_every=1, outer=diloco.SGD(lr=1.0)),
    ):
        for mine, theirs in zip(train(method), gradients, strict=True):
            for name, value in mine.items():
                # Eight steps, each rounding parameters around 1 a few times.
                torch.testing.assert_close(value, theirs[name], rtol=0, atol=8 * 4 * 2**-24)


# --- where the tokens went --------------------------------------------------------------------------------------------

SYNCHRONOUS = {
    "DataParallel": diloco.DataParallel(),
    "DataParallel, parameters": diloco.DataParallel(average="parameters"),
    "LocalSGD": diloco.LocalSGD(sync_every=3),
    "DiLoCo": diloco.DiLoCo(sync_every=4),
    "DiLoCo, outer Adam": diloco.DiLoCo(sync_every=2, outer=diloco.Adam(lr=0.1), weight="tokens"),
    "Streaming": diloco.StreamingDiLoCo(sync_every=4, overlap=2, fragments=LAYERS, error_feedback=True),
    "Streaming, replaced": diloco.StreamingDiLoCo(sync_every=4, overlap=3, fragments=LAYERS, mix=0.0),
    "Streaming, two in flight": diloco.StreamingDiLoCo(
        sync_every=4, overlap=4, fragments=LAYERS, codec=("int4", "int8"), error_feedback=True
    ),
    "Streaming, two in flight, replaced": diloco.StreamingDiLoCo(sync_every=3, overlap=3, fragments=LAYERS, mix=0.0),
}


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("steps", [11, 12])
def test_no_token_vanishes(name: str, steps: int) -> None:
    method = SYNCHRONOUS[name]
    last: list[Any] = []

    def life(index: int, exchange: Any) -> tuple[int, list[dict[str, Any]], list[int]]:
        model = make_model()
        with Learner(model, SGD(model.parameters(), lr=0.1), method=method, exchange=exchange) as learner:
            run(learner, index, range(1, steps + 1))
            learner.state_dict()  # waits for what is on its way
            core = learner._core
            on_its_way = [sum(c.tokens for c in work.in_flight if not c.listed) for work in core.fragments]
            assert on_its_way == [0] * len(core.fragments)
            metrics = learner.metrics()
            last.append(exchange._run.driver)
            return metrics["tokens"], metrics["ledger"], [work.pending_tokens for work in core.fragments]

    learners = diloco.run_local(life, learners=3)
    syncer = last[0].core
    for index, (tokens, ledgers, pending) in enumerate(learners):
        assert tokens == steps * tokens_of(index)
        theirs = syncer.accounting.accounts[f"learner-00{index}"].ledgers
        assert len(ledgers) == len(theirs) == len(syncer.fragments)
        for fragment, (mine, closed) in enumerate(zip(ledgers, theirs, strict=True)):
            assert mine["trained"] == closed.trained == tokens
            assert mine["pending"] == pending[fragment]  # a remainder on one side, counted on the other
            assert mine["merged"] + mine["pending"] + mine["lost"] + sum(mine["discarded"].values()) == tokens
            # The learner has left: nothing is pending with the syncer, and what it was not told of is not merged.
            assert (closed.pending, closed.lost) == (0, 0)
            if method.exchanged != "gradients":  # there the syncer's part never hears which tokens a gradient is of
                assert mine["merged"] == closed.merged
                told = closed.discarded.keys() - {UNMERGED}
                assert all(closed.discarded[reason] <= mine["discarded"][reason] for reason in told)
    assert syncer.accounting.run_tokens == sum(tokens for tokens, _, _ in learners)


# --- resuming ---------------------------------------------------------------------------------------------------------

T = 5  # with an overlap of 2 and more, answers are on their way
PUSHED = diloco.AsyncDiLoCo(sync_every=3, dynamic_steps=False, outer=diloco.Nesterov(lr=0.7), partial="scale")
OTHERS = {
    "pushed, scaled": PUSHED,
    "called": diloco.DecoupledDiLoCo(sync_every=4, fragments=LAYERS, error_feedback=True, codec="int4"),
    "called, displacement kept": diloco.DecoupledDiLoCo(
        sync_every=4, fragments=LAYERS, adopt=diloco.KeepDisplacement()
    ),
    "displacement kept": replace(
        diloco.StreamingDiLoCo(sync_every=4, overlap=2, fragments=LAYERS), adopt=diloco.KeepDisplacement()
    ),
    "pushed, Delayed Nesterov": diloco.AsyncDiLoCo(learners=3, sync_every=3),
    "delayed": diloco.DelayedDiLoCo(sync_every=3),
    "MuLoCo": diloco.MuLoCo(sync_every=3),
    "SparseLoCo": diloco.SparseLoCo(sync_every=3),
    "eager": diloco.EagerDiLoCo(sync_every=3, fragments=LAYERS, weight="tokens"),
    "dropping": diloco.DiLoCo(sync_every=2, quorum=AllLive(drop=0.5)),
}
Encode = Callable[[dict[str, Any], Path], dict[str, Any]]


def through_a_checkpoint(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """As the trainer keeps it: safetensors and JSON."""
    return load_checkpoint(save_checkpoint(folder, T, state, keep=1).path)


def final_state(learner: Learner) -> dict[str, Any]:
    state = learner.state_dict()
    metrics = learner.metrics()
    return {
        "learner": state,
        "model": {name: value.clone() for name, value in learner.model.state_dict().items()},
        "inner": learner.optimizer.state_dict(),
        "global": learner.global_state_dict(),
        "metrics": {key: metrics[key] for key in ("steps", "tokens", "run_tokens", "versions", "ledger")},
    }


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in SYNCHRONOUS), *OTHERS])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_resumed_run_has_the_bits_of_one_that_went_through(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Whether the model is restored before the learner is attached, after, or by the learner alone."""
    method = (SYNCHRONOUS | OTHERS)[name]
    stateless = method.exchanged == "parameters"
    digests: dict[int, tuple[str, ...]] = {}

    def make(index: int, exchange: Exchange, saved: dict[str, Any] | None = None) -> Learner:
        model = make_model(index).to(dtype)
        inner = SGD(model.parameters(), lr=0.1) if stateless else torch.optim.AdamW(model.parameters(), lr=0.01)
        if saved is not None:  # as training frameworks do, before anything is attached
            model.load_state_dict(saved["model"])
            inner.load_state_dict(saved["inner"])
        resume = None if saved is None else saved["learner"]
        return Learner(model, inner, method=method, exchange=exchange, resume=resume)

    def straight(index: int, exchange: Exchange) -> dict[str, Any]:
        with make(index, exchange) as learner:
            run(learner, index, range(1, 2 * T + 1))
            return final_state(learner)

    def first_half(index: int, exchange: Exchange) -> dict[str, Any]:
        with make(index, exchange) as learner:
            run(learner, index, range(1, T + 1))
            digests[index] = learner.digests
            state = {
                "learner": learner.state_dict(),
                "model": learner.model.state_dict(),
                "inner": learner.optimizer.state_dict(),
            }
            return through_a_checkpoint(state, tmp_path / str(index))

    def second_half(index: int, exchange: Exchange) -> dict[str, Any]:
        saved = halves[index]
        with make(index, exchange, saved if index == 0 else None) as learner:
            if index == 1:
                learner.model.load_state_dict(saved["model"])
                learner.optimizer.load_state_dict(saved["inner"])
            assert learner.resumed if index == 0 else learner.load_state_dict(saved["learner"])
            assert learner.digests == digests[index]
            if index == 2:  # the model was not restored at all
                learner.optimizer.load_state_dict(saved["inner"])
            run(learner, index, range(T + 1, 2 * T + 1))
            return final_state(learner)

    whole = diloco.run_local(straight, learners=3)
    halves = diloco.run_local(first_half, learners=3)
    assert_same(diloco.run_local(second_half, learners=3), whole)


def test_what_training_counts_in_a_buffer_goes_on_counting() -> None:
    """Frozen parameters and buffers are the run's and must not change; an integer buffer is the learner's own."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("num_batches", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.num_batches += 1
            return super().forward(x)

    saved: list[dict[str, Any]] = []

    def life(index: int, exchange: Exchange) -> int:
        model = Counting()
        with Learner(
            model, SGD(model.parameters(), lr=0.1), method=diloco.DiLoCo(sync_every=3), exchange=exchange
        ) as learner:
            if saved:
                assert learner.load_state_dict(saved[0])
            run(learner, index, range(1, 5))
            saved.append(learner.state_dict())
            return int(model.num_batches)

    assert diloco.run_local(life, learners=1) == [4]
    assert diloco.run_local(life, learners=1) == [8]
    assert saved[0]["counters"]["num_batches"] == 4  # a state does not change when its learner goes on


def test_the_cases_have_answers_on_their_way_and_error_feedback() -> None:
    """Guards the test above."""

    def life(index: int, exchange: Exchange) -> dict[str, Any]:
        model = make_model()
        with Learner(model, SGD(model.parameters(), lr=0.1), method=method, exchange=exchange) as learner:
            run(learner, index, range(1, T + 1))
            return learner.state_dict()

    for name in ("Streaming", "Streaming, two in flight"):
        method = SYNCHRONOUS[name]
        for state in diloco.run_local(life, learners=2):
            assert state["received"]
            assert state["residuals"]
            assert any(work["in_flight"] for work in state["core"]["fragments"])


def test_a_state_that_does_not_fit_is_refused() -> None:
    def saved(method: Method, model: nn.Module) -> dict[str, Any]:
        def life(index: int, exchange: Exchange) -> dict[str, Any]:
            return Learner(model, SGD(model.parameters(), lr=0.1), method=method, exchange=exchange).state_dict()

        return diloco.run_local(life, learners=1)[0]

    method = diloco.DiLoCo(sync_every=2)
    fits = saved(method, make_model())

    def life(index: int, exchange: Exchange) -> None:
        model = make_model()
        learner = Learner(model, SGD(model.parameters(), lr=0.1), method=method, exchange=exchange)
        with pytest.raises(CheckpointError, match="another model, another cut"):
            learner.load_state_dict(saved(method, nn.Linear(4, 3)))
        with pytest.raises(CheckpointError, match="sync_every is 2 now and 3 in the checkpoint"):
            learner.load_state_dict(saved(diloco.DiLoCo(sync_every=3), make_model()))
        with pytest.raises(CheckpointError, match="the checkpoint has no 'parameters'"):
            learner.load_state_dict({key: value for key, value in fits.items() if key != "parameters"})
        with pytest.raises(ConfigError, match="another kind of exchange"):
            Exchange.load_state_dict(exchange, fits["exchange"])
        assert learner.load_state_dict(fits)
        run(learner, index, range(1, 2))
        with pytest.raises(ConfigError, match="before the first"):
            learner.load_state_dict(fits)

    diloco.run_local(life, learners=1)


# --- run_local --------------------------------------------------------------------------------------------------------


def test_two_runs_give_the_same_bits() -> None:
    method = diloco.StreamingDiLoCo(sync_every=4, overlap=2, fragments=LAYERS)

    def life(index: int, exchange: Exchange) -> dict[str, Any]:
        model = make_model(dropout=0.3)
        with Learner(model, torch.optim.AdamW(model.parameters()), method=method, exchange=exchange) as learner:
            run(learner, index, range(1, 10))
            return final_state(learner)

    first, second = (diloco.run_local(life, learners=3) for _ in range(2))
    assert_same(first, second)


def test_each_learner_has_random_numbers_of_its_own() -> None:
    """What one draws does not depend on what another one draws in between."""

    def life(index: int, exchange: Exchange) -> list[tuple[float, float, float]]:
        model = make_model()
        with Learner(
            model, SGD(model.parameters(), lr=0.0), method=diloco.DiLoCo(sync_every=2), exchange=exchange
        ) as learner:
            drawn = []
            for step in range(1, 6):
                for _ in range(1 + index * greed):
                    numbers = (torch.rand(()).item(), random.random(), float(np.random.rand()))
                drawn.append(numbers)
                run(learner, index, range(step, step + 1))
            return drawn

    greed = 0
    modest = diloco.run_local(life, learners=2)
    greed = 3
    greedy = diloco.run_local(life, learners=2)
    assert greedy[0] == modest[0] == modest[1]
    assert greedy[1] != modest[1]


def test_the_callers_random_state_and_threads_come_back() -> None:
    before = torch.get_num_threads()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    def life(index: int, exchange: Exchange) -> int:
        model = make_model()
        torch.set_num_threads(index + 1)
        with Learner(
            model, SGD(model.parameters(), lr=0.1), method=diloco.DiLoCo(sync_every=2), exchange=exchange
        ) as learner:
            run(learner, index, range(1, 6))
            torch.rand(1), random.random(), np.random.rand()
        return torch.get_num_threads()

    assert diloco.run_local(life, learners=2) == [1, 2]
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_an_error_of_one_learner_stops_the_others_and_surfaces(culprit: int, at: int) -> None:
    ended: list[int] = []

    def life(index: int, exchange: Exchange) -> None:
        try:
            model = make_model()
            if index == culprit and at == 0:
                raise ZeroDivisionError("its own")
            with Learner(
                model, SGD(model.parameters(), lr=0.1), method=diloco.DiLoCo(sync_every=2), exchange=exchange
            ) as learner:
                for step in range(1, 7):
                    if index == culprit and step == at:
                        raise ZeroDivisionError("its own")
                    run(learner, index, range(step, step + 1))
        finally:
            ended.append(index)

    with pytest.raises(ZeroDivisionError, match="its own"):
        diloco.run_local(life, learners=3)
    # One after the other, in turn; who had not begun does not begin.
    assert ended[0] == culprit
    assert ended[1:] == sorted(ended[1:])
    assert len(ended) == 3 if at > 1 else ended


def test_a_learner_that_has_had_enough_leaves_and_the_others_go_on() -> None:
    def life(index: int, exchange: Exchange) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        model = make_model()
        method = diloco.StreamingDiLoCo(sync_every=4, overlap=1, mix=0.0, fragments=LAYERS, codec="fp32")
        with Learner(model, SGD(model.parameters(), lr=0.1), method=method, exchange=exchange) as learner:
            run(learner, index, range(1, 6 if index == 0 else 14))
            learner.state_dict()
            return learner.versions, learner.global_state_dict()

    (first, _), (second, mine), (third, theirs) = diloco.run_local(life, learners=3)
    assert first == (1, 1)
    assert second == third == (3, 3)
    assert_same(mine, theirs)


def test_learners_that_all_wait_are_told() -> None:
    def life(index: int, exchange: Exchange) -> None:
        model = make_model()
        method = diloco.DiLoCo(sync_every=2, quorum=AllLive(at_least=2))
        with Learner(model, SGD(model.parameters(), lr=0.1), method=method, exchange=exchange) as learner:
            run(learner, index, range(1, 3 if index else 9))

    with pytest.raises(
        ExchangeError, match=r"learners 0 all wait and none of them can continue; .*same number of steps\?"
    ):
        diloco.run_local(life, learners=2)


@pytest.mark.parametrize("learners", [0, -1])
def test_a_run_needs_a_learner(learners: int) -> None:
    with pytest.raises(ConfigError, match=f"learners={learners}; a run needs at least one"):
        diloco.run_local(lambda index, exchange: None, learners=learners)
