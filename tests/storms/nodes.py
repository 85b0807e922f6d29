"""A syncer in a storm: its process while there is one, with what `syncer.hosting` does for it, and its way to the
store."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.chaos.versions import require
from tests.run.memory import LaterWorker, LimitedSpool
from tests.run.simulated import POINTS, SimulatedObjects
from tests.storms.drivers import StormDriver, StormJobs, StormStore
from tests.storms.places import FASTEST, SLOWEST, StormFormat

from diloco.core.global_fragment import GlobalFragment
from diloco.errors import DilocoError, MissingObjectError, StandbyError, StoreError, SwapRefusedError
from diloco.exchange.virtual.syncer import SimulatedDriver
from diloco.protocol.accounting import Key
from diloco.protocol.contribution import OUTLIER
from diloco.protocol.manifest import Manifest
from diloco.protocol.publishing import RETRY_S, Publisher, Standing
from diloco.run.ports import Ports, SavedRun

if TYPE_CHECKING:
    from tests.storms.world import Storm

    from diloco.run.journal.recorder import Recorder

DURATIONS_S = {
    "check": (0.0, 0.03), "close": (0.0, 0.3), "put": (0.0, 0.1), "swap": (0.0, 0.1), "delete": (0.0, 0.1),
    "answer": (0.0, 0.03), "load": (0.0, 0.3),
}  # fmt: skip
"""Of the syncer's jobs, and of requests and their answers."""

TIMEOUT_S = (0.5, 5.0)
"""After which a request without an answer fails."""

LATE_S = (0.1, 30.0)
"""After which a request lands whose answer was given up."""

DIFFERS_S = 1e4
"""Clocks of two processes differ by up to so much."""

RUN = "storm"


class ProcessKilled(BaseException):
    """Ends a syncer's process where it stands."""


class NodeClock:
    """A clock of a syncer's process (`run.ports.ClockPort`), which need not go as others do.

    Arguments:
        ring: called with how late it is.
    """

    def __init__(self, node: Node, ring: Callable[[float], None], *, rate: float = 1.0, offset_s: float = 0.0) -> None:
        self._node, self._process, self._ring = node, node.process, ring
        self._rate, self._offset_s = rate, offset_s
        self._at_s = math.inf

    def now_s(self) -> float:
        """As `ClockPort`."""
        return self._offset_s + self._rate * self._node.storm.now_s

    def wake_at(self, at_s: float) -> None:
        """As `ClockPort`."""
        if at_s == self._at_s:
            return
        self._at_s = at_s
        if at_s < math.inf:
            storm_s = (at_s - self._offset_s) / self._rate
            self._node.storm.at(storm_s, lambda: self._node.at_process(self._process, partial(self._happen, at_s)))

    def _happen(self, at_s: float) -> None:
        if at_s != self._at_s:
            return
        if (late_s := self.now_s() - at_s) < 0:  # rounded
            self._node.storm.after(-late_s / self._rate + 1e-9, partial(self._happen, at_s))
            return
        self._at_s = math.inf
        self._ring(late_s)


