"""What learners reach at a syncer's address in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from diloco.core.held import HeldFragment
from diloco.protocol.succession import Proposal, Word
from diloco.run.driver import Driver
from diloco.run.memory import MemorySlot

SimulatedDriver = Driver[HeldFragment, MemorySlot, Tensor]


class Door(Protocol):
    """A syncer's process, as its service is to learners."""

    @property
    def serves(self) -> bool:
        """Whether it serves the run."""

    @property
    def driver(self) -> SimulatedDriver:
        """Of the run. Raises StandbyError: this syncer does not serve it."""

    def heard(self, word: Word) -> Proposal | None:
        """A learner's word; returns what it is asked for."""


@dataclass(frozen=True)
class OneSyncer:
    """That of a run with one syncer."""

    driver: SimulatedDriver

    @property
    def serves(self) -> bool:
        """It always does."""
        return True

    def heard(self, word: Word) -> None:
        """There is nothing to decide."""
