"""What is durable of a syncer's part in a pair, what it has, what it says, and the port that makes it durable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from diloco.protocol.succession import Place, Standing, elector


@dataclass(frozen=True)
class Position:
    """What is durable of a syncer's part.

    Attributes:
        place, is_paired, base, electorate, offered: as in `Succession`.
    """

    place: Place
    is_paired: bool
    base: int
    electorate: frozenset[str]
    offered: int = 0


@dataclass(frozen=True)
class Contents:
    """What a store has.

    Attributes:
        run_id: of its run; "": it has none.
        epoch: the highest that is durable.
        held: by fragment, the newest version and its file's SHA-256.
        files: whole files of tensors besides, which no version names yet.
    """

    run_id: str = ""
    epoch: int = 0
    held: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    files: frozenset[str] = frozenset()

    @property
    def num_published(self) -> int:
        """Versions, of all fragments."""
        return sum(version for version, _ in self.held.values())


@dataclass(frozen=True)
class Hello:
    """What a syncer says when it dials the other one.

    Attributes:
        boot: of its process.
        is_first: it has served the run, and may have versions that were published.
        epoch: the highest that it knows of.
        base: the highest of which it has every published version.
        stays: it serves the run and will not follow: it only says so.
        serves: learners may follow it.
        contents: that it has.
    """

    boot: int
    is_first: bool
    epoch: int
    base: int
    stays: bool
    serves: bool
    contents: Contents


@dataclass(frozen=True)
class Commit:
    """A state of the run that goes to the standby.

    Attributes:
        serial: of the state (`Durable.serial`).
        run_id: of the run.
        newest: by fragment, version and SHA-256 of its file.
        electorate: that goes with it.
    """

    serial: int
    run_id: str
    newest: Mapping[int, tuple[int, str]]
    electorate: frozenset[str]


class Durable(Protocol):
    """A syncer's disk. Each write is durable when it returns, or raises StoreError, and what was there still is."""

    @property
    def serial(self) -> int:
        """Of the state of the run: grows with every write of it."""

    def contents(self) -> Contents:
        """What is there."""

    def epoch(self) -> int:
        """The newest; 0: there is no run."""

    def versions(self) -> tuple[int, ...]:
        """The newest of each fragment."""

    def record(self) -> Mapping[str, Any] | None:
        """The run's (`SyncerCore.saved`); None: there is none yet."""

    def begin_epoch(self, number: int) -> None:
        """Make an epoch durable, of the versions that are there, unless it is."""

    def keep(self, position: Position) -> None:
        """Make the position durable."""


class StandingObserver(Protocol):
    """Gets told of what becomes of a syncer's standing."""

    def stands_as(self, standing: Standing, epoch: int, why: str) -> None:
        """It has changed."""

    def lags(self, versions: int, num_bytes: int, seconds: float) -> None:
        """How far the standby is behind its first."""


def electors(record: Mapping[str, Any]) -> frozenset[str]:
    """The processes of the members of a run, by its record (`SyncerCore.saved`)."""
    return frozenset(elector(learner, record["accounts"][learner]["process"]) for learner in record["members"])
