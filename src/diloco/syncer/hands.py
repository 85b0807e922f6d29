"""Carries out what the state machine decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from diloco.core.contribution import Contribution
from diloco.core.rounds import Accept, Action, Call, Evict, Merge, Publish, Reject, Store, WakeAt
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.syncer.journal import Journal
from diloco.syncer.notices import Watches
from diloco.syncer.spool import Slot, Spool


class Hands:
    """Everything here happens under the run's lock.

    Arguments:
        merge: begins the tensor work of a round.
        wake_at: has the state machine's `tick` called then.
        roster_changed: has the roster stored, soon.
    """

    def __init__(
        self, spool: Spool, watches: Watches, journal: Journal, *, merge: Callable[[Merge, Sequence[Slot]], None],
        wake_at: Callable[[float], None], roster_changed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._spool = spool
        self._watches = watches
        self._journal = journal
        self._merge = merge
        self._wake_at = wake_at
        self._roster_changed = roster_changed
        self._slots: dict[Contribution, Slot] = {}

    def keep(self, contribution: Contribution, slot: Slot) -> None:
        """The bytes of a contribution that was accepted."""
        self._slots[contribution] = slot

    def carry_out(self, actions: Iterable[Action]) -> None:
        """One after the other."""
        wake_at: list[float] = []
        for action in actions:
            match action:
                case Merge():
                    self._merge(action, [self._slots.pop(c) for c in action.contributions])
                case Publish():
                    published = pb.Published(fragment=action.fragment, version=action.version)
                    self._watches.tell_all(pb.Notice(published=published))
                case Call():
                    called = pb.Called(fragment=action.fragment, version=action.version)
                    self._watches.tell_all(pb.Notice(called=called), only=action.learners)
                case Reject():
                    self._reject(action)
                case Evict():
                    self._evict(action)
                case WakeAt():
                    wake_at.append(action.at)
                case Accept() | Store():
                    pass
        if wake_at:
            self._wake_at(min(wake_at))

    def _reject(self, action: Reject) -> None:
        c = action.contribution
        self._journal.rejected(action)
        if (slot := self._slots.pop(c, None)) is not None:
            self._spool.release(slot)
        rejected = pb.Rejected(fragment=c.fragment, round=c.round, reason=action.reason)
        self._watches.tell(c.learner, c.incarnation, pb.Notice(rejected=rejected))

    def _evict(self, action: Evict) -> None:
        self._journal.evicted(action)
        evicted = pb.Evicted(reason=action.reason, replaced=action.replaced)
        self._watches.tell(action.learner, action.incarnation, pb.Notice(evicted=evicted))
        self._watches.close(action.learner, action.incarnation)
        self._roster_changed()
