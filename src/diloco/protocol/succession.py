"""Who may publish, where a second syncer follows the first.

    first     serves the run. A version is published once both have it.
    standby   has everything that was published; takes over when the first is gone.

Neither can tell a dead peer from a cut link, so a third must decide: the learners are the witnesses. A syncer that
wants to go on alone (a first whose standby is silent, a standby whose first is silent) needs most of the electorate,
the learners that the run last knew, twice, as in Paxos:

1. It proposes an epoch. A learner promises it, and accepts no lower epoch from then on.
2. With the promises of most it begins that epoch. Once most follow it, it may publish alone.

A learner promises nothing to a syncer that lacks an epoch that the learner has followed (`base`), nor to another one
than it follows while that one answers. Two majorities share a learner, so at most one of the two syncers gets through,
and that one has every version that was published: those of the time before, because the standby has acknowledged each
of them; those that the other published alone, because most learners have followed that one's epoch and refuse a lower
base. Where both are there and speak to each other, no learner is needed: the first has every version.

The electorate is durable on both. It changes by one at a time, each change acknowledged before the next, since two
majorities of sets that differ by one still share a learner. Its members are processes: one that was started again has
forgotten what it promised, and is a new elector, which counts once both syncers know it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from diloco.errors import DilocoError, LineageError
from diloco.protocol.lineage import Lineage, refusal

RECENT_S = 2.0
"""What learners have said in this time, or twice the patience, is what they say now."""

RAISES_LEAST_S = 600.0
"""A first begins a later epoch for a learner that refuses its own one after the patience, and then after twice as long
each time, up to this: one that only claims to have promised an epoch cannot have the run begin one after the other."""

Place = Literal["first", "standby"]

Standing = Literal["waiting", "paired", "following", "proposing", "installing", "alone", "fenced"]


@dataclass(frozen=True)
class Ballot:
    """An epoch, and the process that wants to begin it."""

    epoch: int
    boot: int


@dataclass(frozen=True)
class Proposal:
    """What a syncer asks learners to promise.

    Attributes:
        base: the highest epoch of which it has every published version.
    """

    ballot: Ballot
    base: int


@dataclass(frozen=True)
class Word:
    """What a learner says to a syncer, with every heartbeat and vote.

    Attributes:
        elector: names the learner's process.
        seen: the syncer that it follows.
        promised: the highest ballot that it has promised; None: none above what it follows.
        silent_s: seconds since it last heard of the syncer that it follows.
    """

    elector: str
    seen: Lineage
    promised: Ballot | None
    silent_s: float


def elector(learner: str, process: int) -> str:
    """The name of a learner's process."""
    return f"{learner}/{process:x}"


