"""What a rank holds of a tensor: all of it, or a box of one that is sharded over the ranks of its island.

FSDP2, HSDP, tensor and expert parallelism hold parameters as DTensors, which say themselves which box is here
(`read_dtensor`). What holds them in another way is described by a `Gather`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from diloco.errors import ConfigError
from diloco.learner.boxes import Box


@dataclass(frozen=True, eq=False)
class Piece:
    """What this rank holds of a tensor.

    Attributes:
        shape: of the whole tensor.
        box: what of it is here. Its shape may be another one with the same elements in the same row-major order, such
            as (numel,) for a piece of a flattened tensor.
        local: its memory, of the shape `box.sizes`. Writing it writes the model.
    """

    shape: tuple[int, ...]
    box: Box
    local: Tensor


class Gather(Protocol):
    """How the ranks of an island hold the tensors of its model."""

    def __call__(self, name: str, tensor: Tensor) -> Piece:
        """The piece of a parameter, or of its gradient, that is here.

        Arguments:
            name: of the parameter.
            tensor: as the model holds it.
        """


def read_dtensor(name: str, tensor: Tensor) -> Piece:
    """The `Gather` of plain tensors, which are here whole, and of DTensors.

    Raises:
        ConfigError: a DTensor with partial sums.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Piece(shape, Box.whole(shape), tensor.detach())
    for placement in tensor.placements:
        if placement.is_partial():
            raise ConfigError(
                f"parameter {name!r} has the placement {placement} over its device mesh, and only shards and replicas "
                "can be exchanged; redistribute it, or describe what each rank holds with gather=…."
            )
    sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local().detach()
    assert tuple(local.shape) == tuple(sizes)
    if local.numel() == 0:
        offsets = (0,) * len(shape)
    return Piece(shape, Box(shape, tuple(offsets), tuple(sizes)), local)
