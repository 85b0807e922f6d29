"""Where two methods are the same by their mathematics, they are the same here: whole runs in one process against each
other, against references written out, and against published numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco import Learner, Method
from diloco.exchange.base import Exchange

LEARNERS = 3
STEPS = 13
Step = Callable[[nn.Module, int, int], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def make_model() -> Net:
    torch.manual_seed(1)
    return Net()


def backward(model: nn.Module, index: int, step: int) -> None:
    """A gradient from data that only learner `index` has."""
    generator = torch.Generator().manual_seed(1000 * index + step)
    x, y = torch.randn(8, 5, generator=generator), torch.randn(8, 2, generator=generator)
    (model(x) - y).square().mean().backward()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def vector(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten() for value in tensors.values()])


def train(
    method: Method,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    *,
    learners: int = LEARNERS,
    steps: int = STEPS,
) -> tuple[list[Tensor], list[Tensor]]:
    """(learner 0's global model, its own model), flat, after every step."""

    def life(index: int, exchange: Exchange) -> list[tuple[Tensor, Tensor]]:
        model = make_model()
        inner = optimizer(model)
        after = []
        with Learner(model, inner, method=method, exchange=exchange) as learner:
            for step in range(1, steps + 1):
                backward(model, index, step)
                inner.step()
                inner.zero_grad()
                learner.step(tokens=8)
                after.append((vector(learner.global_state_dict()), vector(model.state_dict())))
        return after

    first = diloco.run_local(life, learners=learners)[0]
    return [each for each, _ in first], [each for _, each in first]


def assert_same_bits(run: tuple[list[Tensor], list[Tensor]], other: tuple[list[Tensor], list[Tensor]]) -> None:
    for mine, theirs in zip(run[0] + run[1], other[0] + other[1], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_local_sgd_is_diloco_with_an_outer_sgd_of_1(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], overlap: int
) -> None:
    assert_same_bits(
        train(diloco.LocalSGD(sync_every=4, overlap=overlap), optimizer),
        train(diloco.DiLoCo(sync_every=4, overlap=overlap, outer=diloco.SGD(lr=1.0)), optimizer),
    )


def test_local_sgd_averages_parameters() -> None:
    """Against models that are averaged by hand."""
    ours, _ = train(diloco.LocalSGD(sync_every=4))
    models = [make_model() for _ in range(LEARNERS)]
    inners = [adamw(model) for model in models]
    for step in range(1, STEPS + 1):
        for index, (model, inner) in enumerate(zip(models, inners, strict=True)):
            backward(model, index, step)
            inner.step()
            inner.zero_grad()
        if step % 4 == 0:
            mean = torch.stack([vector(model.state_dict()) for model in models]).mean(dim=0)
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
            # The mean of parameters against parameters minus the mean of displacements: roundings of numbers below 1.
            torch.testing.assert_close(ours[step - 1], mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "method",
    [
        diloco.LocalSGD(sync_every=1),
        diloco.DiLoCo(sync_every=1, outer=diloco.SGD(lr=1.0)),
        diloco.DataParallel(average="parameters"),
        diloco.DataParallel(),
        diloco.DataParallel(fragments=diloco.Balanced(3)),
        diloco.StreamingDiLoCo(sync_every=1, overlap=0, mix=0.0, codec="fp32", outer=diloco.SGD(lr=1.0)),
    ],
    ids=["LocalSGD", "DiLoCo", "parameters", "gradients", "gradients by fragments", "Streaming"],
)
def test_averaging_at_every_step_under_sgd_is_data_parallel(method: Method) -> None:
    """One model trained on the mean gradient, written out."""
    _, ours = train(method, sgd)
    model = make_model()
    inner = sgd(model)
    for step in range(1, STEPS + 1):
        gradients = []
        for index in range(LEARNERS):
            backward(model, index, step)
            gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
            inner.zero_grad()
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(parts).mean(dim=0)
        inner.step()
        inner.zero_grad()
        # fp32 rounding only, of numbers below 1, over at most 13 steps.
        torch.testing.assert_close(ours[step - 1], vector(model.state_dict()), rtol=0, atol=1e-6)


def test_data_parallel_on_gradients_holds_for_an_optimizer_with_state() -> None:
    _, ours = train(diloco.DataParallel(), adamw)
    model = make_model()
    inner = adamw(model)
    for step in range(1, STEPS + 1):
        for index in range(LEARNERS):
            backward(model, index, step)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= LEARNERS
        inner.step()
        inner.zero_grad()
        # AdamW divides by √v, which may be small: a relative rounding of the gradient moves a step of 0.01 by 1e-5 at
        # most.
        torch.testing.assert_close(ours[step - 1], vector(model.state_dict()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("codec", ["fp32", "int4", "e3m0"])
def test_streaming_with_one_fragment_and_no_overlap_is_diloco(codec: str) -> None:
    outer = diloco.Nesterov(lr=0.4, momentum=0.9)
    assert_same_bits(
        train(diloco.StreamingDiLoCo(sync_every=4, overlap=0, mix=0.0, fragments=diloco.Whole(), codec=codec)),
        train(diloco.DiLoCo(sync_every=4, codec=codec, outer=outer)),
    )


def test_fragments_that_are_sent_together_are_the_whole_model() -> None:
    """How a model is cut changes nothing where every fragment is sent after the same step."""
    whole = train(diloco.DiLoCo(sync_every=4))
    cut = train(diloco.DiLoCo(sync_every=4, fragments=diloco.Balanced(3), offsets=[4, 4, 4]))
    assert_same_bits(whole, cut)


@pytest.mark.parametrize("average", ["learners", "senders"])
def test_sparseloco_that_sends_everything_is_local_sgd(average: Literal["learners", "senders"]) -> None:
    """Every entry moves in every interval, so all are senders of it."""
    sparse = diloco.SparseLoCo(sync_every=4, codec=("topk-4096", "fp32"), average=average)
    assert_same_bits(train(sparse), train(diloco.LocalSGD(sync_every=4)))


def test_muloco_is_diloco_with_its_numbers() -> None:
    """Muon is the learner's own."""
    outer = diloco.Nesterov(lr=0.8, momentum=0.7)
    assert_same_bits(train(diloco.MuLoCo(), steps=31), train(diloco.DiLoCo(sync_every=30, outer=outer), steps=31))


def test_mixing_with_alpha_1_never_communicates_to_the_learner() -> None:
    alone = make_model()
    inner = adamw(alone)
    _, ours = train(diloco.DiLoCo(sync_every=4, mix=1.0))
    for step in range(1, STEPS + 1):
        backward(alone, 0, step)
        inner.step()
        inner.zero_grad()
        assert torch.equal(ours[step - 1], vector(alone.state_dict()))


def test_one_learner_is_lookahead_with_nesterov() -> None:
    """Lookahead (arXiv 1907.08610): fast weights take H steps, slow weights move towards them; here with Nesterov
    momentum.

    Bit for bit: one contributor's displacement is merged as it is, and every product and sum is rounded once.
    """
    sync_every, lr, momentum = 4, 0.7, 0.9
    ours, _ = train(diloco.DiLoCo(sync_every=sync_every, outer=diloco.Nesterov(lr=lr, momentum=momentum)), learners=1)
    fast = make_model()
    inner = adamw(fast)
    slow = vector(fast.state_dict())
    velocity = torch.zeros_like(slow)
    for step in range(1, STEPS + 1):
        backward(fast, 0, step)
        inner.step()
        inner.zero_grad()
        if step % sync_every == 0:
            displacement = slow - vector(fast.state_dict())
            velocity = momentum * velocity + displacement
            slow = slow - lr * (displacement + momentum * velocity)
            nn.utils.vector_to_parameters(slow.clone(), fast.parameters())
        assert torch.equal(ours[step - 1], slow)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.4, 0.5)])
