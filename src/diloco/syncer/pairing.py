"""One of two syncers: what `Succession` decides becomes durable here, and is done.

Its lock is taken before those of the driver and of the store, never while one of them is held.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from diloco.core.lineage import Epoch
from diloco.core.succession import Place, Proposal, Standing, Succession, Word, elector, next_electorate
from diloco.errors import ConfigError, NotInitialisedError, StandbyError, StoreError
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.run.sense import check_epoch, check_word
from diloco.syncer.position import Position, read_position, write_position
from diloco.syncer.replica import Contents, Lacking, Replica, ReplicatedState

log = logging.getLogger("diloco.syncer")

TICK_S = 0.2

REFUSED_S = 8.0
"""A write waits for the other syncer or for learners for the patience and this long, then it is refused."""


_WHY: Mapping[Standing, str] = {
    "proposing": "the other syncer is silent: learners are asked",
    "installing": "most learners have promised to follow this syncer",
    "alone": "most learners follow this syncer",
    "fenced": "most learners follow another syncer",
}


MAX_EPOCHS_AHEAD = 10**6


class StandingObserver(Protocol):
    """Gets told of what becomes of a syncer's standing."""

    def stands_as(self, standing: Standing, epoch: int, why: str) -> None:
        """It has changed."""

    def lags(self, versions: int, num_bytes: int, seconds: float) -> None:
        """How far the standby is behind its first."""


@dataclass
class Lag:
    """How far a standby is behind.

    Attributes:
        since: monotonic time at which it was not; None: it is not.
    """

    versions: int = 0
    num_bytes: int = 0
    since: float | None = None

    @property
    def seconds(self) -> float:
        """For which it has been behind."""
        return 0.0 if self.since is None else time.monotonic() - self.since

    def of(self, versions: int, num_bytes: int) -> None:
        """It is this far behind now."""
        self.versions, self.num_bytes = versions, num_bytes
        self.since = None if not versions else self.since or time.monotonic()


class StandbyLink:
    """A connection of a standby to its first, at either end.

    Attributes:
        copy: what the standby has.
        boot, peer: of the first's process, and of the other end's.
        epoch: that both have agreed on, with every published version at the standby; None: not yet.
        sent_serial, acked_serial: of the newest state (`Store.serial`) that was sent, and that the standby has.
        sent_electorate, electorate: that was sent, and that the standby has.
        heard_at: monotonic time.
        is_over: it ends.
        unconfirmed: commits that were sent, by number, ascending.
    """

    def __init__(self, copy: Contents, boot: int, peer: int) -> None:
        self.copy, self.boot, self.peer = copy, boot, peer
        self.epoch: int | None = None
        self.sent_serial = self.acked_serial = -1
        self.sent_electorate: frozenset[str] = frozenset()
        self.electorate: frozenset[str] = frozenset()
        self.heard_at = time.monotonic()
        self.is_over = False
        self.unconfirmed: dict[int, tuple[Lacking, frozenset[str]]] = {}
        self._num_sent = 0

    def sends(self, lacking: Lacking, electorate: frozenset[str]) -> int:
        """A commit goes out; returns its number."""
        self._num_sent += 1
        self.unconfirmed[self._num_sent] = lacking, electorate
        self.sent_serial, self.sent_electorate = lacking.serial, electorate
        return self._num_sent

    def confirmed(self, number: int) -> None:
        """The standby has the commits up to this number."""
        for each in [each for each in self.unconfirmed if each <= number]:
            lacking, self.electorate = self.unconfirmed.pop(each)
            self.acked_serial = lacking.serial
            self.copy = Contents(lacking.state.row["run_id"], 0, lacking.newest)


