"""One storm: the real driver, sessions and learner state machines over a simulated network, store and clock.

All of it is one loop over a queue of events.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence

from tests.chaos.versions import BrokenInvariantError, require
from tests.run.memory import LaterWorker, LimitedSpool
from tests.storms.accounts import Accounts
from tests.storms.counts import Counts
from tests.storms.draws import Draws
from tests.storms.drivers import StormDriver
from tests.storms.groups import GroupBook, GroupProgress, GroupWorker, check_groups
from tests.storms.invariants import Ledger, check_dealt, check_learner
from tests.storms.journals import StormJournal
from tests.storms.learners import LearnerProcess, Process
from tests.storms.nodes import DURATIONS_S, RUN, TIMEOUT_S, Node, NodeDoor, ProcessKilled
from tests.storms.places import Snapshot, StormPlace
from tests.storms.plans import STORE_FAULTS, WORKER_FAULTS, Fault, Plan
from tests.storms.progress import LOOK_S, Progress
from tests.storms.units import check_held, check_leases
from tests.storms.wire import STALL_S
from torch import Tensor

from diloco.core.global_fragment import AppliedUpdate, GlobalFragment
from diloco.core.quorum import AllLive
from diloco.errors import DigestError, DilocoError, StoreError
from diloco.exchange.virtual.syncer import Replicas, SimulatedDriver, SyncerProcess
from diloco.protocol.publishing import Standing
from diloco.run.global_model import FragmentAnswer
from diloco.run.memory import MemoryStore
from diloco.run.ports import NullObserver, Ports
from diloco.run.tensor_jobs import TensorJobs

END_S = 60.0
"""By then all is over after the last learner has left: what it left behind has its deadlines behind it."""

MOST_AT_ONCE = 1000
"""Events without time between them."""

SETTLES_S = 25.0
"""After the last fault, and a lease, a syncer serves the run: requests are answered or given up, and tried again."""


class StormReplicas(Replicas):
    """No storm damages a byte: what an update leads to has the published bits. A learner would fetch it whole."""

    def fetched(self, held: GlobalFragment | None, fetched: FragmentAnswer[GlobalFragment, Tensor]) -> AppliedUpdate:
        try:
            return super().fetched(held, fetched)
        except DigestError as error:
            raise BrokenInvariantError(f"an update leads to other bits than were published ({error})") from error


class Storm:
    """A plan as it happens, with some of its faults.

    Arguments:
        journal: keeps all events of the syncer; None: they are not kept.

    Attributes:
        now_s: virtual time.
        place: what is durable.
        nodes: the syncers.
        impostor: of a syncer on an older copy of the state, while there is one.
        quiet_s: when the last fault was over.
        calm_s: when the last one of all will be.
        ledger: what is durable.
        accounts: where the tokens are, as the driver that serves the run has it, or the last one.
        all_accounts: of the last drivers.
        workers: of reinforcement learning.
        group_book: what is durable of groups.
        progress: what goes on.
        counts: that all tokens are counted.
        num_events: that have happened.
        num_finished: learners that have taken all their steps.
        struck: faults that have happened, by kind.
        stood: standings of syncers, as often as they had them.
        torn: the syncer whose process has just ended within a request.
        refuses_until_s, away_until_s, late_until_s, loses_until_s: what the store does to requests.
    """

    num_addresses = 1
    """Of syncers."""

    ledger_type, accounts_type = Ledger, Accounts

    def __init__(self, plan: Plan, faults: Sequence[Fault] | None = None, journal: StormJournal | None = None) -> None:
        self.plan = plan
        self.faults = tuple(plan.faults if faults is None else faults)
        self.draws = Draws(plan.seed)
        self.journal = journal
        self.now_s = 0.0
        self.num_events = 0
        self.struck: Counter[str] = Counter()
        self.ledger = self.ledger_type()
        self.all_accounts: list[Accounts] = []
        self.accounts = self.accounts_type(self.ledger, self.all_accounts, len(plan.sizes))
        self.impostor: Impostor | None = None
        self.replicas = StormReplicas(plan.method, plan.layout)
        self.jobs = TensorJobs(plan.method, seconds=None)
        self.boot = self.num_finished = 0
        self.quiet_s = 0.0
        self.stood = Counter[Standing]()
        self.torn: Node | None = None
        self.refuses_until_s = self.away_until_s = self.late_until_s = self.loses_until_s = -math.inf
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0
        self._look_s = 0.0
        self._num_at_once = 0
        self._is_driver_touched = False
        self._touched: dict[LearnerProcess, None] = {}
        self.progress, self.counts = Progress(self), Counts(self)
        ends_s = (*(fault.at_s + fault.seconds for fault in self.faults), plan.room_at_s)
        self.calm_s = max(ends_s) + max(plan.starts_s) + (TIMEOUT_S[1] if self.faults else 0.0)
        if plan.lease_s < math.inf:
            self.calm_s += plan.lease_s + SETTLES_S
        self._serves_s = 0.0
        self._cut_until_s: dict[tuple[int, int], float] = {}
        self.group_book = GroupBook(plan.rules, len(plan.sizes))
        self.place = StormPlace(self)
        self.nodes = [Node(self, address) for address in range(self.num_addresses)]
        self.learners = [LearnerProcess(self, index) for index in range(len(plan.step_s))]
        for learner, at_s in zip(self.learners, plan.starts_s, strict=True):
            self.at(at_s, learner.start)
        self.workers = [GroupWorker(self, index, each) for index, each in enumerate(plan.workers)]
        self.group_progress = GroupProgress(self, self.workers)
        for fault in self.faults:
            self.at(fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        self.at(plan.room_at_s, self._make_room)
        self._start()

    def _start(self) -> None:
        self.nodes[0].start()

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
            assert self.torn is not None
            self._kill(self.torn, 1.0)
        self._check()
        if self.now_s >= self._look_s:
            self._look_s = self.now_s + LOOK_S
            self._look_at_syncers()
            self.progress.look()
            self.counts.look()
            self.group_progress.look()

    def _wind_up(self) -> None:
        """What learners have left behind ends too."""
        end_s = max(self.now_s, self.calm_s) + END_S
        while self._events and self._events[0][0] <= end_s:
            self._happen()
        require(self.may_publish, "no syncer serves the run in the end")
        assert self.driver is not None
        there = {learner.name for learner in self.learners if any(each.is_alive for each in learner.processes)}
        gone = self.driver.core.members.keys() - there
        require(not gone, f"{gone} are members to the end")
        self.place.check_deleted()
        if self.driver.core.is_settled:
            for process in [each for learner in self.learners for each in learner.processes]:
                process.check_end(self.driver.state.versions)
        num_bytes = sum(
            self.jobs.contribution_bytes(c.fragment, self.plan.sizes[c.fragment])
            for c in self.accounts.open.values()
            if not c.is_empty
        )
        assert self.leading is not None
        held_bytes = self.leading.spool.held_bytes
        is_right = held_bytes == num_bytes
        require(is_right, f"the spool holds {held_bytes} bytes, and {num_bytes} are of open contributions")

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
        ended = self.driver.core.accounting.ended(0)
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
                check_learner(learner.name, learner.core, learner.process.held)
                learner.process.check_line()
                self.accounts.check_learner(learner.name, learner.process.incarnation, learner.core)
        self._touched.clear()

    def _check_syncer(self) -> None:
        for node in self.nodes:
            if node.driver is not None and node.driver.state.is_initialised:
                node.accounts.take_events(self.now_s)
                node.accounts.check(node.driver.core)
                check_leases(node.driver.core.leases)
                check_held(node.driver.core.leases, self.ledger.held_as)
                check_groups(node.driver.core)
                if self.plan.dealt:
                    check_dealt(node.driver.core, {it.name: self.plan.dealt[it.index] for it in self.learners})
                node.check_shown()

    # --- the syncers --------------------------------------------------------------------------------------------------

    @property
    def leading(self) -> Node | None:
        """The one that serves the run, and not one that has lost it and does not know it yet."""
        serving = [node for node in self.nodes if node.driver is not None]
        return max(serving, key=lambda node: node.epoch, default=None)

    @property
    def driver(self) -> StormDriver | None:
        """That serves the run; None: none does."""
        leading = self.leading
        return None if leading is None else leading.driver

    @property
    def began_s(self) -> float:
        """When the driver that is there began, or woke up."""
        leading = self.leading
        return 0.0 if leading is None else max(leading.began_s, leading.asleep_until_s)

    @property
    def may_publish(self) -> bool:
        """Whether versions that are merged may be published."""
        leading = self.leading
        is_awake = leading is not None and leading.asleep_until_s <= self.now_s
        return leading is not None and is_awake and leading.standing == "serving"

    @property
    def has_model(self) -> bool:
        """Whether the run's model is durable."""
        manifest = self.place.manifest
        return manifest is not None and bool(manifest.run_id)

    def next_boot(self) -> int:
        """A number that names a process."""
        self.boot += 1
        return self.boot

    def _look_at_syncers(self) -> None:
        """Where nothing is wrong any more, a syncer serves the run."""
        if self.may_publish:
            self._serves_s = self.now_s
            return
        self.quiet_s = max(self.quiet_s, self.now_s)
        away_s = self.now_s - max(self._serves_s, self.calm_s)
        require(away_s <= 2 * SETTLES_S, f"no syncer serves the run: {[(it.name, it.standing) for it in self.nodes]}")

    def began_to_serve(self, node: Node) -> None:
        """A node's driver has begun; perhaps another one has claimed the run meanwhile, and has stopped again."""
        if node is self.leading and self.place.manifest is not None and node.epoch == self.place.manifest.epoch:
            self.accounts = node.accounts
        self.quiet_s = max(self.now_s, self.quiet_s)
        self.touched()

    def stands(self, node: Node, standing: Standing, why: str) -> None:
        """The standing of a node has changed."""
        self.stood[standing] += 1
        self.quiet_s = max(self.quiet_s, self.now_s + 2.0)
        if standing == "fenced":
            self._fenced(node)

    def _fenced(self, node: Node) -> None:
        raise BrokenInvariantError(f"syncer {node.name} is fenced, and there is no other one: {self.place.manifest}")

    def start_refused(self, node: Node, error: DilocoError) -> None:
        """A node's process has refused to start; a person tries it again."""
        is_known = isinstance(error, StoreError) and "is served by another syncer" in str(error)
        require(is_known and self.plan.lease_s < math.inf, f"syncer {node.name} does not start: {error}")
        process = node.process
        self.after(0.0, lambda: self._kill(node, 1.0) if node.process == process else None)

    def has_snapshot(self) -> None:
        """There is a new snapshot of the place."""

    def _come_back(self, node: Node) -> None:
        if node.publisher is None:
            node.start()

    def began(self, process: Process) -> None:
        """A learner's process begins to train as a new incarnation."""

    def door(self, address: int, *, is_heartbeat: bool = False) -> SyncerProcess | None:
        """What answers a call at a syncer's address; None: nothing does. `is_heartbeat`: as `NodeDoor`."""
        if self.impostor is not None:
            return self.impostor
        node = self.nodes[address]
        is_open = node.publisher is not None and (node.driver is not None or self.plan.lease_s < math.inf)
        return NodeDoor(node, is_heartbeat=is_heartbeat) if is_open else None

    def boot_at(self, address: int) -> int:
        """Names the process that answers there."""
        return self.nodes[address].process if self.impostor is None else self.impostor.boot

    def asleep_until_s(self, address: int) -> float:
        """Until when the process there stands still."""
        return self.nodes[address].asleep_until_s

    def reaches(self, learner: int, address: int) -> bool:
        """Whether a learner can connect to the syncer there."""
        is_cut = self._cut_until_s.get((learner, address), -math.inf) > self.now_s
        return self.door(address) is not None and not is_cut

    def heard(self, learner: str, address: int) -> None:
        """Something of a learner has arrived at a syncer."""
        if self.leading is self.nodes[address]:
            self.progress.heard_s[learner] = self.now_s

    def _start_impostor(self, choice: int) -> None:
        """On a copy of the state that is so old that every learner has followed the epoch that it will begin, or a
        later one; if there is none, no syncer is there."""
        alive = [each for learner in self.learners for each in learner.processes if each.is_alive]
        seen = [0 if each.client.core.seen is None else each.client.core.seen.epoch for each in alive]
        copies = [each for each in self.place.snapshots if each.manifest.epoch < min(seen, default=0)]
        if copies:
            self.impostor = Impostor(self, copies[choice * (len(copies) - 1) // 2], self.next_boot())

    def _end_impostor(self) -> None:
        if self.impostor is None:
            return
        self.impostor.check()
        self.impostor = None
        self._hang_up(0)

    def _make_room(self) -> None:
        for node in self.nodes:
            node.spool.budget_bytes = None
        self.quiet_s = max(self.quiet_s, self.now_s)

    def _kill(self, node: Node, back_s: float) -> None:
        """A node's process dies, and is back after a while."""
        if node.publisher is None:
            return
        node.end()
        if self.journal is not None:
            self.journal.killed(self.draws.unit("journal"))
        self.quiet_s = max(self.quiet_s, self.now_s + back_s)
        self._hang_up(node.address)
        self.after(back_s, lambda: self._come_back(node))

    def _hang_up(self, address: int) -> None:
        for learner in self.learners:
            for process in learner.processes:
                process.wire.syncer_died(address)

    def _stop(self, node: Node, back_s: float) -> None:
        """A node's process ends as `syncer.hosting.HostedDriver.stop` has it."""
        store, publisher, driver = node.store, node.publisher, node.driver
        if store is None or publisher is None:
            return

        def release() -> None:
            if driver is not None and driver.is_busy and publisher.is_serving:
                node.later(0.1, release)
                return
            store.release()
            end()

        def end() -> None:
            if publisher.standing in ("fenced", "released") or publisher.is_retrying:
                self._kill(node, back_s)
            else:
                node.later(0.1, end)

        if driver is not None:
            driver.stop()
        node.later(0.0, release)

    # --- faults -------------------------------------------------------------------------------------------------------

    @property
    def _first(self) -> Node:
        """The syncer that serves the run, or should."""
        return self.leading or self.nodes[0]

    def _strike(self, fault: Fault) -> None:
        self.struck[fault.kind] += 1
        if fault.kind in WORKER_FAULTS:
            self.workers[fault.learner].strike(fault)
            return
        learner = self.learners[fault.learner]
        stall_s = STALL_S if fault.kind == "half open" else 0.0
        given_up_s = TIMEOUT_S[1] if fault.kind in STORE_FAULTS else 0.0
        self.quiet_s = max(self.quiet_s, self.now_s + fault.seconds + stall_s + given_up_s)
        match fault.kind:
            case "kill syncer":
                self._kill(self._first, fault.seconds)
            case "stop syncer":
                self._stop(self._first, fault.seconds)
            case "older copy" if self.driver is not None:
                self.at(self.now_s + fault.seconds, self._end_impostor)
                self._kill(self.nodes[0], fault.seconds)
                self._start_impostor(fault.choice)
            case "tear write":
                self._first.tears_at = fault.choice
            case "refuse writes":
                self.refuses_until_s = self.now_s + fault.seconds
            case "store away":
                self.away_until_s = self.now_s + fault.seconds
            case "land late":
                self.late_until_s = self.now_s + fault.seconds
            case "lose answers":
                self.loses_until_s = self.now_s + fault.seconds
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
        boot: names its process.
        driver: its.
        epoch: that it has begun.
    """

    serves, is_suspended = True, False

    def __init__(self, storm: Storm, snapshot: Snapshot, boot: int) -> None:
        self._storm, self.boot = storm, boot
        saved = snapshot.read()
        store = MemoryStore[GlobalFragment, Tensor](lambda done: self._later("answer", None, done), saved)
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
