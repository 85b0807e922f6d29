"""What is durable of a syncer's part in a pair, what it has, what it says, and the port that makes it durable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from diloco.errors import StoreError
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


@dataclass
class Lag:
    """How far a standby is behind.

    Attributes:
        since: time at which it was not; None: it is not.
    """

    versions: int = 0
    num_bytes: int = 0
    since: float | None = None

    def seconds(self, now: float) -> float:
        """For which it has been behind."""
        return 0.0 if self.since is None else now - self.since

    def of(self, now: float, versions: int, num_bytes: int) -> None:
        """It is this far behind now."""
        self.versions, self.num_bytes = versions, num_bytes
        if not versions:
            self.since = None
        elif self.since is None:
            self.since = now


class StandbyConnection:
    """A connection of a standby to its first, at either end.

    Attributes:
        copy: what the standby has.
        boot, peer: of the first's process, and of the other end's.
        peer_epoch: the highest that the other end knew of when the connection began.
        epoch: that both have agreed on, with every published version at the standby; None: not yet.
        agrees_on: the epoch that goes with the commit under way, to be agreed on; None: none.
        num_rounds: states that the standby was sent before the two agree.
        sent_serial, acked_serial: of the newest state (`Durable.serial`) that was sent, and that the standby has.
        sent_electorate, electorate: that was sent, and that the standby has.
        heard_at: when the other end was heard.
        is_over: it ends.
        unconfirmed: commits that were sent, by number, ascending.
    """

    def __init__(self, copy: Contents, boot: int, peer: int, peer_epoch: int, now: float) -> None:
        self.copy, self.boot, self.peer, self.peer_epoch = copy, boot, peer, peer_epoch
        self.epoch: int | None = None
        self.agrees_on: int | None = None
        self.num_rounds = 0
        self.sent_serial = self.acked_serial = -1
        self.sent_electorate: frozenset[str] = frozenset()
        self.electorate: frozenset[str] = frozenset()
        self.heard_at = now
        self.is_over = False
        self.unconfirmed: dict[int, Commit] = {}
        self._num_sent = 0

    def sends(self, commit: Commit) -> int:
        """A commit goes out; returns its number."""
        self._num_sent += 1
        self.unconfirmed[self._num_sent] = commit
        self.sent_serial, self.sent_electorate = commit.serial, commit.electorate
        return self._num_sent

    def confirmed(self, number: int) -> None:
        """The standby has the commits up to this number."""
        for each in [each for each in self.unconfirmed if each <= number]:
            commit = self.unconfirmed.pop(each)
            self.acked_serial, self.electorate = commit.serial, commit.electorate
            self.copy = Contents(commit.run_id, 0, commit.newest)


@dataclass(frozen=True)
class WriteKey:
    """A version to be written: of which fragment, and with which digest."""

    fragment: int
    version: int
    digest: str


class PairedWrites:
    """Of one driver. A write is durable here first, then at the standby; while the standby has not confirmed it, it is
    refused, as by a full disk, and tried again."""

    def __init__(self) -> None:
        self._unconfirmed: WriteKey | None = None

    def begins(self, key: WriteKey | None) -> bool:
        """A version is to be written, or a record alone (None); returns whether that version is here already, from a
        try before this one: its record is to be written alone.

        Raises:
            StoreError: another version is here and not confirmed. The record that goes with that one is the newest that
                may be durable: one of another version would say that its contributions are open.
        """
        if self._unconfirmed not in (None, key):
            it = self._unconfirmed
            raise StoreError(
                f"version {it.version} of fragment {it.fragment} comes first, which the standby has not confirmed."
            )
        return self._unconfirmed is not None

    def wrote(self, key: WriteKey | None) -> None:
        """It is durable here."""
        self._unconfirmed = key

    def confirmed(self) -> None:
        """It is at the standby too, where there is one."""
        self._unconfirmed = None
