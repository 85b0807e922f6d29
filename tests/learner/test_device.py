"""Encoding on a device, run by run, and bringing new values there: the bits of the host, whatever the device.

On the CPU the same code runs without streams and pinned memory.
"""

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco.core.codecs import codec_from_name, compress
from diloco.core.fragments import make_layout
from diloco.core.layout import Placement
from diloco.exchange.base import Exchange
from diloco.learner.device import RUN_ELEMENTS, DeviceQueue, DeviceUploads, Displacement

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]
CODECS = ("fp32", "bf16", "fp16", "int8", "int4", "e3m0", "2bit", "uniform8", "topk-128-bf16", "sign-pruned-0.5")


def random(num_elements: int, seed: int) -> Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed))


def on(device: str, theta: Tensor, anchor: Tensor | None, rounded: tuple[Placement, ...] = ()) -> Displacement:
    given = theta.to(device, copy=True)
    ready = torch.cuda.current_stream().record_event() if device == "cuda" else None
    return Displacement(DeviceQueue(given.device), given, ready, anchor, rounded)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CODECS)
def test_a_displacement_is_encoded_to_the_bits_of_the_host(name: str, device: str) -> None:
    codec, theta, anchor, residual = codec_from_name(name), *(random(100_001, seed) for seed in range(3))
    for before in (None, residual * 1e-3):
        kept = None if before is None else before.clone()
        payload, after = on(device, theta, anchor).compress(codec, before, 0.95)
        expected = compress(codec, anchor - theta, before, 0.95)
        assert torch.equal(payload, expected[0])
        assert torch.equal(after, expected[1])
        assert payload.device == after.device == torch.device("cpu")
        assert before is None or torch.equal(before, kept)
    assert torch.equal(on(device, theta, anchor).encode(codec), codec.encode(anchor - theta))


@pytest.mark.parametrize("device", DEVICES)
def test_several_runs_are_one_payload(device: str) -> None:
    codec, num_elements = codec_from_name("e3m0"), RUN_ELEMENTS + 40_001
    theta, anchor, residual = (random(num_elements, seed) for seed in range(3))
    payload, after = on(device, theta, anchor).compress(codec, residual, 1.0)
    expected = compress(codec, anchor - theta, residual)
    assert torch.equal(payload, expected[0])
    assert torch.equal(after, expected[1])


@pytest.mark.parametrize("device", DEVICES)
def test_the_anchor_is_rounded_to_each_tensors_dtype(device: str) -> None:
    model = nn.Sequential(nn.Linear(2000, 3000), nn.Linear(3000, 900, bias=False), nn.Linear(900, 41))
    model[1].to(torch.bfloat16)
    model[2].to(torch.float16)
    [fragment] = make_layout(model, diloco.Whole()).fragments
    theta = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    anchor, fp32 = theta + random(fragment.numel, 0) * 1e-3, codec_from_name("fp32")
    rounded = torch.cat([
        anchor[place.elements].to(getattr(torch, place.spec.dtype)).float() for place in fragment.tensors
    ])  # fmt: skip
    kept = anchor.clone()
    delta = on(device, theta, anchor, fragment.tensors).encode(fp32).view(torch.float32)
    assert torch.equal(delta, rounded - theta)
    assert torch.equal(anchor, kept)


@pytest.mark.parametrize("device", DEVICES)
def test_values_that_are_not_finite_are_refused(device: str) -> None:
    theta = random(70_000, 0)
    theta[50_000] = torch.nan
    queue, codec, anchor = DeviceQueue(torch.device(device)), codec_from_name("int4"), random(70_000, 1)
    with pytest.raises(diloco.errors.NonFiniteError) as kept:
        Displacement(queue, theta.to(device), None, anchor, ()).compress(codec, None, 1.0)
    theta[50_000] = 0.0  # the queue is free again, while the error is kept
    payload = Displacement(queue, theta.to(device), None, anchor, ()).encode(codec)
    assert torch.equal(payload, codec.encode(anchor - theta))
    del kept


@pytest.mark.parametrize("device", DEVICES)
def test_an_upload_brings_the_values(device: str) -> None:
    theta = random(RUN_ELEMENTS + 5, 0)
    value, _ = DeviceUploads(torch.device(device)).copy(theta)
    assert value.device.type == device
    assert torch.equal(value.cpu(), theta)

    uploads = DeviceUploads(torch.device(device))
    uploads.start((0, 1), theta)
    uploads.start((1, 1), theta)
    uploads.keep([(0, 1)])
    assert torch.equal(uploads.take((0, 1), theta).cpu(), theta)
    assert uploads.take((1, 1), theta) is theta  # given up


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["e3m0", "topk-128-bf16"])
def test_a_run_on_cuda_has_the_bits_of_one_on_the_cpu(codec: str, dtype: torch.dtype) -> None:
    runs = [trained(device, codec, dtype) for device in ("cpu", "cuda")]
    for name, value in runs[0].items():
        assert torch.equal(runs[1][name], value), name


def test_trained_learners_move_and_agree() -> None:
    """What the comparison of devices rests on."""
    assert not torch.equal(trained("cpu", "e3m0", torch.float32)["0.weight"], make_model().state_dict()["0.weight"])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 50))


def trained(device: str, codec: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The global model of two learners whose steps round once, on every device: θ − g."""
    method = diloco.StreamingDiLoCo(sync_every=4, overlap=2, fragments=diloco.Balanced(2), codec=codec)

    def learn(index: int, exchange: Exchange) -> dict[str, Tensor]:
        model = make_model().to(dtype).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with diloco.Learner(model, optimizer, method=method, exchange=exchange) as learner:
            for step in range(16):
                generator = torch.Generator().manual_seed(100 * index + step)
                for parameter in model.parameters():
                    gradient = torch.randn(parameter.shape, generator=generator) * 1e-3
                    parameter.grad = gradient.to(dtype).to(device)
                optimizer.step()
                learner.step(tokens=1)
            return learner.global_state_dict()

    first, second = diloco.run_local(learn, learners=2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    return first
