"""The order of a model whose tensors are on several ranks."""

import pytest
import torch
from torch import nn

import diloco
from diloco.core.layout import TensorSpec
from diloco.errors import LayoutError
from diloco.learner.island import merged
from diloco.learner.models import joined
from diloco.learner.pieces import read_dtensor
from diloco.learner.roles import Buffers, ModelDescription, Static, described


def specs(*names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, (2,), "float32") for name in names)


def trained(*specs: TensorSpec) -> ModelDescription:
    return ModelDescription(specs, (), (), (), {})


WHOLE = specs("embed", "layers.0.w", "layers.1.w", "layers.2.w", "layers.10.w", "norm", "head")


@pytest.mark.parametrize(
    "held",
    [
        [range(7)],
        [range(7), range(7)],
        [range(3), range(3, 7)],  # stages
        [(0, 1, 3), (2, 4, 5, 6)],  # stages in turns
        [range(3), range(3), range(3, 7), range(3, 7)],
        [(0, 1, 2, 6), (3, 4, 5, 6)],  # tied embeddings on both ends
        [(), range(7)],
    ],
    ids=str,
)
def test_the_order_is_that_of_the_model(held: list[range]) -> None:
    assert merged([trained(*(WHOLE[index] for index in each)) for each in held]) == trained(*WHOLE)


def test_a_tensor_that_two_ranks_describe_differently_is_refused() -> None:
    with pytest.raises(LayoutError, match="'b' is .* on rank 1 of this learner and"):
        merged([trained(*specs("a", "b")), trained(TensorSpec("b", (3,), "float32"))])


class Layer(nn.Module):
    """A trained and a frozen parameter, and a buffer that training may change."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(2, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("bias", torch.zeros(2))


class Model(nn.Module):
    def __init__(self, *layers: int, ends: str = "") -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2) if "first" in ends else None
        self.layers = nn.ModuleDict({str(layer): Layer() for layer in layers})
        self.norm = nn.BatchNorm1d(2, momentum=0.0) if "last" in ends else None


@pytest.mark.parametrize(
    "ranks",
    [
        [[Model(0, 1, ends="first")], [Model(2, 3, ends="last")]],
        [[Model(0, ends="first"), Model(2)], [Model(1), Model(3, ends="last")]],
        [[Model(0, ends="first"), Model(3, ends="last")], [Model(1), Model(2)]],
        [[Model(ends="first"), Model(ends="last")], [Model(0, 1), Model(2, 3)]],
    ],
    ids=["stages", "stages in turns", "there and back", "ends without layers"],
)
@pytest.mark.parametrize(
    ("buffers", "static"),
    [
        ("refuse", "exchange"),
        ("refuse", "digest"),
        ("local", "exchange"),
        ("average", "exchange"),
        ({"*.scale": "average", "*.bias": "average"}, "digest"),
    ],
    ids=str,
)
def test_stages_have_the_layout_of_the_whole_model(
    ranks: list[list[Model]], buffers: Buffers | dict[str, Buffers], static: Static
) -> None:
    """With frozen parameters, buffers and averaged tensors, of which all layers have some."""
    method = diloco.StreamingDiLoCo(fragments=diloco.Balanced(3))

    def of(model: nn.Module) -> ModelDescription:
        return described(model, method, buffers, static, read_dtensor)

    whole = of(Model(0, 1, 2, 3, ends="first last"))
    assert merged([of(joined(parts)) for parts in ranks]).layout(method) == whole.layout(method)