class Witness:
    """A learner's part.

    Arguments:
        seen: the syncer that its checkpoint has followed; None: it has none.

    Attributes:
        seen: the syncer that it follows; None: none yet.
        promised: as in `Word`.
    """

    def __init__(self, seen: Lineage | None = None) -> None:
        self.seen = seen
        self.promised: Ballot | None = None

    def refusal(self, lineage: Lineage) -> DilocoError | None:
        """Why it does not follow a syncer; None: it does."""
        if self.seen == lineage:
            return None
        if (error := refusal(self.seen, lineage)) is not None:
            return error
        promised = self.promised
        if promised is None or lineage.epoch > promised.epoch or promised == Ballot(lineage.epoch, lineage.boot):
            return None
        return LineageError(
            f"the syncer serves epoch {lineage.epoch} of the run, and this learner has promised epoch {promised.epoch} "
            "to another one, which may be taking the run over."
        )

    def follow(self, lineage: Lineage) -> None:
        """It follows this syncer from here on."""
        self.seen = lineage

    def asked(self, proposal: Proposal, *, is_silent: bool) -> bool:
        """A syncer asks for a promise; returns whether it is given. `is_silent`: the syncer that it follows is."""
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
    """A syncer's part.

    Arguments:
        place: which of the two it is.
        is_paired: versions are published only once both have them, which is durable here; a first without this is
            alone.
        epoch: the highest that is durable here.
        base: the highest epoch of which it has every published version, which is durable too.
        boot: of its process.
        electorate: the processes of learners that decide.
        patience_s: for which the other one is silent before anything is done about it.
        offered: the highest epoch that a standby was asked to make its base, which is durable here before. It may have
            done so unheard, with what was there then: publishing alone takes a later one.

    Attributes:
        standing: how it stands:
            "waiting": a first that was started again; it serves nothing before its standby has agreed.
            "paired": a first with a standby; versions are published once both have them.
            "following": a standby.
            "proposing": promises are asked for.
            "installing": its epoch is durable, and not followed by most yet.
            "alone": a first that publishes without a standby.
            "fenced": most learners follow another syncer.
        proposal: to be told to every learner; None: nothing is asked for.
        highest: epoch that is known of.
    """

    def __init__(
        self, place: Place, *, is_paired: bool, epoch: int, base: int, boot: int, electorate: Collection[str],
        patience_s: float, now: float, offered: int = 0,
    ) -> None:  # fmt: skip
        first: Standing = "waiting" if is_paired else "alone"
        self.standing: Standing = "following" if place == "standby" else first
        self.epoch, self.base, self.boot = epoch, base, boot
        self.electorate = frozenset(electorate)
        self.proposal: Proposal | None = None
        self._place: Place = place
        self._patience_s, self._recent_s = patience_s, max(RECENT_S, 2 * patience_s)
        self._linked_at = self._now = now
        self._asked_at = -math.inf
        self.offered, self.highest = offered, max(epoch, offered)
        self._serves = self.standing == "alone"
        self._words: dict[str, tuple[float, Word]] = {}
        self._raised_at, self._raises_after_s = -math.inf, patience_s
        self._refusal: tuple[float, Word | None] = -math.inf, None  # the newest word of one that cannot follow

    # --- the other syncer ---------------------------------------------------------------------------------------------

    def linked(self, now: float) -> None:
        """The other syncer was heard, which still stands as it should: a standby that follows, or its first."""
        self._linked_at = now
        if self.standing == "proposing" and (self._place == "standby" or (self._serves and self.epoch == self.base)):
            self.proposal = None
            self.standing = "following" if self._place == "standby" else "paired"

    def next_epoch(self, other: int) -> int:
        """An epoch that neither of the two syncers has used or promised; `other`: the highest of the other one."""
        self.highest = max(self.highest, other) + 1
        return self.highest

    def next_epoch_is_after(self, epoch: int) -> None:
        """The other one knows of this epoch."""
        self.highest = max(self.highest, epoch)

    def paired(self, now: float, epoch: int) -> None:
        """The standby of this first has every published version, and has made this epoch, which is durable here, its
        base: versions are published once both have them. That they must be is durable here before."""
        self.epoch = self.base = epoch
        self.standing, self.proposal, self._linked_at, self._serves = "paired", None, now, True
        self.highest = max(self.highest, epoch)

    def synced(self, now: float, epoch: int) -> None:
        """This standby has every published version of its first, which serves this epoch from here on; that is durable
        here."""
        self.epoch = self.base = epoch
        self.standing, self.proposal, self._linked_at = "following", None, now
        self.highest = max(self.highest, epoch)

    @property
    def acknowledges(self) -> bool:
        """Whether this standby may acknowledge a version: it has not begun an epoch of its own."""
        return self._place == "standby"

    # --- learners -----------------------------------------------------------------------------------------------------

    def heard(self, now: float, word: Word) -> None:
        """A learner says what it follows and has promised."""
        self.highest = max(self.highest, word.seen.epoch, 0 if word.promised is None else word.promised.epoch)
        if word.elector in self.electorate:
            self._words[word.elector] = now, word
        if self._cannot_follow(word):
            self._refusal = now, word

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._now = now
        is_silent = now - self._linked_at >= self._patience_s
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
        """The epoch to make durable now, and then to call `begun`; None: none."""
        proposal = self.proposal
        if self.standing != "proposing" or proposal is None:
            return None
        promised = sum(word.promised == proposal.ballot for _, word in self._heard())
        return proposal.ballot.epoch if self._is_majority(promised) else None

    def begun(self, epoch: int) -> None:
        """The epoch is durable, and as the base: most learners have promised it, so that nothing that this syncer lacks
        was published in an earlier one, or will be. It serves the epoch from here on; only itself may publish in it."""
        assert self.proposal is not None
        assert self.proposal.ballot.epoch == epoch
        self.base = epoch
        self.epoch, self.standing, self.proposal, self._place = epoch, "installing", None, "first"
        self._serves = True

    @property
    def is_installed(self) -> bool:
        """Whether most learners follow the epoch that this syncer has begun, and no standby may have made this one or
        a later one its base: that it is alone may be made durable, and then `alone` is called."""
        mine = (self.epoch, self.boot)
        following = sum((word.seen.epoch, word.seen.boot) == mine for _, word in self._heard())
        return self.standing == "installing" and self.offered < self.epoch and self._is_majority(following)

    def alone(self) -> None:
        """It is durable that this syncer needs no standby."""
        assert self.is_installed
        self.standing = "alone"

    # --- by hand, or by the other one's word --------------------------------------------------------------------------

    def is_linked(self, now: float) -> bool:
        """Whether the other syncer was heard within the patience."""
        return now - self._linked_at < self._patience_s

    def promoted(self, epoch: int) -> None:
        """A person has decided that this syncer serves the run, whatever learners have promised: this epoch is durable,
        and that it is alone."""
        self.epoch = self.base = epoch
        self.standing, self.proposal, self._place, self._serves = "alone", None, "first", True
        self.highest = max(self.highest, epoch)

    def lost(self) -> None:
        """The other syncer publishes alone in a later epoch, which is durable there."""
        self.standing, self.proposal = "fenced", None

    def raised(self, epoch: int) -> None:
        """This first is alone, and has made this epoch durable, as its base too: a learner has promised the one before
        to another syncer."""
        self.epoch = self.base = epoch
        self.highest = max(self.highest, epoch)

    @property
    def is_refused(self) -> bool:
        """Whether a learner, elector or not, cannot follow this epoch, since it has promised it or a later one to the
        other syncer. It can follow one after that, which a first may always begin: alone, or with its standby."""
        at, word = self._refusal
        is_now = word is not None and self._now - at < self._recent_s and self._cannot_follow(word)
        return is_now and self.standing in ("paired", "alone")

    def raises(self) -> bool:
        """Whether it is time to begin a later epoch for a learner that refuses this one."""
        since_s = self._now - self._raised_at
        if not self.is_refused or since_s < self._raises_after_s:
            return False
        is_rare = since_s >= 2 * RAISES_LEAST_S
        self._raised_at = self._now
        self._raises_after_s = self._patience_s if is_rare else min(2 * self._raises_after_s, RAISES_LEAST_S)
        return True

    # --- what it may do -----------------------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether learners may follow it."""
        return self._serves and self.standing != "fenced"

    @property
    def may_publish(self) -> bool:
        """Whether a version may be published at all; where it is paired, once the standby has it too."""
        return self.standing in ("paired", "alone")

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _propose(self, now: float) -> None:
        self.standing, self._asked_at = "proposing", now
        self.highest += 1
        self.proposal = Proposal(Ballot(self.highest, self.boot), self.base)

    def _cannot_follow(self, word: Word) -> bool:
        is_mine = (word.seen.epoch, word.seen.boot) == (self.epoch, self.boot)
        ballot = word.promised
        if is_mine or ballot is None or ballot == Ballot(self.epoch, self.boot):
            return False
        return ballot.epoch >= self.epoch  # also one of its own that came to nothing, since the standby was back

    def _is_alone(self, word: Word) -> bool:
        return word.silent_s >= self._patience_s

    def _follows_another(self, word: Word) -> bool:
        return word.seen.epoch > self.epoch and word.seen.boot != self.boot

    def _is_most(self, now: float, holds: Callable[[Word], bool]) -> bool:
        return self._is_majority(sum(holds(word) for at, word in self._heard() if now - at < self._recent_s))

    def _heard(self) -> Iterator[tuple[float, Word]]:
        """The newest word of each elector, and when it came; one that has left the electorate has none."""
        return (self._words[each] for each in self.electorate if each in self._words)

    def _is_majority(self, number: int) -> bool:
        return 2 * number > len(self.electorate)


def next_electorate(electorate: Collection[str], members: Collection[str]) -> frozenset[str]:
    """The electorate on its way to being the members: one learner more, or one less, or the same. Those that have come
    first, so that it is never empty while there are members."""
    now, wanted = frozenset(electorate), frozenset(members)
    if come := wanted - now:
        return now | {min(come)}
    if gone := now - wanted:
        return now - {min(gone)}
    return now