class Pairing:
    """A syncer's part in a pair, or alone. Any thread may call any method.

    Arguments:
        store: of the state directory.
        other: the address of the other syncer; None: this one dials none.
        waits_for_both: a first that is alone pairs with a standby that comes.
        patience_s: as in `Succession`.
        observer: is told of standings.

    Attributes:
        changed: the lock; notified at every change.
        link: the connection to the other one.
        lag: of the standby.
        engaged: set once there is a second syncer.

    Raises:
        StoreError: the state directory is damaged.
    """

    def __init__(
        self, store: Replica, *, other: str | None, waits_for_both: bool, patience_s: float,
        observer: StandingObserver,
    ) -> None:  # fmt: skip
        self.changed = threading.Condition(threading.RLock())
        self.link: StandbyLink | None = None
        self.lag = Lag()
        self.other, self.waits_for_both, self.patience_s = other, waits_for_both, patience_s
        self._store, self._observer = store, observer
        self._refused_s = patience_s + REFUSED_S
        self._is_over = False
        self._told: tuple[Standing, int] | None = None
        self._members: frozenset[str] | None = None  # processes of the run's learners; None: not known yet
        self.had_position = (found := read_position(store.path)) is not None
        contents = store.contents()
        if found is None:
            place: Place = "standby" if other is not None and not contents.run_id else "first"
            is_paired = other is not None
            found = Position(place, is_paired, contents.epoch if place == "first" else 0, frozenset())
        elif found.place == "first" and not found.is_paired:  # it was alone: it has all of every epoch that it began
            found = replace(found, base=max(found.base, contents.epoch), is_paired=other is not None)
        self._position = found
        self.engaged = threading.Event()
        if not self.is_single:
            self.engaged.set()
        self.succession = self._succession(contents.epoch)

    def _succession(self, epoch: int) -> Succession:
        position = self._position
        return Succession(
            position.place, is_paired=position.is_paired, epoch=epoch, base=position.base,
            boot=secrets.randbits(63) + 1, electorate=position.electorate, patience_s=self.patience_s,
            now=time.monotonic(),
        )  # fmt: skip

    def _keep(self, **changes: Any) -> None:
        """Make a change of the position durable."""
        position = replace(self._position, **changes)
        if position != self._position or not self.had_position:
            write_position(self._store.path, position)
            self._position, self.had_position = position, True

    # --- what others ask ----------------------------------------------------------------------------------------------

    @property
    def boot(self) -> int:
        """Of this syncer as it serves the run."""
        return self.succession.boot

    @property
    def standing(self) -> Standing:
        """As in `Succession`."""
        return self.succession.standing

    @property
    def is_single(self) -> bool:
        """Whether there is no second syncer, and never was."""
        return not self.had_position and self.other is None and self.link is None

    @property
    def most_epoch(self) -> int:
        """Beyond this, an epoch that others name makes no sense: a repaired state begins the one of its Unix time."""
        return max(self.succession.highest, int(time.time())) + MAX_EPOCHS_AHEAD

    def heard(self, learner: str, word: Word) -> Proposal | None:
        """A learner's word; returns what it is asked for.

        Raises:
            PayloadError: its numbers make no sense.
        """
        with self.changed:
            check_word(learner, word, self.most_epoch)
            self.succession.heard(time.monotonic(), word)
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

    def status(self) -> dict[str, Any] | None:
        """Plain values; None: there is no second syncer."""
        if self.is_single:
            return None
        with self.changed:
            lag = self.lag
            return {
                "standing": self.standing, "epoch": self.succession.epoch, "follows": self.other,
                "connected": self.link is not None, "electorate": sorted(self.succession.electorate),
                "versions_behind": lag.versions, "bytes_behind": lag.num_bytes, "seconds_behind": lag.seconds,
            }  # fmt: skip

    # --- writes -------------------------------------------------------------------------------------------------------

    def before_write(self, record: Mapping[str, Any]) -> None:
        """A write of the run begins.

        Raises:
            StoreError: nothing may be published now.
        """
        if self.is_single:
            return
        with self.changed:
            self._wait(lambda: self.succession.may_publish)
            if not self.succession.may_publish:
                raise StoreError(f"nothing is published by a syncer that is {self.standing}; it is tried again.")
            self._members = frozenset(_electors(record))
            self._renew_electorate()

    def written(self, serial: int) -> None:
        """A write is durable here: wait until it is at the standby too, where there is one.

        Raises:
            StoreError: it is not, and may not be seen.
        """
        if self.is_single:
            return
        with self.changed:
            self.changed.notify_all()
            self._wait(lambda: self._has(serial))
            if not self._has(serial):
                raise StoreError(
                    f"the standby has not confirmed it, and this syncer is {self.standing}; it is published once the "
                    "standby has it, or most learners agree to go on without."
                )

    def _has(self, serial: int) -> bool:
        if self.standing == "alone":
            return True
        link = self.link
        is_there = link is not None and link.epoch == self.succession.epoch and link.acked_serial >= serial
        return is_there and self.standing in ("paired", "proposing")

    def _wait(self, holds: Callable[[], bool]) -> None:
        """Until it holds, or cannot, or has not for too long."""
        began = time.monotonic()
        while not (self._is_over or self.standing in ("fenced", "following", "waiting") or holds()):
            if time.monotonic() - began > self._refused_s:
                return
            self.changed.wait(TICK_S)

    def hurry(self) -> None:
        """The syncer stops: writes wait for the standby a moment only."""
        self._refused_s = 1.0

    def _renew_electorate(self) -> None:
        """One step of the electorate towards the members, once the step before is durable on both."""
        now, link = self.succession.electorate, self.link
        is_there = link is not None and self.is_in_sync(link) and link.electorate == now
        is_behind = self.standing == "paired" and not is_there
        if self._members is None or is_behind or self.standing not in ("paired", "alone"):
            return
        following = next_electorate(now, self._members)
        if following != now:
            self._keep(electorate=following)
            self.succession.electorate = following

    # --- a first: what its standby's connection does ------------------------------------------------------------------

    def rank(self) -> tuple[int, int, bool, int]:
        """Of two that have served the run, the one that has more leads."""
        with self.changed:
            self._renew_epoch()
            it = self.succession
            return it.base, self._store.contents().num_published, it.serves, it.boot

    def _renew_epoch(self) -> None:
        """A driver that is alone begins an epoch of its own when it starts, or gets its model."""
        it = self.succession
        if it.standing == "alone" and (epoch := self._store.epoch()) > it.epoch:
            if self.had_position:
                self._keep(base=epoch)
            else:
                self._position = replace(self._position, base=epoch)
            it.epoch = it.base = epoch
            it.highest = max(it.highest, epoch)

    def begin_sync(self, other_epoch: int, record: Mapping[str, Any] | None) -> int:
        """From here on versions wait for the standby, which is to have all of them; returns the epoch to agree on."""
        with self.changed:
            self._renew_epoch()
            now, it = time.monotonic(), self.succession
            epoch = it.epoch
            if self.standing not in ("alone", "paired") or other_epoch > epoch or it.is_refused:
                epoch = it.next_epoch(other_epoch)
            if not it.electorate and record is not None:
                it.electorate = frozenset(_electors(record))
            self._keep(place="first", is_paired=True, electorate=it.electorate)
            if self.standing == "alone":
                it.paired(now, it.epoch)
            self._tell("a standby has come")
            return epoch

    def finish_sync(self, link: StandbyLink, epoch: int) -> None:
        """The standby has every version, and this epoch as its base."""
        with self.changed:
            if link is not self.link or link.is_over or self.standing in ("fenced", "following", "alone"):
                link.is_over = True
                return
            if epoch > self.succession.epoch:
                self._store.begin_epoch(Epoch(epoch, self._store.versions()), time.time())
            self._keep(base=epoch)
            link.epoch = epoch
            self.succession.paired(time.monotonic(), epoch)
            self._tell("the standby has every version")
            self.changed.notify_all()

    def acknowledged(self, link: StandbyLink, number: int) -> None:
        """The standby says which commit it has."""
        with self.changed:
            link.heard_at = time.monotonic()
            link.confirmed(number)
            if not link.unconfirmed:
                self.lag.of(0, 0)
            if self.is_in_sync(link):
                self.succession.linked(time.monotonic())
                self._tell("the standby answers")
            self.changed.notify_all()

    def is_up_to_date(self, link: StandbyLink) -> bool:
        """Whether all there is was sent to the standby."""
        return self._store.serial == link.sent_serial and self.succession.electorate == link.sent_electorate

    def is_in_sync(self, link: StandbyLink) -> bool:
        """Whether the two ends of a connection stand as they have agreed."""
        is_current = link is self.link and not link.is_over and link.epoch == self.succession.epoch
        return is_current and self.standing in ("paired", "proposing", "following")

    def outranked(self, epoch: int) -> None:
        """The other syncer has every version of this later epoch, with the word of most learners or of a person."""
        with self.changed:
            if self.standing not in ("fenced", "following"):
                self._keep(is_paired=True)  # it may not serve the run when it is started again
                self.succession.lost()
                self._tell(f"the other syncer serves the run in epoch {epoch}")
            self.changed.notify_all()

    # --- a standby ----------------------------------------------------------------------------------------------------

    def hello(self, run: str) -> tuple[pb.FollowHello, Contents]:
        """What this syncer says when it dials the other one, and what it has."""
        with self.changed:
            base, _, serves, boot = self.rank()
            contents, it = self._store.contents(), self.succession
            held = [
                pb.HeldFile(fragment=fragment, version=version, sha256=sha256)
                for fragment, (version, sha256) in sorted(contents.held.items())
            ]
            hello = pb.FollowHello(
                run=run, boot=boot, is_first=self._position.place == "first", epoch=max(contents.epoch, it.highest),
                base=base, num_published=contents.num_published, stays=it.standing in ("alone", "paired"),
                run_id=contents.run_id, held=held, files=sorted(contents.files), serves=serves,
            )  # fmt: skip
            return hello, contents

    def linked_to(self, link: StandbyLink) -> None:
        """A connection begins."""
        with self.changed:
            if self.link is not None:
                self.link.is_over = True
            self.link = link
            self.engaged.set()
            self.changed.notify_all()

    def unlink(self, link: StandbyLink) -> None:
        """It has ended."""
        with self.changed:
            link.is_over = True
            if self.link is link:
                self.link = None
            self.changed.notify_all()

    def concede(self, base: int) -> None:
        """The other syncer leads: this one follows from here on.

        Raises:
            StandbyError: it publishes by now.
        """
        with self.changed:
            if self.standing in ("alone", "paired") or self.succession.base != base:
                raise StandbyError("this syncer serves the run by now, and follows none.")
            if self._position.place == "first" or self.standing == "fenced":
                self._keep(place="standby", is_paired=True)
                self.succession = self._succession(self.succession.epoch)
            else:
                self._keep()
            self._tell(f"follows {self.other}")
            self.changed.notify_all()

    def knows_of(self, epoch: int) -> None:
        """The first knows of this epoch: one that this syncer begins is later, also before it is brought up to date.

        Raises:
            PayloadError: it makes no sense.
        """
        with self.changed:
            check_epoch("the first", epoch, self.most_epoch)
            self.succession.next_epoch_is_after(epoch)

    def take(self, link: StandbyLink, state: ReplicatedState, epoch: int) -> None:
        """A state of the run from the first. `epoch`: that it agrees on with this; 0: none.

        Raises:
            StandbyError: this syncer follows it no more. StoreError: the disk refused.
        """
        with self.changed:
            if link is not self.link or not self.succession.acknowledges:
                raise StandbyError("this syncer follows the other one no more.")
            electorate = frozenset(state.electorate)
            if link.epoch is not None and electorate != self.succession.electorate:
                self._keep(electorate=electorate)
                self.succession.electorate = electorate
            self._store.take(state)
            if epoch:
                self._store.begin_epoch(Epoch(epoch, self._store.versions()), time.time())
                self._keep(place="standby", is_paired=True, base=epoch, electorate=electorate)
                self.succession.electorate = electorate
                self.succession.synced(time.monotonic(), epoch)
                link.epoch = epoch
                self._tell("has every version of the first")

    def heard_first(self, link: StandbyLink, versions: int, num_bytes: int) -> None:
        """The first has said something."""
        with self.changed:
            link.heard_at = time.monotonic()
            self.lag.of(versions, num_bytes)
            if (
                link is self.link
                and link.epoch == self.succession.epoch
                and self.standing in ("following", "proposing")
            ):
                self.succession.linked(time.monotonic())
                self._tell("the first answers")

    def promote(self, *, force: bool) -> tuple[int, tuple[int, ...]]:
        """Serve the run from here on; returns the epoch, and the versions.

        Raises:
            ConfigError: the other one still answers, and this is not forced. NotInitialisedError: there is no run here.
            StoreError: the disk refused.
        """
        with self.changed:
            if self.standing in ("alone", "paired"):
                raise ConfigError(f"this syncer serves the run already: it is {self.standing}.")
            if not (versions := self._store.versions()):
                raise NotInitialisedError("this syncer has no version of any run, and cannot serve one.")
            now = time.monotonic()
            if not force and (self.succession.is_linked(now) or self.link is not None):
                raise ConfigError(
                    "the other syncer answers this one, or did so less than "
                    f"{self.patience_s:g} s ago; stop it first, or force this where it cannot be stopped."
                )
            epoch = self.succession.next_epoch(0)
            self._store.begin_epoch(Epoch(epoch, versions), time.time())
            self._keep(place="first", is_paired=False, base=epoch)
            self.succession.promoted(epoch)
            if self.link is not None:
                self.link.is_over = True
            self._tell("promoted by hand")
            self.changed.notify_all()
            return epoch, versions

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Time has passed.

        Raises:
            StoreError: the disk refuses what is to be durable; it is tried again at the next tick.
        """
        with self.changed:
            it = self.succession
            it.tick(time.monotonic())
            if (epoch := it.wants) is not None:
                self._store.begin_epoch(Epoch(epoch, self._store.versions()), time.time())
                self._keep(place="first", is_paired=True)
                it.begun(epoch)
            self._renew_epoch()
            if self.had_position:
                self._renew_electorate()
            if it.is_installed:
                self._keep(place="first", is_paired=False, base=it.epoch)
                it.alone()
            self._begin_later_epoch()
            if self.link is not None and not self._is_wanted(self.link):
                self.link.is_over = True
            self._tell(_WHY.get(self.standing, "as before"))
            self._observer.lags(self.lag.versions, self.lag.num_bytes, self.lag.seconds)
            self.changed.notify_all()

    def _begin_later_epoch(self) -> None:
        """Where a learner refuses this one."""
        it = self.succession
        if not it.raises():
            return
        if self.standing == "alone":
            epoch = it.next_epoch(0)
            self._store.begin_epoch(Epoch(epoch, self._store.versions()), time.time())
            self._keep(base=epoch)
            it.raised(epoch)
        elif self.link is not None:
            self.link.is_over = True  # the two agree anew

    def is_heard(self, link: StandbyLink) -> bool:
        """Whether the other end has said something within the patience."""
        return time.monotonic() - link.heard_at <= self.patience_s

    def _is_wanted(self, link: StandbyLink) -> bool:
        return self.is_heard(link) and (link.epoch is None or self.is_in_sync(link))

    def _tell(self, why: str) -> None:
        stands = self.standing, self.succession.epoch
        if stands != self._told:
            self._told = stands
            self._observer.stands_as(*stands, why)

    def close(self) -> None:
        """Writes wait no more."""
        with self.changed:
            self._is_over = True
            if self.link is not None:
                self.link.is_over = True
            self.changed.notify_all()


def _electors(record: Mapping[str, Any]) -> list[str]:
    """The processes of the members of a run, by its record (`SyncerCore.saved`)."""
    return [elector(learner, record["accounts"][learner]["process"]) for learner in record["members"]]
