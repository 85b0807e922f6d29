"""Worker and spool of a driver in one process, without threads and files. `Later` schedules their work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

from diloco.core.actions import MergeRound
from diloco.errors import PayloadError
from diloco.run.ports import H, MergedRound, ModelLayout, P, S, S_contra

Later = Callable[[str, int | None, Callable[[], None]], None]
"""Does something later, as an event of its own: what it is ("check", "close", "write" or "written"), of which fragment,
and the call."""


class Jobs(Protocol[H, S_contra, P]):
    """Tensor jobs that are done at once: `diloco.run.tensor_jobs.TensorJobs`, or what stands for it where there are no
    tensors."""

    def contribution_bytes(self, num_elements: int) -> int: ...
    def check(self, slot: S_contra, num_elements: int) -> PayloadError | None: ...
    def close(
        self, action: MergeRound, layout: Any, held: H, slots: Sequence[S_contra]
    ) -> MergedRound[H, P] | PayloadError: ...


class SimulatedWorker(Generic[H, S, P]):
    """Does tensor jobs when `later` says so."""

    def __init__(self, jobs: Jobs[H, S, P], later: Later) -> None:
        self._jobs = jobs
        self._later = later

    def contribution_bytes(self, num_elements: int) -> int:
        """As `ports.WorkerPort`."""
        return self._jobs.contribution_bytes(num_elements)

    def check(self, slot: S, fragment: int, num_elements: int, done: Callable[[PayloadError | None], None]) -> None:
        """As `ports.WorkerPort`."""
        self._later("check", fragment, lambda: done(self._jobs.check(slot, num_elements)))

    def close(
        self, action: MergeRound, layout: ModelLayout, held: H, slots: Sequence[S],
        done: Callable[[MergedRound[H, P] | PayloadError], None],
    ) -> None:  # fmt: skip
        """As `ports.WorkerPort`."""
        self._later("close", action.fragment, lambda: done(self._jobs.close(action, layout, held, slots)))


@dataclass(eq=False)
class MemorySlot:
    """Room for one payload, which is put here whole."""

    num_bytes: int
    payload: Any = None

    @property
    def tensor(self) -> Any:
        """The payload: uint8, where there are tensors."""
        return self.payload


class MemorySpool:
    """Room for payloads in memory."""

    def __init__(self) -> None:
        self.held_bytes = 0

    def allocate(self, num_bytes: int) -> MemorySlot:
        """As `ports.SpoolPort`."""
        self.held_bytes += num_bytes
        return MemorySlot(num_bytes)

    def release(self, slot: MemorySlot) -> None:
        """As `ports.SpoolPort`."""
        self.held_bytes -= slot.num_bytes
        slot.payload = None
