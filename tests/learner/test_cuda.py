"""Runs on a GPU: the bits of the CPU for every kind of method, and ways to train that only a GPU has."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.learner.mixtures import VOCABULARY, Mixture
from torch import Tensor, nn

import diloco
from diloco import Method
from diloco.core.codecs import codec_from_name
from diloco.exchange.base import Exchange

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

METHODS: dict[str, Callable[[], Method]] = {
    "gradients": diloco.DataParallel,
    "gradients-e3m0": partial(diloco.DataParallel, codec="e3m0"),
    "parameters": partial(diloco.DataParallel, average="parameters"),
    "localsgd": partial(diloco.LocalSGD, sync_every=4),
    "int8": partial(diloco.DiLoCo, sync_every=4, codec="int8", error_feedback=True),
    "2bit": partial(diloco.DiLoCo, sync_every=4, codec=("2bit", "fp32"), error_feedback=True),
    "uniform8": partial(diloco.DiLoCo, sync_every=4, codec=("uniform8", "fp32"), error_feedback=True),
    "fp16": partial(diloco.DiLoCo, sync_every=4, codec="fp16"),
    "sign-pruned": partial(diloco.DiLoCo, sync_every=4, codec=("sign-pruned-0.5", "fp32"), error_feedback=True),
    "streaming": partial(
        diloco.StreamingDiLoCo, sync_every=4, overlap=2, fragments=diloco.Balanced(3), error_feedback=True
    ),
    "streaming-int4": partial(diloco.StreamingDiLoCo, sync_every=4, overlap=1, codec="int4"),
    "sparse": partial(diloco.SparseLoCo, sync_every=4),
    "sparse-bf16": partial(diloco.SparseLoCo, sync_every=4, average="learners", codec=("topk-64-bf16", "bf16")),
    "delayed": partial(diloco.DelayedDiLoCo, sync_every=4),
    "delayed-2": partial(diloco.DelayedDiLoCo, sync_every=4, intervals=2, codec="int4", error_feedback=True),
    "eager": partial(diloco.EagerDiLoCo, sync_every=4),
    "eager-e3m0": partial(diloco.EagerDiLoCo, sync_every=4, codec="e3m0", error_feedback=True),
    "decoupled": partial(diloco.DecoupledDiLoCo, sync_every=4, fragments=diloco.Balanced(4)),
    "decoupled-displacement": partial(
        diloco.DecoupledDiLoCo, sync_every=4, fragments=diloco.Balanced(2), adopt=diloco.KeepDisplacement()
    ),
    "async": partial(diloco.AsyncDiLoCo, sync_every=4, learners=2),
    "async-bf16": partial(diloco.AsyncDiLoCo, sync_every=4, learners=2, codec="bf16", error_feedback=True),
}


class Mixed(nn.Module):
    """Whole segments and shorter ones, a tied weight, channels-last memory, a frozen part, a scalar, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(300, 128)
        self.up = nn.Linear(128, 700)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.half = nn.Linear(128, 100).bfloat16()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(20, 30).requires_grad_(requires_grad=False)
        self.head = nn.Linear(128, 300, bias=False)
        self.head.weight = self.embed.weight


