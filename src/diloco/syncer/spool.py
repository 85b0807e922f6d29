"""The spool, in which contributions wait for their round: encoded, in memory up to a budget, beyond it in files."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from diloco.core.buffers import new_buffer
from diloco.errors import NoRoomError
from diloco.exchange.wire.tensors import tensor_of


class Slot:
    """Room for one payload. Fill `buffer`, read `tensor`, then release it."""

    def __init__(self, num_bytes: int, buffer: memoryview | None, make: Callable[[int], memoryview]) -> None:
        self.num_bytes = num_bytes
        self.in_memory = buffer is not None
        self._buffer = buffer
        self._make = make
        self._is_released = False
        self._lock = threading.Lock()  # parts of a payload arrive over several connections

    @property
    def buffer(self) -> memoryview:
        """The room; on a disk it is allocated at its first use.

        Raises:
            NoRoomError: the disk is full.
        """
        assert not self._is_released
        with self._lock:
            if self._buffer is None:
                self._buffer = self._make(self.num_bytes)
            return self._buffer

    @property
    def tensor(self) -> Tensor:
        """uint8, over the buffer."""
        return tensor_of(self.buffer)

    def drop(self) -> memoryview | None:
        """Give up the buffer; a mapped file is freed with the last tensor over it."""
        assert not self._is_released
        self._is_released, buffer, self._buffer = True, self._buffer, None
        return buffer


class Spool:
    """Allocates room for payloads.

    Memory is reused for the next payload of the same size, since filling fresh pages takes much of the time of
    receiving.

    Arguments:
        directory: for payloads beyond the budget; its files are unlinked at once, so that a crash leaves none.
        budget_bytes: most memory, of payloads and of buffers kept for reuse together.

    Attributes:
        held_bytes: of payloads in memory.
    """

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self._directory = directory
        self._budget_bytes = budget_bytes
        self.held_bytes = 0
        self._free: list[memoryview] = []  # oldest first
        self._lock = threading.Lock()

    def allocate(self, num_bytes: int) -> Slot:
        """Room for `num_bytes`, in memory, or on a disk at its first use; returns at once.

        Raises:
            NoRoomError: the process gets no memory.
        """
        with self._lock:
            if self.held_bytes + num_bytes > self._budget_bytes and num_bytes > 0:
                return Slot(num_bytes, None, self._map)
            self.held_bytes += num_bytes
            used = next((index for index, buffer in enumerate(self._free) if len(buffer) == num_bytes), None)
            if used is not None:
                return Slot(num_bytes, self._free.pop(used), self._map)
            while self._free and self.held_bytes + sum(map(len, self._free)) > self._budget_bytes:
                self._free.pop(0)
        try:
            return Slot(num_bytes, new_buffer(num_bytes), self._map)
        except (MemoryError, OSError) as error:
            with self._lock:
                self.held_bytes -= num_bytes
            raise NoRoomError(
                f"the syncer cannot allocate a contribution of {num_bytes} bytes ({error}); lower spool_bytes, so "
                "that more of them wait on disk."
            ) from error

    def release(self, slot: Slot) -> None:
        """Free a slot; tensors over it must not be used afterwards."""
        buffer = slot.drop()
        if slot.in_memory and buffer is not None:
            with self._lock:
                self.held_bytes -= slot.num_bytes
                if slot.num_bytes:
                    self._free.append(buffer)

    def _map(self, num_bytes: int) -> memoryview:
        try:
            with tempfile.TemporaryFile(dir=self._directory) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                return memoryview(mmap.mmap(file.fileno(), num_bytes))
        except OSError as error:
            raise NoRoomError(
                f"the syncer has no room for a contribution of {num_bytes} bytes in {self._directory} ({error}); "
                "free disk space or raise spool_bytes."
            ) from error
