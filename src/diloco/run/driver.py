"""`Driver`: the events of one run. It checks them and enters them into `SyncerCore`; `run.executor` executes the
actions.

    from learners        initialise · join · heartbeat · lease · leave · connected, disconnected · fetch
                         begin_push, then complete_push or cut_push
    from workers         work · made
    from an operator     steer
    from the clock       tick
    from the host        stop, end
    from the worker      a payload is checked, a round is closed
    from the store       a version is stored, a commit is durable

Each call is an event, and none blocks: tensor and disk work is done by a worker, and its result is an event of its own.
So a driver can be stopped between any two effects, and another driver, made from the durable state (`saved`),
continues. The caller must ensure that one event is over before the next begins. Events that wait for the store
(initialisation, join, lease, leave, steer) are answered by a call of `done`.

The life of a contribution: `begin_push` makes room for it, and `complete_push` has its content checked; `SyncerCore`
acknowledges or rejects it; the executor closes its round, makes the new version durable, and publishes it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
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
from diloco.protocol.actions import Acknowledge, Action, Reject
from diloco.protocol.contribution import Budget, Contribution, Standing
from diloco.protocol.groups import Assigned, Made
from diloco.protocol.leases import Ask, Grant
from diloco.protocol.lineage import Lineage, lost, refusal
from diloco.protocol.members import Claim, Deadlines, Report
from diloco.protocol.steering import Order, Pool
from diloco.protocol.syncer import SyncerCore
from diloco.protocol.workers import MAX_REASON, Score, Work
from diloco.run import validation
from diloco.run.executor import ActionExecutor
from diloco.run.global_model import FragmentAnswer
from diloco.run.ports import (
    ConnectionPort,
    H,
    InitialModel,
    ModelLayout,
    P,
    Ports,
    RunMethod,
    S,
    SavedRun,
    event,
    only_watching,
)
from diloco.run.run_state import RunState
from diloco.run.uploads import Span, Upload

SUSPENDED_AFTER_S = 1.0
"""A tick that is later than this means that the whole process was suspended."""

RETRY_EXPECTED_S = 5.0
"""A learner repeats a push that found no room at least once a second. After this long without one, no push is waiting.
"""


class Driver(Generic[H, S, P]):
    """One run.

    Arguments:
        run: its id.
        method: its method; a run that is continued must have the same.
        ports: its environment.
        boot: distinguishes this driver from earlier drivers of the run; not 0.
        deadlines: when a silent learner is evicted.
        saved: the durable state of the run; None: it has no model yet.
        pool: how many learners may train; None: as many as join.
        budget: when the run ends; learners are told, and end by themselves.
        epoch: that this driver's syncer has claimed, in which a new run begins.
        commit_every_s: the shortest time between two commits to the store.

    Attributes:
        state: the run.

    Raises:
        UnknownRunError: another run is saved. AlreadyInitialisedError: it has another method.
    """

    @event
    def __init__(
        self, run: str, method: RunMethod, ports: Ports[H, S, P], *, boot: int, deadlines: Deadlines | None = None,
        saved: SavedRun[H] | None = None, pool: Pool | None = None, budget: Budget | None = None, epoch: int = 1,
        commit_every_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._recorder = ports.recorder
        self.boot = boot
        self.state: RunState[H, P] = RunState(run, method, deadlines, pool, budget)
        self._ports = ports
        self._clock, self._observer = ports.clock, only_watching(ports.observer)
        self._epoch = epoch
        self._executor = ActionExecutor(self.state, ports, self._observer, commit_every_s)
        self._uploads, self._writes = self._executor.uploads, self._executor.writes
        self._connections, self._status = self._executor.connections, self._executor.status
        self._checked_parts = set[Contribution]()  # contributions of several parts whose content is being checked
        self._beginnings: deque[tuple[InitialModel[H], Callable[[DilocoError | None], None]]] = deque()
        self._no_room: tuple[float, str] = (-math.inf, "")
        if saved is not None:
            self.state.restore(saved, self._clock.now_s())
            if saved.record is not None and saved.record.get("is_over", False) != self.state.is_over:  # another budget
                self._writes.record()
            self._clock.wake_at(self._clock.now_s())

    # --- queries, at any time -----------------------------------------------------------------------------------------

    @property
    def core(self) -> SyncerCore:
        """The state machine. Raises NotInitialisedError: there is no model yet."""
        return self.state.core

    @property
    def num_live(self) -> int:
        """Learners that hold the model and listen, or train, and have not finished."""
        return self._executor.num_live if self.state.is_initialised else 0

    @property
    def is_busy(self) -> bool:
        """Whether tensor work is under way, or a commit to a store that does not refuse it."""
        return self._executor.is_busy or (bool(self._beginnings) and not self._ports.store.is_refusing)

    def fetch(self, fragment: int, base: int, claim: Claim | None = None) -> FragmentAnswer[H, P]:
        """The update that follows version `base`, or the newest whole fragment if that update is not kept.

        Arguments:
            claim: of the learner that fetches; None: without its verdicts.

        Raises:
            LayoutError: no such fragment. NotInitialisedError: there is no model yet. StaleIncarnationError,
                LineageError, UnknownRunError, PayloadError: as `connected`.
        """
        if claim is not None:
            self._require_member(claim)
        fetched = self.state.model.fetch(fragment, base)
        if claim is None:
            return fetched
        return replace(fetched, verdicts=self.core.verdicts(claim.learner, fragment, fetched.update.version))

    def status(self) -> dict[str, Any]:
        """Plain values for `diloco status`."""
        no_room_at_s, reason = self._no_room
        waits_for = reason if self._clock.now_s() - no_room_at_s < RETRY_EXPECTED_S else None
        values = self._status.as_dict(self.state, self._clock.now_s())
        return {**values, "spooled_bytes": self._ports.spool.held_bytes, "waits_for": waits_for}

    # --- a run's beginning --------------------------------------------------------------------------------------------

    @event
    def initialise(self, model: InitialModel[H], done: Callable[[DilocoError | None], None]) -> None:
        """Initialise the run with its model, once. `done` is called with None once that is durable; with
        AlreadyInitialisedError if the run has a model, which it keeps; with StoreError if the disk refused, and the run
        has no model.

        Raises:
            AlreadyInitialisedError: it has a model already.
            LayoutError: the method cannot train this model; nothing is written.
            PayloadError: its description is out of bounds.
        """
        validation.check_initial(model)
        self.state.first_core(model)
        self._beginnings.append((model, done))
        if len(self._beginnings) == 1:
            self._write_beginning()

    def _write_beginning(self) -> None:
        state, (model, _) = self.state, self._beginnings[0]
        self._ports.store.initialise(state.run, state.method, model, self._initialised)

    def _initialised(self, error: StoreError | None) -> None:
        model, done = self._beginnings.popleft()
        if error is None:
            self.state.begin(model, self._epoch)
            self._observer.initialised(model, self.state.cut)
        done(error)
        if error is None:
            while self._beginnings:
                self._beginnings.popleft()[1](self.state.already_initialised())
        elif self._beginnings:
            self._write_beginning()

    # --- membership ---------------------------------------------------------------------------------------------------

    @property
    def lineage(self) -> Lineage:
        """The run and the state of it that this driver serves."""
        return self.state.lineage(self.boot)

    @event
    def join(
        self, claim: Claim, layout: ModelLayout, done: Callable[[int], None], *, ready: bool = False,
        overlap: int | None = None, tokens_per_step: int | None = None, held: Sequence[int] | None = None,
        dealt: bool = False,
    ) -> None:  # fmt: skip
        """A learner joins as a new incarnation. `done`: called with its number once that is durable.

        Arguments:
            claim: with the last incarnation of the same process; 0: it had none.
            layout: of the whole model of the run, whatever it holds.
            ready, overlap, tokens_per_step, held, dealt: as in `SyncerCore.joined`.

        Raises:
            NotInitialisedError: there is no model yet. LayoutError: it holds another model.
            LineageError, UnknownRunError: as `protocol.lineage.refusal`. PayloadError: no such step size, such an
                incarnation, or such a set of held fragments, can be.
            StaleIncarnationError: it joins again, but a newer process has taken its name.
            ConfigError: the run's method allows learners no overlap of their own, or not this one.
            NoRoomError: the run's pool has no place for it now. DrainedError: the pool will have none.
        """
        core, learner = self.core, claim.learner
        validation.check_name(learner)
        validation.check_step_size(learner, tokens_per_step)
        validation.check_incarnation(learner, claim.incarnation, core.accounting.incarnation_of(learner))
        self._require_followed(claim)
        if overlap is not None:
            self.state.method.with_own_overlap(overlap)
        if difference := layout.first_difference(self.state.model.layout, "on the learner", "in the run"):
            raise LayoutError(f"learner {learner!r} does not hold the run's model: {difference}.")
        validation.check_held(learner, held, self.state.experts.trunk, len(self.state.versions))
        incarnation, actions = core.joined(
            self._clock.now_s(), learner, process=claim.process, after=claim.incarnation, ready=ready,
            overlap=overlap, tokens_per_step=tokens_per_step, held=held, dealt=dealt,
        )  # fmt: skip
        self._observer.joined(learner, incarnation, core.step, self.state.experts.held_by(core.members[learner]))
        self._writes.record(partial(done, incarnation))
        self._executor.execute(actions)

    @event
    def deal(self, learner: str, size: int) -> tuple[int, ...]:
        """The groups of experts of a learner that is to hold so many, also before the run has a model. Durable once
        the learner has joined with them.

        Raises:
            PayloadError: no learner of the run can hold so many. DrainedError: the run has no place for this one.
        """
        validation.check_name(learner)
        validation.check_deal(learner, size, self.state.dealing.num_groups)
        now_s = self._clock.now_s()
        if not self.state.is_initialised:
            return self.state.dealing.ask(now_s, learner, size, {})
        dealt, actions = self.core.deal(now_s, learner, size)
        self._executor.execute(actions)
        return dealt

    def _require_followed(self, claim: Claim) -> None:
        """Check that the learner can follow this syncer. This check precedes all others: an older copy of the state
        does not know which incarnations are out.

        Raises:
            LineageError, UnknownRunError: as `protocol.lineage.refusal`.
        """
        if (error := refusal(claim.seen, self.lineage)) is not None:
            raise error

    def _require_member(self, claim: Claim) -> None:
        """Check that the learner can follow this syncer, is a member, and has versions that are part of the run.

        Raises:
            LineageError, UnknownRunError: as `protocol.lineage.refusal`. StaleIncarnationError: its incarnation is no
                member, or a version is not part of the run any more. PayloadError: more versions than fragments.
        """
        self._require_followed(claim)
        if not self.state.is_initialised:  # another syncer has let it in
            raise StaleIncarnationError(
                f"incarnation {claim.incarnation} of learner {claim.learner!r} is not part of the run, which has no "
                "model yet; join again for a new one."
            )
        self.core.check(claim.learner, claim.incarnation, claim.process)
        validation.check_versions(claim.learner, claim.versions, len(self.state.versions))
        if claim.seen is None or (gone := lost(self.state.epochs, claim.seen.epoch, claim.versions)) is None:
            return
        fragment, version = gone
        raise StaleIncarnationError(
            f"the run went back to version {version} of fragment {fragment} after epoch {claim.seen.epoch}, and "
            f"version {claim.versions[fragment]} is not part of it any more; join again to continue from the "
            "newest one."
        )

    @event
    def heartbeat(self, claim: Claim, report: Report) -> Standing:
        """A heartbeat; returns the learner's standing.

        Arguments:
            claim: if it follows another syncer, the learner does not count as finished or blocked: this syncer may lack
                some of its contributions.

        Raises:
            StaleIncarnationError, LineageError, UnknownRunError: as `connected`. PayloadError: its numbers are
                implausible.
        """
        self._require_member(claim)
        core, learner = self.core, claim.learner
        tokens_per_step = core.members[learner].tokens_per_step
        validation.check_report(learner, report, len(self.state.versions), core.step, tokens_per_step)
        validation.check_forward(learner, report.steps, self._status.steps_of(learner, claim.incarnation))
        if claim.seen != self.lineage:
            report = replace(report, finished=False, blocked_with=())
        actions = core.heartbeat(self._clock.now_s(), learner, claim.incarnation, report)
        self._status.heard(claim, report.steps)
        self._executor.execute(actions)
        return self._executor.standing(learner, self.num_live)

    @event
    def leave(self, claim: Claim, report: Report, done: Callable[[], None]) -> None:
        """A learner leaves. `done`: called once that is durable.

        Arguments:
            claim: with incarnation 0, all incarnations known to its process were evicted, and only its tokens are
                counted.
            report: `step` is the one at which it ends, unless the syncer knows of a later one.

        Raises:
            StaleIncarnationError: the incarnation is no member, or the process is not the newest of its name.
                PayloadError: its numbers are implausible. LineageError, UnknownRunError: it has followed a later state.
        """
        core, now_s, learner, step = self.core, self._clock.now_s(), claim.learner, report.step
        self._require_followed(claim)
        if claim.incarnation:
            core.check(learner, claim.incarnation, claim.process)
        member = core.members.get(learner)
        validation.check_goodbye(learner, report, core.step, None if member is None else member.tokens_per_step)
        if claim.incarnation:
            actions = core.left(
                now_s, learner, claim.incarnation, step=step, tokens=report.tokens, earlier_tokens=report.earlier_tokens
            )
        else:
            actions = core.left_late(now_s, learner, process=claim.process, step=step, tokens=report.all_tokens)
        if member is not None:
            self._observer.left(learner, member.incarnation, report.tokens)
            self._executor.end(learner, member.incarnation)
        self._writes.record(done)
        self._executor.execute(actions)

    @event
    def lease(self, claim: Claim, ask: Ask, done: Callable[[Grant], None]) -> None:
        """A learner asks for units of the run's data. `done`: called with them once their lease is durable; of groups,
        it is number 0 if too few are free, and the request is to be repeated.

        Raises:
            StaleIncarnationError: the incarnation is no member. ConfigError: it has other data than the run.
            PayloadError: the request is implausible. LineageError, UnknownRunError: it has followed a later state.
        """
        self._require_member(claim)
        validation.check_ask(claim.learner, ask)
        now_s, tokens_before = self._clock.now_s(), self.state.initial_tokens
        grant, actions = self.core.lease(now_s, claim.learner, claim.incarnation, ask, tokens_before=tokens_before)
        if grant.number:
            self._writes.record(partial(done, grant))
        self._executor.execute(actions)
        if not grant.number:
            done(grant)

    @event
    def work(self, work: Work, done: Callable[[Assigned], None]) -> None:
        """A message of a worker of reinforcement learning, or of a trainer about its groups. `done`: called with the
        answer; once the scores are durable, if there are any.

        Raises:
            NotInitialisedError: there is no model yet. PayloadError: it is implausible. StaleIncarnationError,
            ConfigError: as `SyncerCore.work`.
        """
        core = self.core
        validation.check_work(work)
        assigned, actions = core.work(self._clock.now_s(), work)
        if work.scores:
            self._writes.after_record(partial(done, assigned))
        self._executor.execute(actions)
        if not work.scores:
            done(assigned)

    @event
    def made(
        self, worker: str, process: int, made: Sequence[Made], data: Sequence[bytes],
        done: Callable[[Sequence[Score]], None],
    ) -> None:  # fmt: skip
        """Groups were received. `done`: called once they are durable, with those that are not accepted.

        Arguments:
            data: the bytes of each.

        Raises:
            NotInitialisedError: there is no model yet. PayloadError: the call is implausible.
            StaleIncarnationError, NoRoomError: as `SyncerCore.made`.
        """
        core, refused, actions = self.core, list[Score](), list[Action]()
        for each in made:
            validation.check_made(worker, each)
        for each, its_bytes in zip(made, data, strict=True):
            try:
                is_new, actions = core.made(self._clock.now_s(), worker, process, each)
            except PayloadError as error:
                refused.append(Score(each.number, reason=str(error)[:MAX_REASON]))
                continue
            if is_new:
                self._writes.pack(its_bytes)
        if len(refused) == len(made):
            done(refused)
            return
        self._writes.after_record(partial(done, refused))
        self._executor.execute(actions)

    @event
    def connected(self, claim: Claim, connection: ConnectionPort) -> None:
        """A learner has opened a connection. Its standing is sent at once, and whenever it changes. Learners that wait
        for others before they start are sent theirs too.

        Raises:
            StaleIncarnationError: the incarnation is no member, or a version is not part of the run any more.
            LineageError, UnknownRunError: as `protocol.lineage.refusal`. PayloadError: more versions than fragments.
        """
        self._require_member(claim)
        self._connections.opened(claim.learner, claim.incarnation, connection)
        connection.standing(self._executor.standing(claim.learner, self.num_live))
        members = self.core.members.values()
        self._executor.tell([it.learner for it in members if it.learner != claim.learner and it.tokens == 0])

    @event
    def disconnected(self, claim: Claim, connection: ConnectionPort) -> None:
        """The connection broke."""
        if self._connections.broke(claim.learner, claim.incarnation, connection):
            now_s = self._clock.now_s()
            self._executor.execute(self.core.disconnected(now_s, claim.learner, claim.incarnation))

    # --- contributions ------------------------------------------------------------------------------------------------

    @event
    def begin_push(
        self, contribution: Contribution, num_bytes: int, *, boot: int, span: Span | None = None, process: int = 0
    ) -> Upload[S]:
        """Begin the upload of a contribution with a payload of this size: check it, and make room.

        Arguments:
            boot: of the driver that it is addressed to.
            span: the part of the payload that is uploaded; None: all of it. The contribution is complete once all its
                parts are.
            process: as in `Claim`.

        Raises:
            RestartedError: it is addressed to another driver; this one may lack contributions acknowledged there.
            StaleIncarnationError: the incarnation is no member. PayloadError: its numbers are implausible, or its
                learner does not hold the fragment.
            LayoutError: no such fragment or tensor. CorruptPayloadError: not the size that its fragment and codec need.
            NoRoomError: there is no room now; repeat the push. BusyError: an earlier connection still uploads the
                same.
        """
        c = contribution
        if boot != self.boot:
            raise RestartedError(
                "the syncer was restarted; contributions without a verdict are sent again, the oldest first."
            )
        self.core.check(c.learner, c.incarnation, process, fragment=c.fragment)
        validation.check_contribution(c, self.core.step, self.core.members[c.learner].tokens_per_step)
        self.state.model.held(c.fragment)
        fragment = self.state.model.layout.fragments[c.fragment]
        sizes = [
            self._ports.jobs.contribution_bytes(index, each.numel)
            for index, each in enumerate(self.state.model.layout.fragments)
        ]
        validation.check_size(c, num_bytes, sizes[c.fragment], len(fragment.tensors))
        is_here, model_bytes = c in self._checked_parts or self.core.accounting.is_known(c), sum(sizes)
        try:
            return self._uploads.begin(c, num_bytes, span, model_bytes, is_here=is_here)
        except BusyError:
            raise
        except NoRoomError as error:
            self._sent_back(c, error)
            raise

    @event
    def cut_push(self, push: Upload[S], no_room: NoRoomError | None = None, *, received: int = 0) -> None:
        """The upload was cut off.

        Arguments:
            no_room: the error, if there was no room for the payload.
            received: how many first bytes of `push.room` were received. They are kept for the next upload of the same
                contribution (`Upload.received`), while the incarnation is a member and the room is not needed.
        """
        c = push.contribution
        self._uploads.cut(push, self._clock.now_s(), received=received, is_wanted=self._is_wanted(c))
        if no_room is not None:
            self._sent_back(c, no_room)

    def _is_wanted(self, c: Contribution) -> bool:
        """Whether a contribution that is not complete may still be uploaded."""
        member = self.core.members.get(c.learner)
        return member is not None and member.incarnation == c.incarnation and not self.core.accounting.is_known(c)

    def _sent_back(self, c: Contribution, no_room: NoRoomError) -> None:
        now_s = self._clock.now_s()
        if now_s - self._no_room[0] >= RETRY_EXPECTED_S:
            self._observer.waits_for_room(no_room)
        self._no_room = now_s, str(no_room)
        self._uploads.make_room()
        self._observer.sent_back(c)

    @event
    def complete_push(self, push: Upload[S], done: Callable[[DilocoError | None], None]) -> None:
        """All bytes of an upload were received. `done`: called with None once the contribution is accepted, rejected
        (its learner's standing has the verdict when that is durable) or recognised as a duplicate; otherwise with the
        error, and the round is unchanged:

            NonFiniteError, CorruptPayloadError: unusable content. StaleIncarnationError: its incarnation was evicted
                meanwhile.
            VersionError, ConfigError: as `SyncerCore.contributed`.
        """
        if not self._uploads.completed(push):
            done(None)
            return
        if push.span is not None:
            self._checked_parts.add(push.contribution)
        index = push.contribution.fragment
        num_elements = 0 if push.contribution.is_empty else self.state.model.layout.fragments[index].numel
        check = partial(self._ports.jobs.check, push.slot, index, num_elements)
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
        self._executor.decided(actions[:1])
        match actions[0]:
            case Acknowledge(duplicate=False):
                self._uploads.taken(push)
                self.state.experts.contributed(push.contribution)
                self._observer.contributed(push.contribution, push.num_bytes)
            case Reject() as reject:
                self._uploads.release(push.slot)
                self._observer.rejected(reject)
            case _:
                self._uploads.release(push.slot)
        self._executor.execute(actions[1:])
        done(None)

    # --- an operator --------------------------------------------------------------------------------------------------

    @event
    def steer(self, order: Order, by: str, done: Callable[[str], None]) -> None:
        """An operator's order. `done`: called with its effect, in a sentence, once that is durable.

        Arguments:
            by: the operator's name.

        Raises:
            NotInitialisedError: there is no model yet. ConfigError: the order cannot be executed. PayloadError: it is
                malformed.
        """
        validation.check_order(order, by)
        now_s = self._clock.now_s()
        said, actions = self.core.steer(now_s, order, by)
        self._observer.steered(order, by, said)
        self._writes.record(partial(done, said))
        self._executor.execute(actions)

    # --- time ---------------------------------------------------------------------------------------------------------

    @event
    def tick(self, late_s: float = 0.0) -> None:
        """Time has passed: called at the time given to `ClockPort.wake_at`, and now and then.

        Arguments:
            late_s: how much later than planned this is called; large if the whole process was suspended.
        """
        self._executor.wake_at_s = math.inf
        if not self.state.is_initialised:
            return
        core = self.core
        if late_s > SUSPENDED_AFTER_S:  # suspended, or starved: messages of that time are not processed yet
            self._observer.was_suspended(late_s)
            core.was_suspended(late_s)
        self._uploads.tick(self._clock.now_s())
        self._executor.execute(core.tick(self._clock.now_s()))
        self._observer.state_changed(core)

    # --- the end ------------------------------------------------------------------------------------------------------

    @event
    def stop(self) -> None:
        """Close no more rounds. Work under way continues until `is_busy` is false."""
        self._executor.stop()

    @event
    def end(self) -> None:
        """End all connections; learners connect to the driver that serves the run next."""
        self._connections.end_all()
