"""The syncer's state and its hands: `SyncerCore` under a lock, tensor work and disk on one worker thread, notices to learners.

A round's life: `contribute` (gRPC thread) → Merge and Store (worker) → Publish (everybody's queue). What is visible is durable.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diloco import events
from diloco.core.fragments import Layout, digest
from diloco.core.merge import encoded_of
from diloco.core.method import Method
from diloco.core.syncer import (
    Accept,
    Action,
    Call,
    Deadlines,
    Evict,
    Member,
    Merge,
    Publish,
    Reject,
    Store,
    SyncerCore,
    WakeAt,
)
from diloco.core.update import Closed, Contribution, Update, close_round, update_of
from diloco.errors import (
    AlreadyInitialisedError,
    CorruptPayloadError,
    LayoutError,
    NotInitialisedError,
    PayloadError,
    StaleIncarnationError,
    StoreError,
    UnknownRunError,
)
from diloco.exchange.wire.syncer_pb2 import Called, Evicted, Notice, Published, Rejected, Welcome
from diloco.syncer.metrics import LearnerSample, SyncerMetrics
from diloco.syncer.spool import Slot, Spool
from diloco.syncer.store import RosterRow, Saved
from diloco.syncer.store import Store as DurableStore

log = logging.getLogger("diloco.syncer")

KEPT_UPDATES = 2
"""Encoded updates of a fragment kept in memory: a learner with an overlap of a whole interval may be one behind."""

RETRY_S = 2.0
"""Between two tries to store a version on a disk that refuses."""


@dataclass
class Held:
    """One fragment's tensors, and the newest updates as they go over the wire (oldest first)."""

    theta: Tensor
    outer_state: Mapping[str, Tensor]
    residual: Tensor | None
    digest: str
    updates: deque[tuple[Update, Tensor]]


@dataclass(frozen=True)
class Pulled:
    """What a learner fetches: an update as encoded, or a whole fragment, with the outer state where that is on the learners.

    `merged_round`: the newest round of its contributions that is in this version or an earlier one; −1: none is.
    """

    update: Update
    payload: Tensor
    merged_round: int
    outer_state: Mapping[str, Tensor] | None = None


