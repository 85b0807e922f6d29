"""Leadership of a run with two syncers: which of them may publish.

    first     the leader: it serves the run. A version is published once both syncers have it.
    standby   the follower: it has every published version, and takes over when the first fails.

Neither syncer can distinguish a failed peer from a broken link, so the learners vote. To publish alone (a first whose
standby is silent, a standby whose first is silent), a syncer needs a majority of the electorate, the learners that the
run knew last, in both phases of Paxos:

1. Prepare: it proposes a ballot for an epoch. A learner that promises it accepts no lower epoch from then on.
2. Accept: with promises of a majority it begins the epoch. Once a majority follows the epoch, it may publish alone.

A learner promises nothing to a syncer that lacks an epoch that the learner has followed (`base`), nor to a syncer other
than the one that it follows while that one is heard. Two majorities share a learner, so at most one of the two syncers
succeeds, and that one has every published version: those of the pair, because the standby has acknowledged each of
them; those that the other syncer published alone, because a majority has followed its epoch and refuses a lower base.
While both syncers are connected, no vote is needed: the first has every version.

The electorate is durable on both syncers. It changes by one member at a time, and each change is acknowledged before
the next, since majorities of sets that differ by one member share a learner. The members are processes: a restarted
process has lost its promises and is a new elector, which counts once both syncers know it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from diloco.errors import DilocoError, LineageError
from diloco.protocol.lineage import Lineage, refusal

RECENT_S = 2.0
"""Votes are current for this time, or for twice `silence_s` if that is longer."""

RAISES_LEAST_S = 600.0
"""Longest backoff before a first begins a later epoch for a learner that refuses the current one. The backoff starts at
`silence_s` and doubles, so that a learner with false claims of promises cannot trigger epoch after epoch."""

Place = Literal["first", "standby"]

Standing = Literal["waiting", "paired", "following", "proposing", "installing", "alone", "fenced"]


@dataclass(frozen=True)
class Ballot:
    """An epoch, and the process that proposes it."""

    epoch: int
    boot: int


@dataclass(frozen=True)
class Proposal:
    """A syncer's request for promises.

    Attributes:
        base: the highest epoch of which it has every published version.
    """

    ballot: Ballot
    base: int


@dataclass(frozen=True)
class ElectorVote:
    """A learner's vote, sent with every heartbeat.

    Attributes:
        elector: the name of the learner's process.
        seen: the syncer that it follows.
        promised: the highest ballot that it has promised; None: none above the followed epoch.
        silent_s: seconds since it last heard from the syncer that it follows.
    """

    elector: str
    seen: Lineage
    promised: Ballot | None
    silent_s: float


def elector(learner: str, process: int) -> str:
    """Return the elector name of a learner's process."""
    return f"{learner}/{process:x}"


class Elector:
    """A learner as a voter (an acceptor in Paxos).

    Arguments:
        seen: the syncer that its checkpoint followed; None: there is none.

    Attributes:
        seen: the syncer that it follows; None: none yet.
        promised: as in `ElectorVote`.
    """

    def __init__(self, seen: Lineage | None = None) -> None:
        self.seen = seen
        self.promised: Ballot | None = None

    def refusal(self, lineage: Lineage) -> DilocoError | None:
        """Return why it does not follow a syncer; None: it does."""
        if self.seen == lineage:
            return None
        if (error := refusal(self.seen, lineage)) is not None:
            return error
        promised = self.promised
        if promised is None or lineage.epoch > promised.epoch or promised == Ballot(lineage.epoch, lineage.boot):
            return None
        return LineageError(
            f"the syncer serves epoch {lineage.epoch} of the run, but this learner has promised epoch {promised.epoch} "
            "to another syncer, which may be taking over."
        )

    def follow(self, lineage: Lineage) -> None:
        """Follow this syncer from now on."""
        self.seen = lineage

    def asked(self, proposal: Proposal, *, is_silent: bool) -> bool:
        """Return whether it promises a proposal. `is_silent`: whether the syncer that it follows is silent."""
        ballot, seen = proposal.ballot, self.seen
        if ballot == self.promised:
            return True
        if seen is None or proposal.base < seen.epoch or ballot.epoch <= self._highest:
            return False
        if ballot.boot != seen.boot and not is_silent:
            return False
        self.promised = ballot
        return True

    @property
    def _highest(self) -> int:
        return max(0 if self.seen is None else self.seen.epoch, 0 if self.promised is None else self.promised.epoch)


