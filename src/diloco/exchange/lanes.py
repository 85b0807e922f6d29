"""What rank 0 has the other ranks of its learner do, beside the training thread: one thing at a time in each lane.

Rank 0 leads: it tells a command, every rank does its part of it, and all hear how it went on each of them. So either
all ranks have done it, or none goes on with it.
"""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.errors import BusyError, DilocoError, ExchangeError, NoRoomError, UnreachableError
from diloco.exchange.group import Group, error_of, error_values, to_bytes, to_tensor

log = logging.getLogger("diloco")

Command = Mapping[str, Any]
"""Plain values."""


class RankTask(ABC):
    """One rank's part of a command."""

    @abstractmethod
    def work(self) -> Any:
        """Do it; returns plain values for all ranks. Raises DilocoError for all of them."""

    def settle(self, said: Sequence[Any], group: Group) -> None:  # noqa: B027  (most have nothing more to do)
        """All ranks have done their part, and said this. Raises the same DilocoError on every rank, or none."""


class CommandLane:
    """Commands one after the other. `group`: connects the ranks; nothing else uses it."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._lock = threading.Lock()

    def lead(self, command: Command, job: RankTask) -> None:
        """On rank 0: a command for all ranks, this one too.

        Raises:
            ExchangeError: a rank is gone. DilocoError: what a rank has met.
        """
        with self._lock:
            self._tell(json.dumps(command).encode())
            error = self._execute(job)
        if error is not None:
            raise error

    def end(self) -> None:
        """On rank 0: no command follows."""
        with self._lock:
            self._tell(b"")

    def follow(self, job_of: Callable[[Command], RankTask]) -> None:
        """On the other ranks: execute what rank 0 tells, to the end. Errors are rank 0's to handle.

        Raises:
            ExchangeError: a rank is gone.
        """
        while raw := self._hear():
            self._execute(job_of(json.loads(raw)))

    def _tell(self, raw: bytes) -> None:
        self.group.sum([len(raw)], "a command")
        if raw:
            self.group.broadcast(to_tensor(raw), "a command")

    def _hear(self) -> bytes:
        [num_bytes] = self.group.sum([0], "a command")
        raw = torch.empty(num_bytes, dtype=torch.uint8)
        self.group.broadcast(raw, "a command")
        return to_bytes(raw)

    def _execute(self, job: RankTask) -> DilocoError | None:
        said, own = None, None
        try:
            said = job.work()
        except DilocoError as error:
            own = error
        except Exception as error:  # no memory, or a defect: the other ranks must not wait for what will never come
            log.exception("rank %d of this learner failed", self.group.rank)
            own = ExchangeError(f"rank {self.group.rank} of this learner failed: {type(error).__name__}: {error}")
        answers = self.group.gather_values([said, error_values(own)], "how a command went")
        failed = {rank: error for rank, (_, error) in enumerate(answers) if error is not None}
        if not failed:
            try:
                job.settle([said for said, _ in answers], self.group)
            except DilocoError as error:
                return error
            return None
        final = [rank for rank, (name, _) in failed.items() if name not in _TRIED_AGAIN]
        rank = (final or list(failed))[0]
        return own if own is not None and rank == self.group.rank else error_of(*failed[rank])


_TRIED_AGAIN = (UnreachableError.__name__, NoRoomError.__name__, BusyError.__name__)
"""Of several ranks' errors, others say more."""


@dataclass(frozen=True)
class CommandLanes:
    """Of one rank: what it sends, and what it receives."""

    send: CommandLane
    receive: CommandLane

    @property
    def rank(self) -> int:
        """This rank."""
        return self.send.group.rank

    @property
    def num_ranks(self) -> int:
        """Of this learner."""
        return self.send.group.size


class ShardTransfer(RankTask):
    """Bring one rank's shard to rank 0.

    Arguments:
        shard: this rank's, uint8.
        owner: the rank whose shard is brought.

    Attributes:
        received: on rank 0, the shard.
    """

    def __init__(self, shard: Tensor, owner: int) -> None:
        self._shard, self._owner = shard, owner
        self.received = torch.empty(0, dtype=torch.uint8)

    def work(self) -> int:
        return self._shard.numel()

    def settle(self, said: Sequence[Any], group: Group) -> None:
        sizes = [num_bytes if rank == self._owner else 0 for rank, num_bytes in enumerate(said)]
        shard = self._shard if group.rank == self._owner else self._shard[:0]
        self.received = group.collect(shard, sizes, "a shard of this learner's model")