def give_gradients(model: nn.Module, seed: int, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = torch.randn(parameter.shape, generator=generator) * 1e-3
            parameter.grad = gradient.to(parameter.dtype).to(device)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def trained(device: str, method: Method) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """(Global model, own model) of two learners whose steps round once, on every device: θ − g."""

    def learn(index: int, exchange: Exchange) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = Mixed().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with diloco.Learner(model, optimizer, method=method, exchange=exchange) as learner:
            for step in range(24):
                give_gradients(model, 100 * index + step, device)
                optimizer.step()
                learner.step(tokens=1)
                if step == 13:
                    own, expected = weights_of(model), learner.global_state_dict()
                    with learner.global_model():
                        assert_same(weights_of(model), expected)
                    assert_same(weights_of(model), own)
            learner.finish()
            return learner.global_state_dict(), weights_of(model)

    return diloco.run_local(learn, learners=2)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_the_bits_of_the_cpu(name: str) -> None:
    on_cpu, on_gpu = (trained(device, METHODS[name]()) for device in ("cpu", "cuda"))
    assert not torch.equal(on_cpu[0][0]["up.weight"], Mixed().state_dict()["up.weight"])
    for found, expected in zip(itertools.chain(*on_gpu), itertools.chain(*on_cpu), strict=True):
        assert_same(found, expected)


def test_training_on_a_stream_of_its_own_has_the_bits_of_the_cpu() -> None:
    method = METHODS["streaming"]()
    with torch.cuda.stream(torch.cuda.Stream()):
        on_gpu = trained("cuda", method)
    assert_same(on_gpu[0][0], trained("cpu", method)[0][0])


@pytest.mark.parametrize("up", ["fp32", "int8"])
def test_parts_of_a_mixture_have_the_bits_of_the_cpu(up: str) -> None:
    """Untrained rows, and weights by the tokens that the routers on each device chose experts for."""
    fragments = diloco.Experts(groups=2, trunk=diloco.Whole(), every=2, up=up)
    method = diloco.DiLoCo(sync_every=3, fragments=fragments, weight="tokens")

    def learn(device: str, index: int, exchange: Exchange) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        torch.manual_seed(0)
        model = Mixture().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        batch = torch.arange(40).view(4, 10).add(index).remainder(VOCABULARY).to(device)
        with diloco.Learner(
            model, optimizer, method=method, exchange=exchange, trains_experts=("0-2", "1,3")[index]
        ) as learner:
            for step in range(24):
                model(batch).sum().backward()
                give_gradients(model, 100 * index + step, device)
                optimizer.step()
                learner.step(tokens=40)
            learner.finish()
            return learner.global_state_dict(), weights_of(model)

    on_cpu, on_gpu = (diloco.run_local(partial(learn, device), learners=2) for device in ("cpu", "cuda"))
    for found, expected in zip(itertools.chain(*on_gpu), itertools.chain(*on_cpu), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("name", ["streaming", "eager-e3m0", "delayed", "sparse"])
def test_a_resumed_run_has_the_bits_of_no_interruption(name: str) -> None:
    method = METHODS[name]()

    def learn(stop: int, states: list[dict[str, Any]] | None, index: int, exchange: Exchange) -> dict[str, Any]:
        model = Mixed().to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        state = None if states is None else states[index]
        with diloco.Learner(model, optimizer, method=method, exchange=exchange, resume=state) as learner:
            for step in range(learner.steps, stop):
                give_gradients(model, 100 * index + step, "cuda")
                optimizer.step()
                learner.step(tokens=1)
            if stop == 10:
                return learner.state_dict()
            learner.finish()
            return learner.global_state_dict()

    whole = diloco.run_local(partial(learn, 20, None), learners=2)
    states = diloco.run_local(partial(learn, 10, None), learners=2)
    for resumed in diloco.run_local(partial(learn, 20, states), learners=2):
        assert_same(resumed, whole[0])


# - what only a GPU has ------------------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 32))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - x.sort().values).square().mean()


class OnTwoDevices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 512), nn.Linear(512, 32).to("cuda")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.cpu()).relu().to("cuda"))