class Succession:
    """A syncer as a candidate for leadership (a proposer in Paxos).

    Arguments:
        place: first or standby.
        is_paired: versions are published only once both syncers have them, which is durable here; a first without this
            is alone.
        epoch: the highest one durable here.
        base: the highest epoch of which it has every published version, durable too.
        boot: of its process.
        electorate: the learners' processes that vote.
        silence_s: time without a message after which the other syncer is considered silent.
        offered: the highest epoch that was offered to a standby as its base, made durable here before the offer. The
            standby may have adopted it unheard, with the versions of that time: publishing alone requires a later
                epoch.

    Attributes:
        standing:
            "waiting": a restarted first; it serves nothing until its standby agrees.
            "paired": a first with a standby; versions are published once both have them.
            "following": a standby.
            "proposing": it asks for promises.
            "installing": its epoch is durable, but not yet followed by a majority.
            "alone": a first that publishes without a standby.
            "fenced": a majority follows another syncer.
        proposal: to send to every learner; None: there is none.
        highest: the highest known epoch.
    """

    def __init__(
        self, place: Place, *, is_paired: bool, epoch: int, base: int, boot: int, electorate: Collection[str],
        silence_s: float, now: float, offered: int = 0,
    ) -> None:  # fmt: skip
        first: Standing = "waiting" if is_paired else "alone"
        self.standing: Standing = "following" if place == "standby" else first
        self.epoch, self.base, self.boot = epoch, base, boot
        self.electorate = frozenset(electorate)
        self.proposal: Proposal | None = None
        self._place: Place = place
        self._silence_s, self._recent_s = silence_s, max(RECENT_S, 2 * silence_s)
        self._linked_at = self._now = now
        self._asked_at = -math.inf
        self.offered, self.highest = offered, max(epoch, offered)
        self._serves = self.standing == "alone"
        self._votes: dict[str, tuple[float, ElectorVote]] = {}
        self._raised_at, self._raises_after_s = -math.inf, silence_s
        self._newest_refusal: tuple[float, ElectorVote | None] = -math.inf, None

    # --- the other syncer ---------------------------------------------------------------------------------------------

    def linked(self, now: float) -> None:
        """Record a message of the other syncer in its agreed role: a following standby, or the first."""
        self._linked_at = now
        if self.standing == "proposing" and (self._place == "standby" or (self._serves and self.epoch == self.base)):
            self.proposal = None
            self.standing = "following" if self._place == "standby" else "paired"

    def next_epoch(self, other: int) -> int:
        """Return an epoch that neither syncer has used or promised; `other`: the other syncer's highest epoch."""
        self.highest = max(self.highest, other) + 1
        return self.highest

    def next_epoch_is_after(self, epoch: int) -> None:
        """Record an epoch that the other syncer knows."""
        self.highest = max(self.highest, epoch)

    def paired(self, now: float, epoch: int) -> None:
        """Publish with the standby, which has every published version and has made this epoch, durable here, its base.
        The caller has made `is_paired` durable before."""
        self.entered(epoch)
        self.standing, self.proposal, self._linked_at, self._serves = "paired", None, now, True

    def synced(self, now: float, epoch: int) -> None:
        """Follow the first, which serves this epoch from now on and whose published versions this standby all has.
        Both are durable here."""
        self.entered(epoch)
        self.standing, self.proposal, self._linked_at = "following", None, now

    @property
    def acknowledges(self) -> bool:
        """Whether this syncer may acknowledge a version: a standby that has not begun an epoch of its own."""
        return self._place == "standby"

    # --- learners -----------------------------------------------------------------------------------------------------

    def heard(self, now: float, vote: ElectorVote) -> None:
        """Record a learner's vote."""
        self.highest = max(self.highest, vote.seen.epoch, 0 if vote.promised is None else vote.promised.epoch)
        if vote.elector in self.electorate:
            self._votes[vote.elector] = now, vote
        if self._cannot_follow(vote):
            self._newest_refusal = now, vote

    def tick(self, now: float) -> None:
        """Handle the passage of time: propose, repeat a proposal, or yield."""
        self._now = now
        is_silent = now - self._linked_at >= self._silence_s
        match self.standing:
            case "paired" if is_silent:
                self._propose(now)
            case "following" | "waiting" if is_silent and self._is_most(now, self._is_alone):
                self._propose(now)
            case "proposing" | "installing" | "fenced" if self._is_most(now, self._follows_another):
                self.standing, self.proposal = "fenced", None
            case "proposing" | "installing" if now - self._asked_at >= self._recent_s and not self.is_installed:
                self._propose(now)

    @property
    def wants(self) -> int | None:
        """The epoch that a majority has promised: make it durable, then call `begun`; None: none."""
        proposal = self.proposal
        if self.standing != "proposing" or proposal is None:
            return None
        promised = sum(vote.promised == proposal.ballot for _, vote in self._heard())
        return proposal.ballot.epoch if self._is_majority(promised) else None

    def begun(self, epoch: int) -> None:
        """Serve a promised epoch, which is durable, also as the base. A majority has promised it, so no version that
        this syncer lacks was or will be published in an earlier epoch. Only this syncer may publish in it."""
        assert self.proposal is not None
        assert self.proposal.ballot.epoch == epoch
        self.base = epoch
        self.epoch, self.standing, self.proposal, self._place = epoch, "installing", None, "first"
        self._serves = True

    @property
    def is_installed(self) -> bool:
        """Whether a majority follows the epoch that this syncer has begun, and no standby can have made this epoch or a
        later one its base. The caller then makes durable that the syncer is alone, and calls `alone`."""
        mine = (self.epoch, self.boot)
        following = sum((vote.seen.epoch, vote.seen.boot) == mine for _, vote in self._heard())
        return self.standing == "installing" and self.offered < self.epoch and self._is_majority(following)

    def alone(self) -> None:
        """Publish without a standby, which is durable by now."""
        assert self.is_installed
        self.standing = "alone"

    # --- decisions of operators and of the other syncer ---------------------------------------------------------------

    def is_linked(self, now: float) -> bool:
        """Whether the other syncer was heard within `silence_s`."""
        return now - self._linked_at < self._silence_s

    def promoted(self, epoch: int) -> None:
        """Serve the run alone by an operator's decision, regardless of promises. The epoch and that it is alone are
        durable."""
        self.entered(epoch)
        self.standing, self.proposal, self._place, self._serves = "alone", None, "first", True

    def lost(self) -> None:
        """Yield to the other syncer, which publishes alone in a later epoch, durable there."""
        self.standing, self.proposal = "fenced", None

    def entered(self, epoch: int) -> None:
        """Record that this syncer serves or follows this epoch, which is durable, also as the base."""
        self.epoch = self.base = epoch
        self.highest = max(self.highest, epoch)

    @property
    def is_refused(self) -> bool:
        """Whether a learner, elector or not, cannot follow this epoch because it has promised this or a later one to
        the other syncer. It can follow a still later epoch, which a first may always begin, alone or with its
        standby."""
        at, vote = self._newest_refusal
        is_now = vote is not None and self._now - at < self._recent_s and self._cannot_follow(vote)
        return is_now and self.standing in ("paired", "alone")

    def raises(self) -> bool:
        """Whether to begin a later epoch now for a learner that refuses this one."""
        since_s = self._now - self._raised_at
        if not self.is_refused or since_s < self._raises_after_s:
            return False
        is_rare = since_s >= 2 * RAISES_LEAST_S
        self._raised_at = self._now
        self._raises_after_s = self._silence_s if is_rare else min(2 * self._raises_after_s, RAISES_LEAST_S)
        return True

    # --- permissions --------------------------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether learners may follow it."""
        return self._serves and self.standing != "fenced"

    @property
    def may_publish(self) -> bool:
        """Whether this syncer may publish; in a pair, a version must be at the standby first."""
        return self.standing in ("paired", "alone")

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _propose(self, now: float) -> None:
        self.standing, self._asked_at = "proposing", now
        self.highest += 1
        self.proposal = Proposal(Ballot(self.highest, self.boot), self.base)

    def _cannot_follow(self, vote: ElectorVote) -> bool:
        is_mine = (vote.seen.epoch, vote.seen.boot) == (self.epoch, self.boot)
        ballot = vote.promised
        if is_mine or ballot is None or ballot == Ballot(self.epoch, self.boot):
            return False
        return ballot.epoch >= self.epoch  # also an abandoned one of its own: the standby was heard again

    def _is_alone(self, vote: ElectorVote) -> bool:
        return vote.silent_s >= self._silence_s

    def _follows_another(self, vote: ElectorVote) -> bool:
        return vote.seen.epoch > self.epoch and vote.seen.boot != self.boot

    def _is_most(self, now: float, holds: Callable[[ElectorVote], bool]) -> bool:
        return self._is_majority(sum(holds(vote) for at, vote in self._heard() if now - at < self._recent_s))

    def _heard(self) -> Iterator[tuple[float, ElectorVote]]:
        """Yield the newest vote of each current elector, and its time."""
        return (self._votes[each] for each in self.electorate if each in self._votes)

    def _is_majority(self, number: int) -> bool:
        return 2 * number > len(self.electorate)


def next_electorate(electorate: Collection[str], members: Collection[str]) -> frozenset[str]:
    """Return the next electorate on the way to `members`: one learner added, one removed, or unchanged. Additions
    precede removals, so that it is never empty while there are members."""
    now, wanted = frozenset(electorate), frozenset(members)
    if added := wanted - now:
        return now | {min(added)}
    if removed := now - wanted:
        return now - {min(removed)}
    return now
