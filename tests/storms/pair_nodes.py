"""One of two syncers in a storm: its disk, and its process while there is one, with what `syncer.server` does for
it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.chaos.versions import require
from tests.run.memory import LaterWorker, LimitedSpool
from tests.storms.drivers import StormDriver, StormJobs
from tests.storms.pair_disks import Merged, NodeAccounts, NodeStore

from diloco.errors import StoreError
from diloco.exchange.virtual.syncer import SimulatedDriver
from diloco.protocol.accounting import Key
from diloco.protocol.contribution import OUTLIER
from diloco.protocol.pair.pair_core import PairCore
from diloco.protocol.succession import ElectorVote, Proposal, Standing
from diloco.run.ports import Ports, T, Work

if TYPE_CHECKING:
    from tests.storms.pair_world import PairStorm

TICK_S = 0.2
"""As `syncer.standby.pairing.TICK_S`."""

DURATIONS_S = {"check": (0.0, 0.03), "close": (0.0, 0.3), "write": (0.0, 0.1), "written": (0.0, 0.03)}


class Node:
    """A syncer of two.

    Arguments:
        address: number of its address, for learners and for the other one.

    Attributes:
        store: its disk.
        pair: of its process; None: there is none.
        driver: of its process; None: it does not serve the run.
        process: number of its process.
        accounts: of its newest driver.
        spool: of that.
        began_s: when that has begun.
        shown: by fragment, the version that it serves.
        refuses_until_s, tears_at: its disk refuses, or ends the process at a step.
    """

    def __init__(self, storm: PairStorm, address: int) -> None:
        self.storm, self.address = storm, address
        self.store = NodeStore(storm.published, self._at_point)
        self.pair: PairCore | None = None
        self.driver: StormDriver | None = None
        self.process = 0
        self.accounts = NodeAccounts(storm.ledger, storm.all_accounts)
        self.spool = LimitedSpool()
        self.began_s = 0.0
        self.shown: dict[int, int] = {}
        self.refuses_until_s, self.tears_at = -1.0, None  # type: tuple[float, int | None]

    @property
    def name(self) -> str:
        return "AB"[self.address]

    @property
    def epoch(self) -> int:
        """That its process serves, or would."""
        return 0 if self.pair is None else self.pair.succession.epoch

    def start(self, *, follows: bool) -> None:
        """A process, which knows the address of the other one or not."""
        storm = self.storm
        self.process = storm.next_boot()
        self.pair = PairCore(
            self.store, self.store.position, other=f"syncer {1 - self.address}" if follows else None,
            waits_for_both=True, silence_s=storm.plan.silence_s, new_boot=storm.next_boot, observer=self,
            now=storm.now_s,
        )  # fmt: skip
        if self.pair.standing == "alone":
            self._new_driver(is_begun=False)
        self._later(TICK_S, self._tick)
        if follows:
            self._later(storm.draws.between(f"{self.name} dials", 0.0, 1.0), lambda: storm.dial(self))

    def end(self) -> None:
        """The process is killed."""
        self.pair = self.driver = None
        self.process = self.storm.next_boot()

    # --- as `syncer.server.Syncer` ------------------------------------------------------------------------------------

    def _tick(self) -> None:
        pair = self.pair
        assert pair is not None
        self._later(TICK_S, self._tick)
        try:
            pair.tick(self.storm.now_s)
            self.host_as_it_stands()
        except StoreError:
            pass  # again at the next tick
        self.storm.touched()

    def host_as_it_stands(self) -> None:
        """Have a driver where this syncer serves the run, at its epoch, and none where it does not."""
        pair, driver = self.pair, self.driver
        assert pair is not None
        if not pair.succession.serves:
            self.driver = None
            if driver is not None:
                driver.stop()
                driver.end()
                self.storm.refuse_calls(self)
        elif driver is None:
            self._new_driver(is_begun=True)
        elif driver.lineage.epoch < pair.succession.epoch:
            driver.begin_epoch(pair.succession.epoch)

    def _new_driver(self, *, is_begun: bool) -> None:
        from tests.storms.world import RUN, StormClock

        storm, pair = self.storm, self.pair
        assert pair is not None
        saved = self.store.load()
        if saved is not None and not is_begun:
            saved = self.store.begin(saved)
        if (state := self.store.state) is not None:
            storm.published.begins(state)
        self.store.started(pair.write_begins)
        self.accounts = accounts = NodeAccounts(storm.ledger, storm.all_accounts)
        accounts.restarted({} if state is None else state.verdicts)
        is_small = storm.plan.spool_fits is not None and storm.now_s < storm.plan.room_at_s
        jobs = StormJobs(storm.plan.method, accounts)
        room_bytes = (storm.plan.spool_fits or 0) * max(
            itertools.starmap(jobs.contribution_bytes, enumerate(storm.plan.sizes))
        )
        self.spool = LimitedSpool(room_bytes if is_small else None)
        self.began_s, self.shown = storm.now_s, {}
        clock = StormClock(storm, lambda: at_driver(driver.tick))
        worker = PairedWorker(self, lambda what, fragment, do: self._job(what, fragment, lambda: at_driver(do)))
        ports = Ports(clock, self.spool, jobs, self.store, worker, accounts)
        driver = StormDriver(RUN, storm.plan.method, ports, boot=pair.succession.boot, saved=saved)
        driver.ledger, driver.accounts = storm.ledger, accounts

        def at_driver(do: Callable[[], None]) -> None:
            if self.driver is driver:
                storm.touched()
                do()

        self.driver = driver
        storm.touched()

    def _job(self, what: str, fragment: int | None, do: Callable[[], None]) -> None:
        low, high = DURATIONS_S[what]
        self._later(self.storm.draws.between(f"{self.name} {what} {fragment}", low, high), do)

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        process = self.process
        self.storm.after(seconds, lambda: self.storm.at_node(self, process, do))

    def recorded_with(self, fragment: int | None) -> dict[Key, str | None]:
        """The verdicts in a record that is taken now."""
        assert self.driver is not None
        self.accounts.take_events(self.storm.now_s)
        if fragment is None:
            return self.accounts.recorded_with((), ())
        core = self.driver.core
        closing = core.fragments[fragment].closing
        assert closing is not None
        refused = [(c, OUTLIER) for c in closing.refused]
        return self.accounts.recorded_with(closing.contributions, [*refused, *core.rounds.left_out(fragment)])

    def confirmed(self, merged: Merged | None) -> None:
        """A write may be seen: where there is a standby, it has it."""
        pair, state, driver = self.pair, self.store.state, self.driver
        assert pair is not None
        assert state is not None
        assert driver is not None
        self.storm.published.confirmed(driver.lineage.epoch, driver.boot, merged, state)
        if merged is not None and pair.standing in ("paired", "proposing"):
            other, update = self.storm.nodes[1 - self.address].store.contents(), merged.update
            version, digest = other.held.get(update.fragment, (-1, ""))
            has_it = version > update.version or (version, digest) == (update.version, update.digest)
            require(has_it, f"the other syncer has {version} of fragment {update.fragment} at {update}")

    def _at_point(self, point: str) -> None:
        self.storm.disk_at(self, point)

    # --- as `StandingObserver` ----------------------------------------------------------------------------------------

    def standing_changed(self, standing: Standing, epoch: int, why: str) -> None:
        """The standing has changed."""
        self.storm.state_changed(self, standing, epoch, why)

    def lags(self, versions: int, num_bytes: int, seconds: float) -> None:
        """How far the standby is behind."""
        require(versions >= 0 and seconds >= 0.0, f"{self.name} is {versions} versions and {seconds} s behind")

    # --- as `exchange.virtual.syncer.Door` ----------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether it serves the run."""
        return self.driver is not None and self.pair is not None and self.pair.succession.serves


