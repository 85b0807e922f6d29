"""`PairCore`: the decisions of `Succession`, made durable, and their effect on the run's writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from diloco.errors import ConfigError, NotInitialisedError, StandbyError, StoreError
from diloco.protocol.pair.values import Durable, Position, StandbyConnection, StandbyLag, StandingObserver, electors
from diloco.protocol.succession import ElectorVote, Place, Proposal, Standing, Succession, next_electorate

REFUSED_S = 8.0
"""A write waits for the other syncer or for learners for `silence_s` plus this time, then it is refused."""

HURRY_S = 1.0
"""Time that a write waits while the syncer shuts down."""

_WHY: Mapping[Standing, str] = {
    "proposing": "the other syncer is silent: learners are asked",
    "installing": "most learners have promised to follow this syncer",
    "alone": "most learners follow this syncer",
    "fenced": "most learners follow another syncer",
}


class PairCore:
    """One syncer of a pair, or a single syncer. Events are handled one at a time.

    Arguments:
        durable: the disk.
        position: the durable one; None: this syncer was never in a pair.
        other: the address of the other syncer; None: this one dials none.
        waits_for_both: whether a first that is alone pairs with a new standby.
        silence_s: as in `Succession`.
        new_boot: returns a new identifier, other than 0, at each start of this syncer and each time that it begins to
            follow.
        observer: is notified of standings.

    Attributes:
        succession: decides whether this syncer may publish.
        position: its durable state.
        had_position: whether there is any.
        link: the connection to the other syncer.
        lag: of the standby.
        is_over: writes no longer wait.

    All methods raise StoreError where the disk refuses a write; the same event may be retried.
    """

    def __init__(
        self, durable: Durable, position: Position | None, *, other: str | None, waits_for_both: bool,
        silence_s: float, new_boot: Callable[[], int], observer: StandingObserver, now: float,
    ) -> None:  # fmt: skip
        self.durable, self.observer = durable, observer
        self.other, self.waits_for_both, self.silence_s = other, waits_for_both, silence_s
        self.link: StandbyConnection | None = None
        self.lag = StandbyLag()
        self.is_over = False
        self._new_boot = new_boot
        self._refused_s = silence_s + REFUSED_S
        self._told: tuple[Standing, int] | None = None
        self._members: frozenset[str] | None = None  # processes of the run's learners; None: unknown yet
        self.had_position = position is not None
        contents = durable.contents()
        if position is None:
            place: Place = "standby" if other is not None and not contents.run_id else "first"
            is_paired = other is not None
            position = Position(place, is_paired, contents.epoch if place == "first" else 0, frozenset())
        elif position.place == "first" and not position.is_paired:  # it has every version of its epochs
            position = replace(position, base=max(position.base, contents.epoch), is_paired=other is not None)
        self.position = position
        self.succession = self.new_succession(now, contents.epoch)

    def new_succession(self, now: float, epoch: int) -> Succession:
        """Return the succession of the durable position. `epoch`: the highest durable one."""
        position = self.position
        return Succession(
            position.place, is_paired=position.is_paired, epoch=epoch, base=position.base, boot=self._new_boot(),
            electorate=position.electorate, silence_s=self.silence_s, now=now, offered=position.offered,
        )  # fmt: skip

    def keep(self, **changes: Any) -> None:
        """Change the position and make it durable."""
        position = replace(self.position, **changes)
        if position != self.position or not self.had_position:
            self.durable.keep(position)
            self.position, self.had_position = position, True

    def tell(self, why: str) -> None:
        """Notify the observer if the standing has changed."""
        standing = self.standing, self.succession.epoch
        if standing != self._told:
            self._told = standing
            self.observer.standing_changed(*standing, why)

    # --- votes and status ---------------------------------------------------------------------------------------------

    @property
    def standing(self) -> Standing:
        """As in `Succession`."""
        return self.succession.standing

    @property
    def is_single(self) -> bool:
        """Whether this syncer was never in a pair."""
        return not self.had_position and self.other is None and self.link is None

    def heard(self, now: float, word: ElectorVote) -> Proposal | None:
        """Handle a learner's vote; return the proposal for it."""
        self.succession.heard(now, word)
        return self.succession.proposal

    def refusal(self) -> StandbyError:
        """Return the reason why this syncer does not serve the run now."""
        match self.standing:
            case "fenced":
                why = (
                    f"has lost the run: another syncer serves it in a later epoch than {self.succession.epoch}; start "
                    "this one with --follow and the address of the other"
                )
            case "waiting":
                why = "was restarted, and serves the run once its standby or a majority of learners agrees"
            case "following":
                why = f"follows the one at {self.other}, and may take over the run"
            case _:
                why = "is about to serve the run, but is not ready yet"
        return StandbyError(f"this syncer {why}; try the run's other address.")

    def status(self, now: float) -> dict[str, Any] | None:
        """Plain values; None: this syncer was never in a pair."""
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
        """Whether a write of the run may begin now, after it has waited for `waited_s`; False: not yet.

        Raises:
            StoreError: this syncer may not publish now.
        """
        if self.is_single or self.succession.may_publish:
            return True
        if self._gives_up(waited_s):
            raise StoreError(f"a syncer that is {self.standing} publishes nothing; the write is retried.")
        return False

    def write_begins(self, record: Mapping[str, Any]) -> None:
        """Begin a write that `may_write` has allowed, with this record of the run."""
        if not self.is_single:
            self._members = electors(record)
            self._renew_electorate()

    def is_confirmed(self, serial: int, waited_s: float) -> bool:
        """Whether a write that has been durable here for `waited_s` may be published: a standby, if there is one, has
        it too; False: not yet.

        Raises:
            StoreError: it may not be published.
        """
        if self.is_single or self._has(serial):
            return True
        if self._gives_up(waited_s):
            raise StoreError(
                f"the standby has not confirmed the write, and this syncer is {self.standing}; it is published "
                "once the standby has it, or a majority of learners agrees to continue without the standby."
            )
        return False

    def hurry(self) -> None:
        """Shorten the wait of writes for the standby, since the syncer shuts down."""
        self._refused_s = HURRY_S

    def close(self) -> None:
        """End the waits of writes, and the connection."""
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
        """Change the electorate towards the members by one, once the previous change is durable on both syncers."""
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
        """Begin a connection."""
        if self.link is not None:
            self.link.is_over = True
        self.link = link

    def unlink(self, link: StandbyConnection) -> None:
        """End a connection."""
        link.is_over = True
        if self.link is link:
            self.link = None

    def is_heard(self, link: StandbyConnection, now: float) -> bool:
        """Whether the other end was heard within `silence_s`."""
        return now - link.heard_at <= self.silence_s

    def is_in_sync(self, link: StandbyConnection) -> bool:
        """Whether both ends of a connection are in the epoch that they have agreed on."""
        is_agreed = link is self.link and not link.is_over and link.epoch == self.succession.epoch
        return is_agreed and self.standing in ("paired", "proposing", "following")

    # --- promotion and time -------------------------------------------------------------------------------------------

    def promote(self, now: float, *, force: bool) -> tuple[int, tuple[int, ...]]:
        """Serve the run from now on, by an operator's decision; return the epoch and the versions.

        Raises:
            ConfigError: this syncer serves the run already, or the other one is reachable and `force` is not set.
            NotInitialisedError: this syncer has no run.
        """
        if self.standing in ("alone", "paired"):
            raise ConfigError(f"this syncer already serves the run: it is {self.standing}.")
        if not (versions := self.durable.versions()):
            raise NotInitialisedError("this syncer has no version of any run, so it cannot serve one.")
        if not force and (self.succession.is_linked(now) or self.link is not None):
            raise ConfigError(
                "the other syncer is connected, or was heard less than "
                f"{self.silence_s:g} s ago; stop it first, or use --force if it cannot be stopped."
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
        """Handle the passage of time: begin or install epochs, renew the electorate, end silent connections."""
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
        """Take over the epoch that a driver without a standby began at its start or with its initial model."""
        it = self.succession
        if it.standing == "alone" and (epoch := self.durable.epoch()) > it.epoch:
            if self.had_position:
                self.keep(base=epoch)
            else:
                self.position = replace(self.position, base=epoch)
            it.entered(epoch)

    def _begin_later_epoch(self) -> None:
        """Begin a later epoch if a learner refuses this one."""
        it = self.succession
        if not it.raises():
            return
        if self.standing == "alone":
            epoch = it.next_epoch(0)
            self.durable.begin_epoch(epoch)
            self.keep(base=epoch)
            it.entered(epoch)
        elif self.link is not None:
            self.link.is_over = True  # the two agree on a later epoch when they reconnect
