"""One storm: the real driver, sessions and learner state machines over a simulated network, disk and clock.

All of it is one loop over a queue of events.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

from tests.chaos.versions import BrokenInvariantError, require
from tests.run.memory import LaterWorker, LimitedSpool
from tests.storms.accounts import Accounts
from tests.storms.counts import Counts
from tests.storms.draws import Draws
from tests.storms.drivers import RecordingStore, RecordingWorker, StormDriver, StormJobs
from tests.storms.invariants import Ledger, check_learner
from tests.storms.journals import StormJournal
from tests.storms.learners import LearnerProcess, Process
from tests.storms.plans import Fault, Plan
from tests.storms.progress import LOOK_S, Progress
from tests.storms.units import UnitLedger, check_leases
from tests.storms.wire import STALL_S
from torch import Tensor

from diloco.core.global_fragment import AppliedUpdate, GlobalFragment
from diloco.core.quorum import AllLive
from diloco.errors import DigestError
from diloco.exchange.virtual.syncer import OneSyncer, Replicas, SimulatedDriver, SyncerProcess
from diloco.protocol.accounting import Key
from diloco.protocol.contribution import OUTLIER
from diloco.run.global_model import FragmentAnswer
from diloco.run.memory import POINTS, MemoryStore
from diloco.run.ports import NullObserver, Ports, SavedRun
from diloco.run.tensor_jobs import TensorJobs

END_S = 60.0
"""By then all is over after the last learner has left: what it left behind has its deadlines behind it."""

MOST_AT_ONCE = 1000
"""Events without time between them."""

DURATIONS_S = {"check": (0.0, 0.03), "close": (0.0, 0.3), "write": (0.0, 0.1), "written": (0.0, 0.03)}
"""Of the syncer's jobs and writes."""

RUN = "storm"


class StormReplicas(Replicas):
    """No storm damages a byte: what an update leads to has the published bits. A learner would fetch it whole."""

    def fetched(self, held: GlobalFragment | None, fetched: FragmentAnswer[GlobalFragment, Tensor]) -> AppliedUpdate:
        try:
            return super().fetched(held, fetched)
        except DigestError as error:
            raise BrokenInvariantError(f"an update leads to other bits than were published ({error})") from error


class ProcessKilled(BaseException):
    """Ends the syncer's process where it stands."""


