"""The journal of a storm, in memory: what its syncers were told, as far as it outlives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diloco.run.journal.payloads import TensorFormats, TensorPayloads
from diloco.run.journal.recorder import Recorder
from diloco.run.journal.replay import Replay


class StormJournal:
    """All entries and payloads of a storm.

    Attributes:
        entries: in order.
        kept: payloads by name.
    """

    def __init__(self, *, with_payloads: bool = True) -> None:
        self.entries: list[str] = []
        self.kept: dict[str, bytes] = {}
        self._num_durable = 0
        self._payloads = TensorPayloads(self if with_payloads else None)

    def recorder(self) -> Recorder[Any]:
        """That of the next driver."""
        return Recorder(self, self._payloads)

    def append(self, entry: str) -> None:
        """As `recorder.JournalPort`."""
        self.entries.append(entry)

    def sync(self) -> None:
        """As `recorder.JournalPort`."""
        self._num_durable = len(self.entries)

    def killed(self, survives: float) -> None:
        """The process is gone with a part of what it had not made durable."""
        num_volatile = len(self.entries) - self._num_durable
        del self.entries[self._num_durable + int(survives * num_volatile) :]

    def __call__(self, name: str, parts: Sequence[memoryview]) -> bool:
        """As `payloads.Keep`."""
        self.kept[name] = b"".join(parts)
        return True

    def has_any(self, prefix: str) -> bool:
        """As `payloads.Keep`."""
        return any(name.startswith(prefix) for name in self.kept)

    def replay(self, entries: Sequence[str] | None = None) -> Replay:
        """The syncers again, from these entries."""
        replay = Replay(TensorFormats(self.read))
        for entry in self.entries if entries is None else entries:
            replay.take(entry)
        return replay

    def read(self, name: str) -> bytearray | None:
        """A kept payload; None: it is not kept."""
        data = self.kept.get(name)
        return None if data is None else bytearray(data)
