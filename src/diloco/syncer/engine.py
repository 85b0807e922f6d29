"""One run behind the service: what learners and viewers may ask, one call at a time.

A round's life: `contribute` (a call's thread) → tensor work and disk (`merger`) → everybody's queue of notices (`hands`). What is
visible is durable. All decisions are `SyncerCore`'s (`state`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from diloco import events
from diloco.core.fragments import Layout
from diloco.core.held import HeldFragment
from diloco.core.members import Deadlines
from diloco.core.method import Method
from diloco.core.rounds import Accept, Action, Reject
from diloco.core.update import Contribution
from diloco.errors import (
    AlreadyInitialisedError,
    LayoutError,
    NoRoomError,
    StaleIncarnationError,
    UnknownRunError,
)
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.syncer.hands import Hands
from diloco.syncer.held import HeldModel, Pulled
from diloco.syncer.journal import Journal
from diloco.syncer.merger import Merger
from diloco.syncer.metrics import SyncerMetrics
from diloco.syncer.notices import Notices, Watches
from diloco.syncer.spool import Slot, Spool
from diloco.syncer.state import RunState
from diloco.syncer.status import Status
from diloco.syncer.store import Store
from diloco.syncer.ticker import Ticker
from diloco.watching import only_watching

STOOD_STILL_S = 1.0
"""A tick that comes later than this says that the whole process stood still."""


class Engine:
    """One run.

    Arguments:
        run: its id.
        method: its method; a stored run must have the same.
        store: where it lives.
        spool: where contributions wait.
        deadlines: when a silent learner is given up.
        events_log: the syncer's events.
        metrics: what Prometheus reads.
    """

    def __init__(
        self, run: str, method: Method, store: Store, spool: Spool, *, deadlines: Deadlines, events_log: events.EventLog,
        metrics: SyncerMetrics,
    ) -> None:  # fmt: skip
        self.method = method
        self._state = RunState(run, method, deadlines)
        self._lock = self._state.lock
        self._store = store
        self._spool = spool
        self._journal = only_watching(Journal(events_log, metrics))
        self._watches = Watches()
        self._status = Status(self._state)
        self._processes: dict[str, int] = {}  # the newest of each learner, since this syncer started
        self._ticker = Ticker(self._tick)
        self._merger = Merger(self._state, store, spool, self._journal, carry_out=self._carry_out)
        self._hands = Hands(
            spool, self._watches, self._journal, merge=self._merger.merge, wake_at=self._ticker.wake_at,
            roster_changed=lambda: self._merger.submit(self._merger.save_roster),
        )  # fmt: skip
        if (saved := store.load()) is not None:
            self._state.restore(saved, store)
        self._journal.set_aside(store.tidy(saved))
        self._ticker.start()

    # --- what everybody may ask -------------------------------------------------------------------------------------------

    def require_run(self, run: str) -> None:
        """Raises UnknownRunError for any other run than this one."""
        if run != self._state.run:
            raise UnknownRunError(
                f"this syncer serves run {self._state.run!r}, not {run!r}; check the run's name and the address."
            )

    @property
    def initialised(self) -> bool:
        return self._state.is_initialised

    @property
    def model(self) -> HeldModel:
        """Raises NotInitialisedError: there is no model yet."""
        return self._state.model

    def position(self) -> tuple[int, int]:
        """The highest inner step known, and the tokens trained by the run."""
        with self._lock:
            if not self.initialised:
                return 0, 0
            core = self._state.core
            return core.step, core.books.run_tokens + self._state.initial_tokens

    def versions(self) -> list[int]:
        """Of each fragment; empty before there is a model."""
        with self._lock:
            return [fragment.version for fragment in self._state.core.fragments] if self.initialised else []

    def sync_every(self, learner: str) -> int:
        """Inner steps between two pushes of a learner, where they differ by learner; 0: the method's."""
        with self._lock:
            return self._state.core.sync_every_of(learner) if self.method.dynamic_steps else 0

    def num_live(self) -> int:
        """Learners that hold the model and listen, or train, and have not finished."""
        with self._lock:
            members = list(self._state.core.members.values()) if self.initialised else []
            trains, finished = {m.learner for m in members if m.ready}, {m.learner for m in members if m.finished}
            return len((trains | self._watches.learners) - finished)

    def pull(self, fragment: int, base: int) -> Pulled:
        """The update that follows version `base`, or the newest whole fragment where that is not kept.

        Raises:
            LayoutError: no such fragment. NotInitialisedError: there is no model yet.
        """
        with self._lock:
            return self.model.pull(fragment, base)

    def status(self) -> dict[str, Any]:
        """Plain values for `diloco status`."""
        with self._lock:
            return self._status.as_dict(num_spooled_bytes=self._spool.held_bytes, waits_for=self._journal.waits_for)

    # --- membership -------------------------------------------------------------------------------------------------------

    def initialise(
        self, layout: Layout, thetas: Sequence[Tensor], static: bytes, *, learner: str, source: str, step: int, tokens: int
    ) -> None:  # fmt: skip
        """Give the run its model, once.

        Raises:
            AlreadyInitialisedError: it has one, which stays as it is.
            LayoutError: the method cannot train it; nothing is written.
            StoreError: it could not be made durable; the run stays without a model.
        """
        state = self._state
        with state.durable:
            if self.initialised:
                raise AlreadyInitialisedError(
                    f"run {state.run!r} has a model already and keeps it; join it without --initialise."
                )
            core = state.beginning(layout, step=step)  # what cannot be trained is refused before anything is written
            fragments = [HeldFragment.first(self.method, f, theta) for f, theta in enumerate(thetas)]
            self._store.initialise(
                state.run, self.method.to_dict(), layout.to_dict(), fragments, static, source,
                state={"step": step, "initial_tokens": tokens, "round_steps": core.round_steps, "clock": core.clock},
            )  # fmt: skip
            num = len(fragments)
            model = HeldModel(self.method, layout, static, fragments, [()] * num, [{} for _ in range(num)])
            with self._lock:
                state.begin(core, model, tokens=tokens)
        self._journal.initialised(learner, source, layout, step, tokens, len(static))

    def join(self, learner: str, layout: Layout, *, process: int = 0, again: bool = False) -> int:
        """A new incarnation of `learner`, durably; returns its number.

        Arguments:
            process: whose it is. again: after an incarnation of the same process was given up.

        Raises:
            NotInitialisedError: there is no model yet. LayoutError: it holds another model.
            StaleIncarnationError: it joins again, but a newer process has its place.
        """
        if difference := layout.first_difference(self.model.layout):
            raise LayoutError(f"learner {learner!r} (here) does not hold the run's model (there): {difference}.")
        with self._lock:
            if again and self._processes.get(learner, process) != process:
                raise StaleIncarnationError(
                    f"another process has joined run {self._state.run!r} as {learner!r}; give every learner its own name."
                )
            self._processes[learner] = process
            incarnation, actions = self._state.core.joined(time.monotonic(), learner)
            self._journal.joined(learner, incarnation, self._state.core.step)
            self._hands.carry_out(actions)
        self._merger.save_roster()
        return incarnation

    def check(self, learner: str, incarnation: int) -> None:
        """Raises StaleIncarnationError unless this incarnation is part of the run."""
        with self._lock:
            self._state.core.check(learner, incarnation)

    def heartbeat(
        self, learner: str, incarnation: int, *, step: int, tokens: int, step_s: float | None, waiting: bool,
        finished: bool = False, versions: tuple[int, ...] = (),
    ) -> int:  # fmt: skip
        """A sign of life; `versions`: the newest that it has. Returns the inner step that it starts from if it has not trained yet."""
        with self._lock:
            core = self._state.core
            actions = core.heartbeat(
                time.monotonic(), learner, incarnation, step=step, tokens=tokens, step_s=step_s, waiting=waiting, finished=finished
            )  # fmt: skip
            self._status.heard(learner, incarnation, versions)
            self._hands.carry_out(actions)
            return core.start_step(learner)

    def leave(self, learner: str, incarnation: int, tokens: int) -> None:
        """Goodbye."""
        with self._lock:
            self._hands.carry_out(self._state.core.left(time.monotonic(), learner, incarnation, tokens=tokens))
            self._journal.left(learner, incarnation, tokens)
            self._watches.close(learner, incarnation)
        self._merger.submit(self._merger.save_roster)

    def watch(self, learner: str, incarnation: int) -> Notices:
        """The queue of notices for a learner; None ends it. Opening it again (after a lost connection) starts a new one."""
        with self._lock:
            core = self._state.core
            core.check(learner, incarnation)
            notices = self._watches.open(learner, incarnation)
            step = core.start_step(learner)
            notices.put(pb.Notice(welcome=pb.Welcome(step=step, awaited=step < core.step, boot=self._state.boot)))
            for index, fragment in enumerate(core.fragments):  # a call may have been missed
                round_ = fragment.rounds.get(fragment.version)
                if round_ is not None and round_.called and fragment.phase == "open" and learner not in round_.fresh:
                    notices.put(pb.Notice(called=pb.Called(fragment=index, version=fragment.version)))
            return notices

    def disconnected(self, learner: str, incarnation: int, notices: Notices) -> None:
        """The connection that `notices` fed broke."""
        with self._lock:
            if self._watches.lost(learner, incarnation, notices):
                self._hands.carry_out(self._state.core.disconnected(time.monotonic(), learner, incarnation))

    # --- contributions ----------------------------------------------------------------------------------------------------

    def allocate(self, fragment: int, num_bytes: int) -> Slot:
        """Room for a contribution.

        Raises:
            LayoutError: no such fragment. CorruptPayloadError: not the size that its fragment and codec need.
            NoRoomError: the disk is full; what is waiting stays, and the learner comes again with this one.
        """
        self.model.require_size(fragment, num_bytes)
        try:
            return self._spool.allocate(num_bytes)
        except NoRoomError as error:
            self._journal.has_no_room(error)
            raise

    def release(self, slot: Slot) -> None:
        """The contribution never became complete."""
        self._spool.release(slot)

    def contribute(self, contribution: Contribution, slot: Slot) -> str | None:
        """Take a contribution; returns None when it is accepted, else why it will not be merged.

        Raises:
            NonFiniteError, CorruptPayloadError, LayoutError: content that cannot be used; the round is as before.
            StaleIncarnationError: from an incarnation that is out.
        """
        is_kept = False
        try:
            self.method.up.check(slot.tensor, self.model.fragment(contribution.fragment).theta.numel())
            self.model.require_tensors(contribution.fragment, contribution.tensors)
            with self._lock:
                first, *others = self._state.core.contributed(time.monotonic(), contribution)
                if isinstance(first, Accept) and not first.duplicate:
                    is_kept = True
                    self._hands.keep(contribution, slot)
                    self._journal.contributed(contribution, slot.num_bytes, self._status.contributed(contribution))
                if isinstance(first, Reject):
                    self._journal.rejected(first)
                self._hands.carry_out(others)
        finally:
            if not is_kept:
                self._spool.release(slot)
        return first.reason if isinstance(first, Reject) else None

    def _carry_out(self, actions: Iterable[Action]) -> None:
        self._hands.carry_out(actions)

    # --- time -------------------------------------------------------------------------------------------------------------

    def _tick(self, late_s: float) -> None:
        with self._lock:
            if not self.initialised:
                return
            core = self._state.core
            if late_s > STOOD_STILL_S:  # suspended, or starved: what learners said meanwhile has not been heard yet
                self._journal.stood_still(late_s)
                for member in core.members.values():
                    member.seen_at += late_s
                    member.progressed_at += late_s
                    if member.broken_at is not None:
                        member.broken_at += late_s
            self._hands.carry_out(core.tick(time.monotonic()))
            self._journal.stands(core)

    # --- the end ----------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait for tensor work that has been started, without accepting more."""
        self._merger.drain()

    def stop(self) -> None:
        """End the threads; learners see their streams end and reconnect to whoever serves the run next."""
        self._ticker.stop()
        self._merger.stop()
        with self._lock:
            self._watches.close_all()

    def raise_failure(self) -> None:
        """Raise what the worker or the ticker failed with, if one did: without them no round is merged and no learner given up."""
        failure = self._merger.failure or self._ticker.failure
        if failure is not None:
            raise failure
