"""A worker and a spool in memory that do as a test says."""

from __future__ import annotations

from collections.abc import Callable

from diloco.errors import NoRoomError
from diloco.run.memory import MemorySlot, MemorySpool
from diloco.run.ports import T, Work

Later = Callable[[str, int | None, Callable[[], None]], None]
"""Does something later, as an event of its own: what it is (a kind of work, or "answer"), of which fragment, and the
call."""


class LaterWorker:
    """Does jobs when `later` says so. Requests to the store are answered later than they take effect."""

    def __init__(self, later: Later) -> None:
        self._later = later

    def submit(self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """As `ports.WorkerPort`."""
        if what in ("check", "close"):
            self._later(what, fragment, lambda: done(job()))
            return

        def request() -> None:
            found = job()
            self._later("answer", None, lambda: done(found))

        self._later(what, fragment, request)


class LimitedSpool(MemorySpool):
    """Room for payloads in memory, up to a budget.

    Attributes:
        budget_bytes: the most that may be held; None: no limit.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes

    def allocate(self, num_bytes: int) -> MemorySlot:
        """As `ports.SpoolPort`. Raises NoRoomError."""
        if self.budget_bytes is not None and self.held_bytes + num_bytes > self.budget_bytes:
            raise NoRoomError(f"there is no room for a contribution of {num_bytes} bytes; it is taken once there is.")
        return super().allocate(num_bytes)
