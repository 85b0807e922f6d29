"""Snapshots: what is sent is what the parameters were, measured from the anchor as the parameters could hold it."""

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco.core.codecs import codec_from_name
from diloco.core.fragments import Layout, make_layout
from diloco.learner.device import Displacement, Snapshots
from diloco.learner.partition import partition_of
from diloco.learner.pieces import Units

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


def make_model(dtype: torch.dtype, device: str = "cpu") -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7, bias=False)).to(dtype).to(device)


def flat_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().cpu().flatten() for p in model.parameters()])


def snapshots_of(model: nn.Module, layout: Layout) -> Snapshots:
    parameters = dict(model.named_parameters())
    return Snapshots(partition_of(layout, parameters, Units(layout)), next(model.parameters()).device)


def values_of(displacement: Displacement) -> Tensor:
    """It gives nothing but payloads."""
    return displacement.encode(codec_from_name("fp32")).view(torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_displacement_from_the_anchor_rounded_to_the_parameters_dtype(dtype: torch.dtype, device: str) -> None:
    model = make_model(dtype, device)
    layout = make_layout(model, diloco.Whole())
    (fragment,) = layout.fragments
    snapshots = snapshots_of(model, layout)
    anchor = torch.randn(fragment.numel)
    expected = anchor.to(dtype).float() - flat_of(model)

    snapshot = snapshots.take(0, dict(model.named_parameters()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # training goes on
    kept = anchor.clone()
    displacement = values_of(snapshots.displacement(0, anchor, snapshot))

    assert displacement.dtype == torch.float32
    assert displacement.device.type == "cpu"
    assert torch.equal(displacement, expected)
    assert torch.equal(anchor, kept)


def test_parameters_of_several_dtypes() -> None:
    model = make_model(torch.float32)
    model[1].to(torch.bfloat16)
    layout = make_layout(model, diloco.Whole())
    (fragment,) = layout.fragments
    snapshots = snapshots_of(model, layout)
    anchor = torch.randn(fragment.numel)
    rounded = torch.cat([anchor[:18], anchor[18:].bfloat16().float()])
    snapshot = snapshots.take(0, dict(model.named_parameters()))
    assert torch.equal(values_of(snapshots.displacement(0, anchor, snapshot)), rounded - flat_of(model))


def test_without_an_anchor_it_is_the_tensors_themselves() -> None:
    model = make_model(torch.bfloat16)
    layout = make_layout(model, diloco.Whole())
    snapshots = snapshots_of(model, layout)
    snapshot = snapshots.take(0, dict(model.named_parameters()))
    assert torch.equal(values_of(snapshots.displacement(0, None, snapshot)), flat_of(model))


def test_buffers_are_reused_once_given_back() -> None:
    model = make_model(torch.float32)
    layout = make_layout(model, diloco.Balanced(2))
    snapshots = snapshots_of(model, layout)
    tensors = dict(model.named_parameters())
    first = snapshots.take(0, tensors)
    second = snapshots.take(0, tensors)  # two in flight
    other = snapshots.take(1, tensors)
    addresses = {s.values.data_ptr() for s in (first, second, other)}
    assert len(addresses) == 3
    snapshots.give_back(second)
    assert snapshots.take(0, tensors).values is second.values
    assert snapshots.take(0, tensors).values.data_ptr() not in addresses
