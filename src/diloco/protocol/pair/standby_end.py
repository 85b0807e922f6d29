"""A standby's end of a connection: what it says, takes and confirms."""

from __future__ import annotations

from collections.abc import Callable

from diloco.errors import StandbyError
from diloco.protocol.pair.first_end import FirstEnd
from diloco.protocol.pair.link import Link
from diloco.protocol.pair.pair_core import PairCore
from diloco.protocol.pair.values import Contents, Hello


class StandbyEnd:
    """What a connection to the other syncer does at this one. All methods raise StoreError as those of `PairCore`.

    Arguments:
        pair: of this syncer.
    """

    def __init__(self, pair: PairCore) -> None:
        self._pair = pair

    def hello(self) -> Hello:
        """What this syncer says when it dials the other one."""
        pair = self._pair
        base, _, serves, boot = FirstEnd(pair).rank()
        contents, it = pair.durable.contents(), pair.succession
        return Hello(
            boot, pair.position.place == "first", max(contents.epoch, it.highest), base,
            it.standing in ("alone", "paired"), serves, contents,
        )  # fmt: skip

    def concede(self, now: float, base: int) -> None:
        """The other syncer leads: this one follows from here on. `base`: that this one has said.

        Raises:
            StandbyError: it publishes by now.
        """
        pair = self._pair
        if pair.standing in ("alone", "paired") or pair.succession.base != base:
            raise StandbyError("this syncer serves the run by now, and follows none.")
        if pair.position.place == "first" or pair.standing == "fenced":
            pair.keep(place="standby", is_paired=True)
            pair.succession = pair.new_succession(now, pair.succession.epoch)
        else:
            pair.keep()
        pair.tell(f"follows {pair.other}")

    def linked(self, now: float, contents: Contents, boot: int) -> Link:
        """The connection begins. `contents`: that were said; `boot`: of the first's process."""
        link = Link(contents, boot, boot, 0, now)
        self._pair.linked_to(link)
        return link

    def heard(self, now: float, link: Link, versions: int, num_bytes: int) -> None:
        """The first has said something, and how far this standby is behind."""
        pair = self._pair
        link.heard_at = now
        pair.lag.of(now, versions, num_bytes)
        is_agreed = link is pair.link and link.epoch == pair.succession.epoch
        if is_agreed and pair.standing in ("following", "proposing"):
            pair.succession.linked(now)
            pair.tell("the first answers")

    def take(
        self, now: float, link: Link, electorate: frozenset[str], epoch: int, write: Callable[[], None]
    ) -> None:  # fmt: skip
        """A state of the run from the first, which `write` makes durable. `epoch`: to agree on with it; 0: none.

        Raises:
            StandbyError: this syncer follows it no more. Others as `write`.
        """
        pair = self._pair
        if link is not pair.link or not pair.succession.acknowledges:
            raise StandbyError("this syncer follows the other one no more.")
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