class Engine:
    """One run.

    Arguments:
        run: its id.
        method: its method; a stored run must have the same.
        store: where it lives.
        spool: where contributions wait.
        log: the syncer's events.
        metrics: what Prometheus reads.
    """

    def __init__(
        self,
        run: str,
        method: Method,
        store: DurableStore,
        spool: Spool,
        *,
        deadlines: Deadlines,
        events_log: events.EventLog,
        metrics: SyncerMetrics,
    ) -> None:
        self.run = run
        self.method = method
        self.deadlines = deadlines
        self.layout: Layout | None = None
        self.static = b""
        self._store = store
        self._spool = spool
        self._events = events_log
        self._metrics = metrics
        self._lock = threading.RLock()
        self._core: SyncerCore | None = None
        self._held: list[Held] = []
        self._initial_tokens = 0
        self._slots: dict[Contribution, Slot] = {}
        self._watchers: dict[tuple[str, int], queue.SimpleQueue[Notice | None]] = {}
        self._last_contributors: dict[int, tuple[str, ...]] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="syncer-merge")
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._failure: BaseException | None = None
        saved = store.load()
        if saved is not None:
            self._restore(saved)
        self._ticker = threading.Thread(target=self._tick_forever, name="syncer-tick", daemon=True)
        self._ticker.start()

    # --- what the service asks --------------------------------------------------------------------------------------------

    def require_run(self, run: str) -> None:
        """Raises UnknownRunError for any other run than this one."""
        if run != self.run:
            raise UnknownRunError(
                f"this syncer serves run {self.run!r}, not {run!r}; check the run's name and the address."
            )

    @property
    def initialised(self) -> bool:
        return self._core is not None

    @property
    def core(self) -> SyncerCore:
        """The state machine.

        Raises:
            NotInitialisedError: there is no model yet.
        """
        if self._core is None:
            raise NotInitialisedError(f"run {self.run!r} has no model yet; start one learner with --initialise.")
        return self._core

    def position(self) -> tuple[int, int]:
        """The highest inner step known, and the tokens trained by the run."""
        with self._lock:
            return (0, 0) if self._core is None else (self._core.step, self._core.run_tokens + self._initial_tokens)

    def num_live(self) -> int:
        """Learners that hold the model and listen."""
        with self._lock:
            return len(self._watchers)

    def versions(self) -> list[int]:
        """Of each fragment; empty before there is a model."""
        with self._lock:
            return [] if self._core is None else [fragment.version for fragment in self._core.fragments]

    def initialise(
        self,
        layout: Layout,
        thetas: Sequence[Tensor],
        static: bytes,
        *,
        learner: str,
        source: str,
        step: int,
        tokens: int,
    ) -> None:
        """Give the run its model, once.

        Raises:
            AlreadyInitialisedError: it has one, which stays as it is.
            StoreError: it could not be made durable; the run stays without a model.
        """
        with self._lock:
            if self._core is not None:
                raise AlreadyInitialisedError(
                    f"run {self.run!r} has a model already and keeps it; join it without --initialise."
                )
            states = {f: self.method.outer.init(theta.numel()) for f, theta in enumerate(thetas)}
            state = {"step": step, "initial_tokens": tokens, "round_steps": [0] * len(thetas), "clock": float(step),
                     "merged_rounds": {}}  # fmt: skip
            self._store.initialise(
                self.run,
                self.method.to_dict(),
                layout.to_dict(),
                dict(enumerate(thetas)),
                states,
                static,
                source,
                state=state,
            )
            self._held = [
                Held(theta, states[f], None, digest(theta), deque(maxlen=KEPT_UPDATES))
                for f, theta in enumerate(thetas)
            ]
            self.layout, self.static, self._initial_tokens = layout, static, tokens
            self._core = SyncerCore(
                self.method, [0] * len(thetas), deadlines=self.deadlines, step=step, clock=float(step)
            )
            self._events.append(
                events.Initialised(
                    learner=learner,
                    source=source,
                    layout_digest=layout.digest(),
                    num_parameters=layout.num_parameters,
                    step=step,
                    tokens=tokens,
                    num_bytes=4 * sum(theta.numel() for theta in thetas) + len(static),
                )
            )

    def join(self, learner: str, layout: Layout) -> int:
        """A new incarnation of `learner`; returns its number.

        Raises:
            NotInitialisedError: there is no model yet. LayoutError: it holds another model.
        """
        with self._lock:
            core = self.core
            assert self.layout is not None
            if difference := layout.first_difference(self.layout):
                raise LayoutError(f"learner {learner!r} (here) does not hold the run's model (there): {difference}.")
            incarnation, actions = core.joined(time.monotonic(), learner)
            self._events.append(events.Joined(learner=learner, incarnation=incarnation, step=core.step))
            self._metrics.joined(learner)
            self._carry_out(actions)
            self._save_roster()
            return incarnation

    def check(self, learner: str, incarnation: int) -> None:
        """Raises StaleIncarnationError unless this incarnation is part of the run."""
        with self._lock:
            self.core.check(learner, incarnation)

    def heartbeat(
        self, learner: str, incarnation: int, *, step: int, tokens: int, step_s: float | None, waiting: bool
    ) -> None:
        """A sign of life."""
        with self._lock:
            now = time.monotonic()
            self._carry_out(
                self.core.heartbeat(now, learner, incarnation, step=step, tokens=tokens, step_s=step_s, waiting=waiting)
            )

    def leave(self, learner: str, incarnation: int, tokens: int) -> None:
        """Goodbye."""
        with self._lock:
            self._carry_out(self.core.left(time.monotonic(), learner, incarnation, tokens=tokens))
            self._events.append(events.Left(learner=learner, incarnation=incarnation, tokens=tokens))
            self._close_watch(learner, incarnation)
            self._save_roster()

    def allocate(self, fragment: int, num_bytes: int) -> Slot:
        """Room for a contribution of exactly the size its fragment and codec need.

        Raises:
            LayoutError: no such fragment. CorruptPayloadError: another size.
        """
        if not 0 <= fragment < len(self._held):
            raise LayoutError(
                f"the run has fragments 0 to {len(self._held) - 1}, not {fragment}; use the run's layout."
            )
        expected = self.method.up.encoded_bytes(self._held[fragment].theta.numel())
        if num_bytes != expected:
            raise CorruptPayloadError(
                f"a contribution to fragment {fragment} has {expected} bytes as {self.method.up.name}, not {num_bytes}; "
                "encode it with the run's codec."
            )
        return self._spool.allocate(num_bytes)

    def release(self, slot: Slot) -> None:
        """The contribution never became complete."""
        self._spool.release(slot)

    def contribute(self, contribution: Contribution, slot: Slot) -> str | None:
        """Take a contribution; returns None when it is accepted, else why it will not be merged.

        Raises:
            NonFiniteError, CorruptPayloadError: content that cannot be used; the round is as before.
            StaleIncarnationError: from an incarnation that is out.
        """
        try:
            self.method.up.check(slot.tensor, self._held[contribution.fragment].theta.numel())
        except PayloadError:
            self._spool.release(slot)
            raise
        with self._lock:
            try:
                actions = self.core.contributed(time.monotonic(), contribution)
            except StaleIncarnationError:  # given up while it was sending
                self._spool.release(slot)
                raise
            first = actions[0]
            if isinstance(first, Accept) and not first.duplicate:
                self._slots[contribution] = slot
                self._metrics.contributed(contribution.learner, staleness=contribution.round - contribution.base)
                self._events.append(
                    events.Contributed(
                        learner=contribution.learner,
                        fragment=contribution.fragment,
                        round=contribution.round,
                        base=contribution.base,
                        tokens=contribution.tokens,
                        steps=contribution.steps,
                        num_bytes=slot.num_bytes,
                    )
                )
            else:
                self._spool.release(slot)
            if isinstance(first, Reject):
                self._log_reject(first)
                self._carry_out(actions[1:])
                return first.reason
            self._carry_out(actions[1:])
            return None

    def pull(self, fragment: int, base: int, *, learner: str = "", incarnation: int = 0) -> Pulled:
        """The update that follows version `base`, as encoded; the newest whole fragment, losslessly, where that is not kept.

        Raises:
            LayoutError: no such fragment. NotInitialisedError: there is no model yet.
        """
        with self._lock:
            core = self.core
            if not 0 <= fragment < len(self._held):
                raise LayoutError(
                    f"the run has fragments 0 to {len(self._held) - 1}, not {fragment}; use the run's layout."
                )
            held, version = self._held[fragment], core.fragments[fragment].version
            merged_round = core.merged_round(learner, incarnation, fragment)
            for update, payload in held.updates:
                if update.base == base and update.version <= version:
                    return Pulled(update, payload, merged_round)
            contributors = self._last_contributors.get(fragment, ())  # known after a restart too
            whole = Update(fragment, version - 1, version, contributors, (), 1.0, held.digest, lossless=True)
            state = held.outer_state if self.method.outer_at == "learners" else None
            return Pulled(whole, held.theta, merged_round, state)

    def sync_every(self, learner: str) -> int:
        """Inner steps to this learner's next push, where learners push."""
        with self._lock:
            return 0 if self._core is None else self._core.sync_every_of(learner)

    def watch(self, learner: str, incarnation: int) -> queue.SimpleQueue[Notice | None]:
        """The queue of notices for a learner; None ends it. Opening it again (after a lost connection) starts a new one."""
        with self._lock:
            self.core.check(learner, incarnation)
            self._close_watch(learner, incarnation)
            notices: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
            self._watchers[learner, incarnation] = notices
            notices.put(Notice(welcome=Welcome(step=self.core.step)))
            return notices

    def disconnected(self, learner: str, incarnation: int, notices: queue.SimpleQueue[Notice | None]) -> None:
        """The connection that `notices` fed broke."""
        with self._lock:
            if self._core is not None and self._watchers.get((learner, incarnation)) is notices:
                del self._watchers[learner, incarnation]
                self._carry_out(self._core.disconnected(time.monotonic(), learner, incarnation))

    def is_replaced(self, learner: str, incarnation: int) -> bool:
        """Whether a newer incarnation has taken this one's place."""
        with self._lock:
            return self._core is not None and self._core.is_replaced(learner, incarnation)

    def status(self) -> dict[str, Any]:
        """Plain values for `diloco status`."""
        with self._lock:
            step, tokens = self.position()
            base: dict[str, Any] = {
                "run": self.run,
                "method": self.method.to_dict(),
                "initialised": self.initialised,
                "step": step,
                "tokens": tokens,
                "initial_tokens": self._initial_tokens,
                "spooled_bytes": self._spool.held_bytes,
            }
            if self._core is None:
                return {**base, "learners": {}, "fragments": []}
            status = {**self._core.status(time.monotonic()), **base}
            for index, fragment in enumerate(status["fragments"]):
                fragment["last_contributors"] = list(self._last_contributors.get(index, ()))
            return status

    def drain(self) -> None:
        """Wait for tensor work that has been started, without accepting more."""
        self._worker.submit(lambda: None).result()

    def stop(self) -> None:
        """End the threads; learners see their streams end and reconnect to whoever serves the run next."""
        self._stopping.set()
        self._wake.set()
        self._ticker.join()
        self._worker.shutdown(wait=True)
        with self._lock:
            for notices in self._watchers.values():
                notices.put(None)
            self._watchers.clear()

    def raise_failure(self) -> None:
        """Raise what the worker failed with, if it did."""
        if self._failure is not None:
            raise self._failure

    # --- carrying out -----------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: Iterable[Action]) -> None:
        """Under the lock."""
        for action in actions:
            match action:
                case Merge():
                    slots = [self._slots.pop(c) for c in action.contributions]
                    self._worker.submit(self._merge, action, slots).add_done_callback(self._note_failure)
                case Publish():
                    notice = Notice(published=Published(fragment=action.fragment, version=action.version))
                    for notices in self._watchers.values():
                        notices.put(notice)
                case Call():
                    called = Notice(called=Called(fragment=action.fragment, version=action.version))
                    for (learner, _), notices in self._watchers.items():
                        if learner in action.learners:
                            notices.put(called)
                case Reject():
                    self._log_reject(action)
                    c = action.contribution
                    if (slot := self._slots.pop(c, None)) is not None:
                        self._spool.release(slot)
                    if (queue_ := self._watchers.get((c.learner, c.incarnation))) is not None:
                        queue_.put(Notice(rejected=Rejected(fragment=c.fragment, round=c.round, reason=action.reason)))
                case Evict():
                    self._evict(action)
                case WakeAt():
                    self._wake.set()
                case Accept() | Store():
                    pass

    def _evict(self, action: Evict) -> None:
        log.warning("evicted %s (incarnation %d): %s", action.learner, action.incarnation, action.reason)
        self._metrics.evicted(action.learner)
        self._events.append(
            events.Evicted(learner=action.learner, incarnation=action.incarnation, reason=action.reason)
        )
        notices = self._watchers.get((action.learner, action.incarnation))
        if notices is not None:
            notices.put(Notice(evicted=Evicted(reason=action.reason, replaced=action.replaced)))
            self._close_watch(action.learner, action.incarnation)
        self._save_roster()

    def _close_watch(self, learner: str, incarnation: int) -> None:
        notices = self._watchers.pop((learner, incarnation), None)
        if notices is not None:
            notices.put(None)

    def _merge(self, action: Merge, slots: Sequence[Slot]) -> None:
        """On the worker: tensor work, then disk, then visibility."""
        f = action.fragment
        held = self._held[f]
        started = time.monotonic()
        assert self.layout is not None
        places = self.layout.fragments[f].tensors
        encoded = encoded_of(action.contributions, action.weights, [slot.tensor for slot in slots], action.round)
        try:
            closed = close_round(
                self.method, held.theta, held.outer_state, held.residual, encoded, places, action.scale
            )
            update = update_of(self.method, f, action.round, encoded, closed, action.scale, digest(closed.theta))
        except PayloadError as error:
            with self._lock:
                self._carry_out(self.core.abandoned(time.monotonic(), f, "not finite"))
            log.error("round %d of fragment %d was abandoned: %s", action.round, f, error)
            return
        finally:
            encoded.clear()
            for slot in slots:
                self._spool.release(slot)
        merge_s = time.monotonic() - started
        with self._lock:
            self._carry_out(self.core.merged(f, closed.refused))
            members = self.core.fragments[f].rounds[action.round].members
        self._events.append(
            events.Merged(
                fragment=f,
                round=action.round,
                version=update.version,
                contributors=update.contributors,
                weights=update.weights,
                tokens=tuple(
                    sum(c.tokens for c in action.contributions if c.learner == each) for each in update.contributors
                ),
                steps=tuple(
                    sum(c.steps for c in action.contributions if c.learner == each) for each in update.contributors
                ),
                members=tuple(sorted(members)),
                scale=action.scale,
                merge_s=merge_s,
            )
        )
        started = time.monotonic()
        if not self._store_until_done(update, closed, sum(c.tokens for c in action.contributions)):
            return
        self._publish(update, closed, merge_s, time.monotonic() - started)

    def _store_until_done(self, update: Update, closed: Closed, tokens: int) -> bool:
        """Durable before visible. A disk that refuses is tried again until it has room or the syncer stops."""
        warned = False
        while True:
            with self._lock:
                ledgers, roster, state = deepcopy(self.core.ledgers), self._roster(), self._state()
            try:
                self._store.publish(update, closed, tokens=tokens, ledgers=ledgers, roster=roster, state=state)
                return True
            except StoreError as error:
                if not warned:
                    log.error(
                        "version %d of fragment %d waits for the disk: %s", update.version, update.fragment, error
                    )
                    warned = True
            if self._stopping.wait(RETRY_S):
                return False

    def _publish(self, update: Update, closed: Closed, merge_s: float, persist_s: float) -> None:
        f = update.fragment
        with self._lock:
            held = self._held[f]
            held.theta, held.outer_state, held.residual = closed.theta, closed.outer_state, closed.residual
            held.digest = update.digest
            held.updates.append((update, closed.payload))
            self._last_contributors[f] = update.contributors
            self._carry_out(self.core.stored(time.monotonic(), f))
            live = len(self.core.members)
        self._events.append(
            events.Published(
                fragment=f,
                version=update.version,
                digest=update.digest,
                num_bytes=closed.payload.numel(),
                persist_s=persist_s,
            )
        )
        self._metrics.merged(f, contributors=len(update.contributors), live=live, seconds=merge_s)
        self._metrics.persisted(persist_s)
        self._metrics.published(f, update.version)

    def _note_failure(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            log.critical("the merge thread failed", exc_info=error)
            self._failure = error

    def _log_reject(self, action: Reject) -> None:
        c = action.contribution
        log.warning(
            "rejected %s's contribution to round %d of fragment %d: %s", c.learner, c.round, c.fragment, action.reason
        )
        self._events.append(
            events.Rejected(
                learner=c.learner,
                fragment=c.fragment,
                reason=action.reason,
                round=c.round,
                base=c.base,
                tokens=c.tokens,
            )
        )
        self._metrics.rejected(c.learner, action.reason)

    def _tick_forever(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(0.2)
            self._wake.clear()
            with self._lock:
                if self._core is not None:
                    self._carry_out(self._core.tick(time.monotonic()))
                    self._metrics.set_ledgers(self._core.ledgers)
                    members = self._core.members.values()
                    self._metrics.set_learners([LearnerSample(m.learner, m.step, m.step_s, m.healthy) for m in members])
            self._stopping.wait(0.05)

    # --- durable state ----------------------------------------------------------------------------------------------------

    def _restore(self, saved: Saved) -> None:
        if saved.run != self.run:
            raise UnknownRunError(
                f"{self._store.path} holds run {saved.run!r}, not {self.run!r}; use another state directory."
            )
        if difference := self.method.difference(Method.from_dict(saved.method)):
            raise AlreadyInitialisedError(
                f"run {self.run!r} was started with another method ({difference}); start a new run to change it."
            )
        self.layout, self.static = Layout.from_dict(saved.layout), saved.static
        fragments = [saved.fragments[f] for f in range(len(self.layout.fragments))]
        self._held = [Held(f.theta, f.outer_state, f.residual, f.digest, deque(maxlen=KEPT_UPDATES)) for f in fragments]
        self._initial_tokens = int(saved.state["initial_tokens"])
        self._last_contributors = {it.fragment: it.contributors for it in self._store.history()}
        now = time.monotonic()
        roster = [
            Member(row.learner, row.incarnation, row.step, now, now, connected=False, ready=True, tokens=row.tokens)
            for row in saved.roster
            if row.alive
        ]
        self._core = SyncerCore(
            self.method,
            [f.version for f in fragments],
            deadlines=self.deadlines,
            roster=roster,
            incarnations={row.learner: row.incarnation for row in saved.roster},
            ledgers=saved.ledgers,
            step=int(saved.state["step"]),
            round_steps=saved.state["round_steps"],
            clock=saved.state["clock"],
            merged_rounds={
                learner: [(incarnation, round_) for incarnation, round_ in rounds]
                for learner, rounds in saved.state["merged_rounds"].items()
            },
        )

    def _state(self) -> dict[str, Any]:
        core = self.core
        return {"step": core.step, "initial_tokens": self._initial_tokens, "round_steps": core.round_steps, "clock": core.clock,
                "merged_rounds": core.durable_merged_rounds()}  # fmt: skip

    def _roster(self) -> list[RosterRow]:
        core = self.core
        rows = []
        for learner, incarnation in core.incarnations.items():
            member = core.members.get(learner)
            rows.append(
                RosterRow(
                    learner,
                    incarnation,
                    member.step if member else 0,
                    member.tokens if member else 0,
                    alive=member is not None,
                )
            )
        return rows

    def _save_roster(self) -> None:
        """Who is here must survive a crash, or the first to come back would merge alone."""
        try:
            self._store.save_roster(self._roster(), self.core.durable_ledgers())
        except StoreError as error:
            log.error("the roster could not be stored: %s", error)
