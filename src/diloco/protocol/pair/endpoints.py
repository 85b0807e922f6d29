"""The two ends of a connection in a pair of syncers: the first serves the run, the standby follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from diloco.errors import BusyError, LineageError, StandbyError, UnknownRunError
from diloco.protocol.pair.pair_core import PairCore
from diloco.protocol.pair.values import Contents, Hello, StandbyConnection, electors

CATCH_UP_ROUNDS = 3
"""States sent to a standby before versions wait for its confirmation, if each has new versions."""


class FirstEndpoint:
    """The first's end of a standby's connection. All methods raise StoreError as those of `PairCore`.

    Arguments:
        pair: of this syncer.
    """

    def __init__(self, pair: PairCore) -> None:
        self._pair = pair

    # --- admission of a standby ---------------------------------------------------------------------------------------

    def accept(self, now: float, hello: Hello) -> StandbyConnection | None:
        """Handle the other syncer's hello. Return the connection; None: the other syncer serves the run, this one does
        not.

        Raises:
            StandbyError: this syncer accepts no standby.
            BusyError: it has another standby.
            LineageError, UnknownRunError: the caller cannot follow it.
        """
        pair, copy = self._pair, hello.contents
        mine = self.rank()
        held = pair.durable.contents()
        if copy.run_id and held.run_id and copy.run_id != held.run_id:
            raise UnknownRunError(
                f"the caller holds another run of this name (id {copy.run_id}) than is served here (id {held.run_id}); "
                "give it an empty state directory."
            )
        if hello.is_first and held.run_id and hello.base > pair.succession.epoch:
            self._outranked(hello.base)
        if hello.stays:
            if pair.standing in ("fenced", "following"):
                return None
            raise LineageError(
                f"both syncers serve the run, this one in epoch {pair.succession.epoch} and the caller in epoch "
                f"{hello.epoch}; stop the wrong one, and start it with --follow."
            )
        if pair.standing in ("following", "fenced"):
            raise StandbyError("this syncer does not serve the run and accepts no standby.")
        if pair.link is not None and pair.link.peer != hello.boot and pair.is_heard(pair.link, now):
            raise BusyError("another standby follows this syncer; a run has one.")
        if hello.is_first and mine < (hello.base, copy.num_published, hello.serves, hello.boot):
            raise StandbyError("the caller has more versions of the run than this syncer, which must follow it.")
        if not hello.is_first and copy.num_published > held.num_published and hello.base >= mine[0]:
            raise LineageError(
                f"the standby has {copy.num_published} versions and this syncer has {held.num_published}: the state of "
                "this syncer was rolled back; stop it, and let the standby take over."
            )
        link = StandbyConnection(copy, pair.succession.boot, hello.boot, hello.epoch, now)
        pair.linked_to(link)
        return link

    def rank(self) -> tuple[int, int, bool, int]:
        """Return the rank of this syncer: of two that have served the run, the higher one leads."""
        self._pair.renew_epoch()
        it = self._pair.succession
        return it.base, self._pair.durable.contents().num_published, it.serves, it.boot

    def _outranked(self, epoch: int) -> None:
        """Yield to the other syncer, which has every version of a later epoch by majority vote or promotion."""
        pair = self._pair
        if pair.standing not in ("fenced", "following"):
            pair.keep(is_paired=True)  # it must not serve the run after a restart
            pair.succession.lost()
            pair.tell(f"the other syncer serves the run in epoch {epoch}")

    # --- replication to the standby -----------------------------------------------------------------------------------

    def has_news(self, link: StandbyConnection) -> bool:
        """Whether to call `next_state` now, without waiting for a confirmation."""
        if link.is_over or link.unconfirmed:
            return link.is_over
        has_run = link.sent_serial >= 0 or self._pair.durable.epoch() > 0
        return link.agrees_on is not None or (has_run and not self.is_up_to_date(link))

    def next_state(self, now: float, link: StandbyConnection) -> int | None:
        """Decide whether to send the durable state to the standby now.

        Returns:
            The epoch to agree on with it (0: none); None: send only a keep-alive. The caller then reads the state and
            sends it with `begins` and `StandbyConnection.sends`.
        """
        pair = self._pair
        if link.is_over or link.unconfirmed:
            return None
        if link.agrees_on is not None and not self._agreed(now, link, link.agrees_on):
            return None
        is_up_to_date = self.is_up_to_date(link)
        if is_up_to_date:
            link.num_rounds = CATCH_UP_ROUNDS
        is_wanted = pair.waits_for_both or pair.standing != "alone"
        agrees = is_wanted and link.epoch is None and link.num_rounds >= CATCH_UP_ROUNDS
        if pair.durable.epoch() == 0 or (is_up_to_date and not agrees):
            return None
        if agrees:
            link.agrees_on = self._begin_sync(now, link)
        link.num_rounds += 1
        return link.agrees_on or 0

    def begins(
        self, now: float, link: StandbyConnection, newest: Mapping[int, tuple[int, str]], num_bytes: int
    ) -> tuple[int, frozenset[str]]:
        """Begin sending a state with these newest versions and `num_bytes` in files. Return the number of versions
        that the standby is behind, and the electorate to send."""
        behind = max(0, sum(version for version, _ in newest.values()) - link.copy.num_published)
        self._pair.lag.of(now, behind, num_bytes)
        return behind, self._pair.succession.electorate

    def acknowledged(self, now: float, link: StandbyConnection, number: int) -> None:
        """Handle the standby's confirmation of a commit."""
        pair = self._pair
        link.heard_at = now
        link.confirmed(number)
        if not link.unconfirmed:
            pair.lag.of(now, 0, 0)
        if pair.is_in_sync(link):
            pair.succession.linked(now)
            pair.tell("the standby answers")

    def is_up_to_date(self, link: StandbyConnection) -> bool:
        """Whether the newest state was sent to the standby."""
        pair = self._pair
        return pair.durable.serial == link.sent_serial and pair.succession.electorate == link.sent_electorate

    def _begin_sync(self, now: float, link: StandbyConnection) -> int:
        """Make versions wait for the standby from now on; return the epoch to agree on."""
        pair = self._pair
        pair.renew_epoch()
        it = pair.succession
        epoch = it.epoch
        if pair.standing not in ("alone", "paired") or link.peer_epoch > epoch or it.is_refused:
            epoch = it.next_epoch(link.peer_epoch)
        if not it.electorate and (record := pair.durable.record()) is not None:
            it.electorate = electors(record)
        pair.keep(place="first", is_paired=True, electorate=it.electorate, offered=max(epoch, it.offered))
        it.offered = max(epoch, it.offered)
        if pair.standing == "alone":
            it.paired(now, it.epoch)
        pair.tell("a standby has come")
        return epoch

    def _agreed(self, now: float, link: StandbyConnection, epoch: int) -> bool:
        """Enter an epoch, which the standby has made its base with every version; return whether the connection
        continues."""
        pair = self._pair
        if link is not pair.link or pair.standing in ("fenced", "following", "alone") or epoch < pair.succession.epoch:
            link.is_over = True
            return False
        if epoch > pair.succession.epoch:
            pair.durable.begin_epoch(epoch)
        pair.keep(base=epoch)
        link.epoch, link.agrees_on = epoch, None
        pair.succession.paired(now, epoch)
        pair.tell("the standby has every version")
        return True


