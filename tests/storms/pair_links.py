"""A standby's connection to the other syncer in a storm: messages take their time, and get lost with the link."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.storms.pair_disks import DiskState
from tests.storms.pair_nodes import Node

from diloco.errors import DilocoError
from diloco.protocol.pair.endpoints import FirstEndpoint, StandbyEndpoint
from diloco.protocol.pair.pair_core import PairCore
from diloco.protocol.pair.values import Commit, Hello, StandbyConnection

if TYPE_CHECKING:
    from tests.storms.pair_world import PairStorm

DIAL_S, FENCED_DIAL_S, WORD_S = 1.0, 5.0, 0.5
"""As in `syncer.standby.following`."""

LOOK_S = 0.1
"""An end looks this often whether it is over, and whether there is something to send."""


class _End:
    """One end of the connection.

    Attributes:
        pair: of the process that has it.
        is_open: this end has not hung up, and its process is there.
    """

    def __init__(self, storm: PairStorm, node: Node) -> None:
        assert node.pair is not None
        self.node, self.pair, self.process = node, node.pair, node.process
        self.link: StandbyConnection | None = None
        self.free_s = self.said_s = 0.0
        self._storm, self._is_open = storm, True

    @property
    def is_open(self) -> bool:
        return self._is_open and self.is_there

    @property
    def is_there(self) -> bool:
        """Its process is."""
        return self.node.process == self.process

    def hang_up(self) -> None:
        """This end is over."""
        self._is_open = False
        if self.link is not None and self.is_there:
            self.pair.unlink(self.link)


class Follow:
    """A call of one syncer to the other one, until it is over."""

    def __init__(self, storm: PairStorm, caller: Node, callee: Node) -> None:
        self._storm = storm
        self._caller, self._callee = _End(storm, caller), _End(storm, callee)
        self._is_sending, self._newest = False, 0
        self._again_s = DIAL_S
        self._hello = StandbyEndpoint(self._caller.pair).hello()
        self._at(self._caller, storm.plan.silence_s, self._give_up)
        self._send(self._callee, lambda: self._accept(self._hello))

    # --- messages -----------------------------------------------------------------------------------------------------

    def _send(self, to: _End, arrive: Callable[[], None], seconds: float = 0.0) -> None:
        """In order, and over a link that is cut once it is back. A process that is gone is heard of."""
        storm, sender = self._storm, self._callee if to is self._caller else self._caller
        delay_s = storm.draws.between(f"to {to.node.name}", 0.002, 0.1) + seconds
        to.free_s = max(to.free_s, storm.now_s + delay_s)

        def arrives() -> None:
            if storm.is_split:
                storm.at(storm.split_until_s, arrives)
            elif to.is_open:
                storm.at_node(to.node, to.process, arrive)
            elif sender.is_open:
                storm.at_node(sender.node, sender.process, lambda: self._end(sender))

        storm.at(to.free_s, arrives)

    def _at(self, end: _End, seconds: float, do: Callable[[], None]) -> None:
        """At one end, after a while, if it is not over."""
        storm = self._storm
        storm.after(seconds, lambda: storm.at_node(end.node, end.process, do) if end.is_open else None)

    def _end(self, end: _End) -> None:
        """One end hangs up; the other one hears of it, unless the link is cut."""
        if not end.is_open:
            return
        end.hang_up()
        other = self._callee if end is self._caller else self._caller
        self._send(other, lambda: self._end(other))
        if end is self._caller:
            self._storm.after(self._again_s, self._dial_again)

    def _dial_again(self) -> None:
        end = self._caller
        self._storm.at_node(end.node, end.process, lambda: self._storm.dial(end.node))

    def _give_up(self) -> None:
        """There was no answer."""
        if self._caller.link is None:
            self._end(self._caller)

    def _tries(self, end: _End, do: Callable[[PairCore], None]) -> bool:
        """Returns whether it was done; otherwise this end is over."""
        try:
            do(end.pair)
        except DilocoError:
            self._end(end)
            return False
        return True

    # --- the first ----------------------------------------------------------------------------------------------------

    def _accept(self, hello: Hello) -> None:
        end = self._callee

        def accept(pair: PairCore) -> None:
            end.link = FirstEndpoint(pair).accept(self._storm.now_s, hello)

        if not self._tries(end, accept):
            return
        if end.link is None:
            self._again_s = FENCED_DIAL_S
            self._end(end)
            return
        boot, highest = end.link.boot, end.pair.succession.highest
        self._send(self._caller, lambda: self._begin(boot, highest))
        self._look()

    def _look(self) -> None:
        end, now = self._callee, self._storm.now_s
        link = end.link
        assert link is not None
        if link.is_over:
            self._end(end)
            return
        self._at(end, LOOK_S, self._look)
        if self._is_sending:
            return
        found = list[int | None]()
        if not self._tries(end, lambda pair: found.append(FirstEndpoint(pair).next_state(now, link))):
            return
        if (epoch := found[0]) is not None:
            self._is_sending = True
            self._at(end, self._storm.draws.between("reads", 0.0, 0.03), lambda: self._commit(epoch))
        elif now - end.said_s >= WORD_S:
            end.said_s = now
            self._send(self._caller, lambda: self._heard(0))

    def _commit(self, epoch: int) -> None:
        """What is durable now goes out."""
        end, now = self._callee, self._storm.now_s
        link, store = end.link, end.node.store
        assert link is not None
        self._is_sending = False
        state, contents = store.state, store.contents()
        assert state is not None
        behind, electorate = FirstEndpoint(end.pair).begins(now, link, contents.held, 0)
        number = link.sends(Commit(store.serial, contents.run_id, contents.held, electorate))
        end.said_s = now
        seconds = self._storm.draws.between("commit", 0.0, 0.2)
        self._send(self._caller, lambda: self._take(state, electorate, epoch, number, behind), seconds)

    def _acknowledged(self, number: int) -> None:
        link = self._callee.link
        assert link is not None
        self._tries(self._callee, lambda pair: FirstEndpoint(pair).acknowledged(self._storm.now_s, link, number))

    # --- the standby --------------------------------------------------------------------------------------------------

    def _begin(self, boot: int, highest: int) -> None:
        end, now = self._caller, self._storm.now_s

        def begin(pair: PairCore) -> None:
            StandbyEndpoint(pair).concede(now, self._hello.base)
            pair.succession.next_epoch_is_after(highest)
            end.node.host_as_it_stands()
            end.link = StandbyEndpoint(pair).linked(now, self._hello.contents, boot)

        if self._tries(end, begin):
            self._say()

    def _say(self) -> None:
        link = self._caller.link
        assert link is not None
        if link.is_over:
            self._end(self._caller)
            return
        self._at(self._caller, WORD_S, self._say)
        newest = self._newest
        self._send(self._callee, lambda: self._acknowledged(newest))

    def _heard(self, behind: int) -> None:
        link = self._caller.link
        if link is not None:
            self._tries(self._caller, lambda pair: StandbyEndpoint(pair).heard(self._storm.now_s, link, behind, 0))

    def _take(self, state: DiskState, electorate: frozenset[str], epoch: int, number: int, behind: int) -> None:
        end, now = self._caller, self._storm.now_s
        link = end.link
        if link is None or link.is_over:
            self._end(end)
            return
        self._heard(behind)

        def take(pair: PairCore) -> None:
            StandbyEndpoint(pair).take(now, link, electorate, epoch, lambda: end.node.store.take(state))

        if self._tries(end, take):
            self._newest = number
            self._send(self._callee, lambda: self._acknowledged(number))