def test_the_outer_step_is_torchs_nesterov_on_the_mean(lr: float, momentum: float) -> None:
    """`torch.optim.SGD(nesterov=True)` on the mean displacement of three learners trained by hand."""
    outer = diloco.Nesterov(lr=lr, momentum=momentum) if momentum else diloco.SGD(lr=lr)
    ours, _ = train(diloco.DiLoCo(sync_every=4, outer=outer))
    models = [make_model() for _ in range(LEARNERS)]
    inners = [adamw(model) for model in models]
    theta = nn.Parameter(vector(models[0].state_dict()).clone())
    reference = torch.optim.SGD([theta], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for step in range(1, STEPS + 1):
        for index, (model, inner) in enumerate(zip(models, inners, strict=True)):
            backward(model, index, step)
            inner.step()
            inner.zero_grad()
        if step % 4 == 0:
            displacements = [theta.detach() - vector(model.state_dict()) for model in models]
            theta.grad = torch.stack(displacements).mean(dim=0)
            reference.step()
            for model in models:
                nn.utils.vector_to_parameters(theta.detach().clone(), model.parameters())
        # torch fuses the multiply and the add; three outer steps of numbers below 1.
        torch.testing.assert_close(ours[step - 1], theta.detach(), rtol=0, atol=1e-6)


# --- torchft's published trajectory -----------------------------------------------------------------------------------

# Weights start at 1; gradient 2, inner lr 1, outer lr 2, H = 6, P = 2, two learners that do the same. Layer 0 is
# synchronised after inner steps 3, 9, 15, layer 1 three steps later, each sent τ steps earlier; between two
# synchronisations a layer falls by 2 a step.
GOLDEN_LAYER_0 = {
    0: [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
    1: [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
}
GOLDEN_LAYER_1 = {
    0: [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
    1: [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
}


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)])


@pytest.mark.parametrize("overlap", [0, 1])
def test_torchfts_golden_trajectory(overlap: int) -> None:
    offsets = [(p + 1) * 3 - overlap for p in range(2)]  # torchft counts to the application
    method = diloco.StreamingDiLoCo(
        sync_every=6, overlap=overlap, offsets=offsets, mix=0.0, codec="fp32", outer=diloco.SGD(lr=2.0),
        fragments=diloco.Named([["layers.0"], ["layers.1"]]),
    )  # fmt: skip

    def life(index: int, exchange: Exchange) -> list[list[float]]:
        model = TwoLayers()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        seen = [[layer[0].item() for layer in model.layers]]
        with Learner(model, inner, method=method, exchange=exchange) as learner:
            for _ in range(15):
                for layer in model.layers:
                    layer.grad = torch.full((3,), 2.0)
                inner.step()
                learner.step(tokens=1)
                assert all(bool((layer == layer[0]).all()) for layer in model.layers)
                seen.append([layer[0].item() for layer in model.layers])
        return seen

    for seen in diloco.run_local(life, learners=2):
        assert [layer_0 for layer_0, _ in seen] == GOLDEN_LAYER_0[overlap]
        assert [layer_1 for _, layer_1 in seen] == GOLDEN_LAYER_1[overlap]