class StandbyEndpoint:
    """The standby's end of a connection to the first. All methods raise StoreError as those of `PairCore`.

    Arguments:
        pair: of this syncer.
    """

    def __init__(self, pair: PairCore) -> None:
        self._pair = pair

    def hello(self) -> Hello:
        """Return the first message to the other syncer."""
        pair = self._pair
        base, _, serves, boot = FirstEndpoint(pair).rank()
        contents, it = pair.durable.contents(), pair.succession
        return Hello(
            boot, pair.position.place == "first", max(contents.epoch, it.highest), base,
            it.standing in ("alone", "paired"), serves, contents,
        )  # fmt: skip

    def concede(self, now: float, base: int) -> None:
        """Follow the other syncer from now on. `base`: that of this syncer's hello.

        Raises:
            StandbyError: this syncer serves the run by now.
        """
        pair = self._pair
        if pair.standing in ("alone", "paired") or pair.succession.base != base:
            raise StandbyError("this syncer now serves the run and follows no other.")
        if pair.position.place == "first" or pair.standing == "fenced":
            pair.keep(place="standby", is_paired=True)
            pair.succession = pair.new_succession(now, pair.succession.epoch)
        else:
            pair.keep()
        pair.tell(f"follows {pair.other}")

    def linked(self, now: float, contents: Contents, boot: int) -> StandbyConnection:
        """Begin the connection. `contents`: those of this standby's hello; `boot`: of the first's process."""
        link = StandbyConnection(contents, boot, boot, 0, now)
        self._pair.linked_to(link)
        return link

    def heard(self, now: float, link: StandbyConnection, versions: int, num_bytes: int) -> None:
        """Handle a message of the first, with the lag of this standby."""
        pair = self._pair
        link.heard_at = now
        pair.lag.of(now, versions, num_bytes)
        is_agreed = link is pair.link and link.epoch == pair.succession.epoch
        if is_agreed and pair.standing in ("following", "proposing"):
            pair.succession.linked(now)
            pair.tell("the first answers")

    def take(
        self, now: float, link: StandbyConnection, electorate: frozenset[str], epoch: int, write: Callable[[], None]
    ) -> None:  # fmt: skip
        """Take a state of the run from the first; `write` makes it durable. `epoch`: to agree on with it; 0: none.

        Raises:
            StandbyError: this syncer no longer follows the first.
            Others as `write`.
        """
        pair = self._pair
        if link is not pair.link or not pair.succession.acknowledges:
            raise StandbyError("this syncer no longer follows the other one.")
        if link.epoch is not None and electorate != pair.succession.electorate:
            pair.keep(electorate=electorate)
            pair.succession.electorate = electorate
        write()
        if epoch:
            pair.durable.begin_epoch(epoch)
            pair.keep(place="standby", is_paired=True, base=epoch, electorate=electorate)
            pair.succession.electorate = electorate
            pair.succession.synced(now, epoch)
            link.epoch = epoch
            pair.tell("has every version of the first")
