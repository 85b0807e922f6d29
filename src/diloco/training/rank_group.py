"""The processes that act together: the ranks that torchrun started, or just this one.

As one learner they hold the same model, share every batch, and agree on when to stop; the first rank speaks, writes and
saves for all.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import ConfigError
from diloco.exchange.group import Group

TIMEOUT_S = 24 * 3600.0
"""How long a rank waits for the first one, which may itself wait for other learners. A rank that dies is noticed at
once."""


class RankGroup:
    """Ranks that act together. Without a group this process is alone, and everything is local.

    Every method but `rows` and `synchronised` is called by all ranks in the same order.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self._group = None if process_group is None else Group(process_group, timeout_s=TIMEOUT_S)
        self.rank = 0 if self._group is None else self._group.rank
        self.size = 1 if self._group is None else self._group.size

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks, writes and saves."""
        return self.rank == 0

    def rows(self, num_rows: int) -> slice:
        """This rank's part of a batch that divides over the ranks."""
        share = num_rows // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def check_batch(self, num_rows: int, accumulate: int) -> None:
        """Raise ConfigError unless a batch divides equally over ranks and micro-batches."""
        if num_rows % (self.size * accumulate):
            raise ConfigError(
                f"a batch of {num_rows} sequences does not divide over {self.size} ranks x {accumulate} micro-batches; "
                "change train.batch, train.global_batch or train.accumulate"
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as its ranks train it: gradients become the mean over ranks in the backward pass."""
        if self._group is None or self.size == 1:
            return model
        return DistributedDataParallel(model, process_group=self.process_group)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag if self._group is None else self._group.sum([int(flag)], "a request to stop")[0] > 0

    def mean(self, value: float) -> float:
        """The mean over ranks."""
        if self._group is None:
            return value
        values: list[float] = self._group.gather_values(value, "the mean over ranks")
        return sum(values) / self.size

    def shared(self, value: float) -> float:
        """The first rank's value, on every rank."""
        if self._group is None:
            return value
        number = torch.tensor([value], dtype=torch.float64)
        self._group.broadcast(number, "a value of rank 0")
        return float(number)

    def gathered(self, part: Tensor) -> list[Tensor]:
        """Every rank's bytes (uint8), in rank order."""
        if self._group is None:
            return [part]
        sizes = self._group.gather_values(part.numel(), "the sizes of what ranks save")
        return list(self._group.gather(part, sizes, "what ranks save").split(sizes))

    def require_same(self, values: Any, what: str) -> None:
        """Raise the same ConfigError on every rank unless `values` (plain ones) are the same on all."""
        if self._group is None:
            return
        theirs = self._group.gather_values(values, what)
        for rank, other in enumerate(theirs):
            if other != theirs[0]:
                raise ConfigError(f"{what} is {theirs[0]} on rank 0 and {other} on rank {rank}; start all ranks alike")

    def close(self) -> None:
        """Part from the other ranks."""
        if self._group is not None:
            self._group.disconnect()


def synchronised(model: nn.Module, last: bool) -> AbstractContextManager[object]:
    """A context for the backward pass of a micro-batch: ranks exchange gradients in the last one only."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()


def started_by_torchrun() -> bool:
    """Whether this process is one of the ranks of a torchrun."""
    return dist.is_torchelastic_launched()


def local_rank() -> int:
    """This process's rank on its machine, as torchrun says; 0 without it."""
    return int(os.environ["LOCAL_RANK"]) if started_by_torchrun() else 0


def choose_device(name: str) -> torch.device:
    """The device of `train.device` for this process.

    Raises ConfigError when CUDA is asked for and not there, or has fewer devices than there are ranks.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError('train.device = "cuda" but torch sees no CUDA device; use "auto" or "cpu"')
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    rank = local_rank()
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
        job = RankGroup(dist.group.WORLD)
        try:
            yield job
        finally:
            job.close()
    finally:
        dist.destroy_process_group()
