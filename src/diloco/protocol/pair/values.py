"""Values of a pair of syncers: durable position, messages, a connection at either end, and the port of the disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from diloco.errors import StoreError
from diloco.protocol.succession import Place, Standing, elector


@dataclass(frozen=True)
class Position:
    """The durable state of a syncer in a pair.

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
    """The contents of a store.

    Attributes:
        run_id: of its run; "": it has none.
        epoch: the highest durable one.
        held: by fragment, the newest version and its file's SHA-256.
        files: further complete files of tensors, which no version names yet.
    """

    run_id: str = ""
    epoch: int = 0
    held: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    files: frozenset[str] = frozenset()

    @property
    def num_published(self) -> int:
        """Number of published versions, over all fragments."""
        return sum(version for version, _ in self.held.values())


@dataclass(frozen=True)
class Hello:
    """The first message of a syncer that dials the other one.

    Attributes:
        boot: of its process.
        is_first: it has served the run, and may have published versions.
        epoch: the highest one that it knows.
        base: the highest epoch of which it has every published version.
        stays: it serves the run and will not follow; the message only reports this.
        serves: learners may follow it.
        contents: of its store.
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
    """A state of the run that is sent to the standby.

    Attributes:
        serial: of the state (`Durable.serial`).
        run_id: of the run.
        newest: by fragment, version and SHA-256 of its file.
        electorate: that is sent with it.
    """

    serial: int
    run_id: str
    newest: Mapping[int, tuple[int, str]]
    electorate: frozenset[str]


class Durable(Protocol):
    """A syncer's disk. A write is durable when it returns; if it raises StoreError, the previous state is intact."""

    @property
    def serial(self) -> int:
        """Serial number of the run's state, which every write increases."""

    def contents(self) -> Contents:
        """The contents of the store."""

    def epoch(self) -> int:
        """The newest epoch; 0: there is no run."""

    def versions(self) -> tuple[int, ...]:
        """The newest version of each fragment."""

    def record(self) -> Mapping[str, Any] | None:
        """The run's record (`SyncerCore.saved`); None: there is none yet."""

    def begin_epoch(self, number: int) -> None:
        """Make an epoch with the current versions durable, unless it is."""

    def keep(self, position: Position) -> None:
        """Make the position durable."""


class StandingObserver(Protocol):
    """Observes a syncer's standing."""

    def standing_changed(self, standing: Standing, epoch: int, why: str) -> None:
        """The standing has changed."""

    def lags(self, versions: int, num_bytes: int, seconds: float) -> None:
        """The lag of the standby behind the first."""


def electors(record: Mapping[str, Any]) -> frozenset[str]:
    """Return the processes of a run's members, from its record (`SyncerCore.saved`)."""
    return frozenset(elector(learner, record["accounts"][learner]["process"]) for learner in record["members"])


@dataclass
class StandbyLag:
    """The lag of a standby.

    Attributes:
        since: time at which the standby was last up to date; None: it is.
    """

    versions: int = 0
    num_bytes: int = 0
    since: float | None = None

    def seconds(self, now: float) -> float:
        """Return the time for which the standby has been behind."""
        return 0.0 if self.since is None else now - self.since

    def of(self, now: float, versions: int, num_bytes: int) -> None:
        """Set the current lag."""
        self.versions, self.num_bytes = versions, num_bytes
        if not versions:
            self.since = None
        elif self.since is None:
            self.since = now


class StandbyConnection:
    """A connection of a standby to its first, at either end.

    Attributes:
        copy: contents of the standby.
        boot, peer: identifiers of the first's process, and of the other end's.
        peer_epoch: the highest epoch that the other end knew when the connection began.
        epoch: the epoch that both ends have agreed on, with every published version at the standby; None: not yet.
        agrees_on: the epoch proposed with the commit in flight; None: none.
        num_rounds: states sent to the standby before the two agree.
        sent_serial, acked_serial: serial (`Durable.serial`) of the newest state that was sent, and confirmed.
        sent_electorate, electorate: the newest one that was sent, and confirmed.
        heard_at: time of the last message from the other end.
        is_over: the connection ends.
        unconfirmed: commits in flight, by number, ascending.
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
        """Record a sent commit; return its number."""
        self._num_sent += 1
        self.unconfirmed[self._num_sent] = commit
        self.sent_serial, self.sent_electorate = commit.serial, commit.electorate
        return self._num_sent

    def confirmed(self, number: int) -> None:
        """Record the confirmation of the commits up to this number."""
        for each in [each for each in self.unconfirmed if each <= number]:
            commit = self.unconfirmed.pop(each)
            self.acked_serial, self.electorate = commit.serial, commit.electorate
            self.copy = Contents(commit.run_id, 0, commit.newest)


@dataclass(frozen=True)
class WriteKey:
    """Identifies a version to write."""

    fragment: int
    version: int
    digest: str


class PairedWrites:
    """The writes of one driver in a pair. A write is durable here first, then at the standby; until the standby
    confirms it, it is refused, as by a full disk, and retried."""

    def __init__(self) -> None:
        self._unconfirmed: WriteKey | None = None

    def begins(self, key: WriteKey | None) -> bool:
        """Begin the write of a version, or of a record alone (None). Return whether an earlier attempt has already
        written the version: then only its record is to be written.

        Raises:
            StoreError: another version is written and not confirmed. No newer record than that version's may become
                durable: it would still list its contributions as open.
        """
        if self._unconfirmed not in (None, key):
            it = self._unconfirmed
            raise StoreError(f"version {it.version} of fragment {it.fragment} must be confirmed by the standby first.")
        return self._unconfirmed is not None

    def wrote(self, key: WriteKey | None) -> None:
        """Record that the write is durable here."""
        self._unconfirmed = key

    def confirmed(self) -> None:
        """Record that the standby, if there is one, has confirmed the write."""
        self._unconfirmed = None
