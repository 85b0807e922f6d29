"""The order of a model whose tensors are on several ranks."""

import pytest

from diloco.core.layout import TensorSpec
from diloco.errors import LayoutError
from diloco.learner.union import _merged


def specs(*names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, (2,), "float32") for name in names)


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
    assert _merged([tuple(WHOLE[index] for index in each) for each in held]) == WHOLE


def test_a_tensor_that_two_ranks_describe_differently_is_refused() -> None:
    with pytest.raises(LayoutError, match="'b' is .* on rank 1 of this learner and"):
        _merged([specs("a", "b"), (TensorSpec("b", (3,), "float32"),)])
