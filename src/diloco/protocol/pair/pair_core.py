"""One of two syncers: what `Succession` decides becomes durable, and what follows from it for the run's writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from diloco.errors import ConfigError, NotInitialisedError, StandbyError, StoreError
from diloco.protocol.pair.values import Durable, Lag, Position, StandbyConnection, StandingObserver, electors
from diloco.protocol.succession import Place, Proposal, Standing, Succession, Word, next_electorate

REFUSED_S = 8.0
"""A write waits for the other syncer or for learners for the patience and this long, then it is refused."""

HURRY_S = 1.0
"""A write waits this long where the syncer stops."""

_WHY: Mapping[Standing, str] = {
    "proposing": "the other syncer is silent: learners are asked",
    "installing": "most learners have promised to follow this syncer",
    "alone": "most learners follow this syncer",
    "fenced": "most learners follow another syncer",
}


class PairCore:
    """A syncer's part in a pair, or alone. Events follow each other, one at a time.

    Arguments:
        durable: the disk.
        position: that is on it; None: this syncer never had a second one.
        other: the address of the other syncer; None: this one dials none.
        waits_for_both: a first that is alone pairs with a standby that comes.
        patience_s: as in `Succession`.
        new_boot: names this syncer each time that it begins to follow, or is started: a number other than 0.
        observer: is told of standings.

    Attributes:
        succession: decides who may publish.
        position: what is durable of its part.
        had_position: whether anything is.
        link: the connection to the other one.
        lag: of the standby.
        is_over: writes wait no more.

    All methods raise StoreError where the disk refuses what is to be durable; the same event may be tried again.
    """

    def __init__(
        self, durable: Durable, position: Position | None, *, other: str | None, waits_for_both: bool,
        patience_s: float, new_boot: Callable[[], int], observer: StandingObserver, now: float,
    ) -> None:  # fmt: skip
        self.durable, self.observer = durable, observer
        self.other, self.waits_for_both, self.patience_s = other, waits_for_both, patience_s
        self.link: StandbyConnection | None = None
        self.lag = Lag()
        self.is_over = False
        self._new_boot = new_boot
        self._refused_s = patience_s + REFUSED_S
        self._told: tuple[Standing, int] | None = None
        self._members: frozenset[str] | None = None  # processes of the run's learners; None: not known yet
        self.had_position = position is not None
        contents = durable.contents()
        if position is None:
            place: Place = "standby" if other is not None and not contents.run_id else "first"
            is_paired = other is not None
            position = Position(place, is_paired, contents.epoch if place == "first" else 0, frozenset())
        elif position.place == "first" and not position.is_paired:  # it has all of every epoch that it began
            position = replace(position, base=max(position.base, contents.epoch), is_paired=other is not None)
        self.position = position
        self.succession = self.new_succession(now, contents.epoch)

    def new_succession(self, now: float, epoch: int) -> Succession:
        """By what is durable of its part. `epoch`: the highest that is."""
        position = self.position
        return Succession(
            position.place, is_paired=position.is_paired, epoch=epoch, base=position.base, boot=self._new_boot(),
            electorate=position.electorate, patience_s=self.patience_s, now=now, offered=position.offered,
        )  # fmt: skip

    def keep(self, **changes: Any) -> None:
        """Make a change of the position durable."""
        position = replace(self.position, **changes)
        if position != self.position or not self.had_position:
            self.durable.keep(position)
            self.position, self.had_position = position, True

    def tell(self, why: str) -> None:
        """The standing may have changed."""
        stands = self.standing, self.succession.epoch
        if stands != self._told:
            self._told = stands
            self.observer.stands_as(*stands, why)

    # --- what others ask ----------------------------------------------------------------------------------------------

    @property
    def standing(self) -> Standing:
        """As in `Succession`."""
        return self.succession.standing

    @property
    def is_single(self) -> bool:
        """Whether there is no second syncer, and never was."""
        return not self.had_position and self.other is None and self.link is None

    def heard(self, now: float, word: Word) -> Proposal | None:
        """A learner's word; returns what it is asked for."""
        self.succession.heard(now, word)
        return self.succession.proposal

    def refusal(self) -> StandbyError:
        """Why this syncer does not serve the run now."""
        match self.standing:
            case "fenced":
                why = (
                    f"has lost the run: another syncer serves it in a later epoch than {self.succession.epoch}; start "
                    "this one with --follow and the address of that one"
                )
            case "waiting":
                why = "was started again, and serves the run once its standby or most learners have agreed"
            case "following":
                why = f"follows the one at {self.other}, and may take the run over"
            case _:
                why = "is about to serve the run, and is not ready yet"
        return StandbyError(f"this syncer {why}; try the run's other address.")

    def status(self, now: float) -> dict[str, Any] | None:
        """Plain values; None: there is no second syncer."""
        if self.is_single:
            return None
        lag = self.lag
        return {
            "standing": self.standing, "epoch": self.succession.epoch, "follows": self.other,
            "connected": self.link is not None, "electorate": sorted(self.succession.electorate),
            "versions_behind": lag.versions, "bytes_behind": lag.num_bytes, "seconds_behind": lag.seconds(now),
        }  # fmt: skip

    # --- writes -------------------------------------------------------------------------------------------------------

    def may_write(self, waited_s: float) -> bool:
        """Whether a write of the run, which has waited this long, may begin now; False: not yet.

        Raises:
            StoreError: nothing may be published now.
        """
        if self.is_single or self.succession.may_publish:
            return True
        if self._gives_up(waited_s):
            raise StoreError(f"nothing is published by a syncer that is {self.standing}; it is tried again.")
        return False

    def write_begins(self, record: Mapping[str, Any]) -> None:
        """One that may begin does, with this record of the run."""
        if not self.is_single:
            self._members = electors(record)
            self._renew_electorate()

    def is_confirmed(self, serial: int, waited_s: float) -> bool:
        """Whether a write that has been durable here for this long may be seen: it is at the standby too, where there
        is one; False: not yet.

        Raises:
            StoreError: it may not be seen.
        """
        if self.is_single or self._has(serial):
            return True
        if self._gives_up(waited_s):
            raise StoreError(
                f"the standby has not confirmed it, and this syncer is {self.standing}; it is published once the "
                "standby has it, or most learners agree to go on without."
            )
        return False

    def hurry(self) -> None:
        """The syncer stops: writes wait for the standby a moment only."""
        self._refused_s = HURRY_S

    def close(self) -> None:
        """Writes wait no more, and the connection ends."""
        self.is_over = True
        if self.link is not None:
            self.link.is_over = True

    def _gives_up(self, waited_s: float) -> bool:
        return self.is_over or self.standing in ("fenced", "following", "waiting") or waited_s > self._refused_s

    def _has(self, serial: int) -> bool:
        if self.standing == "alone":
            return True
        link = self.link
        is_there = link is not None and link.epoch == self.succession.epoch and link.acked_serial >= serial
        return is_there and self.standing in ("paired", "proposing")

    def _renew_electorate(self) -> None:
        """One step of the electorate towards the members, once the step before is durable on both."""
        now, link = self.succession.electorate, self.link
        is_there = link is not None and self.is_in_sync(link) and link.electorate == now
        is_behind = self.standing == "paired" and not is_there
        if self._members is None or is_behind or self.standing not in ("paired", "alone"):
            return
        following = next_electorate(now, self._members)
        if following != now:
            self.keep(electorate=following)
            self.succession.electorate = following

    # --- connections --------------------------------------------------------------------------------------------------

    def linked_to(self, link: StandbyConnection) -> None:
        """A connection begins."""
        if self.link is not None:
            self.link.is_over = True
        self.link = link

    def unlink(self, link: StandbyConnection) -> None:
        """It has ended."""
        link.is_over = True
        if self.link is link:
            self.link = None

    def is_heard(self, link: StandbyConnection, now: float) -> bool:
        """Whether the other end has said something within the patience."""
        return now - link.heard_at <= self.patience_s

    def is_in_sync(self, link: StandbyConnection) -> bool:
        """Whether the two ends of a connection stand as they have agreed."""
        is_agreed = link is self.link and not link.is_over and link.epoch == self.succession.epoch
        return is_agreed and self.standing in ("paired", "proposing", "following")

    # --- by hand, and time --------------------------------------------------------------------------------------------

    def promote(self, now: float, *, force: bool) -> tuple[int, tuple[int, ...]]:
        """Serve the run from here on; returns the epoch, and the versions.

        Raises:
            ConfigError: the other one still answers, and this is not forced. NotInitialisedError: there is no run here.
        """
        if self.standing in ("alone", "paired"):
            raise ConfigError(f"this syncer serves the run already: it is {self.standing}.")
        if not (versions := self.durable.versions()):
            raise NotInitialisedError("this syncer has no version of any run, and cannot serve one.")
        if not force and (self.succession.is_linked(now) or self.link is not None):
            raise ConfigError(
                "the other syncer answers this one, or did so less than "
                f"{self.patience_s:g} s ago; stop it first, or force this where it cannot be stopped."
            )
        epoch = self.succession.next_epoch(0)
        self.durable.begin_epoch(epoch)
        self.keep(place="first", is_paired=False, base=epoch)
        self.succession.promoted(epoch)
        if self.link is not None:
            self.link.is_over = True
        self.tell("promoted by hand")
        return epoch, versions

    def tick(self, now: float) -> None:
        """Time has passed."""
        it = self.succession
        it.tick(now)
        if (epoch := it.wants) is not None:
            self.durable.begin_epoch(epoch)
            self.keep(place="first", is_paired=True, base=epoch)
            it.begun(epoch)
        self.renew_epoch()
        if self.had_position:
            self._renew_electorate()
        if it.is_installed:
            self.keep(place="first", is_paired=False)
            it.alone()
        self._begin_later_epoch()
        if (link := self.link) is not None:
            link.is_over |= not self.is_heard(link, now) or (link.epoch is not None and not self.is_in_sync(link))
        self.tell(_WHY.get(self.standing, "as before"))
        self.observer.lags(self.lag.versions, self.lag.num_bytes, self.lag.seconds(now))

    def renew_epoch(self) -> None:
        """A driver that is alone begins an epoch of its own when it starts, or gets its model."""
        it = self.succession
        if it.standing == "alone" and (epoch := self.durable.epoch()) > it.epoch:
            if self.had_position:
                self.keep(base=epoch)
            else:
                self.position = replace(self.position, base=epoch)
            it.epoch = it.base = epoch
            it.highest = max(it.highest, epoch)

    def _begin_later_epoch(self) -> None:
        """Where a learner refuses this one."""
        it = self.succession
        if not it.raises():
            return
        if self.standing == "alone":
            epoch = it.next_epoch(0)
            self.durable.begin_epoch(epoch)
            self.keep(base=epoch)
            it.raised(epoch)
        elif self.link is not None:
            self.link.is_over = True  # the two agree anew