class Storm:
    """A plan as it happens, with some of its faults.

    Arguments:
        journal: keeps all events of the syncer; None: they are not kept.

    Attributes:
        now_s: virtual time.
        driver: of the syncer's process; None: it is not there.
        impostor: of a syncer on an older copy of the state, while there is one.
        began_s: when that process began.
        quiet_s: when the last fault was over.
        calm_s: when the last one of all will be.
        ledger: what is durable.
        accounts: where the tokens are.
        progress: what goes on.
        counts: that all tokens are counted.
        num_events: that have happened.
        num_finished: learners that have taken all their steps.
        struck: faults that have happened, by kind.
    """

    num_addresses = 1
    """Of syncers."""

    ledger_type, accounts_type, store_type = Ledger, Accounts, RecordingStore

    def __init__(self, plan: Plan, faults: Sequence[Fault] | None = None, journal: StormJournal | None = None) -> None:
        self.plan = plan
        self.faults = tuple(plan.faults if faults is None else faults)
        self.draws = Draws(plan.seed)
        self.journal = journal
        self.now_s = 0.0
        self.num_events = 0
        self.struck: Counter[str] = Counter()
        self.ledger = self.ledger_type()
        self.accounts = self.accounts_type(self.ledger)
        self.driver: StormDriver | None = None
        self.impostor: Impostor | None = None
        self.replicas = StormReplicas(plan.method, plan.layout)
        self.jobs = StormJobs(plan.method, self.accounts)
        self.boot = self.num_finished = 0
        self.began_s = self.quiet_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0
        self._look_s = 0.0
        self._num_at_once = 0
        self._is_driver_touched = False
        self._touched: dict[LearnerProcess, None] = {}
        self.progress, self.counts = Progress(self), Counts(self)
        ends_s = (*(fault.at_s + fault.seconds for fault in self.faults), plan.room_at_s)
        self.calm_s = max(ends_s) + max(plan.starts_s)
        self._tears_at: int | None = None
        self._refuses_until_s = -math.inf
        self._store = self.store_type(self.ledger, UnitLedger(len(plan.sizes)), self._at_point)
        self._spool = LimitedSpool()
        self.learners = [LearnerProcess(self, index) for index in range(len(plan.step_s))]
        for learner, at_s in zip(self.learners, plan.starts_s, strict=True):
            self.at(at_s, learner.start)
        for fault in self.faults:
            self.at(fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        self.at(plan.room_at_s, self._make_room)
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
            self._happen()
        if all(learner.has_finished for learner in self.learners):
            self._wind_up()

    def _happen(self) -> None:
        """The next event."""
        before_s = self.now_s
        self.now_s, _, event = heapq.heappop(self._events)
        self.num_events += 1
        self._num_at_once = self._num_at_once + 1 if self.now_s == before_s else 0
        if self._num_at_once >= MOST_AT_ONCE:
            raise BrokenInvariantError(f"something happens again and again: {self.standstill()}")
        try:
            event()
        except ProcessKilled:
            self._kill_syncer(1.0)
        self._check()
        if self.now_s >= self._look_s:
            self._look_s = self.now_s + LOOK_S
            self.progress.look()
            self.counts.look()

    def _wind_up(self) -> None:
        """What learners have left behind ends too."""
        end_s = max(self.now_s, self.calm_s) + END_S
        while self._events and self._events[0][0] <= end_s:
            self._happen()
        assert self.driver is not None
        there = {learner.name for learner in self.learners if any(each.is_alive for each in learner.processes)}
        gone = self.driver.core.members.keys() - there
        require(not gone, f"{gone} are members to the end")
        if self.driver.core.is_settled:
            for process in [each for learner in self.learners for each in learner.processes]:
                process.check_end(self.driver.state.versions)
        num_bytes = sum(
            self.jobs.contribution_bytes(c.fragment, self.plan.sizes[c.fragment])
            for c in self.accounts.open.values()
            if not c.is_empty
        )
        require(
            self._spool.held_bytes == num_bytes,
            f"the spool holds {self._spool.held_bytes} bytes, and {num_bytes} are of open contributions",
        )

    @property
    def _is_over(self) -> bool:
        """When the others have finished, those that are left may be too few to begin, or to end a scheduled round where
        the syncer did not hear of the others' end."""
        if self.num_finished == 0:  # there are `at_least` learners
            return self.progress.is_stranded
        left = [learner for learner in self.learners if not learner.has_finished]
        is_stuck = len(left) < self.plan.method.quorum.at_least and all(learner.waits_for_others for learner in left)
        return not left or self.progress.is_stranded or is_stuck

    @property
    def lacks_a_goodbye(self) -> bool:
        """Whether a learner has finished while the syncer was away, and fewer than `at_least` are left or known to have
        ended."""
        if self.driver is None or not isinstance(self.plan.method.quorum, AllLive):
            return False
        ended = self.driver.core.ended(0)
        num_known = sum(not learner.has_finished or learner.name in ended for learner in self.learners)
        return num_known < self.plan.method.quorum.at_least

    def standstill(self) -> str:
        """For the message of a failure."""
        rounds = "no syncer" if self.driver is None else str(self.driver.status()["fragments"])
        return "; ".join([*(learner.told() for learner in self.learners), rounds])

    def touched(self, learner: LearnerProcess | None = None) -> None:
        """Something happens at a learner; None: at the syncer."""
        if learner is None:
            self._is_driver_touched = True
        else:
            self._touched[learner] = None

    def _check(self) -> None:
        """What the event has changed is as it must be."""
        is_touched, self._is_driver_touched = self._is_driver_touched, False
        if is_touched:
            self._check_syncer()
        for learner in self._touched:
            if learner.core is not None:
                check_learner(learner.name, learner.core)
                learner.process.check_line()
                self.accounts.check_learner(learner.name, learner.process.incarnation, learner.core)
        self._touched.clear()

    def _check_syncer(self) -> None:
        if self.driver is not None and self.driver.state.is_initialised:
            self.accounts.take_events(self.now_s)
            self.accounts.check(self.driver.core)
            check_leases(self.driver.core.leases)
            for fragment, version in enumerate(self.driver.state.versions):
                self.ledger.published(fragment, version)

    # --- the syncer's process -----------------------------------------------------------------------------------------

    @property
    def may_publish(self) -> bool:
        """Whether versions that are merged may be published."""
        return True

    @property
    def has_model(self) -> bool:
        """Whether the run's model is durable."""
        return self._store.is_initialised

    def _start_syncer(self) -> None:
        self.boot += 1
        boot = self.boot

        def later(what: str, fragment: int | None, do: Callable[[], None]) -> None:
            low, high = DURATIONS_S[what]
            self.after(self.draws.between(f"{what} {fragment}", low, high), lambda: at_syncer(do))

        def at_syncer(do: Callable[[], None]) -> None:
            if self.driver is not None and self.boot == boot:
                self.touched()
                do()

        def recorded_with(fragment: int | None) -> dict[Key, str | None]:
            assert self.driver is not None
            self.accounts.take_events(self.now_s)
            if fragment is None:
                return self.accounts.recorded_with((), ())
            core = self.driver.core
            closing = core.fragments[fragment].closing
            assert closing is not None
            refused = [(c, OUTLIER) for c in closing.refused]
            return self.accounts.recorded_with(closing.contributions, [*refused, *core.rounds.left_out(fragment)])

        saved = self._store.load()
        if saved is not None:
            saved = self._store.begin(saved)
            self.ledger.restored(saved)
        self.accounts.restarted(self.ledger.verdicts)
        worker = RecordingWorker(self._store, later, recorded_with)
        clock = StormClock(self, lambda: at_syncer(self.driver.tick) if self.driver is not None else None)
        is_small = self.plan.spool_fits is not None and self.now_s < self.plan.room_at_s
        room_bytes = (self.plan.spool_fits or 0) * max(
            itertools.starmap(self.jobs.contribution_bytes, enumerate(self.plan.sizes))
        )
        self._spool = LimitedSpool(room_bytes if is_small else None)
        ports = Ports(clock, self._spool, self.jobs, self._store, worker, self.accounts)
        if self.journal is not None:
            ports = self.journal.recorded(ports)
        self.began_s = self.quiet_s = max(self.now_s, self.quiet_s)
        self.driver = StormDriver(RUN, self.plan.method, ports, boot=boot, saved=saved)
        self.driver.ledger, self.driver.accounts = self.ledger, self.accounts
        self.touched()

    def began(self, process: Process) -> None:
        """A learner's process begins to train as a new incarnation."""

    def door(self, address: int) -> SyncerProcess | None:
        """What answers at a syncer's address; None: nothing does."""
        driver = self.driver if self.impostor is None else self.impostor.driver
        return None if driver is None else OneSyncer(driver)

    def boot_at(self, address: int) -> int:
        """Names the process that answers there."""
        return self.boot

    def reaches(self, learner: int, address: int) -> bool:
        """Whether a learner can connect to the syncer there."""
        return self.door(address) is not None

    def heard(self, learner: str, address: int) -> None:
        """Something of a learner has arrived at a syncer."""
        self.progress.heard_s[learner] = self.now_s

    def _start_impostor(self, choice: int) -> None:
        """On a copy of the state that is so old that every learner has followed the epoch that it will begin, or a
        later one; if there is none, no syncer is there."""
        alive = [each for learner in self.learners for each in learner.processes if each.is_alive]
        seen = [0 if each.client.core.seen is None else each.client.core.seen.epoch for each in alive]
        copies = [saved for saved in self._store.copies if saved.epochs[-1].number < min(seen, default=0)]
        if not copies:
            return
        self.boot += 1
        self.impostor = Impostor(self, copies[choice * (len(copies) - 1) // 2], self.boot)

    def _end_impostor(self) -> None:
        if self.impostor is None:
            return
        self.impostor.check()
        self.impostor = None
        self._hang_up()

    def _make_room(self) -> None:
        self._spool.budget_bytes = None
        self.quiet_s = max(self.quiet_s, self.now_s)

    def _kill_syncer(self, back_s: float) -> None:
        if self.driver is None:
            return
        self.driver = None
        if self.journal is not None:
            self.journal.killed(self.draws.unit("journal"))
        self.quiet_s = max(self.quiet_s, self.now_s + back_s)
        self._hang_up()
        self.after(back_s, self._start_syncer)

    def _hang_up(self) -> None:
        self.boot += 1
        for learner in self.learners:
            for process in learner.processes:
                process.wire.syncer_died(0)

    def _at_point(self, point: str) -> None:
        """The disk is at one of its steps."""
        if self._tears_at is not None and point == POINTS[self._tears_at]:
            self._tears_at = None
            raise ProcessKilled
        if self.now_s < self._refuses_until_s:
            raise OSError(errno.ENOSPC, f"no space left at {point!r}")

    # --- faults -------------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self.struck[fault.kind] += 1
        learner = self.learners[fault.learner]
        stall_s = STALL_S if fault.kind == "half open" else 0.0
        self.quiet_s = max(self.quiet_s, self.now_s + fault.seconds + stall_s)
        match fault.kind:
            case "kill syncer":
                self._kill_syncer(fault.seconds)
            case "older copy" if self.driver is not None:
                self.at(self.now_s + fault.seconds, self._end_impostor)
                self._kill_syncer(fault.seconds)
                self._start_impostor(fault.choice)
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


class Impostor:
    """A syncer that was started on an older copy of the run's state, under learners that have followed a later one.

    Attributes:
        driver: its.
        epoch: that it has begun.
    """

    def __init__(self, storm: Storm, saved: SavedRun[GlobalFragment], boot: int) -> None:
        self._storm, self._boot = storm, boot
        store = MemoryStore[GlobalFragment, Tensor](saved=saved)
        jobs = TensorJobs(storm.plan.method, seconds=None, in_place=True)
        clock = StormClock(storm, lambda: self._if_there(self.driver.tick))
        ports = Ports(clock, LimitedSpool(), jobs, store, LaterWorker(self._later), NullObserver())
        begun = store.begin(store.load() or saved)
        self.epoch = begun.epochs[-1].number
        self._versions = tuple(held.version for held in saved.fragments)
        self.driver = SimulatedDriver(RUN, storm.plan.method, ports, boot=boot, saved=begun)
        self._incarnations = self._newest()

    def _later(self, what: str, fragment: int | None, do: Callable[[], None]) -> None:
        self._storm.after(DURATIONS_S[what][1], lambda: self._if_there(do))

    def _if_there(self, do: Callable[[], None]) -> None:
        if self._storm.impostor is self:
            do()

    def _newest(self) -> dict[str, int]:
        accounts = self.driver.core.accounting.accounts
        return {learner: account.incarnation for learner, account in accounts.items()}

    def check(self) -> None:
        """No learner has joined it, or given it anything."""
        core = self.driver.core
        newest = self._newest()
        require(newest == self._incarnations, f"an older copy of the state has had {self._incarnations}, now {newest}")
        require(not core.accounting.open, f"an older copy of the state has {[*core.accounting.open]}")
        now = self.driver.state.versions
        require(now == self._versions, f"an older copy of the state went from versions {self._versions} to {now}")


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
