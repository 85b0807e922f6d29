"""Objects of an Accelerator: its prepared optimizer, and how its ranks share the model, batches and checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from diloco.errors import CheckpointError
from diloco.integrations.common import required_library

with required_library("accelerate"):
    from accelerate import ParallelismConfig
    from accelerate.optimizer import AcceleratedOptimizer


class PreparedOptimizer:
    """A prepared optimizer, and whether the gradient scaler skipped its last step.

    Arguments:
        optimizer: result of `accelerator.prepare`, or a plain optimizer.

    Attributes:
        inner: the wrapped optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._outer = optimizer
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        self.inner = optimizer
        self._found_inf: Tensor | None = None
        self.inner.register_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Record `found_inf`: a fused optimizer skips a step itself, and accelerate counts that as a step."""
        self._found_inf = getattr(optimizer, "found_inf", None)

    @property
    def has_skipped(self) -> bool:
        """Whether the gradient scaler has skipped the last step."""
        if isinstance(self._outer, AcceleratedOptimizer) and self._outer.step_was_skipped:
            return True
        return self._found_inf is not None and bool(self._found_inf)


def num_copies(parallelism: ParallelismConfig | None) -> int:
    """Number of ranks with the same batch, as in tensor and context parallelism."""
    return 1 if parallelism is None else parallelism.tp_size * parallelism.cp_size


def is_first_copy(parallelism: ParallelismConfig | None, mesh: DeviceMesh | None) -> bool:
    """Whether this rank is the first of the ranks with its batch.

    Arguments:
        mesh: the device mesh of the Accelerator.
    """
    if num_copies(parallelism) == 1:
        return True
    assert mesh is not None
    assert mesh.mesh_dim_names is not None
    return all(mesh.get_local_rank(name) == 0 for name in ("tp", "cp") if name in mesh.mesh_dim_names)


def require_part(own: Path, num_ranks: int) -> None:
    """Check that a checkpoint has the part of this rank.

    Arguments:
        own: the directory of this rank's part, beside those of the other ranks.

    Raises:
        CheckpointError: the checkpoint has parts of fewer ranks.
    """
    saved = [] if own.is_dir() else list(own.parent.glob("rank-*"))
    if saved:
        raise CheckpointError(
            f"the checkpoint is of a job of {len(saved)} ranks, and this one has {num_ranks}; use the same number."
        )