class NodeDoor:
    """What learners reach of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def serves(self) -> bool:
        """As `Door`."""
        return self._node.serves

    @property
    def driver(self) -> SimulatedDriver:
        """As `Door`."""
        node = self._node
        assert node.pair is not None
        if node.driver is None or not node.serves:
            raise node.pair.refusal()
        return node.driver

    def heard(self, word: ElectorVote) -> Proposal | None:
        """As `Door`."""
        pair = self._node.pair
        assert pair is not None
        return None if pair.is_single else pair.heard(self._node.storm.now_s, word)


class PairedWorker(LaterWorker):
    """Does the jobs of a node's driver. A write waits, as `syncer.standby.pairing.Pairing` has it wait."""

    def __init__(self, node: Node, later: Callable[[str, int | None, Callable[[], None]], None]) -> None:
        super().__init__(later)
        self._node = node

    def submit(self, what: Work, fragment: int | None, job: Callable[[], T], done: Callable[[T], None]) -> None:
        """As `ports.WorkerPort`."""
        node = self._node
        if what != "write" or node.pair is None:
            super().submit(what, fragment, job, done)
            return
        pair, store, began_s = node.pair, node.store, node.storm.now_s
        assert node.driver is not None
        is_first = not node.driver.state.is_initialised
        if not is_first:
            store.verdicts = node.recorded_with(fragment)

        def tries() -> None:
            store.refusal = None
            try:
                if not is_first and not pair.may_write(node.storm.now_s - began_s):
                    self._again(tries)
                    return
            except StoreError as error:
                store.refusal = error
            found = job()
            if found is None and not is_first:
                self._wait(store.serial, store.under_way, node.storm.now_s, fragment, done)
            else:
                self._later("written", fragment, lambda: done(found))

        self._later("write", fragment, tries)

    def _wait(
        self, serial: int, merged: Merged | None, began_s: float, fragment: int | None, done: Callable[..., None]
    ) -> None:
        node, pair = self._node, self._node.pair
        assert pair is not None

        def looks() -> None:
            found: StoreError | None = None
            try:
                if not pair.is_confirmed(serial, node.storm.now_s - began_s):
                    self._again(looks)
                    return
                node.confirmed(merged)
                node.store.writes.confirmed()
            except StoreError as error:
                found = error
            self._later("written", fragment, lambda: done(found))

        looks()

    def _again(self, do: Callable[[], None]) -> None:
        driver = self._node.driver
        self._node._later(0.05, partial(self._if_there, driver, do))

    def _if_there(self, driver: StormDriver | None, do: Callable[[], None]) -> None:
        if self._node.driver is driver:
            do()
