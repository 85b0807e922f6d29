"""The healing of joiners at a driver: which learner gives its inner state (`StateRelay`), its room, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic

from diloco.core.state_relay import Peer, StateRelay
from diloco.errors import NoRoomError
from diloco.run import sense
from diloco.run.connections import Connections
from diloco.run.inner_rooms import InnerRooms
from diloco.run.ports import Observer, S, SpoolPort
from diloco.run.run_state import RunState


class InnerRelay(Generic[S]):
    """The relay of one driver.

    Arguments:
        boot: of the driver.
        state: the run.
        tell: sends these learners what stands for them.
        wake: has `tick` called at `StateRelay.wake_at`.

    Attributes:
        relay: decides; inside `event`, but for `StateRelay.fetches`.
        rooms: of the states.
    """

    def __init__(
        self, boot: int, state: RunState[Any, Any], connections: Connections, spool: SpoolPort[S], observer: Observer,
        *, tell: Callable[[set[str]], None], wake: Callable[[], None],
    ) -> None:  # fmt: skip
        self.relay = StateRelay(boot)
        self.rooms: InnerRooms[S] = InnerRooms()
        self._state, self._connections, self._spool, self._observer = state, connections, spool, observer
        self._tell, self._wake = tell, wake

    @contextmanager
    def event(self) -> Iterator[StateRelay]:
        """An event of the relay. After it, rooms that are not needed are given back, and who is asked is told."""
        before = self.relay.asks
        try:
            yield self.relay
        finally:
            for slot in self.rooms.unused(keep=self.relay.held):
                self._spool.release(slot)
            if (now := self.relay.asks) != before:
                self._tell({each[0] for each in (before, now) if each is not None})
            for relayed in self.relay.ended():
                self._observer.healed(relayed)
            self._wake()

    def peers(self) -> list[Peer]:
        """Learners whose inner state may be had."""
        return [
            Peer(it.learner, it.incarnation, it.tokens, it.step_s)
            for it in self._state.core.members.values()
            if it.healthy and not it.finished and self._connections.of(it.learner, it.incarnation) is not None
        ]

    def began(self, now_s: float, learner: str, incarnation: int, number: int, digest: str, num_bytes: int) -> None:
        """A peer begins its upload: check it, and make room.

        Raises:
            NoRoomError: there is none. PayloadError: it was not asked, or its state cannot be the joiner's.
        """
        most_bytes = sense.most_inner_bytes(self._state.model.layout)
        with self.event() as relay:
            relay.began(now_s, learner, incarnation, number, digest, num_bytes, most_bytes)
            try:
                self.rooms.require_place()
                self.rooms.add(number, self._spool.allocate(num_bytes))
            except NoRoomError:
                relay.cut(now_s, learner, incarnation, number)
                raise