@pytest.mark.parametrize("case", ["fused", "fp16 with a scaler", "compiled", "two devices"])
def test_learners_agree_and_learn(case: str) -> None:
    """A scaler of this size skips its first steps."""
    is_fp16 = case == "fp16 with a scaler"

    def learn(index: int, exchange: Exchange) -> tuple[dict[str, Tensor], list[float]]:
        model = OnTwoDevices() if case == "two devices" else make_model().to("cuda")
        if case == "compiled":
            model.compile()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=case != "two devices")
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, enabled=is_fp16)
        torch.manual_seed(index)
        losses = []
        method = diloco.StreamingDiLoCo(sync_every=10, overlap=2, fragments=diloco.Balanced(3), error_feedback=True)
        with diloco.Learner(model, optimizer, method=method, exchange=exchange) as learner:
            for _ in range(60):
                optimizer.zero_grad()
                with torch.autocast("cuda", torch.float16, enabled=is_fp16):
                    loss = loss_of(model, torch.rand(64, 32, device="cuda"))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                learner.step(tokens=64)
                losses.append(loss.item())
            learner.finish()
            return learner.global_state_dict(), losses

    (first, losses), (second, _) = diloco.run_local(learn, learners=2)
    assert_same(second, first)
    assert losses[-1] < 0.8 * losses[0]


def test_a_step_that_is_one_cuda_graph_trains_on_what_is_adopted() -> None:
    """Values are adopted in place, so that replays read them."""
    method = diloco.DiLoCo(sync_every=10, codec="e3m0")

    def learn(index: int, exchange: Exchange) -> tuple[dict[str, Tensor], list[float]]:
        model = make_model().to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        generator = torch.Generator("cuda").manual_seed(index)
        x = torch.rand(64, 32, device="cuda", generator=generator)

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            return loss

        with diloco.Learner(model, optimizer, method=method, exchange=exchange, rewarm_steps=0) as learner:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph, losses = torch.cuda.CUDAGraph(), []
            with torch.cuda.graph(graph):
                loss = step()
            for _ in range(60):
                x.uniform_(generator=generator)
                graph.replay()
                learner.step(tokens=64)
                losses.append(loss.item())
            learner.finish()
            assert_same(weights_of(model), learner.global_state_dict())  # adopted at the last step
            return learner.global_state_dict(), losses

    (first, losses), (second, _) = diloco.run_local(learn, learners=2)
    assert_same(second, first)
    assert losses[-1] < 0.7 * losses[0]


def test_a_snapshot_is_of_the_step_at_which_it_is_sent() -> None:
    """Also where the device is many products behind. All elements have one value, which the CPU gives for few."""
    method = diloco.LocalSGD(sync_every=2, overlap=1, codec="fp32")

    def learn(device: str, num_elements: int, index: int, exchange: Exchange) -> Tensor:
        model = nn.Linear(num_elements, 1, bias=False, device=device)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        busy = torch.randn(8192, 8192, device="cuda")
        out = torch.empty_like(busy)
        with diloco.Learner(model, optimizer, method=method, exchange=exchange) as learner:
            for _ in range(12):
                for _ in range(10):
                    torch.mm(busy, busy, out=out)
                model.weight.grad = torch.full_like(model.weight, -1.0)
                optimizer.step()
                learner.step(tokens=1)
                for _ in range(10):
                    torch.mm(busy, busy, out=out)
            learner.finish()
            return learner.global_state_dict()["weight"]

    expected = float(diloco.run_local(partial(learn, "cpu", 8), learners=2)[0].amax())
    for found in diloco.run_local(partial(learn, "cuda", 1 << 24), learners=2):
        assert float(found.amin()) == float(found.amax()) == expected > 0


@pytest.mark.parametrize("name", ["int8", "e3m0", "bf16", "2bit", "uniform8", "topk-128-2bit", "sign-pruned-0.5"])
def test_codecs_use_no_operation_that_torch_calls_nondeterministic(name: str) -> None:
    codec, x = codec_from_name(name), torch.randn(100_001, generator=torch.Generator().manual_seed(0))
    torch.use_deterministic_algorithms(True)
    try:
        payload = codec.encode(x.to("cuda"))
        decoded = codec.decode(payload, len(x))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(payload.cpu(), codec.encode(x))
    assert torch.equal(decoded.cpu(), codec.decode(codec.encode(x), len(x)))
