"""The ranks that train one learner: those that torchrun started, or this process alone.

All ranks hold the same model, share every batch, and stop after the same step. The first rank logs, writes events and
saves checkpoints for all.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import ConfigError
from diloco.exchange.group import Group
from diloco.training.expert_parallel import shard_experts

TIMEOUT_S = 24 * 3600.0
"""Timeout of waiting for the first rank, which may itself wait for other learners. The death of a rank is noticed at
once."""


class RankGroup:
    """Ranks that act together; a process without a process group is its only rank.

    All ranks must call every method but `rows` and `synchronised` in the same order.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self._group = None if process_group is None else Group(process_group, timeout_s=TIMEOUT_S)
        self.rank = 0 if self._group is None else self._group.rank
        self.size = 1 if self._group is None else self._group.size

    @property
    def is_first(self) -> bool:
        """Whether this rank logs, writes and saves for all."""
        return self.rank == 0

    def rows(self, num_rows: int) -> slice:
        """This rank's rows of a batch, which must divide over the ranks."""
        share = num_rows // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def check_batch(self, num_rows: int, accumulate: int) -> None:
        """Raise ConfigError unless a batch divides equally over ranks and micro-batches."""
        if num_rows % (self.size * accumulate):
            raise ConfigError(
                f"a batch of {num_rows} sequences does not divide over {self.size} ranks x {accumulate} micro-batches; "
                "change train.batch, train.global_batch or train.accumulate"
            )

    def wrap(self, model: nn.Module, expert_parallel: int | None = None) -> nn.Module:
        """The model to train on these ranks: the backward pass averages gradients over them.

        Arguments:
            expert_parallel: number of ranks that share the experts; None: every rank holds the whole model.
        """
        if expert_parallel is not None:
            return shard_experts(model, expert_parallel, self.size)
        if self._group is None or self.size == 1:
            return model
        return DistributedDataParallel(model, process_group=self.process_group)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag if self._group is None else self._group.sum([int(flag)], "a request to stop")[0] > 0

    def mean(self, value: float) -> float:
        """The mean over ranks."""
        values: list[float] = self._values_of_all(value, "the mean over ranks")
        return sum(values) / self.size

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks of a tensor, in place, on its device."""
        if self.process_group is not None:
            dist.all_reduce(values, group=self.process_group)
        return values

    def from_first(self, value: float) -> float:
        """The first rank's value, on every rank."""
        return float(self._values_of_all(value, "a value of rank 0")[0])

    def gather(self, part: Tensor) -> list[Tensor]:
        """Every rank's bytes (uint8), in rank order."""
        if self._group is None:
            return [part]
        sizes = self._values_of_all(part.numel(), "the sizes of checkpoint parts")
        return list(self._group.gather(part, sizes, "checkpoint parts").split(sizes))

    def whole(self, value: Any) -> Any:
        """A nested state with whole tensors in place of DTensors, on the first rank's host; empty ones on others."""
        if isinstance(value, DTensor):
            found = value.full_tensor()
            return found.cpu() if self.is_first else found.new_empty(0, device="cpu")
        if isinstance(value, Mapping):
            return {key: self.whole(each) for key, each in value.items()}
        return [self.whole(each) for each in value] if isinstance(value, list) else value

    def require_same(self, values: Any, what: str) -> None:
        """Raise the same ConfigError on every rank unless `values` (plain ones) are equal on all."""
        first, *others = self._values_of_all(values, what)
        for rank, other in enumerate(others, 1):
            if other != first:
                raise ConfigError(f"{what} is {first} on rank 0 and {other} on rank {rank}; start all ranks alike")

    def _values_of_all(self, values: Any, what: str) -> list[Any]:
        return [values] if self._group is None else self._group.gather_values(values, what)

    def close(self) -> None:
        """Disconnect from the other ranks."""
        if self._group is not None:
            self._group.disconnect()


def synchronised(model: nn.Module, last: bool) -> AbstractContextManager[object]:
    """A context for the backward pass of a micro-batch: ranks exchange gradients in the last one only."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()


def started_by_torchrun() -> bool:
    """Whether torchrun started this process."""
    return dist.is_torchelastic_launched()


def choose_device(name: str) -> torch.device:
    """The device of `train.device` for this process.

    Raises ConfigError when CUDA is requested and not available, or this machine has fewer devices than ranks.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError('train.device = "cuda" but torch sees no CUDA device; use "auto" or "cpu"')
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    rank = int(os.environ["LOCAL_RANK"]) if started_by_torchrun() else 0
    if rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {rank} of this machine has no CUDA device, there are {torch.cuda.device_count()}; "
            "start no more ranks than devices"
        )
    return torch.device("cuda", rank)


@contextmanager
def ranks_of_process(device: str) -> Iterator[RankGroup]:
    """The ranks that torchrun started, on the devices of `train.device`; or this process alone."""
    if not started_by_torchrun():
        yield RankGroup()
        return
    chosen = choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
    try:
        ranks = RankGroup(dist.group.WORLD)
        try:
            yield ranks
        finally:
            ranks.close()
    finally:
        dist.destroy_process_group()
