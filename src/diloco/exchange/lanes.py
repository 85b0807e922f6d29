"""Commands of rank 0 to all ranks of its learner, executed beside the training thread, one at a time in each lane.

Rank 0 leads: it broadcasts a command, every rank executes its part, and all of them gather the outcomes. So either all
ranks have executed a command, or none of them continues from it.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diloco.errors import BusyError, DilocoError, ExchangeError, NoRoomError, UnreachableError
from diloco.exchange.group import Group, attempt, error_of, error_values, to_bytes, to_tensor

log = logging.getLogger("diloco")

Command = Mapping[str, Any]
"""Plain values."""

RETRIED = (UnreachableError.__name__, NoRoomError.__name__, BusyError.__name__)
"""Errors after which rank 0 repeats a command. Of the errors of several ranks, another kind takes precedence."""


@dataclass(frozen=True)
class RankTask:
    """One rank's part of a command.

    Attributes:
        work: executes it, and returns plain values for all ranks. Raises DilocoError for all of them.
        settle: is called after every rank's `work`, with what each of them returned; its result is that of the command
            on this rank. Raises the same DilocoError on every rank, or on none.
    """

    work: Callable[[], Any]
    settle: Callable[[Sequence[Any]], Any] = lambda _: None


class CommandLane:
    """Commands one after the other. `group` connects the ranks, for this lane only."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._lock = threading.Lock()

    def lead(self, command: Command, task: RankTask) -> Any:
        """On rank 0: have all ranks execute a command; `task` is this rank's part. Returns what it settles to.

        Raises:
            ExchangeError: a rank is lost. DilocoError: the error of any rank.
        """
        with self._lock:
            self._broadcast(json.dumps(command).encode())
            result, error = self._execute(task)
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """On rank 0: no command follows."""
        with self._lock:
            self._broadcast(b"")

    def follow(self, task_of: Callable[[Command], RankTask]) -> None:
        """On the other ranks: execute rank 0's commands until there are no more. Rank 0 handles their errors.

        Raises:
            ExchangeError: a rank is lost.
        """
        while raw := self._broadcast():
            self._execute(task_of(json.loads(raw)))

    def _broadcast(self, raw: bytes = b"") -> bytes:
        """Rank 0's `raw`, on every rank."""
        [num_bytes] = self.group.sum([len(raw)], "a command")
        message = to_tensor(raw) if raw else torch.empty(num_bytes, dtype=torch.uint8)
        self.group.broadcast(message, "a command")
        return to_bytes(message)

    def _execute(self, task: RankTask) -> tuple[Any, DilocoError | None]:
        try:
            value, own = attempt(task.work)
        except Exception as error:  # out of memory, or a defect: the other ranks must not wait for this one
            log.exception("rank %d of this learner failed", self.group.rank)
            value = None
            own = ExchangeError(f"rank {self.group.rank} of this learner failed: {type(error).__name__}: {error}")
        answers = self.group.gather_values([value, error_values(own)], "the outcome of a command")
        failed = {rank: error for rank, (_, error) in enumerate(answers) if error is not None}
        if not failed:
            return attempt(lambda: task.settle([value for value, _ in answers]))
        final = [rank for rank, (name, _) in failed.items() if name not in RETRIED]
        rank = (final or list(failed))[0]
        return None, own if own is not None and rank == self.group.rank else error_of(*failed[rank])


@dataclass(frozen=True)
class CommandLanes:
    """The two lanes of a rank: for contributions that it sends, and for versions that it receives."""

    send: CommandLane
    receive: CommandLane

    @property
    def group(self) -> Group:
        """The ranks of the learner, as connected by one of the lanes."""
        return self.send.group
