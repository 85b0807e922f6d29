"""A spool in memory, for a run in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
