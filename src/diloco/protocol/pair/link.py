"""A connection of a standby to its first, and how far the standby is behind."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.protocol.pair.values import Commit, Contents


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


class Link:
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
