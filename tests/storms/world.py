"""One storm: the real driver, sessions and learner state machines over a simulated network, disk and clock.

All of it is one loop over a queue of events.
"""

from __future__ import annotations

import errno
import heapq
import math
from collections.abc import Callable, Sequence

from tests.run.memory import LaterWorker
from tests.storms.draws import Draws
from tests.storms.invariants import BrokenInvariantError, Ledger, check_learner, check_syncer, require
from tests.storms.learners import LearnerProcess
from tests.storms.plans import Fault, Plan
from torch import Tensor

from diloco.core.held import HeldFragment
from diloco.core.rounds import AllLive
from diloco.exchange.virtual.client import SimulatedDriver
from diloco.exchange.virtual.replicas import Replicas
from diloco.run.driver import Driver
from diloco.run.memory import POINTS, MemorySpool, MemoryStore
from diloco.run.ports import InitialModel, Json, MergedRound, NullObserver, Observer, Ports, RunMethod
from diloco.run.tensor_jobs import TensorJobs

PATIENCE_S = 120.0
"""Bound of what may take time after the last fault: a learner's next step, and the end of a round that has enough
contributions."""

DURATIONS_S = {"check": (0.0, 0.03), "close": (0.0, 0.3), "write": (0.0, 0.1), "written": (0.0, 0.03)}
"""Of the syncer's jobs and writes."""

RUN = "storm"


class ProcessKilled(BaseException):
    """Ends the syncer's process where it stands."""