class Node:
    """A syncer.

    Arguments:
        address: number of its address, for learners.

    Attributes:
        process: number of its process; another one once that is gone.
        publisher, store: of its process; None: there is none.
        driver: of its process; None: it has not begun to serve the run.
        accounts: of its newest driver.
        spool: of that.
        began_s: when that has begun.
        asleep_until_s: its process stands still until then.
        sleeps_at_swap: its process falls asleep at its next swap, for this long, before that lands or after.
        unreachable_until_s: it does not reach the store until then.
        tears_at: its process ends at this step of a request.
    """

    def __init__(self, storm: Storm, address: int) -> None:
        self.storm, self.address = storm, address
        self.process = 0
        self.publisher: Publisher | None = None
        self.store: StormStore | None = None
        self.driver: StormDriver | None = None
        self.accounts = storm.accounts
        self.spool = LimitedSpool()
        self.began_s = 0.0
        self.asleep_until_s = self.unreachable_until_s = -math.inf
        self.sleeps_at_swap: tuple[float, bool] | None = None
        self.tears_at: int | None = None
        self._former: int | None = None  # on its own disk
        self._silent_s = 0.0  # how long no answer comes to the request that has just failed
        self._recorder: Recorder[Any] | None = None

    @property
    def name(self) -> str:
        return "AB"[self.address]

    @property
    def standing(self) -> Standing | None:
        """Of its process; None: there is none."""
        return None if self.publisher is None else self.publisher.standing

    @property
    def serves(self) -> bool:
        """Whether it serves the run, as far as it knows; perhaps it is suspended."""
        return self.driver is not None and self.publisher is not None and self.publisher.is_serving

    @property
    def epoch(self) -> int:
        """That its driver serves."""
        return 0 if self.driver is None else self._epoch

    # --- the process --------------------------------------------------------------------------------------------------

    def start(self, *, is_standby: bool = False) -> None:
        """A new process."""
        storm, plan = self.storm, self.storm.plan
        self.process = storm.next_boot()
        self.publisher = Publisher(
            RUN, boot=self.process, former=self._former, address=self.name, is_standby=is_standby,
            lease_s=plan.lease_s, keep_s=plan.keep_s, shortest_swap_s=plan.shortest_swap_s,
        )  # fmt: skip
        self._recorder = None if storm.journal is None else storm.journal.recorder()
        rate, offset_s = 1.0, 0.0
        if plan.lease_s < math.inf:
            rate = storm.draws.of(f"{self.name} clock rate", (1.0, 1.0, SLOWEST, FASTEST))
            offset_s = storm.draws.between(f"{self.name} clock offset", -DIFFERS_S, DIFFERS_S)
        store = StormStore(
            SimulatedObjects(storm.place, self._reach, plan.shortest_swap_s), StormFormat(), self.publisher,
            LaterWorker(self._job), NodeClock(self, lambda _: store.tick(), rate=rate, offset_s=offset_s), self,
            (lambda: None) if self._recorder is None else self._recorder.sync,
        )  # fmt: skip
        self.store = store
        store.start()

    def end(self) -> None:
        """The process is gone."""
        self.publisher = self.store = self.driver = None
        self.process = self.storm.next_boot()
        self.asleep_until_s, self.sleeps_at_swap = -math.inf, None
        self.storm.touched()

    def at_process(self, process: int, do: Callable[[], None]) -> None:
        """Do something in a process, if it is there; later, if it is asleep."""
        if self.process != process:
            return
        if self.storm.now_s < self.asleep_until_s:
            self.storm.at(self.asleep_until_s, lambda: self.at_process(process, do))
            return
        self.storm.touched()
        do()

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something in this process after a while."""
        self.storm.after(seconds, partial(self.at_process, self.process, do))

    def _job(self, what: str, fragment: int | None, do: Callable[[], None]) -> None:
        silent_s, self._silent_s = self._silent_s, 0.0
        self.later(silent_s + self.storm.draws.between(f"{self.name} {what} {fragment}", *DURATIONS_S[what]), do)

    # --- its way to the store -----------------------------------------------------------------------------------------

    def _reach(self, what: str, request: Callable[[], Any]) -> Any:
        """As `simulated.Reach`."""
        try:
            return self._reaches(what, request)
        except BaseException:
            self.storm.place.is_littered |= what == "delete"
            raise

    def _reaches(self, what: str, request: Callable[[], Any]) -> Any:
        storm = self.storm
        self._at_point(what)
        if storm.now_s < storm.refuses_until_s:
            raise StoreError(f"the store refuses to {what}; it is tried again.")
        if storm.now_s < max(storm.away_until_s, self.unreachable_until_s):
            self._silence(what)
        if storm.now_s < storm.late_until_s and storm.draws.unit(f"{self.name} {what} is late") < 0.6:
            self._lands_later(storm.draws.between(f"{self.name} {what} lands", *LATE_S), request)
            self._silence(what)
        if self.sleeps_at_swap is not None and what == "swap":
            (seconds, is_before), self.sleeps_at_swap = self.sleeps_at_swap, None
            self.asleep_until_s = storm.now_s + seconds
            if is_before:
                self._lands_later(storm.draws.between(f"{self.name} lands asleep", 0.0, 2 * seconds), request)
                self._silence(what)
        found = request()
        self._at_point(f"after {what}")
        if storm.now_s < storm.loses_until_s and storm.draws.unit(f"{self.name} {what} is lost") < 0.7:
            self._silence(what)
        return found

    def _lands_later(self, seconds: float, request: Callable[[], object]) -> None:
        """A request takes effect after its answer was given up, unless a person has replaced what is at the place."""
        place, era = self.storm.place, self.storm.place.era

        def land() -> None:
            if place.era == era:
                place.is_littered = True
                with suppress(SwapRefusedError, MissingObjectError):
                    request()

        self.storm.after(seconds, land)

    def _silence(self, what: str) -> None:
        self._silent_s = self.storm.draws.between(f"{self.name} {what} times out", *TIMEOUT_S)
        raise StoreError(f"the store has not answered to {what} within {self._silent_s:.1f} s.")

    def _at_point(self, point: str) -> None:
        if self.tears_at is not None and point == POINTS[self.tears_at]:
            self.tears_at = None
            self.storm.torn = self
            raise ProcessKilled

    # --- as `published.StoreHost` -------------------------------------------------------------------------------------

    def stands(self, standing: Standing, why: str) -> None:
        """As `StoreHost`."""
        self.storm.stands(self, standing, why)

    def serve(self, manifest: Manifest) -> None:
        """As `StoreHost`."""
        self._job("load", None, lambda: self._load(manifest))

    def refused(self, error: DilocoError) -> None:
        """As `StoreHost`."""
        self.storm.start_refused(self, error)

    def saw(self, manifest: Manifest | None) -> None:
        """As `StoreHost`."""

    def waits(self, what: str, error: StoreError) -> None:
        """As `StoreHost`."""
        require(not isinstance(error, SwapRefusedError | MissingObjectError), f"{self.name} waits for {what}: {error}")

    def _load(self, manifest: Manifest) -> None:
        """Load the run that was claimed, and serve it."""
        self._former = self.process
        if self.publisher is None or not self.publisher.is_serving:
            return
        saved = None
        if manifest.run_id:
            try:
                saved = StormFormat().read(SimulatedObjects(self.storm.place, self._reach), manifest)
            except MissingObjectError:
                require(self.storm.place.manifest != manifest, "an object of the newest manifest is missing")
                return  # another one has claimed the run
            except StoreError:
                self.later(RETRY_S + self._silent_s, lambda: self._load(manifest))
                return
        self._begin(manifest, None if saved is None else saved.begun(manifest.epoch))

    def _begin(self, manifest: Manifest, saved: SavedRun[GlobalFragment] | None) -> None:
        storm, store = self.storm, self.store
        assert store is not None
        newest = storm.place.manifest
        if saved is not None and newest is not None and newest.epoch == manifest.epoch:
            storm.ledger.restored(saved)
        self.accounts = accounts = storm.accounts_type(storm.ledger, storm.all_accounts, len(storm.plan.sizes))
        accounts.restarted(storm.place.verdicts_at[manifest.epoch])
        del storm.all_accounts[1:-4]  # of drivers that are gone
        jobs = StormJobs(storm.plan.method, accounts)
        is_small = storm.plan.spool_fits is not None and storm.now_s < storm.plan.room_at_s
        room_bytes = (storm.plan.spool_fits or 0) * max(
            itertools.starmap(jobs.contribution_bytes, enumerate(storm.plan.sizes))
        )
        self.spool = LimitedSpool(room_bytes if is_small else None)
        self.began_s, self._epoch = storm.now_s, manifest.epoch
        clock = NodeClock(self, lambda late_s: driver.tick(late_s))  # noqa: PLW0108 - there is no driver yet
        ports = Ports(clock, self.spool, jobs, store, LaterWorker(self._job), accounts)
        if self._recorder is not None:
            ports = self._recorder.around(ports)
        driver = StormDriver(
            RUN, storm.plan.method, ports, boot=self.process, saved=saved, epoch=manifest.epoch,
            commit_every_s=storm.plan.shortest_swap_s,
        )  # fmt: skip
        driver.ledger, driver.accounts = storm.ledger, accounts
        if driver.state.is_initialised:
            accounts.begins_with(driver.core)
        store.note = lambda merged: storm.place.written.__setitem__((manifest.epoch, merged.update), merged)
        store.recorded_with = partial(self._recorded_with, driver)
        store.begun(manifest.run_id, () if saved is None else saved.epochs)
        self.driver = driver
        storm.began_to_serve(self)

    def _recorded_with(self, driver: StormDriver, fragments: Sequence[int]) -> dict[Key, str | None]:
        self.accounts.take_events(self.storm.now_s)
        core = driver.core
        merged, rejected = list[Any](), list[tuple[Any, str]]()
        for fragment in fragments:
            closing = core.fragments[fragment].closing
            assert closing is not None
            merged += closing.contributions
            rejected += [*((c, OUTLIER) for c in closing.refused), *core.rounds.left_out(fragment)]
        return self.accounts.recorded_with(merged, rejected)

    # --- what holds ---------------------------------------------------------------------------------------------------

    def check_shown(self) -> None:
        """What its driver shows is of the one line that was published."""
        driver = self.driver
        if driver is None or not driver.state.is_initialised:
            return
        for fragment in range(len(driver.state.versions)):
            self.storm.ledger.shown(driver.state.model.held(fragment), self._epoch, driver.first[fragment])


class NodeDoor:
    """What a call reaches of a node (`exchange.virtual.syncer.SyncerProcess`).

    Arguments:
        is_heartbeat: the call is one that a suspended syncer answers, or began before that.
    """

    def __init__(self, node: Node, *, is_heartbeat: bool) -> None:
        self._node, self._is_heartbeat = node, is_heartbeat

    @property
    def serves(self) -> bool:
        """As `SyncerProcess`."""
        return self._node.serves

    @property
    def is_suspended(self) -> bool:
        """As `SyncerProcess`."""
        return self._node.standing == "suspended"

    @property
    def driver(self) -> SimulatedDriver:
        """As `SyncerProcess`."""
        node = self._node
        if node.driver is None or not node.serves or (self.is_suspended and not self._is_heartbeat):
            raise StandbyError(f"syncer {node.name} is {node.standing}; ask the other one.")
        return node.driver
