"""`Driver`: executes the actions of `SyncerCore`, for one run.

    from learners        initialise · join · heartbeat · lease · leave · connected, disconnected · fetch
                         begin_push, then complete_push or cut_push
    from an operator     steer
    from the clock       tick
    from the host        begin_epoch · stop, end
    from the worker      a payload is checked, a round is closed
    from the disk        a write is durable, or refused

Each call is an event, and none blocks: tensor and disk work goes to a worker, whose result is an event of its own. So a
driver can be stopped between any two effects, and another driver, made from the durable state (`saved`), continues. The
caller must ensure that one event is over before the next begins. Events that wait for the disk (initialisation, join,
lease, leave, steer) are answered by a call of `done`.

The life of a contribution: a push is begun, which makes room for it, and completed, which has its content checked;
`SyncerCore` acknowledges or rejects it; its round is closed (`JobsPort.close`), made durable
(`StorePort.publish`), and only then visible. A refused write is tried again after `writes.RETRY_S`. Until it
succeeds the version is not visible, and contributions wait in the spool.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic

from diloco.errors import (
    BusyError,
    DilocoError,
    LayoutError,
    NoRoomError,
    PayloadError,
    RestartedError,
    StaleIncarnationError,
    StoreError,
)
from diloco.protocol.actions import (
    Acknowledge,
    Action,
    Evict,
    MergeRound,
    PersistRecord,
    Publish,
    Reject,
    Tell,
    WakeAt,
)  # fmt: skip
from diloco.protocol.contribution import NOT_FINITE, Contribution, Standing
from diloco.protocol.leases import Ask, Grant
from diloco.protocol.lineage import Lineage, lost, refusal
from diloco.protocol.members import Deadlines
from diloco.protocol.steering import Order, Pool
from diloco.protocol.syncer import SyncerCore
from diloco.run import validation as sense
from diloco.run.assembly import Span
from diloco.run.connections import Connections
from diloco.run.global_model import FragmentAnswer
from diloco.run.ports import ConnectionPort, H, InitialModel, MergedRound, ModelLayout, P, Ports, RunMethod, S, SavedRun
from diloco.run.recorded import event
from diloco.run.run_state import RunState
from diloco.run.status import RunStatus
from diloco.run.uploads import Upload, Uploads
from diloco.run.writes import Write, Writes, refusal_of
from diloco.watching import only_watching

STOOD_STILL_S = 1.0
"""A tick that is later than this means that the whole process was suspended."""

COMES_AGAIN_S = 5.0
"""A learner repeats a push without room at least once a second. After this long without a repetition, none is waiting.
"""


class Driver(Generic[H, S, P]):
    """One run.

    Arguments:
        run: its id.
        method: its method; a run that is continued must have the same.
        ports: its world.
        boot: names this driver among those that served the run before it, other than 0.
        deadlines: when a silent learner is evicted.
        saved: what is durable of the run; None: it has no model yet.
        pool: how many learners may train; None: as many as join.

    Attributes:
        state: the run.

    Raises:
        UnknownRunError: another run is saved. AlreadyInitialisedError: it has another method.
    """

    @event
    def __init__(
        self, run: str, method: RunMethod, ports: Ports[H, S, P], *, boot: int, deadlines: Deadlines | None = None,
        saved: SavedRun[H] | None = None, pool: Pool | None = None,
    ) -> None:  # fmt: skip
        self._recorder = ports.recorder
        self.boot = boot
        self.state: RunState[H, P] = RunState(run, method, deadlines or Deadlines(), pool)
        self._ports = ports
        self._clock, self._observer = ports.clock, only_watching(ports.observer)
        self._connections = Connections()
        self._writes: Writes[H, P] = Writes()
        self._status = RunStatus()
        self._slots: dict[Contribution, S] = {}
        self._uploads: Uploads[S] = Uploads(ports.spool)
        self._checked_parts = set[Contribution]()  # those put together whose content is being checked
        self._beginnings: deque[tuple[InitialModel[H], Callable[[DilocoError | None], None]]] = deque()
        self._num_closing = 0
        self._num_standings = 0
        self._heard_steps: dict[tuple[str, int], int] = {}  # by learner and incarnation: its own steps
        self._wake_at_s = math.inf
        self._no_room: tuple[float, str] = (-math.inf, "")
        self._data_news = (0, 0)  # passes done, and units that came back
        self._is_stopping = False
        if saved is not None:
            self.state.restore(saved, self._clock.now_s())
            self._clock.wake_at(self._clock.now_s())

    # --- what may be asked at any time --------------------------------------------------------------------------------

    @property
    def core(self) -> SyncerCore:
        """The state machine. Raises NotInitialisedError: there is no model yet."""
        return self.state.core

    @property
    def num_live(self) -> int:
        """Learners that hold the model and listen, or train, and have not finished."""
        members = list(self.core.members.values()) if self.state.is_initialised else []
        trains, finished = {m.learner for m in members if m.ready}, {m.learner for m in members if m.finished}
        return len((trains | self._connections.learners) - finished)

    @property
    def is_busy(self) -> bool:
        """Whether tensor work or a write is under way that does not wait for a disk that refused it."""
        return self._num_closing > 0 or self._writes.are_moving or bool(self._beginnings)

    @event
    def standing(self, learner: str) -> Standing:
        """The standing of a member."""
        return self._standing(learner, self.num_live)

    def _standing(self, learner: str, num_live: int) -> Standing:
        self._num_standings += 1
        return replace(
            self.core.standing(learner),
            num_live=num_live,
            run_tokens=self.state.run_tokens,
            order=self._num_standings,
        )

    def fetch(
        self, fragment: int, base: int, learner: str = "", incarnation: int = 0, *, versions: Sequence[int] = (),
        seen: Lineage | None = None, process: int = 0,
    ) -> FragmentAnswer[H, P]:  # fmt: skip
        """The update that follows version `base`, or the newest whole fragment where that is not kept.

        Arguments:
            learner, incarnation: for which it is; "": a viewer.
            versions, seen, process: as in `heartbeat`.

        Raises:
            LayoutError: no such fragment. NotInitialisedError: there is no model yet. StaleIncarnationError,
                LineageError, UnknownRunError, PayloadError: as `connected`.
        """
        if learner:
            self._require_line(seen)
            self.core.check(learner, incarnation, process)
            sense.check_versions(learner, len(versions), len(self.state.versions))
            self._require_line(seen, versions)
        fetched = self.state.model.fetch(fragment, base)
        verdicts = self.core.verdicts(learner, fragment, fetched.update.version) if learner else ()
        return replace(fetched, verdicts=verdicts)

    def status(self) -> dict[str, Any]:
        """Plain values for `diloco status`."""
        no_room_at_s, reason = self._no_room
        waits_for = reason if self._clock.now_s() - no_room_at_s < COMES_AGAIN_S else None
        state = self.state
        base = {
            "run": state.run,
            "method": state.method.to_dict(),
            "initialised": state.is_initialised,
            "run_id": self.lineage.run_id,
            "epoch": self.lineage.epoch,
            "step": state.step,
            "tokens": state.run_tokens,
            "initial_tokens": state.initial_tokens,
            "spooled_bytes": self._ports.spool.held_bytes,
            "waits_for": waits_for,
        }
        if not state.is_initialised:
            return {**base, "steering": None, "learners": {}, "fragments": [], "newest_merge": None, "data": None}
        return {**base, **self._status.as_dict(state.core, state.model, self._clock.now_s())}

    # --- a run's beginning --------------------------------------------------------------------------------------------

    @event
    def initialise(self, model: InitialModel[H], done: Callable[[DilocoError | None], None]) -> None:
        """Give the run its model, once. `done` is called with None once that is durable; with AlreadyInitialisedError
        if the run has a model, which stays; with StoreError if the disk refused, and the run stays without a model.

        Raises:
            AlreadyInitialisedError: it has a model already.
            LayoutError: the method cannot train it; nothing is written.
            PayloadError: its description is out of bounds.
        """
        sense.check_initial(model)
        self.state.first_core(model)
        self._beginnings.append((model, done))
        if len(self._beginnings) == 1:
            self._write_beginning()

    def _write_beginning(self) -> None:
        state, (model, _) = self.state, self._beginnings[0]
        persist = partial(self._ports.store.initialise, state.run, state.method, model)
        self._ports.worker.submit("write", None, partial(refusal_of, persist), self._initialised)

    def _initialised(self, error: StoreError | None) -> None:
        model, done = self._beginnings.popleft()
        if error is None:
            self.state.begin(model)
            self._observer.initialised(model)
        done(error)
        if error is None:
            while self._beginnings:
                self._beginnings.popleft()[1](self.state.already_initialised())
        elif self._beginnings:
            self._write_beginning()

    # --- membership ---------------------------------------------------------------------------------------------------

    @property
    def lineage(self) -> Lineage:
        """Which state of which run is served."""
        return self.state.lineage(self.boot)

    @event
    def begin_epoch(self, number: int) -> None:
        """This epoch is durable, and served from here on: learners that follow this driver have agreed to it."""
        self.state.begin_epoch(number)

    @event
    def join(
        self, learner: str, layout: ModelLayout, done: Callable[[int], None], *, process: int = 0, after: int = 0,
        ready: bool = False, overlap: int | None = None, tokens_per_step: int | None = None,
        seen: Lineage | None = None,
    ) -> None:  # fmt: skip
        """A learner joins as a new incarnation. `done`: called with its number once that is durable.

        Arguments:
            process, after, ready, overlap, tokens_per_step: as in `SyncerCore.joined`.
            seen: what the learner has followed; None: nothing yet.

        Raises:
            NotInitialisedError: there is no model yet. LayoutError: it holds another model.
            LineageError, UnknownRunError: as `protocol.lineage.refusal`. PayloadError: no such step size, or such an
                incarnation, can be.
            StaleIncarnationError: it joins again, but a newer process has its place.
            ConfigError: the run's method gives learners no overlap of their own, or not this one.
            NoRoomError: the run's pool has no place for it now. DrainedError: nor will it have one.
        """
        core = self.core
        sense.check_name(learner)
        sense.check_step_size(learner, tokens_per_step)
        sense.check_incarnation(learner, after, core.accounting.incarnation_of(learner))
        self._require_line(seen)
        if overlap is not None:
            self.state.method.with_own_overlap(overlap)
        if difference := layout.first_difference(self.state.model.layout):
            raise LayoutError(f"learner {learner!r} (here) does not hold the run's model (there): {difference}.")
        incarnation, actions = core.joined(
            self._clock.now_s(), learner, process=process, after=after, ready=ready, overlap=overlap,
            tokens_per_step=tokens_per_step,
        )  # fmt: skip
        self._observer.joined(learner, incarnation, core.step)
        self._writes.record(self._clock.now_s(), partial(done, incarnation))
        self._execute(actions)

    def check(self, learner: str, incarnation: int, process: int | None = None) -> None:
        """As `SyncerCore.check`."""
        self.core.check(learner, incarnation, process)

    def _require_line(self, seen: Lineage | None, versions: Sequence[int] = ()) -> None:
        """Check that a learner can follow this syncer, and that the versions that it holds are part of the run.

        The first comes before all else: an older copy of the state does not say which incarnations are out.

        Raises:
            LineageError, UnknownRunError: it cannot. StaleIncarnationError: they are not.
        """
        if seen is None:
            return
        if (error := refusal(seen, self.lineage)) is not None:
            raise error
        if (gone := lost(self.state.epochs, seen.epoch, versions)) is not None:
            fragment, version = gone
            raise StaleIncarnationError(
                f"the run went back to version {version} of fragment {fragment} after epoch {seen.epoch}, and version "
                f"{versions[fragment]} is not part of it any more; join again to continue from the newest one."
            )

    @event
    def heartbeat(
        self, learner: str, incarnation: int, *, step: int, steps: int, tokens: int, step_s: float | None,
        waiting: bool, finished: bool = False, blocked_with: Sequence[int] = (), versions: Sequence[int] = (),
        confirmed: Sequence[int] = (), seen: Lineage | None = None, earlier_tokens: int = 0,
        process: int = 0,
    ) -> Standing:  # fmt: skip
        """A heartbeat; returns the learner's standing.

        Arguments:
            process: whose incarnation it is, as it said when it joined.
            versions: the newest that the learner has, by fragment.
            seen: the syncer that it has them from, and that has all contributions of a learner that has `finished` or
                is blocked: another one may lack some, so that the learner is neither. None: it follows none yet.
            others: as in `SyncerCore.heartbeat`.

        Raises:
            StaleIncarnationError: the incarnation is out, or a version is not part of the run any more. PayloadError:
                its numbers make no sense. LineageError, UnknownRunError: as `protocol.lineage.refusal`.
        """
        core = self.core
        self._require_line(seen)
        core.check(learner, incarnation, process)
        sense.check_heartbeat(
            learner, step=step, steps=steps, tokens=tokens, step_s=step_s, num_versions=len(versions),
            num_confirmed=len(confirmed), num_blocked=len(blocked_with),
            num_fragments=len(self.state.versions), run_step=core.step,
            tokens_per_step=core.members[learner].tokens_per_step, earlier_tokens=earlier_tokens,
        )  # fmt: skip
        self._require_line(seen, versions)
        sense.check_forward(learner, steps, self._heard_steps.get((learner, incarnation), 0))
        self._heard_steps[learner, incarnation] = steps
        actions = core.heartbeat(
            self._clock.now_s(), learner, incarnation, step=step, steps=steps, tokens=tokens, step_s=step_s,
            waiting=waiting, finished=finished and seen == self.lineage,
            blocked_with=tuple(blocked_with) if seen == self.lineage else (), confirmed=tuple(confirmed),
            earlier_tokens=earlier_tokens,
        )  # fmt: skip
        self._status.heard(learner, incarnation, versions)
        self._execute(actions)
        return self.standing(learner)

    @event
    def leave(
        self, learner: str, incarnation: int, done: Callable[[], None], *, tokens: int, step: int = 0,
        earlier_tokens: int = 0, process: int = 0, seen: Lineage | None = None,
    ) -> None:  # fmt: skip
        """A learner leaves. `done`: called once that is durable.

        Arguments:
            incarnation: 0: all that its process knows of are out, and what is to be counted are its tokens.
            tokens, earlier_tokens: trained by this incarnation, and by earlier ones of its process.
            step: at which it ends, unless the syncer knows of a later one.
            seen: what the learner follows. process: as in `heartbeat`.

        Raises:
            StaleIncarnationError: the incarnation is out, or the process is not the newest of its name. PayloadError:
                its numbers make no sense. LineageError, UnknownRunError: it has followed a later state.
        """
        core, now_s = self.core, self._clock.now_s()
        self._require_line(seen)
        if incarnation:
            core.check(learner, incarnation, process)
        member = core.members.get(learner)
        sense.check_step(learner, step, core.step)
        for each in (tokens, earlier_tokens):
            sense.check_tokens(learner, each, core.step, None if member is None else member.tokens_per_step)
        if incarnation:
            actions = core.left(now_s, learner, incarnation, step=step, tokens=tokens, earlier_tokens=earlier_tokens)
        else:
            actions = core.left_late(now_s, learner, process=process, step=step, tokens=earlier_tokens + tokens)
        if member is not None:
            self._observer.left(learner, member.incarnation, tokens)
            self._end(learner, member.incarnation)
        self._writes.record(now_s, done)
        self._execute(actions)

    @event
    def lease(
        self, learner: str, incarnation: int, ask: Ask, done: Callable[[Grant], None], *, seen: Lineage | None = None,
        process: int = 0,
    ) -> None:  # fmt: skip
        """A learner asks for units of the run's data. `done`: called with them once their lease is durable.

        Arguments:
            seen: what the learner follows. process: as in `heartbeat`.

        Raises:
            StaleIncarnationError: the incarnation is out. ConfigError: it has other data than the run.
            PayloadError: the request makes no sense. LineageError, UnknownRunError: it has followed a later state.
        """
        self._require_line(seen)
        self.core.check(learner, incarnation, process)
        sense.check_ask(learner, ask)
        now_s, tokens_before = self._clock.now_s(), self.state.initial_tokens
        grant, actions = self.core.lease(now_s, learner, incarnation, ask, tokens_before=tokens_before)
        self._writes.record(now_s, partial(done, grant))
        self._execute(actions)

    @event
    def connected(
        self, learner: str, incarnation: int, connection: ConnectionPort, *, versions: Sequence[int] = (),
        seen: Lineage | None = None, process: int = 0,
    ) -> None:  # fmt: skip
        """A learner has opened a connection. Its standing is sent at once, and whenever it changes.

        Learners that wait for others before they start are sent theirs too.

        Arguments:
            versions, seen, process: as in `heartbeat`.

        Raises:
            StaleIncarnationError, LineageError, UnknownRunError: as `heartbeat`. PayloadError: more versions than
                fragments.
        """
        self._require_line(seen)
        self.core.check(learner, incarnation, process)
        sense.check_versions(learner, len(versions), len(self.state.versions))
        self._require_line(seen, versions)
        self._connections.opened(learner, incarnation, connection)
        connection.standing(self.standing(learner))
        self._tell([it.learner for it in self.core.members.values() if it.learner != learner and it.tokens == 0])

    @event
    def disconnected(self, learner: str, incarnation: int, connection: ConnectionPort) -> None:
        """This connection broke."""
        if self._connections.broke(learner, incarnation, connection):
            self._execute(self.core.disconnected(self._clock.now_s(), learner, incarnation))

    # --- contributions ------------------------------------------------------------------------------------------------

    @event
    def begin_push(
        self, contribution: Contribution, num_bytes: int, *, boot: int, span: Span | None = None, process: int = 0
    ) -> Upload[S]:
        """Begin the upload of a contribution with a payload of this size: check it, and make room.

        Arguments:
            boot: the driver that it is meant for.
            span: the part of the payload that is uploaded; None: all of it. The contribution has arrived once all of
                its parts have.
            process: as in `heartbeat`.

        Raises:
            RestartedError: another driver than this one, which may lack what that one had acknowledged.
            StaleIncarnationError: from an incarnation that is out. PayloadError: its numbers make no sense.
            LayoutError: no such fragment or tensor. CorruptPayloadError: not the size that its fragment and codec need.
            NoRoomError: there is none now; the same push is taken once there is. BusyError: once an earlier connection
                has ended, which uploads the same.
        """
        c = contribution
        if boot != self.boot:
            raise RestartedError(
                "the syncer was started again; what it has not given a verdict on is sent again, the oldest first."
            )
        self.core.check(c.learner, c.incarnation, process)
        sense.check_contribution(c, self.core.step, self.core.members[c.learner].tokens_per_step)
        self.state.model.held(c.fragment)
        fragment = self.state.model.layout.fragments[c.fragment]
        sense.check_size(c, num_bytes, self._ports.jobs.contribution_bytes(fragment.numel), len(fragment.tensors))
        is_here = c in self._checked_parts or self.core.is_known(c)
        model_bytes = sum(self._ports.jobs.contribution_bytes(each.numel) for each in self.state.model.layout.fragments)
        try:
            return self._uploads.begin(c, num_bytes, span, model_bytes, is_here=is_here)
        except BusyError:
            raise
        except NoRoomError as error:
            self._sent_back(c, error)
            raise

    @event
    def cut_push(self, push: Upload[S], no_room: NoRoomError | None = None, *, received: int = 0) -> None:
        """The upload was broken off.

        Arguments:
            no_room: the error, if there was no room for the payload.
            received: bytes of `push.room`, the first ones, that are here. They are kept for the next upload of the same
                (`Upload.received`), as long as the incarnation is part of the run and room is not needed.
        """
        c = push.contribution
        self._uploads.cut(push, self._clock.now_s(), received=received, is_wanted=self._is_wanted(c))
        if no_room is not None:
            self._sent_back(c, no_room)

    def _is_wanted(self, c: Contribution) -> bool:
        """Whether a contribution that is not here may still come."""
        member = self.core.members.get(c.learner)
        return member is not None and member.incarnation == c.incarnation and not self.core.is_known(c)

    def _sent_back(self, c: Contribution, no_room: NoRoomError) -> None:
        now_s = self._clock.now_s()
        if now_s - self._no_room[0] >= COMES_AGAIN_S:
            self._observer.waits_for_room(no_room)
        self._no_room = now_s, str(no_room)
        self._uploads.make_room()
        self._observer.sent_back(c)

    @event
    def complete_push(self, push: Upload[S], done: Callable[[DilocoError | None], None]) -> None:
        """All of its payload is here. `done`: None once it is accepted, rejected (its learner's standing says so when
        that is durable) or known as a duplicate; otherwise what is wrong with it, and the round is as before:

            NonFiniteError, CorruptPayloadError: content that cannot be used. StaleIncarnationError: its incarnation is
                out by now.
            VersionError, ConfigError: as `SyncerCore.contributed`.
        """
        if not self._uploads.completed(push):
            done(None)
            return
        if push.span is not None:
            self._checked_parts.add(push.contribution)
        index = push.contribution.fragment
        num_elements = self.state.model.layout.fragments[index].numel
        check = partial(self._ports.jobs.check, push.slot, num_elements)
        self._ports.worker.submit("check", index, check, partial(self._checked, push, done))

    def _checked(self, push: Upload[S], done: Callable[[DilocoError | None], None], error: PayloadError | None) -> None:
        actions: list[Action] = []
        self._checked_parts.discard(push.contribution)
        try:
            if error is not None:
                raise error
            actions = self.core.contributed(self._clock.now_s(), push.contribution)
        except DilocoError as refusal:
            self._uploads.release(push.slot)
            done(refusal)
            return
        self._decided(actions[:1])
        match actions[0]:
            case Acknowledge(duplicate=False):
                self._slots[push.contribution] = push.slot
                self._uploads.taken(push)
                self._observer.contributed(push.contribution, push.num_bytes)
            case Reject() as reject:
                self._uploads.release(push.slot)
                self._observer.rejected(reject)
            case _:
                self._uploads.release(push.slot)
        self._execute(actions[1:])
        done(None)

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _close(self, action: MergeRound) -> None:
        if self._is_stopping:  # the driver that serves the run next gets these contributions again
            return
        self._num_closing += 1
        slots = [self._slots.pop(c) for c in action.contributions]
        model = self.state.model
        bases = {c.learner: c.base for c in action.contributions}
        if self.core.members.keys() <= bases.keys():  # every learner has the base of what it sent
            model.drop_updates(action.fragment, min(bases.values()))
        close = partial(self._ports.jobs.close, action, model.layout, model.held(action.fragment), slots)
        self._ports.worker.submit("close", action.fragment, close, partial(self._closed, action, slots))

    def _closed(self, action: MergeRound, slots: Sequence[S], merged: MergedRound[H, P] | PayloadError) -> None:
        self._num_closing -= 1
        for slot in slots:
            self._ports.spool.release(slot)
        now_s = self._clock.now_s()
        if isinstance(merged, PayloadError):
            self._observer.abandoned(action, merged)
            self._execute(self.core.abandoned(now_s, action.fragment, NOT_FINITE))
            return
        self._observer.merged(merged)
        self._status.merged(action, self.core)
        self._writes.version(now_s, merged)
        self.core.merged(action.fragment, merged.refused)
        self._execute([])

    def _write(self) -> None:
        """Begin the next write that is due."""
        if (write := self._writes.begin(self._clock.now_s())) is None:
            return
        store, merged = self._ports.store, write.merged
        fragment = None if merged is None else merged.update.fragment
        record = self.core.saved(storing=fragment)
        persist = partial(store.save_record if merged is None else partial(store.publish, merged), record.values)
        done = partial(self._written, write, record.serial)
        self._ports.worker.submit("write", fragment, partial(refusal_of, persist), done)

    def _written(self, write: Write[H, P], serial: int, error: StoreError | None) -> None:
        now_s = self._clock.now_s()
        if error is not None:
            if not write.is_refused:
                self._observer.waits_for_disk(str(write), error)
            self._writes.refused(now_s, write)
            self._execute([])
            return
        then = self._writes.ended(write)
        if write.merged is None:
            actions = self.core.recorded(now_s, serial)
        else:
            self.state.model.take(write.merged, self.core.intervals_in_flight)
            self._observer.published(write.merged, len(self.core.members), now_s - write.wanted_at_s)
            actions = self.core.stored(now_s, write.merged.update.fragment, serial)
        self._execute(actions)
        for each in then:
            each()

    # --- an operator --------------------------------------------------------------------------------------------------

    @event
    def steer(self, order: Order, by: str, done: Callable[[str], None]) -> None:
        """An operator's order. `done`: called with what was done, in a sentence, once that is durable.

        Arguments:
            by: who gives it.

        Raises:
            NotInitialisedError: there is no model yet. ConfigError: it cannot be carried out. PayloadError: it makes no
                sense.
        """
        sense.check_order(order, by)
        now_s = self._clock.now_s()
        said, actions = self.core.steer(now_s, order, by)
        self._observer.steered(order, by, said)
        self._writes.record(now_s, partial(done, said))
        self._execute(actions)

    # --- time ---------------------------------------------------------------------------------------------------------

    @event
    def tick(self, late_s: float = 0.0) -> None:
        """Time has passed: called at the time given to `ClockPort.wake_at`, and now and then.

        Arguments:
            late_s: how much later than planned this is called; large if the whole process was suspended.
        """
        self._wake_at_s = math.inf
        if not self.state.is_initialised:
            return
        core = self.core
        if late_s > STOOD_STILL_S:  # suspended, or starved: what learners said meanwhile has not been heard yet
            self._observer.stood_still(late_s)
            core.stood_still(late_s)
        self._uploads.tick(self._clock.now_s())
        self._execute(core.tick(self._clock.now_s()))
        self._observer.stands(core)

    # --- the end ------------------------------------------------------------------------------------------------------

    @event
    def stop(self) -> None:
        """Close no more rounds. Work under way continues until `is_busy` is false."""
        self._is_stopping = True

    @event
    def end(self) -> None:
        """End all connections; learners connect to the driver that serves the run next."""
        self._connections.end_all()

    # --- actions ------------------------------------------------------------------------------------------------------

    def _execute(self, actions: Sequence[Action]) -> None:
        """Execute the actions of an event, and begin what else is due."""
        told: set[str] = set()
        self._decided(actions)
        for action in actions:
            match action:
                case MergeRound():
                    self._close(action)
                case Reject(contribution=c):
                    self._observer.rejected(action)
                    if (slot := self._slots.pop(c, None)) is not None:
                        self._ports.spool.release(slot)
                case PersistRecord():
                    self._writes.record(self._clock.now_s())
                case Publish():
                    told.update(self.core.members)
                case Tell(learners=learners):
                    told.update(learners)
                case Evict():
                    self._evict(action)
                case WakeAt(at=at):
                    self._wake_at_s = at
                case Acknowledge():
                    pass
        self._write()
        self._tell(told)
        self._look_at_data()
        self._clock.wake_at(min(self._wake_at_s, self._writes.next_s))

    def _look_at_data(self) -> None:
        leases = self.core.leases
        news = leases.passes_done, leases.num_returned
        if news != self._data_news:
            self._data_news = news
            self._observer.data_moved(leases)

    def _decided(self, actions: Sequence[Action]) -> None:
        if self._recorder is not None:
            self._recorder.decided(actions)

    def _evict(self, action: Evict) -> None:
        self._observer.evicted(action)
        if (connection := self._connections.of(action.learner, action.incarnation)) is not None:
            connection.evicted(action.reason, replaced=action.replaced)
        self._end(action.learner, action.incarnation)

    def _end(self, learner: str, incarnation: int) -> None:
        self._connections.end(learner, incarnation)
        self._uploads.end(learner, incarnation)
        self._heard_steps.pop((learner, incarnation), None)

    def _tell(self, learners: Collection[str]) -> None:
        num_live = self.num_live if learners else 0
        for learner in sorted(learners):
            member = self.core.members.get(learner)
            if member is not None and (connection := self._connections.of(learner, member.incarnation)) is not None:
                connection.standing(self._standing(learner, num_live))