class Storm:
    """A plan as it happens, with some of its faults.

    Attributes:
        now_s: virtual time.
        driver: of the syncer's process; None: it is not there.
        ledger: what is durable.
        num_events: that have happened.
    """

    def __init__(self, plan: Plan, faults: Sequence[Fault] | None = None) -> None:
        self.plan = plan
        self.faults = tuple(plan.faults if faults is None else faults)
        self.draws = Draws(plan.seed)
        self.now_s = 0.0
        self.num_events = 0
        self.ledger = Ledger()
        self.driver: SimulatedDriver | None = None
        self.replicas = Replicas(plan.method)
        self.jobs = TensorJobs(plan.method, seconds=None, in_place=True)
        self.boot = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0
        self._look_s = 0.0
        self._is_stranded = False
        self._still: dict[object, tuple[object, float]] = {}
        """What stands still: the learner or fragment, the step or version that it is at, and since when."""
        self._calm_s = max((fault.at_s + fault.seconds for fault in self.faults), default=0.0) + max(plan.starts_s)
        self._tears_at: int | None = None
        self._refuses_until_s = -math.inf
        self._store = _RecordingStore(self.ledger, self._at_point)
        self.learners = [LearnerProcess(self, index) for index in range(len(plan.step_s))]
        for learner, at_s in zip(self.learners, plan.starts_s, strict=True):
            self.at(at_s, learner.start)
        for fault in self.faults:
            self.at(fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        self._start_syncer()

    # --- time ---------------------------------------------------------------------------------------------------------

    def at(self, at_s: float, event: Callable[[], None]) -> None:
        """Let something happen at a time."""
        self._num_planned += 1
        heapq.heappush(self._events, (max(at_s, self.now_s), self._num_planned, event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Let something happen after a while."""
        self.at(self.now_s + seconds, event)

    def run(self) -> None:
        """Until every learner has finished and left; raises AssertionError where something does not hold."""
        while not self._is_over:
            require(bool(self._events), "nothing will ever happen again")
            self.now_s, _, event = heapq.heappop(self._events)
            self.num_events += 1
            try:
                event()
            except ProcessKilled:
                self._kill_syncer(1.0)
            self._check()
            if self.now_s >= self._look_s:
                self._look_s = self.now_s + 1.0
                self._check_progress()

    @property
    def _is_over(self) -> bool:
        """When the others have finished, those that are left may be too few to begin, or to end a scheduled round where
        the syncer did not hear of the others' end."""
        left = [learner for learner in self.learners if not learner.has_finished]
        are_too_few = len(left) < self.plan.method.quorum.at_least
        return not left or self._is_stranded or (are_too_few and all(learner.waits_for_others for learner in left))

    @property
    def _lacks_a_goodbye(self) -> bool:
        """Whether a learner has finished while the syncer was away, and fewer than `at_least` are left or known to have
        ended."""
        if self.driver is None or not isinstance(self.plan.method.quorum, AllLive):
            return False
        ended = self.driver.core.ended(0)
        num_known = sum(not learner.has_finished or learner.name in ended for learner in self.learners)
        return num_known < self.plan.method.quorum.at_least

    def _standstill(self) -> str:
        rounds = "no syncer" if self.driver is None else str(self.driver.status()["fragments"])
        return "; ".join([*(learner.told() for learner in self.learners), rounds])

    def _check(self) -> None:
        if self.driver is not None and self.driver.state.is_initialised:
            check_syncer(self.driver.core)
            for fragment, version in enumerate(self.driver.state.versions):
                self.ledger.published(fragment, version)
        for learner in self.learners:
            if learner.core is not None:
                check_learner(learner.name, learner.core)

    def _check_progress(self) -> None:
        """Learners go on, and rounds that have enough contributions end."""
        for learner in self.learners:
            core = learner.core
            self._moves(learner.name, None if learner.has_finished else (id(core), core.step if core else 0))
        if self.driver is None or not self.driver.state.is_initialised:
            return
        rounds, at_least = self.driver.core.rounds, self.plan.method.quorum.at_least
        for fragment, version in enumerate(self.driver.state.versions):
            self._moves(fragment, version if len(rounds.roster(fragment)[0]) >= at_least else None)

    def _moves(self, what: object, at: object) -> None:
        """`at`: where it is; None: it need not go on."""
        before, since_s = self._still.get(what, (None, 0.0))
        if at is None or at != before:
            self._still[what] = at, self.now_s
        elif self.now_s - max(since_s, self._calm_s) > PATIENCE_S:
            if self._lacks_a_goodbye:
                self._is_stranded = True
                return
            raise BrokenInvariantError(f"{what} does not go on: {self._standstill()}")

    # --- the syncer's process -----------------------------------------------------------------------------------------

    @property
    def has_model(self) -> bool:
        """Whether the run's model is durable."""
        return self._store.load() is not None

    def _start_syncer(self) -> None:
        self.boot += 1
        boot = self.boot

        def later(what: str, fragment: int | None, do: Callable[[], None]) -> None:
            low, high = DURATIONS_S[what]
            self.after(self.draws.between(f"{what} {fragment}", low, high), lambda: do() if self.boot == boot else None)

        saved = self._store.load()
        if saved is not None:
            self.ledger.restored(saved)
        observer: Observer = NullObserver()
        clock = StormClock(self, lambda: self.driver.tick() if self.driver is not None and self.boot == boot else None)
        ports = Ports(clock, MemorySpool(), self.jobs, self._store, LaterWorker(later), observer)
        self.driver = Driver(RUN, self.plan.method, ports, boot=boot, saved=saved)

    def _kill_syncer(self, back_s: float) -> None:
        if self.driver is None:
            return
        self.driver = None
        self.boot += 1
        for learner in self.learners:
            for process in learner.processes:
                process.wire.syncer_died()
        self.after(back_s, self._start_syncer)

    def _at_point(self, point: str) -> None:
        """The disk is at one of its steps."""
        if self._tears_at is not None and point == POINTS[self._tears_at]:
            self._tears_at = None
            raise ProcessKilled
        if self.now_s < self._refuses_until_s:
            raise OSError(errno.ENOSPC, f"no space left at {point!r}")

    # --- faults -------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        learner = self.learners[fault.learner]
        match fault.kind:
            case "kill syncer":
                self._kill_syncer(fault.seconds)
            case "tear write":
                self._tears_at = fault.choice
            case "refuse writes":
                self._refuses_until_s = self.now_s + fault.seconds
            case "kill learner":
                learner.kill()
                self.after(fault.seconds, lambda: learner.come_back(fault.choice))
            case "same name":
                learner.replace()
            case "cut":
                learner.wire_do(lambda wire: wire.cut())
            case "half open":
                learner.wire_do(lambda wire: wire.go_silent())
            case "freeze":
                learner.freeze(fault.seconds)


class StormClock:
    """A clock of the storm (`run.ports.ClockPort`)."""

    def __init__(self, storm: Storm, ring: Callable[[], None]) -> None:
        self._storm, self._ring = storm, ring
        self._at_s = math.inf

    def now_s(self) -> float:
        """Virtual time."""
        return self._storm.now_s

    def wake_at(self, at_s: float) -> None:
        """Ring then; an earlier call is void."""
        if at_s == self._at_s:
            return
        self._at_s = at_s
        if at_s < math.inf:
            self._storm.at(at_s, lambda: self._happen(at_s))

    def _happen(self, at_s: float) -> None:
        if at_s == self._at_s:
            self._at_s = math.inf
            self._ring()


class _RecordingStore(MemoryStore[HeldFragment, Tensor]):
    """Tells the ledger what is durable, also where the process dies at that very step."""

    def __init__(self, ledger: Ledger, at: Callable[[str], None]) -> None:
        super().__init__(at)
        self._ledger = ledger

    def initialise(self, run: str, method: RunMethod, model: InitialModel[HeldFragment]) -> None:
        before = self._saved
        try:
            super().initialise(run, method, model)
        finally:
            if self._saved is not before:
                self._ledger.initial(model.fragments)

    def publish(self, merged: MergedRound[HeldFragment, Tensor], record: Json) -> None:
        before = self._saved
        try:
            super().publish(merged, record)
        finally:
            if self._saved is not before:
                self._ledger.durable(merged)
