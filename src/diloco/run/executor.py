"""`ActionExecutor`: executes the actions of `SyncerCore`. A closed round is merged (`JobsPort.close`), its version is
made durable with the run's record (`StorePort.put`, then `commit`), and only then it is visible and learners are
notified. While the store refuses, the version is not visible, and contributions wait in the spool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic

from diloco.errors import PayloadError
from diloco.protocol.actions import Action, Evict, MergeRound, PersistRecord, Publish, Reject, Tell, WakeAt
from diloco.protocol.contribution import NOT_FINITE, Standing
from diloco.run.ports import ConnectionPort, H, MergedRound, Observer, P, Ports, S
from diloco.run.run_state import RunState
from diloco.run.status import RunStatus
from diloco.run.uploads import Uploads

Then = Callable[[], None]


@dataclass(eq=False)
class Commit(Generic[H, P]):
    """Versions with a record, or a record alone.

    Attributes:
        versions: in merge order, each with the time at which it was merged.
        pack: new groups of reinforcement learning.
        then: called once they are durable.
    """

    versions: list[tuple[MergedRound[H, P], float]]
    pack: list[bytes]
    then: list[Then]


class Writes(Generic[H, P]):
    """The queue of what one driver makes durable: versions and the run's record, by one commit at a time.

    A record is taken when its commit begins, so the store never holds an older state after a newer one, and one record
    serves all earlier requests.

    Arguments:
        every_s: the shortest time between the beginnings of two commits.

    Attributes:
        is_stopping: what learners ask for from now on is left to the driver that serves the run next.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.is_stopping = False
        self._not_before_s = -math.inf
        self._num_putting = 0
        self._versions: list[tuple[MergedRound[H, P], float]] = []
        self._wants_record = False
        self._pack: list[bytes] = []
        self._then: list[Then] = []
        self._is_under_way = False

    def putting(self) -> None:
        """A version is being stored."""
        self._num_putting += 1

    def put(self, merged: MergedRound[H, P], merged_at_s: float) -> None:
        """A version is stored: the next commit publishes it."""
        self._num_putting -= 1
        self._versions.append((merged, merged_at_s))

    def record(self, then: Then | None = None) -> None:
        """The run's record is to be made durable. `then`: called once it is."""
        self._wants_record |= not self.is_stopping
        if then is not None:
            self._then.append(then)

    def pack(self, group: bytes) -> None:
        """A group is stored with the next record."""
        self._pack.append(group)

    def after_record(self, then: Then) -> None:
        """Call `then` once the next record is durable, which the state machine asks for when it is due."""
        self._then.append(then)

    def begin(self, now_s: float) -> Commit[H, P] | None:
        """The commit to begin now; None: one is under way, or none is due."""
        if self._is_under_way or now_s < self.next_s:
            return None
        commit = Commit(self._versions, self._pack, self._then)
        self._versions, self._pack, self._then, self._wants_record = [], [], [], False
        self._is_under_way, self._not_before_s = True, now_s + self._every_s
        return commit

    def ended(self) -> None:
        """The commit under way is durable."""
        self._is_under_way = False

    @property
    def next_s(self) -> float:
        """When the next commit is due; infinite while one is under way, whose end is an event."""
        is_wanted = self._wants_record or bool(self._versions)
        return self._not_before_s if is_wanted and not self._is_under_way else math.inf

    @property
    def are_open(self) -> bool:
        """Whether anything is to be made durable."""
        return self._is_under_way or self._wants_record or bool(self._versions) or self._num_putting > 0


class Connections:
    """The newest connection of each incarnation. A broken connection stays until the break is detected."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], ConnectionPort] = {}

    def opened(self, learner: str, incarnation: int, connection: ConnectionPort) -> None:
        """A connection was opened; an earlier one of the incarnation ends."""
        self.end(learner, incarnation)
        self._open[learner, incarnation] = connection

    def broke(self, learner: str, incarnation: int, connection: ConnectionPort) -> bool:
        """A connection broke. Returns whether it was the newest of its incarnation."""
        if self._open.get((learner, incarnation)) is not connection:
            return False
        del self._open[learner, incarnation]
        return True

    def end(self, learner: str, incarnation: int) -> None:
        """End an incarnation's connection, if it has one."""
        if (connection := self._open.pop((learner, incarnation), None)) is not None:
            connection.end()

    def end_all(self) -> None:
        """End all of them."""
        for learner, incarnation in list(self._open):
            self.end(learner, incarnation)

    def of(self, learner: str, incarnation: int) -> ConnectionPort | None:
        """An incarnation's connection; None: it has none."""
        return self._open.get((learner, incarnation))

    @property
    def learners(self) -> set[str]:
        """All learners with a connection."""
        return {learner for learner, _ in self._open}


class ActionExecutor(Generic[H, S, P]):
    """Executes the actions of one run.

    Arguments:
        state: the run; actions are executed once it has a model.
        ports: its world.
        observer: that of the ports, with its errors contained.
        commit_every_s: the shortest time between two commits.

    Attributes:
        uploads: the payloads of contributions, until their rounds are closed.
        writes: the queue of what is to be made durable.
        connections: of learners.
        status: facts for `diloco status`.
        wake_at_s: the time at which `SyncerCore` asked to be woken.
    """

    def __init__(self, state: RunState[H, P], ports: Ports[H, S, P], observer: Observer, commit_every_s: float) -> None:
        self.uploads: Uploads[S] = Uploads(ports.spool)
        self.writes: Writes[H, P] = Writes(commit_every_s)
        self.connections = Connections()
        self.status = RunStatus()
        self.wake_at_s = math.inf
        self._state, self._ports, self._observer, self._clock = state, ports, observer, ports.clock
        self._num_closing = 0
        self._num_standings = 0
        self._data_news = (0, 0)  # passes done, and units that were returned

    def execute(self, actions: Sequence[Action]) -> None:
        """Execute the actions of an event, and begin the next commit that is due."""
        told: set[str] = set()
        self.decided(actions)
        for action in actions:
            match action:
                case MergeRound():
                    self._close(action)
                case Reject(contribution=c):
                    self._observer.rejected(action)
                    self.uploads.drop(c)
                case PersistRecord():
                    self.writes.record()
                case Publish():
                    told.update(self._state.core.members)
                case Tell(learners=learners):
                    told.update(learners)
                case Evict():
                    self._evict(action)
                case WakeAt(at=at):
                    self.wake_at_s = at
        self._commit()
        self.tell(told)
        self._look_at_data()
        self._clock.wake_at(min(self.wake_at_s, self.writes.next_s))

    def decided(self, actions: Sequence[Action]) -> None:
        """Journal the actions that are executed."""
        if self._ports.recorder is not None:
            self._ports.recorder.decided(actions)

    def stop(self) -> None:
        """Close no more rounds: the driver that serves the run next gets their contributions again."""
        self.writes.is_stopping = True

    @property
    def is_busy(self) -> bool:
        """Whether a round is being closed, or something is being made durable by a store that does not refuse it."""
        return self._num_closing > 0 or (self.writes.are_open and not self._ports.store.is_refusing)

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _close(self, action: MergeRound) -> None:
        if self.writes.is_stopping:
            return
        self._num_closing += 1
        slots = [self.uploads.take(c) for c in action.contributions]
        model = self._state.model
        bases = {c.learner: c.base for c in action.contributions}
        members = self._state.core.members.values()
        if all(it.learner in bases for it in members if it.holds(action.fragment)):  # each has the base of its own
            model.drop_updates(action.fragment, min(bases.values()))
        close = partial(self._ports.jobs.close, action, model.layout, model.held(action.fragment), slots)
        self._ports.worker.submit("close", action.fragment, close, partial(self._closed, action, slots))

    def _closed(self, action: MergeRound, slots: Sequence[S], merged: MergedRound[H, P] | PayloadError) -> None:
        self._num_closing -= 1
        for slot in slots:
            self._ports.spool.release(slot)
        now_s, core = self._clock.now_s(), self._state.core
        if isinstance(merged, PayloadError):
            self._observer.abandoned(action, merged)
            self.execute(core.abandoned(now_s, action.fragment, NOT_FINITE))
            return
        self._observer.merged(merged, self._state.experts.merged(merged))
        self.status.merged(action, core)
        core.merged(action.fragment, merged.refused, merged.update.digest)
        self.writes.putting()
        self._ports.store.put(merged, partial(self._put, merged, now_s))
        self.execute([])

    def _put(self, merged: MergedRound[H, P], merged_at_s: float) -> None:
        self.writes.put(merged, merged_at_s)
        self.execute([])

    # --- commits ------------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Begin the next commit that is due."""
        if (commit := self.writes.begin(self._clock.now_s())) is None:
            return
        versions = [merged for merged, _ in commit.versions]
        record = self._state.core.saved(storing=[merged.update.fragment for merged in versions])
        values = {**record.values, "is_over": self._state.is_over}
        self._ports.store.commit(versions, values, commit.pack, partial(self._committed, commit, record.serial))

    def _committed(self, commit: Commit[H, P], serial: int) -> None:
        now_s, core = self._clock.now_s(), self._state.core
        self.writes.ended()
        actions: list[Action] = []
        for merged, merged_at_s in commit.versions:
            self._state.model.take(merged, core.intervals_in_flight)
            num_live = sum(it.holds(merged.update.fragment) for it in core.members.values())
            self._observer.published(merged, num_live, now_s - merged_at_s)
            actions += core.stored(now_s, merged.update.fragment)
        self.execute([*actions, *core.recorded(now_s, serial)])
        for each in commit.then:
            each()

    # --- learners -----------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Learners that hold the model and listen, or train, and have not finished."""
        members = list(self._state.core.members.values())
        trains, finished = {m.learner for m in members if m.ready}, {m.learner for m in members if m.finished}
        return len((trains | self.connections.learners) - finished)

    def standing(self, learner: str, num_live: int) -> Standing:
        """The standing of a member, as it is sent."""
        self._num_standings += 1
        return replace(
            self._state.core.standing(learner), num_live=num_live, run_tokens=self._state.run_tokens,
            order=self._num_standings, budget=self._state.budget,
        )  # fmt: skip

    def tell(self, learners: Collection[str]) -> None:
        """Send those of these learners that are connected their standing."""
        num_live = self.num_live if learners else 0
        for learner in sorted(learners):
            member = self._state.core.members.get(learner)
            if member is not None and (connection := self.connections.of(learner, member.incarnation)) is not None:
                connection.standing(self.standing(learner, num_live))

    def end(self, learner: str, incarnation: int) -> None:
        """End an incarnation: close its connection, and drop the payloads that it was uploading."""
        self.connections.end(learner, incarnation)
        self.uploads.end(learner, incarnation)

    def _evict(self, action: Evict) -> None:
        self._observer.evicted(action)
        if (connection := self.connections.of(action.learner, action.incarnation)) is not None:
            connection.evicted(action.reason, replaced=action.replaced)
        self.end(action.learner, action.incarnation)

    def _look_at_data(self) -> None:
        leases = self._state.core.leases
        news = leases.passes_done, leases.num_returned
        if news != self._data_news:
            self._data_news = news
            self._observer.data_moved(leases)
